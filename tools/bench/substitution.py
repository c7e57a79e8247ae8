"""Row substitution: what two jobs on one dataset save by reading first what is cached.

Both have seeds of their own and read side by side through one mount, whose cache takes a part of
the dataset. An arm is how far the sampler looks ahead; 0 is a plain shuffle. Counted are files that
the origin gave, so the machine's speed says little.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from fusecache.config.settings import SSD_BYTES_MIN
from tools.bench.hints import hinted_mount
from tools.bench.rows import Bench
from tools.hintsd_command import HintsdCommand

FILES, FILES_QUICK, FILE_BYTES = 6_000, 1_500, 100_000
EPOCHS = 3
SHARES = (0.2, 0.4)
BATCH, WORKERS, JOBS = 32, 2, 2
PAUSE_S = 0.03
ROUNDS = 3
ARMS = {"a plain shuffle": 0, "10 batches": 10, "an epoch": 1 << 20}
TIMEOUT_S = 600.0


def substitution(bench: Bench) -> None:
    """Row substitution: a fifth, and two fifths of the dataset in a mount's RAM and SSD."""
    count = FILES_QUICK if bench.quick else FILES
    with bench.folder("substitution") as work, HintsdCommand(work) as daemon:
        source = work / "source"
        source.mkdir()
        names = bench.readers.fill_files(source, count, FILE_BYTES, 8)
        for seed in range(bench.rounds(ROUNDS)):
            for share in SHARES:
                for arm, look_ahead in ARMS.items():
                    budget = max(int(count * FILE_BYTES * share), 2 * SSD_BYTES_MIN)
                    options = ("--ram", str(budget - SSD_BYTES_MIN), "--ssd", str(SSD_BYTES_MIN))
                    with hinted_mount(daemon, source, work, options) as mount:
                        told: dict[str, Any] = {"root": str(mount.mountpoint), "paths": list(names)}
                        told |= {"epochs": EPOCHS, "batch": BATCH, "workers": WORKERS}
                        told |= {"look_ahead": look_ahead, "pause_s": PAUSE_S}

                        def fetched() -> int:
                            return int(mount.status()["origin"]["files"])

                        files = _run(told, seed, fetched)
                    cold, later = files[0] / count, sum(files[1:]) / (EPOCHS - 1) / count
                    for name, datasets in (("first epoch", cold), ("later ones", later)):
                        what = f"{arm}, {share:.0%}: {name}"
                        bench.results.add("substitution", what, "fusecache", "datasets", datasets)
                    bench.say(f"substitution, {arm}, {share:.0%}: {cold:.3f}, then {later:.3f}")
    bench.results.note(
        f"substitution: {JOBS} jobs together; {count:,} files of {FILE_BYTES // 1000} KB, batches "
        f"of {BATCH}; SSD {SSD_BYTES_MIN >> 20} MiB of the share, RAM the rest"
    )


def _run(told: dict[str, Any], seed: int, fetched: Callable[[], int]) -> list[int]:
    """Files that the origin gave in each epoch, for all jobs together."""
    command = [sys.executable, "-m", "tools.bench.substitution_reader"]
    files, before = [], 0
    with contextlib.ExitStack() as stack:
        readers = []
        for job in range(JOBS):
            reader = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(reader.kill)
            readers.append(reader)
            _say(reader, json.dumps({**told, "seed": JOBS * seed + job}))
        for _ in range(told["epochs"]):
            for reader in readers:
                _say(reader, "")
            for reader in readers:
                assert reader.stdout is not None
                if int(reader.stdout.readline() or 0) != len(told["paths"]):
                    raise RuntimeError("a reader of row substitution failed: see above")
            files.append(fetched() - before)
            before = fetched()
        for reader in readers:
            reader.wait(TIMEOUT_S)
    return files


def _say(reader: "subprocess.Popen[str]", line: str) -> None:
    assert reader.stdin is not None
    reader.stdin.write(line + "\n")
    reader.stdin.flush()


ROWS: dict[str, Callable[[Bench], None]] = {"substitution": substitution}

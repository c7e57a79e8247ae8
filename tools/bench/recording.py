"""Row trace: what a recording costs the readers of a mount.

INVARIANT: a pass that is recorded counts only if the trace has each of its reads.
"""

import contextlib
import functools
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tools.bench.rows import FILE_BYTES, READER_COUNTS, Bench, Figure
from tools.fusecache_command import FusecacheMount, default_executable

SMALL_BYTES = 10_000
WAYS = {"fusecache": None, "recorded": (), "every open": ("--every-open",)}
COLUMNS = ("recorded", "every open")
HOT_TIMES = 10  # a hot pass reads each file so often: it would last some hundredths of a second
_BEGIN_S = 60.0
_SETTLE_S = 0.5  # after that nobody does anything that readers do not cause


@contextlib.contextmanager
def _recorded(root: Path, work: Path, flags: tuple[str, ...], expected: int) -> Iterator[None]:
    """RuntimeError: the trace has another number of accesses than expected at least."""
    file = work / "trace"
    file.unlink(missing_ok=True)
    command = [str(default_executable()), "trace", str(root), "-o", str(file), "--json", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + _BEGIN_S
        while not file.exists():  # it begins when that is there
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("fusecache trace has not begun")
            time.sleep(0.01)
        time.sleep(_SETTLE_S)
        yield
        process.send_signal(signal.SIGINT)
        facts = json.loads(process.communicate(timeout=_BEGIN_S)[0])
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if facts["lost"] or facts["gaps_unknown"] or facts["accesses"] < expected:
        raise RuntimeError(f"{facts['accesses']} of {expected} reads were recorded")


def trace(bench: Bench) -> None:
    """Row trace: hot and cold reads with and without a recording, by turns."""
    counts = {FILE_BYTES: 5000, SMALL_BYTES: 20_000}
    for size, full in counts.items():
        count = full // 5 if bench.quick else full
        with bench.folder("trace") as work:
            _trace_size(bench, work, count, size)


def _trace_size(bench: Bench, work: Path, count: int, size: int) -> None:
    source = work / "source"
    source.mkdir()
    bench.say(f"trace: making {count} files of {size} bytes")
    names = bench.readers.fill_files(source, count, size, 9)
    options = ("--ram", str(3 * count * size))
    with FusecacheMount(source, work / "mnt", work / "cache", options) as mount:
        root = mount.mountpoint
        mount.command("warm", str(root), timeout_s=900)
        mount.settle()

        def one_pass(way: str, state: str, readers: int, seed: int) -> Figure:
            flags = WAYS[way]
            some = names * (HOT_TIMES if state == "hot" else 1)
            expected = 0 if state == "hot" and not flags else len(some)
            with contextlib.ExitStack() as stack:
                if state == "hot":  # and names of a recording before are trusted again
                    bench.readers.read_files(root, names, READER_COUNTS[-1], seed)
                if flags is not None:
                    stack.enter_context(_recorded(root, work, flags, expected))
                if state == "cold":
                    bench.drop()
                done = bench.readers.read_files(root, some, readers, seed)
            plural = "s" * (readers > 1)
            what = f"{size // 1000} KB, {state}, {readers} reader{plural}"
            return what, way, "files/s", done.items_per_s

        def one_round(number: int) -> list[Figure]:
            return [
                one_pass(way, state, readers, number)
                for state in ("hot", "cold")
                for readers in READER_COUNTS
                for way in bench.turns(number, tuple(WAYS))
            ]

        for number in range(bench.rounds(9)):
            bench.undisturbed("trace", functools.partial(one_round, number))
            bench.say(f"trace, {size // 1000} KB: round {number + 1} done")


ROWS = {"trace": trace}

"""Row wide: how long a read waits while one directory of 200,000 names is gone through."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

from tools.bench import stalls
from tools.bench.hints import announced, hinted_mount, started_hintsd
from tools.bench.rows import FILE_BYTES, Bench, Figure
from tools.fusecache_command import FusecacheMount

_FILES = 200
_ALONE_S = 10.0
_TIMES = 5
_LONG_S = 0.1


def wide(bench: Bench) -> None:
    """Row wide: reads from SSD, alone, beside `warm` of a pattern that all names are compared with,
    and beside a hint whose files hintsd has the mount list.
    """
    count = 50_000 if bench.quick else 200_000
    with bench.folder("wide") as work:
        source = work / "source"
        source.mkdir()
        bench.readers.make_tree(source, 1, count)
        folder = next(source.iterdir())
        read = source / "read"
        read.mkdir()
        names = bench.readers.fill_files(read, _FILES, FILE_BYTES, 3)
        listed = sorted(path.name for path in folder.iterdir())
        with (
            started_hintsd(work) as daemon,
            hinted_mount(daemon, source, work, ()) as mount,
        ):
            mount.command("warm", str(mount.mountpoint), "read/**", timeout_s=900)
            mount.settle()
            os.listdir(mount.mountpoint / folder.name)  # the origin's own time is row listing's
            one_round = functools.partial(
                _round, mount, read, names, work / "expected.txt", folder.name, listed
            )
            for number in range(bench.rounds(3)):
                bench.undisturbed("wide", one_round)
                bench.say(f"wide: round {number + 1} done")
    bench.results.note(f"wide: {_FILES} files of {FILE_BYTES} bytes beside {count} empty ones")


def _round(
    mount: FusecacheMount, read: Path, names: list[str], expected: Path, folder: str,
    listed: list[str],
) -> list[Figure]:  # fmt: skip
    pattern = f"{folder}/*{listed[-1][1:]}"

    def warm() -> None:
        for _ in range(_TIMES):
            mount.command("warm", str(mount.mountpoint), pattern, timeout_s=300)

    def hint() -> None:
        for number in range(_TIMES):
            with announced(mount.mountpoint / folder, listed, number, 1):
                pass

    ways: dict[str, Callable[[], None]] = {
        "alone": lambda: time.sleep(_ALONE_S),
        "beside warm": warm,
        "beside a hint": hint,
    }
    spans: dict[str, tuple[float, float]] = {}
    with stalls.reading(mount.mountpoint / "read", read, names, expected) as end:
        for what, act in ways.items():
            begin = time.monotonic()
            act()
            spans[what] = begin, time.monotonic()
        outcome = end()
    if outcome["errors"] or outcome["wrong"]:
        raise RuntimeError(f"reads failed: {outcome['errors'][:3]}, {outcome['wrong']} wrong")
    figures: list[Figure] = []
    for what, (begin, last) in spans.items():
        took = [b - a for a, b in outcome["spans"] if begin <= a < last] or [last - begin]
        figures.append((f"{what}: longest read", "fusecache", "ms", max(took) * 1e3))
        long = sum(one > _LONG_S for one in took)
        figures.append((f"{what}: reads over 0.1 s", "fusecache", "", float(long)))
        figures.append((f"{what}: reads a second", "fusecache", "", len(took) / (last - begin)))
    return figures


ROWS = {"wide": wide}

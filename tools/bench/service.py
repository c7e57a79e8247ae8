"""Row service: mounts with the host's cache service, beside mounts with a cache of their own.

*alone*: one mount, as in rows hot and cold. *two users*: two mounts of one dataset on a throttled
origin, each read by one reader, at the same time, in the same order or in orders of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.bench import peers, rows
from tools.bench.readers import Readers
from tools.bench.results import Results
from tools.bench.rows import FILE_BYTES, Bench, Figure
from tools.slow_origin import LoopOrigin

PRIVATE, SERVICE = "fusecache", "service"
READ_BPS, READ_IOPS = 50_000_000, 2_000
_START_S = 10.0


@contextlib.contextmanager
def served(work: Path) -> Iterator[Path]:
    """`fusecache cached` in a directory of its own; its socket."""
    directory, path = work / "cached", work / "cached.sock"
    command = [str(Path(sys.executable).with_name("fusecache")), "cached"]
    process = subprocess.Popen([*command, "--dir", str(directory), "--socket", str(path)])
    try:
        deadline = time.monotonic() + _START_S
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("fusecache cached did not begin")
            time.sleep(0.02)
        yield path
    finally:
        process.terminate()
        process.wait(30)


def digest(source: Path) -> None:
    """The manifest of `source`, for the service."""
    command = [str(Path(sys.executable).with_name("fusecache")), "digest", str(source)]
    subprocess.run([*command, "--digest", "blake3"], check=True, stdout=subprocess.DEVNULL)


def service(bench: Bench) -> None:
    _alone(bench)
    _two_users(bench)


def _alone(bench: Bench) -> None:
    found = Results()
    with bench.folder("alone") as work, served(work) as socket:

        def make(name: str, source: Path, at: Path) -> peers.Peer:
            if name != SERVICE:
                return peers.make(name, source, at)
            digest(source)
            options = ("--cache", str(socket), "--ssd", "64M")
            peer = peers.Fusecache(source, at / f"mnt-{name}", at / f"{name}-cache", options)
            peer.name = name
            return peer

        own = dataclasses.replace(bench, names=("native", PRIVATE, SERVICE), results=found)
        rows.small_files(own, hot=True, cold=True, make=make)
    for one in found.series:
        for value in one.values:
            bench.results.add("service", f"alone, {one.row}, {one.work}", one.peer, one.unit, value)


def _two_users(bench: Bench) -> None:
    count = 300 if bench.quick else 1_000
    with bench.folder("users") as work, LoopOrigin(work, count * FILE_BYTES * 2) as device:
        files = bench.readers.fill_files(device.directory, count, FILE_BYTES, 4)
        digest(device.directory)
        (work / "second").mkdir()
        readers = bench.readers, Readers(work / "second")
        device.throttle(READ_BPS, READ_IOPS)

        def both(name: str, seeds: tuple[int, int], what: str, number: int) -> list[Figure]:
            with contextlib.ExitStack() as stack:
                folder = stack.enter_context(bench.folder(f"{name}-{seeds[1]}-{number}"))
                options: tuple[str, ...] = ()
                if name == SERVICE:
                    options = ("--cache", str(stack.enter_context(served(folder))), "--ssd", "64M")
                users = [
                    stack.enter_context(
                        peers.Fusecache(
                            device.directory,
                            folder / f"mnt{user}",
                            folder / f"cache{user}",
                            options,
                        )
                    )
                    for user in range(2)
                ]
                bench.drop()
                before, begun = device.bytes_read(), time.monotonic()
                threads = [
                    threading.Thread(target=own.read_files, args=(user.root, files, 1, seed))
                    for own, user, seed in zip(readers, users, seeds, strict=True)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                took_s = time.monotonic() - begun
                share = (device.bytes_read() - before) / (count * FILE_BYTES)
            return [
                (what, name, "s", took_s),
                (f"{what}: from the origin", name, "datasets", share),
            ]

        for number in range(bench.rounds(3)):
            for what, seeds in (("same order", (7, 7)), ("orders of their own", (7, 8))):
                for name in bench.turns(number, (PRIVATE, SERVICE)):
                    attempt = functools.partial(both, name, seeds, f"two users, {what}", number)
                    bench.undisturbed("service", attempt)
            bench.say(f"service: round {number + 1} of two users done")


ROWS: dict[str, Callable[[Bench], None]] = {"service": service}
COLUMNS = (SERVICE,)

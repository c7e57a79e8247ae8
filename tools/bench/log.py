"""Rows log-…: what it brings that samples lie on SSD in the order in which an epoch reads them.

Each row stands alone and takes some minutes: `tools/bench/run --rows 'log-*'` runs them all. What
they share, and what holds for all, is in logged.py.
"""

import contextlib
import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.bench.hints import (
    ORIGIN_BPS,
    ORIGIN_IOPS,
    PACE_SHARE,
    HintDoubted,
    announced,
    in_order,
    load_epochs,
    run_module,
    started_hintsd,
)
from tools.bench.logged import (
    AHEAD,
    COUNTS,
    DEVICE_IOPS,
    Files,
    Stand,
    chosen,
    dataset,
    device,
    measured,
    mounted,
    run,
)
from tools.bench.rows import Bench, Figure
from tools.hintsd_command import HintsdCommand
from tools.slow_origin import LoopOrigin

LAYOUTS = ("static", "reorder", "auto")
PARTIAL = (10_000, 110_000)
PARTIAL_COUNT = 36_000
PARTIAL_SHARE = 0.5
# Which of the origin's limits is met first; at 110 KB it is its bandwidth anyway.
ORIGINS = {10_000: {"requests": ORIGIN_IOPS, "bandwidth": 0}, 110_000: {"bandwidth": ORIGIN_IOPS}}
PACED_BYTES = 110_000
BANDWIDTH = (10_000, 110_000)
TWO_BYTES, TWO_COUNT = 10_000, 24_000
EPOCHS_MOST = 1000  # of a job that reads until another one has ended
META_SAMPLES = 14_000_000
META_COLUMNS = ("hintsd", "mount", "both")
NATIVE_SHARE = 4  # on the limited device native reads so small a part, side by side on disk


@contextlib.contextmanager
def _prepared(
    bench: Bench, size: int, name: str, most: int = 1 << 30
) -> Iterator[tuple[Stand, Path]]:
    """A daemon, files, a place for caches; and native's files on the same device."""
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(bench.folder("log"))
        daemon = stack.enter_context(started_hintsd(work))
        files = stack.enter_context(dataset(bench, work, size, most))
        if name == "plain":
            yield measured(bench, daemon, files, work, name), files.source
            return
        disk = stack.enter_context(device(work, files))
        native = disk.directory / "native"
        native.mkdir()
        bench.readers.fill_files(native, len(files.names), size, 3)
        disk.throttle(0, DEVICE_IOPS)
        stand = measured(bench, daemon, files, disk.directory, name, disk)
        bench.results.note(
            f"log: limited: {DEVICE_IOPS} reads/s of ext4 on a loop device that holds the cache"
        )
        yield stand, native


def _rounds(bench: Bench, row: str) -> Iterator[int]:
    for number in range(1 if bench.quick else bench.rounds(3)):
        yield number
        bench.say(f"{row}: round {number + 1} done")


def _sizes(size: int, name: str, bench: Bench) -> None:
    """Rows log-3k … log-110k-plain: whole epochs, all on SSD, as fast as the loader goes."""
    with _prepared(bench, size, name) as (stand, native):
        files, results = stand.files, bench.results
        what = f"{files.what}, {name}"
        few = files.names[: len(files.names) // (NATIVE_SHARE if name == "limited" else 1)]
        layouts = bench.layouts or LAYOUTS
        for number in _rounds(bench, what):
            speeds: dict[str, float] = {}
            for peer in bench.turns(number, ("native", "ceiling", *layouts)):
                if peer == "native":
                    seconds = load_epochs(native, few, seed=1, epochs=2, drop=True)[1]["seconds"]
                    speeds[peer] = len(few) / seconds
                elif peer == "ceiling":
                    seconds = load_epochs(files.source, files.names, seed=1, epochs=2)[1]["seconds"]
                    speeds[peer] = len(files.names) / seconds
                elif (ran := run(stand, what, peer)) is not None:
                    speeds[peer] = len(files.names) / ran.seconds
                    written = ran.log_written_share
                    results.add("log", f"{what}: log written", peer, "of what was read", written)
                    if ran.written_share is not None:
                        work = f"{what}: written to the device"
                        results.add("log", work, peer, "of what was read", ran.written_share)
            for peer, speed in speeds.items():
                results.add("log", what, peer, "files/s", speed)
                results.add("log", f"{what}: of native", peer, "×", speed / speeds["native"])
                share = speed / speeds["ceiling"]
                results.add("log", f"{what}: of the ceiling", peer, "×", share)


def _bandwidth(bench: Bench) -> None:
    """Row log-bandwidth: a reader that takes what is there and reads no byte of it."""
    for size in BANDWIDTH:
        for name in ("plain", "limited"):
            with _prepared(bench, size, name) as (stand, _):
                what = f"{stand.files.what}, {name}: bandwidth"
                for number in _rounds(bench, what):
                    speed = stand.place.sequential_bytes_per_s
                    for state in ("rewritten meanwhile", "read only"):
                        bench.results.add("log", f"{what}, {state}", "device", "MB/s", speed / 1e6)
                    for peer in bench.turns(number, bench.layouts or ("static", "reorder")):
                        stage = functools.partial(_stage, stand, what, peer)
                        bench.undisturbed("log", stage)


def _stage(stand: Stand, what: str, layout: str) -> list[Figure]:
    """Three epochs; the last one is written for no other, so it is only read."""
    names, readers = stand.files.names, stand.bench.readers
    epochs, figures = 3, []
    with mounted(stand, layout) as mount:
        root = mount.mountpoint
        with announced(root, names, 1, epochs):
            for epoch in range(epochs):
                before = _pushed_bytes(mount.status())
                done = readers.await_files(in_order(root, names, 1, epoch))
                pushed = _pushed_bytes(mount.status()) - before
                if epoch:
                    state = "read only" if epoch == epochs - 1 else "rewritten meanwhile"
                    speed = pushed / done.seconds / 1e6
                    figures.append((f"{what}, {state}", layout, "MB/s", speed))
    return figures


def _pushed_bytes(status: dict[str, dict[str, int]]) -> int:
    return status["reads"]["bytes_pushed"]


def _paced(bench: Bench) -> None:
    """Row log-paced: a consumer of 0.7 of the disk's sequential bandwidth: how much longer its
    epochs are than they must be.
    """
    for name in ("plain", "limited"):
        with _prepared(bench, PACED_BYTES, name) as (stand, _):
            what = f"{stand.files.what}, {name}"
            work, pace = f"{what}, paced: epoch", PACE_SHARE * stand.place.sequential_bytes_per_s
            for number in _rounds(bench, work):
                bench.results.add("log", work, "consumer", "seconds", stand.files.bytes / pace)
                for peer in bench.turns(number, bench.layouts or LAYOUTS):
                    ran = run(stand, what, peer, pace_bytes_per_s=pace)
                    if ran is not None:
                        bench.results.add("log", work, peer, "seconds", ran.seconds)


def _partial(size: int, bench: Bench) -> None:
    """Rows log-partial-…: half of the dataset fits on SSD, the rest comes from a limited origin in
    every epoch.
    """
    with bench.folder("log") as work, contextlib.ExitStack() as stack:
        daemon = stack.enter_context(started_hintsd(work))
        files = stack.enter_context(dataset(bench, work, size, PARTIAL_COUNT))
        room = ("--ssd", str(int(files.on_ssd_bytes * PARTIAL_SHARE)))
        folder = work / "origin"
        folder.mkdir()
        slow = stack.enter_context(LoopOrigin(folder, files.bytes * 5 // 4 + (256 << 20)))
        origin = slow.directory / "data"
        shutil.copytree(files.source, origin)
        disk = stack.enter_context(device(work, files))
        disk.throttle(0, DEVICE_IOPS)
        stand = measured(bench, daemon, files, disk.directory, "limited", disk)
        few = files.names[: len(files.names) // NATIVE_SHARE]
        for limit, iops in ORIGINS[size].items():
            slow.throttle(ORIGIN_BPS, iops)
            what = f"{files.what}, half of it on SSD, origin's {limit} limited"
            for number in _rounds(bench, what):
                peers = ("stock", *(bench.layouts or ("static", "reorder")))
                for peer in bench.turns(number, peers):
                    if peer == "stock":
                        epoch = load_epochs(origin, few, seed=1, epochs=2, drop=True)[1]
                        bench.results.add("log", what, peer, "files/s", len(few) / epoch["seconds"])
                        continue
                    ran = run(stand, what, peer, origin, room)
                    if ran is not None:
                        speed = len(files.names) / ran.seconds
                        bench.results.add("log", what, peer, "files/s", speed)
            slow.unthrottle()


def _two(bench: Bench) -> None:
    """Row log-two: who reads beside the job that the log follows."""
    with _prepared(bench, TWO_BYTES, "limited", TWO_COUNT) as (stand, _):
        daemon, files = stand.daemon, stand.files
        for number in _rounds(bench, "log-two"):
            for layout in bench.turns(number, ("static", "reorder")):
                for hints, who in ((True, "a second job"), (False, "an unhinted reader")):
                    with mounted(stand, layout, jobs=2) as mount:
                        what = f"{files.what}, limited, beside a job: {who}"
                        try:
                            speed = _beside(bench, daemon, mount.mountpoint, files, hints)
                        except HintDoubted as error:
                            bench.results.note(f"log: {what}: {layout}: left out: {error}")
                            continue
                        bench.results.add("log", what, layout, "files/s", speed)
                        if layout == "reorder":
                            bench.results.note(f"log: {what}: {chosen(daemon)}")


def _beside(bench: Bench, daemon: HintsdCommand, root: Path, files: Files, hints: bool) -> float:
    """Files/s of the reader beside, while a job goes on that has filled the store: the second job's
    in its second epoch; without hints every epoch is like the others, and it is slow.
    """
    goes_on = bench.work / "goes-on"
    goes_on.touch()
    names = files.names if hints else files.names[::NATIVE_SHARE]
    with ThreadPoolExecutor(1) as pool:
        try:
            first = pool.submit(
                load_epochs,
                *(root, files.names),
                seed=1,
                epochs=EPOCHS_MOST,
                hints=True,
                workers=2,
                while_there=str(goes_on),
            )
            while not any((job["epoch"] or 0) > 0 for job in daemon.status()["jobs"]):
                if first.done():
                    first.result()
                    raise RuntimeError("the job has ended")
                time.sleep(0.05)
            ahead = AHEAD if hints else 0
            epochs = load_epochs(
                *(root, names), seed=2, epochs=1 + hints, hints=hints, ahead=ahead, workers=2
            )
        finally:
            goes_on.unlink()
        first.result()
    return len(names) / float(epochs[-1]["seconds"])


def _meta(bench: Bench) -> None:
    """Row log-meta: orders of two epochs, their chunks, `pack` frames, and the mount's index."""
    samples = META_SAMPLES // (10 if bench.quick else 1)
    for _ in _rounds(bench, "log-meta"):
        said = json.loads(run_module("tools.bench.meta_cost", str(samples)).stdout)
        for who in META_COLUMNS:
            bench.results.add("log", "MetaIndex: CPU", who, "seconds", said[who]["cpu_s"])
            bench.results.add("log", "MetaIndex: memory", who, "GB", said[who]["bytes"] / 1e9)
    bench.results.note(f"log: MetaIndex: {samples:,} samples, {said['chunks']} chunks")


ROWS: dict[str, Callable[[Bench], None]] = {
    **{
        f"log-{size // 1000}k{'' if name == 'limited' else '-plain'}": functools.partial(
            _sizes, size, name
        )
        for name in ("limited", "plain")
        for size in COUNTS
    },
    "log-bandwidth": _bandwidth,
    "log-paced": _paced,
    **{f"log-partial-{size // 1000}k": functools.partial(_partial, size) for size in PARTIAL},
    "log-two": _two,
    "log-meta": _meta,
}
COLUMNS = ("ceiling", "consumer", *LAYOUTS, *META_COLUMNS)

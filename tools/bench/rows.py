"""The rows: what is read, in which state of the caches, by how many readers.

INVARIANT: within a row the peers take turns pass by pass, first ones changing from round to round.
INVARIANT: a pass that needs a state of the caches makes that state itself, right before it.
"""

import contextlib
import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.bench import peers, stalls
from tools.bench.readers import Readers
from tools.bench.results import Results
from tools.fusecache_command import FusecacheMount
from tools.slow_origin import LoopOrigin, drop_caches, drops_seen

FILE_BYTES = 110_000
READER_COUNTS = (1, 4)
WRITTEN = "written"  # native files that were written just before, and never read from disk
COLUMNS = (WRITTEN,)
_SLOW_READ_S = 0.005  # a read of 110 KB that takes longer has waited for something
_DYING_S = 0.05
_ATTEMPTS = 20  # of a pass that other processes disturb
_SLOW_PEER_FILES = 500  # rclone needs milliseconds for each: fewer files, the same figure per file


# What a pass found: work, peer, unit, value.
Figure = tuple[str, str, str, float]


@dataclass
class Bench:
    work: Path
    readers: Readers
    names: tuple[str, ...]  # of the peers
    quick: bool
    results: Results
    say: Callable[[str], None]
    asked_rounds: int | None = None  # instead of each row's own number
    files: Mapping[int, int] = field(default_factory=dict)  # log and budgets: size -> samples
    epochs: int | None = None  # of the log rows: those of a mount that count
    layouts: tuple[str, ...] = ()  # of the log rows, instead of each row's own
    loaders: tuple[str, ...] = ()  # of the budgets rows: peers that are no mounts
    own_drops: int = 0

    def rounds(self, full: int) -> int:
        if self.asked_rounds is not None:
            return self.asked_rounds
        return min(3, full) if self.quick else full

    def turns(self, round_number: int, names: tuple[str, ...]) -> tuple[str, ...]:
        first = round_number % len(names)
        return names[first:] + names[:first]

    def drop(self) -> None:
        drop_caches()
        self.own_drops += 1

    def undisturbed(self, row: str, attempt: Callable[[], list[Figure]]) -> None:
        """Add what `attempt` finds, again if another process dropped the caches meanwhile.

        RuntimeError: that happened _ATTEMPTS times running.
        """
        for _ in range(_ATTEMPTS):
            by_others = drops_seen() - self.own_drops
            figures = attempt()
            if drops_seen() - self.own_drops == by_others:
                for work, peer, unit, value in figures:
                    self.results.add(row, work, peer, unit, value)
                return
            self.say(f"{row}: another process dropped the kernel's caches: again")
        raise RuntimeError("other processes keep dropping the kernel's caches")

    def chosen(self, *names: str) -> tuple[str, ...]:
        return tuple(name for name in names if name in self.names)

    @contextlib.contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        folder = self.work / name
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _from_origin(peer: peers.Peer) -> int:
    if not isinstance(peer, peers.Fusecache):
        return 0
    return int(peer.mount.status()["reads"]["from_origin"])


def _readers(count: int) -> str:
    return f"{count} reader{'s' * (count > 1)}"


Make = Callable[[str, Path, Path], peers.Peer]


def small_files(bench: Bench, hot: bool, cold: bool, make: Make = peers.make) -> None:
    """Rows hot and cold: whole files of 110 KB, or those that were asked for."""
    for size_bytes, count in (bench.files or {FILE_BYTES: 2000 if bench.quick else 5000}).items():
        _files_of(bench, size_bytes, count, hot, cold, make)


def _files_of(bench: Bench, size_bytes: int, count: int, hot: bool, cold: bool, make: Make) -> None:
    results, size = bench.results, f"{size_bytes // 1000} KB, " if bench.files else ""
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(bench.folder("small"))
        source, written = work / "source", work / WRITTEN
        source.mkdir()
        files = bench.readers.fill_files(source, count, size_bytes, 1)
        mounted: dict[str, peers.Peer] = {}
        for name in bench.names:
            bench.say(f"mounting {name} over {count} files of {size_bytes} bytes")
            peer = stack.enter_context(make(name, source, work))
            peer.warm()
            mounted[name] = peer

        def run(name: str, readers: int, seed: int, in_python: bool = False) -> float:
            some = files[:_SLOW_PEER_FILES] if name == "rclone" else files
            root = written if name == WRITTEN else mounted[name].root
            return bench.readers.read_files(root, some, readers, seed, in_python).items_per_s

        for name in bench.names:  # twice: the first may only have started to fill a cache
            for seed in range(2):
                run(name, 1, seed)

        def hot_round(number: int) -> list[Figure]:
            """Pages lie anew in each round: where they happen to lie is worth 20 % either way."""
            bench.drop()
            for name in bench.turns(number, bench.names):
                run(name, 1, number)
            shutil.rmtree(written, ignore_errors=True)
            shutil.copytree(source, written)
            os.sync()  # not beside the passes
            turns = bench.turns(number, (*bench.names, WRITTEN))
            figures: list[Figure] = []
            for readers, in_python in itertools.product(READER_COUNTS, (False, True)):
                what = size + _readers(readers) + ", in Python" * in_python
                for name in turns:
                    speed = run(name, readers, number, in_python)
                    figures.append((what, name, "files/s", speed))
            return figures

        if hot:
            for number in range(bench.rounds(9)):
                bench.undisturbed("hot", functools.partial(hot_round, number))
                bench.say(f"hot: round {number + 1} done")
        if cold:
            fetched = {name: _from_origin(mounted[name]) for name in bench.names}
            for number in range(bench.rounds(5)):
                for readers in READER_COUNTS:
                    for name in bench.turns(number, bench.names):
                        bench.drop()
                        speed = run(name, readers, number)
                        results.add("cold", size + _readers(readers), name, "files/s", speed)
                bench.say(f"cold: round {number + 1} done")
            if "fusecache" in mounted:
                more = _from_origin(mounted["fusecache"]) - fetched["fusecache"]
                results.note(f"cold: fusecache read {more} times from the origin meanwhile")


def listing(bench: Bench) -> None:
    """Row listing: 200,000 names in one directory: first, again, stat of each; first of a second
    mount.
    """
    count = 50_000 if bench.quick else 200_000
    names = bench.chosen("native", "fusecache", "bindfs", "mergerfs")
    with bench.folder("listing") as work:
        source = work / "source"
        source.mkdir()
        bench.readers.make_tree(source, 1, count)
        folder = next(source.iterdir()).name

        def list_it(name: str) -> list[Figure]:
            shutil.rmtree(work / "fusecache-cache", ignore_errors=True)  # with the saved table
            with peers.make(name, source, work) as peer:
                root = peer.root / folder
                first, again = bench.readers.list_entries(root), bench.readers.list_entries(root)
                each = bench.readers.stat_entries(root)
            if not first.items == again.items == each.items == count:
                raise RuntimeError(f"{name} lists {first.items} and {again.items} of {count}")
            passes = {"first": first, "again": again, "stat of each": each}
            if name == "fusecache":
                with peers.make(name, source, work) as peer:
                    passes["first of a second mount"] = bench.readers.list_entries(root)
            return [(what, name, "entries/s", p.items_per_s) for what, p in passes.items()]

        for number in range(bench.rounds(5)):
            for name in bench.turns(number, names):
                bench.readers.stat_entries(source / folder)  # the origin's own caches are warm
                bench.undisturbed("listing", functools.partial(list_it, name))
            bench.say(f"listing: round {number + 1} done")
    bench.results.note(f"listing: {count} empty files; each first listing is of a fresh mount")


def stream(bench: Bench) -> None:
    """Row stream: one large file from end to end in reads of 1 MiB."""
    size_bytes = (256 << 20) if bench.quick else (2 << 30)
    with bench.folder("stream") as work:
        source = work / "source"
        source.mkdir()
        name = bench.readers.fill_files(source, 1, size_bytes, 2)[0]

        def run(peer: peers.Peer, what: str) -> Figure:
            done = bench.readers.read_stream(peer.root / name)
            return (what, peer.name, "MB/s", done.bytes_per_s / 1e6)

        def stream_it(peer_name: str) -> list[Figure]:
            figures: list[Figure] = []
            shutil.rmtree(work / "fusecache-cache", ignore_errors=True)
            with peers.make(peer_name, source, work) as peer:
                bench.drop()
                if isinstance(peer, peers.Fusecache):
                    figures.append(run(peer, "cold, store empty"))
                    peer.mount.settle()
                    bench.drop()
                    figures.append(run(peer, "cold, from the store"))
                else:
                    figures.append(run(peer, "cold"))
                run(peer, "hot")  # pages may still be on their way in: this pass waits for them
                figures += [run(peer, "hot") for _ in range(3)]
            return figures

        for number in range(bench.rounds(3)):
            for peer_name in bench.turns(number, bench.chosen("native", "fusecache")):
                bench.undisturbed("stream", functools.partial(stream_it, peer_name))
            bench.say(f"stream: round {number + 1} done")
    bench.results.note(f"stream: a file of {size_bytes >> 20} MiB")


def _set_sizes(pids: tuple[int, ...]) -> tuple[int, int]:
    """Resident and proportional bytes of the processes together."""
    resident = proportional = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Rss:"):
                resident += int(line.split()[1]) * 1024
            elif line.startswith("Pss:"):
                proportional += int(line.split()[1]) * 1024
    return resident, proportional


def memory(bench: Bench) -> None:
    """Row memory: keeper and server with 1,280,000 files listed, less the same with ten."""
    if "fusecache" not in bench.names:
        return
    folders, each = (100, 1280) if bench.quick else (1000, 1280)
    with bench.folder("memory") as work, contextlib.ExitStack() as stack:
        many, few = work / "many", work / "few"
        many.mkdir()
        few.mkdir()
        bench.readers.make_tree(few, 1, 10)
        inodes = folders * (each + 1) + 1000
        options = f"size=4G,nr_inodes={inodes}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(many)], check=True)
        stack.callback(subprocess.run, ["umount", "-l", str(many)], check=False)
        bench.say(f"making {folders * each} files in {folders} directories")
        bench.readers.make_tree(many, folders, each)
        sizes = {}
        for source in (few, many):
            with peers.Fusecache(source, work / "mnt", work / "cache") as peer:
                listed = bench.readers.list_tree(peer.root)
                peer.mount.settle()
                sizes[source] = _set_sizes(peer.mount.pids())
                bench.say(f"memory: listed {listed.items} entries in {listed.seconds:.1f} s")
        for index, work_name in enumerate(("resident set size", "proportional set size")):
            more = sizes[many][index] - sizes[few][index]
            bench.results.add(
                "memory", work_name, "fusecache", "bytes/file", more / (folders * each)
            )
    base = sizes[few][1] / 1e6
    bench.results.note(
        f"memory: {folders * each} files; keeper and server together; base {base:.0f} MB"
    )


def kill(bench: Bench) -> None:
    """Row kill: from `kill -9` of the server to the end of the read that was waiting for it."""
    if "fusecache" not in bench.names:
        return
    kills, count = (5, 200) if bench.quick else (16, 1000)
    with bench.folder("kill") as work:
        source = work / "source"
        source.mkdir()
        names = bench.readers.fill_files(source, count, FILE_BYTES, 3)
        with peers.Fusecache(source, work / "mnt", work / "cache") as peer:
            peer.warm()
            with stalls.reading(peer.root, source, names, work / "expected.txt") as end:
                times = _kill(peer.mount, kills)
                outcome = end()
        bench.say(f"kill: {kills} kills, {outcome['reads']} reads")
    spans = [(begin, end) for begin, end in outcome["spans"]]
    for moment in times:
        bench.results.add("kill", "next byte", "fusecache", "s", _next_byte(spans, moment))
    series = bench.results.get("kill", "next byte", "fusecache")
    assert series is not None
    bench.results.add("kill", "longest", "fusecache", "s", max(series.values))
    bench.results.note(
        f"kill: {len(times)} kills during {outcome['reads']} reads:"
        f" {len(outcome['errors'])} failed, {outcome['wrong']} with wrong bytes"
    )
    if outcome["errors"] or outcome["wrong"]:
        bench.results.note(f"kill: FAILED READS, for example {outcome['errors'][:3]}")


def _kill(mount: FusecacheMount, kills: int) -> list[float]:
    """When each was."""
    chance = random.Random(0)
    times: list[float] = []
    for _ in range(kills):
        time.sleep(2 + chance.random())
        victim = mount.pids()[1]
        times.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)
    time.sleep(3)
    return times


def _next_byte(spans: list[tuple[float, float]], moment: float) -> float:
    """Seconds from the kill to the end of the read that it stalled; of the next one if none."""
    after = [span for span in spans if span[1] > moment]
    if not after:
        raise RuntimeError("the reader read nothing after a kill")
    # A killed process may serve a little longer: what it stalls can begin shortly after the kill.
    caught = [span for span in after if span[0] < moment + _DYING_S]
    slowest = max(caught or after[:1], key=lambda span: span[1] - span[0])
    if slowest[1] - slowest[0] < _SLOW_READ_S:
        slowest = next((span for span in after if span[0] >= moment), after[-1])
    return slowest[1] - moment


def origin(bench: Bench) -> None:
    """Row origin: epochs from a throttled origin, directly and through the mount, four readers."""
    count, readers = (500, 4) if bench.quick else (2000, 4)
    read_bps, read_iops = 50_000_000, 2000
    names = bench.chosen("native", "fusecache")
    with bench.folder("origin") as work, LoopOrigin(work, count * FILE_BYTES * 2) as device:
        files = bench.readers.fill_files(device.directory, count, FILE_BYTES, 4)
        device.throttle(read_bps, read_iops)

        def three_epochs(name: str) -> list[Figure]:
            figures: list[Figure] = []
            shutil.rmtree(work / "fusecache-cache", ignore_errors=True)
            with peers.make(name, device.directory, work) as peer:
                for epoch, dropped in enumerate((True, True, False), 1):
                    if dropped:
                        bench.drop()
                    before = device.bytes_read()
                    done = bench.readers.read_files(peer.root, files, readers, epoch)
                    share = (device.bytes_read() - before) / done.size_bytes
                    what = f"epoch {epoch}{', kernel caches dropped' if dropped else ''}"
                    figures.append((what, name, "files/s", done.items_per_s))
                    figures.append((f"{what}: bytes from the origin", name, "of all", share))
                    if isinstance(peer, peers.Fusecache):
                        peer.mount.settle()
            return figures

        for number in range(bench.rounds(3)):
            for name in bench.turns(number, names):
                bench.undisturbed("origin", functools.partial(three_epochs, name))
            bench.say(f"origin: round {number + 1} done")
    bench.results.note(
        f"origin: ext4 on a loop device, {read_bps / 1e6:.0f} MB/s and {read_iops} requests/s"
    )

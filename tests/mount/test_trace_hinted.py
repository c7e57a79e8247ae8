"""`fusecache trace` of hinted epochs: what the mount cannot see, hintsd tells (docs/TRACES.md)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hintsd
from fusecache.traces import traces
from fusecache.traces.traces import Gap, Trace
from hintsd.follow.progress import SPACING_LEAST
from hintsd.lab.replay import Workload
from hintsd.lab.shuffle import shuffled
from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_hinted import make_dataset
from tests.mount.test_trace import Record, Recorder, record, recorded, whole
from tests.support.hintsd_support import Client, DaemonProcess
from tests.support.mounted import Mount, eventually
from tests.support.residency import locked

pytestmark = pytest.mark.filterwarnings("ignore:hintsd")

__all__ = ["record"]  # a fixture

EPOCHS = 3
SAMPLES = 300
BATCH = 10
COMPUTE_S = 0.01  # of a batch: an epoch that is over before hintsd looks again is not told whole
AT_END_S = (
    0.5  # what is seen later than 0.1 s after an epoch's last step is taken for the next one's
)
PART = 50  # samples that are read before hintsd is waited for, which may be slower still


@pytest.fixture
def daemon(place: Place) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(place.base)
    daemon.start()
    yield daemon
    daemon.kill()


_trainings = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def _trainings_end_before_the_mount(mounting: Mounting) -> Iterator[None]:
    yield
    _trainings.close()


class Files(Dataset[int]):
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        assert self.paths[index].read_bytes()
        return index


def is_at(daemon: DaemonProcess, place: tuple[int, int]) -> bool:
    return place_of(daemon) == place


def place_of(daemon: DaemonProcess) -> tuple[int, int]:
    now = status(daemon)
    return now["epoch"], now["index"]


def noted_place(daemon: DaemonProcess) -> tuple[int, int]:
    """From where the next hintsd goes on."""
    (file,) = (Path(daemon.path).parent / "jobs").glob("*.position")
    epoch, index = msgpack.unpackb(file.read_bytes())
    return epoch, index


class Training:
    """A hinted loader over the mount, whose place hintsd knows: it needs an epoch to begin."""

    def __init__(self, place: Place, mount: Mount, daemon: DaemonProcess, workers: int) -> None:
        self._names = make_dataset(place, SAMPLES)
        paths = [mount.path / name for name in self._names]
        # A page that the host takes brings a READ, and hintsd is less sure of the place then.
        _trainings.enter_context(locked(paths))
        self._loader = DataLoader(
            Files(paths),
            batch_size=BATCH,
            shuffle=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(5),
        )
        self.job = hintsd.attach(self._loader, paths=paths)
        _trainings.callback(self.job.close)  # its thread looks at the mount, once hintsd is gone
        self.slack = SPACING_LEAST + (2 * workers + 1) * BATCH
        """Samples that hintsd is not sure of, at most."""
        self.epoch()
        eventually(lambda: "epoch" in status(daemon))
        for epoch in range(2, 6):  # hintsd has laid the last file's wire in time, or does next time
            self.epoch()
            with contextlib.suppress(AssertionError):
                eventually(functools.partial(is_at, daemon, (epoch, 0)), timeout_s=10, every_s=0.2)
                return
        raise AssertionError(f"hintsd is at {place_of(daemon)}, its reader at an epoch's end")

    def epoch(
        self,
        between: Callable[[], None] = lambda: None,
        wait: Callable[[int], None] = lambda read: None,
    ) -> list[str]:
        """The names read, in torch's order. `between`: called in the middle; `wait`: after each
        part, with how many are read.
        """
        read: list[str] = []
        for batch in self._loader:
            time.sleep(COMPUTE_S)
            read += [str(self._names[int(index)]) for index in batch]
            if len(read) == SAMPLES // 2:
                between()
            if len(read) % PART == 0:
                wait(len(read))
            if len(read) == SAMPLES:
                time.sleep(AT_END_S)
        return read

    def follow(self, recorder: Recorder, begun: int = 0) -> Callable[[int], None]:
        """For `epoch`: wait until what is read is told, `begun` samples before it, too."""

        def wait(read: int) -> None:
            eventually(lambda: told(recorder) >= begun + read - self.slack, every_s=0.2)

        return wait

    def epochs(self, recorder: Recorder) -> list[list[str]]:
        """EPOCHS of them, from the recording's beginning on."""
        return [self.epoch(wait=self.follow(recorder, n * SAMPLES)) for n in range(EPOCHS)]


def epochs_of(trace: Trace) -> list[list[str]]:
    names = recorded(trace)
    return [
        names[begin:end]
        for begin, end in itertools.pairwise([*trace.epoch_starts.tolist(), len(names)])
    ]


def status(daemon: DaemonProcess) -> dict[str, Any]:
    with contextlib.closing(Client(daemon.path)) as client:
        jobs = client.ask("status")["jobs"]
    return dict(jobs[0]) if jobs else {}


def lru_hits(trace: Trace) -> float:
    """Of a cache of half the dataset."""
    return Workload(trace, 1, "trace").replay("lru", int(trace.sizes.sum()) // 2, 1).hit_ratio


def told(recorder: Recorder) -> int:
    """How many rows hints have brought so far."""
    seen = recorder.trace(parts=True).seen
    assert seen is not None
    return int((seen & 7 == traces.BY_HINT).sum())


@in_one_mode
@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_order_is_recorded(
    place: Place, mounting: Mounting, daemon: DaemonProcess, record: Record, workers: int
) -> None:
    mount = mounting("--hintsd", daemon.path, "--ram", "64M")
    training = Training(place, mount, daemon, workers)
    recorder = record(mount)
    drawn = training.epochs(recorder)
    # nothing is seen for two seconds: the last epoch is told to its end
    eventually(lambda: told(recorder) == EPOCHS * SAMPLES, every_s=0.2)
    trace = recorder.end()
    assert whole(trace)
    assert epochs_of(trace) == drawn
    assert trace.times_s is not None
    assert sorted(trace.times_s) == trace.times_s.tolist()
    assert trace.readers is not None
    assert set(trace.readers) == {-1}
    # chance makes 0.02 of so few samples, as a standard deviation; it is seeded
    assert abs(lru_hits(trace) - lru_hits(shuffled(SAMPLES, EPOCHS, seed=1))) < 0.06


@in_one_mode
def test_what_is_not_sure_yet_is_what_was_seen(
    place: Place, mounting: Mounting, daemon: DaemonProcess, record: Record
) -> None:
    mount = mounting("--hintsd", daemon.path, "--ram", "64M")
    training = Training(place, mount, daemon, 2)
    recorder = record(mount)
    drawn = training.epochs(recorder)
    sure = EPOCHS * SAMPLES - training.slack
    eventually(lambda: told(recorder) >= sure, every_s=0.2)
    trace, is_told = recorder.end(), told(recorder) == EPOCHS * SAMPLES
    assert (trace.is_complete, recorder.is_untold) == (True, not is_told)
    assert trace.gaps == (() if is_told else (Gap(len(trace.items), None),))
    got = recorded(trace)
    assert got[:sure] == [name for names in drawn for name in names][:sure]
    assert len(got) <= EPOCHS * SAMPLES
    assert set(got[sure:]) <= set(drawn[-1][-training.slack :])
    assert trace.epoch_starts.tolist() == [0, SAMPLES, 2 * SAMPLES]
    training.job.close()


@pytest.mark.parametrize("zero_open", [False], ids=["ordinary"], indirect=True)
def test_where_all_opens_are_seen_nobody_is_asked(
    place: Place, mounting: Mounting, daemon: DaemonProcess, record: Record
) -> None:
    """Ordinary mode is complete by itself: amid an epoch, and whoever dies but the server."""
    mount = mounting("--hintsd", daemon.path, "--ram", "64M")
    training = Training(place, mount, daemon, 0)
    begun: list[Recorder] = []
    drawn = training.epoch(lambda: begun.append(record(mount)))[SAMPLES // 2 :]
    drawn += training.epoch(daemon.kill)
    daemon.start()
    drawn += training.epoch()
    trace = begun[0].end()
    assert whole(trace)
    assert recorded(trace) == drawn
    assert trace.epoch_starts.tolist() == [0]
    assert trace.seen is not None
    assert traces.BY_HINT not in trace.seen


@in_one_mode
def test_a_recording_that_begins_amid_an_epoch(
    place: Place, mounting: Mounting, daemon: DaemonProcess, record: Record
) -> None:
    mount = mounting("--hintsd", daemon.path, "--ram", "64M")
    training = Training(place, mount, daemon, 0)
    begun: list[Recorder] = []

    def begin() -> None:
        eventually(lambda: status(daemon)["index"] >= SAMPLES // 2 - training.slack)
        begun.append(record(mount))

    def wait(read: int) -> None:
        if begun:  # where hintsd saw the reader, or a little before that
            training.follow(begun[0], -SAMPLES // 2 - training.slack)(read)

    first = training.epoch(begin, wait)
    second = training.epoch(wait=lambda read: wait(SAMPLES + read))
    training.job.close()
    (recorder,) = begun
    eventually(lambda: recorded(recorder.trace())[-1:] == second[-1:])
    trace = recorder.end()
    assert whole(trace)
    rest, last = epochs_of(trace)
    assert last == second
    assert first[-len(rest) :] == rest
    assert abs(len(rest) - SAMPLES // 2) <= training.slack


def _drawn_where(names: list[str], drawn: list[list[str]]) -> list[tuple[str, list[int]]]:
    """To see what went wrong: the place of each in each epoch."""
    return [(name, [epoch.index(name) for epoch in drawn]) for name in names]


@in_one_mode
@pytest.mark.parametrize("who", ["hintsd", "server", "recorder"])
def test_who_ends_meanwhile(
    place: Place, mounting: Mounting, daemon: DaemonProcess, record: Record, who: str
) -> None:
    """What is told is in torch's order, each sample once; what is missing is noted."""
    mount = mounting("--hintsd", daemon.path, "--ram", "64M")
    training = Training(place, mount, daemon, 0)
    recorder = record(mount)

    def end() -> None:
        eventually(lambda: told(recorder) >= SAMPLES, every_s=0.2)  # the first epoch
        if who == "hintsd":  # what it told since it noted its place would be told again
            eventually(lambda: noted_place(daemon) == place_of(daemon), every_s=0.2)
            daemon.kill()
            daemon.start()
            eventually(lambda: "epoch" in status(daemon))
        elif who == "server":
            mount.kill_server()
        else:
            recorder.process.kill()
            recorder.wait()

    def wait(read: int) -> None:
        if read < SAMPLES // 2:
            training.follow(recorder, SAMPLES)(read)

    drawn = [training.epoch(wait=training.follow(recorder)), training.epoch(end, wait)]
    if who != "recorder":
        before = told(recorder)

        def goes_on() -> bool:
            drawn.append(training.epoch())
            return told(recorder) > before + SAMPLES

        eventually(goes_on, every_s=0.3)
        recorder.process.terminate()
        recorder.wait()
    trace = recorder.trace()
    assert trace.is_complete is (who != "recorder")
    assert bool(trace.gaps) is (who != "recorder")
    assert trace.readers is not None
    names = [name for name, by in zip(recorded(trace), trace.readers, strict=True) if by < 0]
    assert names[:SAMPLES] == drawn[0]
    rest = itertools.chain(*drawn)
    at = next((place for place, name in enumerate(names) if name not in rest), None)
    assert at is None, _drawn_where(names[max(0, at - 3) : at + 4], drawn)

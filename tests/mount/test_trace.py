"""`fusecache trace` on a real mount: it records what was read, whoever dies meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusecache.base.errors import EXIT_BUSY, EXIT_FAILED, EXIT_NOT_A_MOUNT, EXIT_OK, EXIT_USAGE
from fusecache.traces import traces
from fusecache.traces.traces import Gap, Trace
from tests.conftest import Mounting, OrdinaryUser, Place, in_one_mode
from tests.mount.test_hinted import make_dataset, order, shuffled, staged
from tests.support.directed import Directed, request
from tests.support.mounted import COMMAND, Mount, command, drop_file, environment, eventually
from tests.support.residency import held, is_in_memory
from tests.support.trees import random_bytes

FILES = 40
FILE_BYTES = 10_000
LARGE_BYTES = 9 << 20
REFUSAL_S = 20.0


@pytest.fixture
def names(place: Place) -> list[str]:
    """Files of one READ each, old enough to be kept, in a shuffled order."""
    names = [f"class{number % 3}/{number:03}.jpg" for number in range(FILES)]
    for name in names:
        os.utime(place.write(name, random_bytes(name, FILE_BYTES)), (1e9, 1e9))
    random.Random(1).shuffle(names)
    return names


class Recorder:
    """A `fusecache trace` that has begun."""

    def __init__(self, mount: Mount, path: Path, *flags: str) -> None:
        self.path = path
        self.is_untold = False
        self.process = subprocess.Popen(
            [*COMMAND, "trace", str(mount.path), "-o", str(path), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        eventually(lambda: self._has_header() or self.process.poll() is not None)

    def _has_header(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def wait(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def end(self, number: int = signal.SIGINT) -> Trace:
        """Stop it as a user does. What hints had not told to the end of an epoch is said."""
        self.process.send_signal(number)
        code, out, err = self.wait()
        assert code == EXIT_OK
        self.is_untold = " of its last epoch, of " in err
        assert err.count("\n") == self.is_untold
        assert str(self.path) in out
        return self.trace()

    def trace(self, parts: bool = False) -> Trace:
        return traces.read(self.path, parts=parts)


Record = Callable[..., Recorder]


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    begun: list[Recorder] = []

    def begin(mount: Mount, *flags: str, path: Path | None = None) -> Recorder:
        begun.append(Recorder(mount, path or tmp_path / f"{len(begun)}.trace", *flags))
        return begun[-1]

    yield begin
    for recorder in begun:
        if recorder.process.poll() is None:
            recorder.process.kill()
            recorder.process.communicate()


def read(mount: Mount, names: list[str]) -> None:
    for name in names:
        assert len((mount.path / name).read_bytes()) == FILE_BYTES


def forget(mount: Mount, names: list[str]) -> None:
    for name in names:
        drop_file(mount.path / name)


def recorded(trace: Trace) -> list[str]:
    assert trace.names is not None
    return [trace.names[item] for item in trace.items]


def whole(trace: Trace) -> bool:
    return trace.is_complete and trace.gaps == ()


# ---- what is seen --------------------------------------------------------------------------------


def test_reads_that_reach_the_mount_are_recorded(
    place: Place, mounting: Mounting, zero_open: bool, names: list[str], record: Record
) -> None:
    mount = mounting()
    recorder = record(mount)
    read(mount, names)
    taken: list[str] = []  # of whose pages the host has taken the first: seen once more

    def bring() -> None:
        taken.extend(name for name in names if not is_in_memory(mount.path / name))
        read(mount, names)

    if zero_open:  # in the other mode each open is seen, and `held` opens
        with held([mount.path / name for name in names], bring):
            read(mount, names)  # from the page cache
    trace = recorder.end()
    assert whole(trace)
    assert recorded(trace) == names + taken
    assert set(trace.sizes) == {FILE_BYTES}
    assert trace.epoch_starts.tolist() == [0]
    assert trace.readers is not None
    assert set(trace.readers) <= {threading.get_native_id(), 0}
    assert trace.times_s is not None
    assert sorted(trace.times_s) == list(trace.times_s)
    assert [one for one in how(recorder) if not taken or one != traces.FROM_SSD] == (
        [traces.FROM_ORIGIN]
        if zero_open
        else [traces.OPENED, traces.FROM_ORIGIN | traces.CONTINUES]
    )
    mount.read_until_stored(*names, blocks=FILES)
    recorder = record(mount)
    read(mount, names[::-1])
    assert recorded(recorder.end()) == names[::-1]
    assert how(recorder) == (
        [traces.FROM_SSD] if zero_open else [traces.OPENED, traces.FROM_SSD | traces.CONTINUES]
    )


def how(recorder: Recorder) -> list[int]:
    """All values of `seen`."""
    seen = recorder.trace(parts=True).seen
    assert seen is not None
    return sorted({int(value) for value in seen})


def test_every_open_is_recorded_on_demand(
    mounting: Mounting, names: list[str], record: Record
) -> None:
    mount = mounting()
    read(mount, names)  # the kernel knows all names, and has all pages
    recorder = record(mount, "--every-open")
    read(mount, names[::-1])
    os.listdir(mount.path / "class1")
    read(mount, names)
    subprocess.run(["cat", mount.path / names[3]], stdout=subprocess.DEVNULL, check=True)
    trace = recorder.end()
    assert whole(trace)
    assert recorded(trace) == [*names[::-1], *names, names[3]]
    assert trace.readers is not None
    assert set(trace.readers[:-1]) == {threading.get_native_id()}
    assert trace.readers[-1] not in (0, threading.get_native_id())
    forget(mount, names)
    recorder = record(mount, "--every-open")
    read(mount, names)  # with READs: still one access each
    trace = recorder.end()
    assert recorded(trace) == names
    parts = recorder.trace(parts=True).seen
    assert parts is not None
    assert (len(parts), len(trace.items)) == (2 * FILES, FILES)


@in_one_mode
def test_reads_within_large_files_are_parts(
    place: Place, mounting: Mounting, record: Record
) -> None:
    os.utime(place.write("large", random_bytes("large", LARGE_BYTES)), (1e9, 1e9))
    mount = mounting()
    recorder = record(mount)
    with open(mount.path / "large", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for offset in (0, 5 << 20, 1 << 20):
            assert len(os.pread(file.fileno(), 1000, offset)) == 1000
    recorder.end()
    assert recorded(recorder.trace()) == ["large"]
    seen = recorder.trace(parts=True).seen
    assert seen is not None
    assert list(seen).count(traces.ELSEWHERE | traces.CONTINUES) >= 2


@pytest.mark.parametrize("flags", [["--every-open"], []])
def test_hinted_epochs(
    place: Place, mounting: Mounting, zero_open: bool, record: Record, flags: list[str]
) -> None:
    """Where all opens are seen, what is recorded is what torch drew. Else wires tell some of it;
    what hints add: tests/mount/test_trace_hinted.py.
    """
    count = 600
    paths, spec = make_dataset(place, count), shuffled(count)
    mount = mounting("--ram", "64M")
    drawn = []
    with Directed() as directed:
        directed.open("job", request(mount.path, spec, epochs=2))
        staged(directed, "job", count * 8192)
        recorder = record(mount, *flags)
        for epoch in range(2):
            for index in order(spec, epoch):
                (mount.path / paths[index]).read_bytes()
                drawn.append(str(paths[index]))
        trace = recorder.end()
    if zero_open and not flags:
        assert whole(trace) != recorder.is_untold
    else:
        assert whole(trace)
        assert recorded(trace) == drawn
    assert trace.seen is not None
    assert traces.OPENED in trace.seen


# ---- processes that end --------------------------------------------------------------------------


@in_one_mode
def test_the_server_is_killed_meanwhile(
    mounting: Mounting, names: list[str], record: Record
) -> None:
    mount = mounting()
    recorder = record(mount)
    read(mount, names[:10])
    eventually(lambda: len(recorder.trace().items) == 10)
    mount.kill_server()
    probe = names[10]

    def goes_on() -> bool:
        forget(mount, [probe])
        read(mount, [probe])
        return recorded(recorder.trace())[10:11] == [probe]

    eventually(goes_on, every_s=0.5)
    read(mount, names[11:])
    recorder.process.send_signal(signal.SIGTERM)
    code, _, err = recorder.wait()
    assert code == EXIT_OK
    assert err == (
        "fusecache: warning: the server was restarted, or had to wait too long for this recorder, "
        "1 time; what was read meanwhile is missing\n"
    )
    trace = recorder.trace()
    assert trace.is_complete
    assert trace.gaps == (Gap(10, None),)
    got = recorded(trace)
    assert got[:10] == names[:10]
    assert [name for name in got[10:] if name != probe] == names[11:]
    assert trace.names is not None
    assert len(set(trace.names)) == len(trace.names) == FILES


@in_one_mode
def test_the_recorder_is_killed(mounting: Mounting, names: list[str], record: Record) -> None:
    mount = mounting()
    recorder = record(mount)
    read(mount, names[:10])
    eventually(lambda: len(recorder.trace().items) == 10)
    recorder.process.kill()
    recorder.wait()
    assert recorded(recorder.trace()) == names[:10]
    assert not recorder.trace().is_complete
    read(mount, names[10:])

    def records_again() -> Trace:
        after = Recorder(mount, recorder.path.with_name("after"), "--seconds", "0.01", "--force")
        assert after.wait()[0] == EXIT_OK
        return after.trace()

    assert len(eventually(records_again).items) == 0


@in_one_mode
def test_it_ends_with_the_mount(mounting: Mounting, names: list[str], record: Record) -> None:
    mount = mounting()
    recorder = record(mount)
    read(mount, names)
    mount.umount()
    code, out, err = recorder.wait()
    assert code == EXIT_OK
    assert err == f"fusecache: {mount.path}: the mount is gone: the recording has ended\n"
    assert f"{FILES} of {FILES} files" in out
    assert recorded(recorder.trace()) == names


@in_one_mode
@pytest.mark.parametrize("flags", [("--seconds", "0.3"), ("--max-size", "300")])
def test_it_ends_by_itself(
    mounting: Mounting, names: list[str], record: Record, flags: tuple[str, str]
) -> None:
    mount = mounting()
    recorder = record(mount, *flags, "--json")
    read(mount, names)
    code, out, err = recorder.wait()
    assert (code, err) == (EXIT_OK, "")
    facts = json.loads(out)
    assert facts["complete"]
    if "--max-size" in flags:
        assert facts["size_bytes"] >= 300
        assert recorded(recorder.trace()) == names[: facts["accesses"]]
    shown = command("trace", "--show", recorder.path, "--json")
    assert json.loads(shown.stdout) == facts


@in_one_mode
def test_a_full_disk_keeps_what_is_whole(
    mounting: Mounting, names: list[str], record: Record, small_disk: Path
) -> None:
    mount = mounting()
    recorder = record(mount, path=small_disk / "t")
    read(mount, names[:10])
    eventually(lambda: len(recorder.trace().items) == 10)
    with open(small_disk / "rest", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    assert os.statvfs(small_disk).f_bfree == 0

    def has_ended() -> bool:
        forget(mount, names)
        read(mount, names)
        return recorder.process.poll() is not None

    eventually(has_ended)
    code, out, err = recorder.wait()
    assert (code, out) == (EXIT_FAILED, "")
    assert err.startswith(f"fusecache: {small_disk}/t: No space left on device; ")
    assert err.count("\n") == 1
    assert recorded(recorder.trace())[:10] == names[:10]
    assert not recorder.trace().is_complete


# ---- refusals ------------------------------------------------------------------------------------


@in_one_mode
def test_refusals(
    mounting: Mounting,
    names: list[str],
    record: Record,
    tmp_path: Path,
    ordinary_user: OrdinaryUser,
) -> None:
    mount = mounting()
    recorder = record(mount)
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("mine")
    for arguments, code, line in (
        ([mount.path, "-o", new], EXIT_BUSY, "another fusecache trace records this mount"),
        ([tmp_path, "-o", new], EXIT_NOT_A_MOUNT, "is not on a fusecache mount"),
        ([mount.path, "-o", there], EXIT_USAGE, f"{there} exists; --force replaces it"),
        ([mount.path], EXIT_USAGE, "give -o FILE"),
        ([mount.path, "-o", new, "--seconds", "0"], EXIT_USAGE, "--seconds: 0"),
        ([mount.path, "-o", new, "--max-size", "big"], EXIT_USAGE, "--max-size: 'big'"),
        (["--show", there], EXIT_USAGE, f"{there} is no access trace"),
        (["--show", new], EXIT_FAILED, "No such file"),
        (["--show", there, "-o", new], EXIT_USAGE, "--show takes a FILE"),
    ):
        done = command("trace", *arguments, timeout_s=REFUSAL_S)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert line in done.stderr
        assert done.stderr.count("\n") == 1
    assert whole(recorder.end())
    for place, line in ((mount.path / "t", "Read-only"), (tmp_path / "no/t", "No such file")):
        done = command("trace", mount.path, "-o", place, "--seconds", "0.1")
        assert done.returncode == EXIT_FAILED
        assert line in done.stderr
    done = command(
        *("trace", mount.path, "-o", ordinary_user.home / "t"),
        prefix=ordinary_user.prefix,
        program=ordinary_user.program,
        env=ordinary_user.env,
    )
    assert done.returncode == EXIT_FAILED
    assert "belongs to another user" in done.stderr
    assert there.read_text() == "mine"
    assert not new.exists()

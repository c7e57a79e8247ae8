"""What a device can do: measured, kept in the cache directory, refused where it is not valid."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusecache import _native
from fusecache.base import command, errors
from fusecache.base.disk import cache_names, probe
from fusecache.base.disk.probe import Probe
from fusecache.base.errors import UserError
from fusecache.cli import main as cli
from tests.support.store_support import Opened

MIB = 1 << 20
SMALL = {"file_bytes": 8 * MIB, "pass_s": 0.01}


def made(**changes: Any) -> Probe:
    """A disk of 3,000 requests a second and 1 GB/s."""
    values = {
        "device": 1,
        "device_bytes": 2,
        "taken_at": 3.0,
        "sequential_bytes_per_s": 1e9,
        "write_bytes_per_s": 1e9,
        "mixed_bytes_per_s": 5e8,
        "random": [[size, 3000 * size] for size in probe.RANDOM_BYTES],
    }
    return Probe.from_map(values | changes)


@pytest.fixture
def measured(tmp_path: Path) -> Probe:
    return probe.measure(tmp_path, **SMALL)  # type: ignore[arg-type]


# ---- measuring -------------------------------------------------------------------------------


def test_all_is_measured_and_only_the_result_is_left(tmp_path: Path, measured: Probe) -> None:
    assert [path.name for path in tmp_path.iterdir()] == ["probe"]
    assert [size for size, _ in measured.random] == list(probe.RANDOM_BYTES)
    assert measured.device == tmp_path.stat().st_dev
    assert abs(measured.taken_at - time.time()) < 60
    assert (tmp_path / "probe").read_bytes().count(b"\n") == 1
    assert probe.load(tmp_path) == measured


@pytest.fixture
def direct(tmp_path: Path) -> Iterator[int]:
    """A file of 4 MiB, all of ones, past the page cache."""
    path = tmp_path / "file"
    path.write_bytes(b"\xff" * 4 * MIB)
    fd = os.open(path, os.O_RDWR)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    yield fd
    os.close(fd)


def io(fd: int, reads: int, writes: int, seconds: float, size: int = 4 * MIB) -> tuple[int, int]:
    return _native.probe_io(fd, size, 65536, reads, 65536, writes, False, seconds)[:2]


def test_writes_go_through_once_and_no_two_sectors_are_alike(tmp_path: Path, direct: int) -> None:
    assert io(direct, 0, 4, 60.0) == (0, 4 * MIB)
    written = (tmp_path / "file").read_bytes()
    sectors = {written[at : at + 4096] for at in range(0, 4 * MIB, 4096)}
    assert len(sectors) == 1024


def passes(fd: int, reads: int, writes: int, read_bytes: int) -> Iterator[tuple[int, int]]:
    """Each twice as long as the one before, until one has read more than that: disks are busy."""
    seconds, read = 0.1, 0
    while read <= read_bytes:
        read, written = io(fd, reads, writes, seconds)
        yield read, written
        seconds *= 2


def test_reads_write_nothing_and_go_on_until_the_time_is_over(tmp_path: Path, direct: int) -> None:
    for _, written in passes(direct, 8, 0, 4 * MIB):  # the whole file, and more
        assert written == 0
    assert (tmp_path / "file").read_bytes() == b"\xff" * 4 * MIB


def test_as_much_is_written_as_is_read_and_in_the_other_half(tmp_path: Path, direct: int) -> None:
    for read, written in passes(direct, 4, 4, 2 * MIB):  # its whole half, and more
        assert abs(read - written) <= 5 * MIB
    content = (tmp_path / "file").read_bytes()
    assert content[: 2 * MIB] == b"\xff" * 2 * MIB
    assert content[2 * MIB :] != b"\xff" * 2 * MIB


def test_a_short_read_is_an_error(direct: int) -> None:
    os.ftruncate(direct, MIB)
    with pytest.raises(OSError, match="Input/output"):
        io(direct, 4, 0, 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"read_bytes": 100},
        {"read_bytes": 2 * MIB},
        {"write_bytes": 0},
        {"reads": 0, "writes": 0},
        {"reads": 40, "writes": 40},
        {"file_bytes": 4096},
        {"seconds": math.nan},
    ],
)
def test_what_cannot_be_done_is_refused(direct: int, changes: dict[str, Any]) -> None:
    whole: dict[str, Any] = {
        "fd": direct, "file_bytes": 4 * MIB, "read_bytes": 4096, "reads": 1, "write_bytes": 4096,
        "writes": 1, "is_random": False, "seconds": 0.01,
    }  # fmt: skip
    _native.probe_io(**whole)
    with pytest.raises(ValueError, match="blocks of"):
        _native.probe_io(**(whole | changes))


class Passes:
    """Instead of the device: each pass takes a second, at rates that are given in turn."""

    def __init__(self, large: list[int]) -> None:
        self.large = iter(large)
        self.asked: list[str] = []

    def __call__(
        self, fd: int, size: int, read_bytes: int, reads: int, write_bytes: int, writes: int,
        is_random: bool, seconds: float,
    ) -> tuple[int, int, float]:  # fmt: skip
        kind = "random" if is_random else "mixed" if reads and writes else "large"
        self.asked.append(kind if reads else "write")
        if not reads:
            return 0, size, 1.0
        return (next(self.large) if kind == "large" else 100 * MIB), 0, 1.0


def test_a_figure_is_the_median_of_passes_in_turn_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes([100, 20, 110, 90, 105])
    monkeypatch.setattr(_native, "probe_io", passes)
    found = probe.measure(tmp_path, **SMALL)  # type: ignore[arg-type]
    assert found.sequential_bytes_per_s == 100
    assert found.mixed_bytes_per_s == 100 * MIB
    assert found.spread == pytest.approx(0.9)  # 110 - 20 of 100
    each_round = ["large", *["random"] * 4, "mixed"]
    assert passes.asked == ["write", *each_round * probe.PASSES]


def test_a_slow_disk_is_measured_in_fewer_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes([100])
    monkeypatch.setattr(_native, "probe_io", passes)
    monkeypatch.setattr(probe, "PASSES_S_MOST", 0.0)
    found = probe.measure(tmp_path, **SMALL)  # type: ignore[arg-type]
    assert (found.sequential_bytes_per_s, found.spread) == (100, 0)


@pytest.mark.parametrize("of_a_cache", ["format", "segments"])
def test_nothing_is_measured_among_the_files_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_a_cache: str
) -> None:
    (tmp_path / "mine").write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.delattr(os, "posix_fallocate")
        with pytest.raises(UserError, match="holds other files and is no cache") as caught:
            probe.measure(tmp_path, **SMALL)  # type: ignore[arg-type]
    assert caught.value.exit_code == errors.EXIT_USAGE
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / of_a_cache).mkdir()
    probe.measure(tmp_path, **SMALL)  # type: ignore[arg-type]
    assert probe.load(tmp_path) is not None


@pytest.mark.parametrize("rest", ["lock", "high", "index", "format.tmp", ".fusecache-check-abc"])
def test_what_may_become_a_cache_is_measured(tmp_path: Path, rest: str) -> None:
    (tmp_path / rest).touch()
    probe.measure(tmp_path, **SMALL)  # type: ignore[arg-type]
    assert probe.load(tmp_path) is not None


# ---- directories that cannot be measured ------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "part"),
    [(errno.ENOSPC, "No space left on device (it takes 8 MiB)"), (errno.EROFS, "Read-only")],
)
def test_no_room_is_one_line_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, part: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UserError) as caught:
        probe.measure(tmp_path, **SMALL)  # type: ignore[arg-type]
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("free", "takes"), [(8192, 256), (2047, 255), (1000, 125), (257, 32), (33, 32), (32, 32)]
)
def test_where_less_is_free_the_file_is_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, takes: int
) -> None:
    made: list[int] = []

    def refuse(_fd: int, _offset: int, length: int) -> None:
        made.append(length)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    disk = (4096, 4096, 0, 0, free * 256, 0, 0, 0, 0, 0)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(disk))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UserError, match="Read-only"):
        probe.measure(tmp_path)
    assert made == [takes * MIB]


def test_a_disk_with_too_little_room_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = (4096, 4096, 0, 0, 31 * 256, 0, 0, 0, 0, 0)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(disk))
    with pytest.raises(UserError, match=r"that takes 32 MiB, and 31 MiB are free on its disk$"):
        probe.measure(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_smallest_file_is_large_enough(tmp_path: Path) -> None:
    found = probe.measure(tmp_path, probe.SMALL_FILE_BYTES, 0.01)
    assert probe.load(tmp_path) == found


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be measured: No such file"):
        probe.measure(tmp_path / "none", **SMALL)  # type: ignore[arg-type]


def test_a_result_that_cannot_be_kept_leaves_the_old_one(
    tmp_path: Path, measured: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match="Input/output"):
        probe.measure(tmp_path, **SMALL)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["probe"]
    assert probe.load(tmp_path) == measured


MEASURE = """
import sys
from pathlib import Path
from fusecache import _native
from fusecache.base import command
from fusecache.base.disk import probe
real = _native.probe_io
def told(*arguments):
    print("measuring", flush=True)
    return real(*arguments)
_native.probe_io = told
command.run("fusecache", lambda: probe.measure(Path(sys.argv[1]), 8 << 20, 0.5))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_file_is_gone_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "measuring\n"
    child.send_signal(number)
    _, said = child.communicate(timeout=30)
    if number == signal.SIGINT:
        assert child.returncode == errors.EXIT_INTERRUPTED
        assert said == "fusecache: interrupted\n"
    assert list(tmp_path.iterdir()) == []


# ---- keeping ---------------------------------------------------------------------------------


def rewrite(directory: Path, **changes: Any) -> None:
    """The kept result with other values and a right checksum."""
    kept = json.loads((directory / "probe").read_text())
    changed = Probe.from_map(kept["probe"] | changes)
    kept |= {"probe": changed.as_map(), "checksum": probe._checksum(changed)}
    (directory / "probe").write_text(json.dumps(kept))


def test_a_result_is_of_its_device_and_of_the_last_30_days(tmp_path: Path, measured: Probe) -> None:
    for changes in (
        {"device": measured.device + 1},
        {"device_bytes": measured.device_bytes + 4096},
        {"taken_at": time.time() - 30.1 * 86_400},
        {"taken_at": time.time() + 3600},
    ):
        rewrite(tmp_path, **changes)
        assert probe.load(tmp_path) is None
        rewrite(tmp_path, **measured.as_map())
        assert probe.load(tmp_path) == measured
    rewrite(tmp_path, taken_at=time.time() - 29.9 * 86_400)
    assert probe.load(tmp_path) is not None


def test_a_directory_that_was_measured_first_becomes_a_cache(
    tmp_path: Path, measured: Probe
) -> None:
    assert cache_names.is_cache(os.listdir(tmp_path))
    tmp_path.chmod(0o755)
    opened = Opened(tmp_path)
    opened.store.close()
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    assert probe.load(tmp_path) == measured


def test_a_server_measures_once_and_only_what_is_not_known(
    tmp_path: Path, measured: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(directory: Path) -> Probe:
        asked.append(directory)
        return made()

    monkeypatch.setattr(probe, "measure", measure)
    known = probe.Device([tmp_path])
    known.measure_once()
    assert known.found == measured
    (tmp_path / "probe").unlink()
    device = probe.Device([tmp_path])
    assert device.found is None
    for _ in range(3):
        device.measure_once()
    assert device._thread is not None
    device._thread.join(30)
    assert device.found == made()
    assert asked == [tmp_path]


def test_a_device_that_cannot_be_measured_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = probe.Device([tmp_path / "none"])
    for _ in range(3):
        device.measure_once()
        assert device._thread is not None
        device._thread.join(30)
    assert device.found is None
    assert device.fault.endswith("cannot be measured: No such file or directory")
    (record,) = caplog.records
    assert record.getMessage().startswith("--layout auto stays static: ")


def test_a_damaged_result_is_none(tmp_path: Path, measured: Probe) -> None:
    whole = (tmp_path / "probe").read_bytes()
    assert probe.load(tmp_path) == measured
    digit = whole.index(b'"mixed_bytes_per_s": ') + 21
    other = b"1" if whole[digit : digit + 1] != b"1" else b"2"
    for damaged in (
        b"",
        b"[]",
        b"\xff" * 100,
        whole[:-20],
        whole[:digit] + other + whole[digit + 1 :],
        whole.replace(b'"version": 2', b'"version": 1'),
    ):
        (tmp_path / "probe").write_bytes(damaged)
        assert probe.load(tmp_path) is None
    (tmp_path / "probe").unlink()
    assert probe.load(tmp_path) is None
    os.mkfifo(tmp_path / "probe")
    assert probe.load(tmp_path) is None


def test_the_wire_gives_back_what_was_measured_and_nothing_else(measured: Probe) -> None:
    assert Probe.from_map(json.loads(json.dumps(measured.as_map()))) == measured
    wrong: tuple[dict[str, Any], ...] = (
        {"mixed_bytes_per_s": 0},
        {"mixed_bytes_per_s": math.inf},
        {"write_bytes_per_s": math.nan},
        {"sequential_bytes_per_s": "fast"},
        {"random": []},
        {"random": [[16384, 1.0], [4096, 1.0]]},
        {"random": [4096]},
        {"device": None},
        {"spread": -0.1},
        {"spread": math.nan},
    )
    for changes in wrong:
        with pytest.raises(ValueError, match="no result of a probe"):
            made(**changes)


# ---- what samples cost at random ---------------------------------------------------------------


def test_requests_limit_small_samples_exactly() -> None:
    """3,000 a second of whatever size, up to where bandwidth is the limit."""
    for size in (1, 100, 3000, 10_000, 30_000, 110_000):
        assert made().random_bytes_per_s(size) == pytest.approx(3000 * size)


def test_a_record_that_just_needs_another_page_is_read_whole() -> None:
    bandwidth = made(random=[[size, 1e9] for size in probe.RANDOM_BYTES])
    assert bandwidth.random_bytes_per_s(4096 - 192) == pytest.approx(1e9 * (4096 - 192) / 4096)
    assert bandwidth.random_bytes_per_s(4096) == pytest.approx(1e9 * 4096 / 8192)


def test_large_samples_are_as_fast_as_sequential_reads_and_never_slower_than_smaller_ones() -> None:
    found = made()
    rates = [found.random_bytes_per_s(size) for size in (110_000, 300_000, 900_000, 2_000_000)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(1e9, rel=0.01)
    slow_stream = made(sequential_bytes_per_s=1e6)
    assert slow_stream.random_bytes_per_s(2_000_000) > 3e8


# ---- the command -------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        command.run(
            "fusecache",
            lambda: cli.cli(list(arguments), prog_name="fusecache", standalone_mode=False),
        )
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_command_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "measure", lambda directory: made())
    assert run("probe", str(tmp_path)) == errors.EXIT_OK
    said = capfd.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert ["random", "reads", "of", "16", "KiB", "46.9", "MiB", "3,000"] in lines
    assert ["10", "KB", "28.6", "MiB/s", "477", "MiB/s", "16.67"] in lines
    assert "lie up to 0% apart" in said
    assert run("probe", str(tmp_path), "--json") == errors.EXIT_OK
    told = capfd.readouterr()
    assert Probe.from_map(json.loads(told.out)) == made()
    assert told.err == ""
    shaky = made(spread=0.7)
    monkeypatch.setattr(probe, "measure", lambda directory: shaky)
    assert run("probe", str(tmp_path)) == errors.EXIT_OK
    assert "70% apart: somebody else uses the disk" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("none", "does not exist: make it"),
        ("file", "is a file: give a cache directory, or a mount point"),
        ("/proc", "is on a file system that stores nothing; give a directory on the SSD"),
    ],
)
def test_the_command_says_what_cannot_be_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str, part: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert run("probe", str(tmp_path / place)) == errors.EXIT_NOT_A_MOUNT
    assert part in capfd.readouterr().err


def test_show_measures_nothing(
    tmp_path: Path,
    measured: Probe,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr(probe, "measure")
    assert run("probe", "--show", "--json", str(tmp_path)) == errors.EXIT_OK
    assert Probe.from_map(json.loads(capfd.readouterr().out)) == measured
    assert run("probe", "--show", str(tmp_path)) == errors.EXIT_OK
    assert "random reads of 16 KiB" in capfd.readouterr().out
    (tmp_path / "probe").unlink()
    assert run("probe", "--show", str(tmp_path)) == errors.EXIT_FAILED
    assert f"to measure: fusecache probe {tmp_path}" in capfd.readouterr().err


def test_several_devices_are_as_fast_as_the_slowest_allows(tmp_path: Path) -> None:
    fast = made()
    slow = replace(
        fast,
        device=fast.device + 1,
        mixed_bytes_per_s=fast.mixed_bytes_per_s / 4,
        random=tuple((size, rate / 2) for size, rate in fast.random),
    )
    both = probe.together([fast, slow])
    assert both.mixed_bytes_per_s == fast.mixed_bytes_per_s / 2
    assert both.sequential_bytes_per_s == 2 * fast.sequential_bytes_per_s
    assert both.random == fast.random
    assert both.device_bytes == 2 * fast.device_bytes
    assert probe.together([fast, fast]) == fast, "one device counts once"
    assert probe.Probe.from_map(both.as_map()) == both

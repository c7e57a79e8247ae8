"""The journal of live jobs, with real processes."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import pytest

from hintsd.daemon.journal import Entry, Journal, JournalBusy, process_start

START = process_start(os.getpid()) or 0
ENTRY = Entry("train-1", 5, os.getpid(), START, {"path": b"/\xff", "epochs": None}, 2, 30)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
def journal(directory: Path) -> Iterator[Journal]:
    journal = Journal(str(directory))
    yield journal
    journal.close()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"lock", "number"}


def test_what_was_written_is_loaded(journal: Journal) -> None:
    other = dataclasses.replace(ENTRY, job="train-2", pid=0, pid_start=0)
    journal.write(other)
    journal.write(ENTRY)
    assert journal.load() == [ENTRY, other]
    journal.move("train-2", 7, 99)
    assert journal.load() == [ENTRY, dataclasses.replace(other, epoch=7, position=99)]
    journal.write(other)
    assert journal.load() == [ENTRY, other]


def test_scores(journal: Journal, directory: Path) -> None:
    journal.write(ENTRY)
    assert journal.scores(ENTRY.job) is None
    for uses in (b"1234", b"12345678"):
        journal.score(ENTRY.job, uses)
        assert journal.load() == [ENTRY]
        assert journal.scores(ENTRY.job) == uses
    for wrong in (b"", b"\xc1", b"\x91\x01", b"\xc4\x09123"):
        (directory / f"{ENTRY.job}.scores").write_bytes(wrong)
        with pytest.raises(ValueError, match="msgpack"):
            journal.scores(ENTRY.job)
    journal.forget_scores(ENTRY.job)
    assert journal.scores(ENTRY.job) is None
    journal.score(ENTRY.job, b"1234")
    journal.write(ENTRY)  # another one of the same name
    assert journal.scores(ENTRY.job) is None
    journal.score(ENTRY.job, b"1234")
    journal.remove(ENTRY.job)
    assert names(directory) == set()


def test_removed_jobs_are_gone(journal: Journal, directory: Path) -> None:
    journal.write(ENTRY)
    journal.move(ENTRY.job, 3, 4)
    journal.remove(ENTRY.job)
    journal.remove(ENTRY.job)
    assert journal.load() == []
    assert names(directory) == set()


def test_job_whose_process_is_gone_is_removed(journal: Journal, directory: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        start = process_start(process.pid)
        assert start is not None
        entry = dataclasses.replace(ENTRY, pid=process.pid, pid_start=start)
        journal.write(entry)
        journal.move(entry.job, 3, 4)
        assert len(journal.load()) == 1
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_start(process.pid) is None  # only its exit status is left
        assert journal.load() == []
    assert names(directory) == set()


def test_process_with_the_same_number_is_another_one(journal: Journal) -> None:
    journal.write(dataclasses.replace(ENTRY, pid_start=START - 1))
    assert journal.load() == []


def test_a_process_is_named_by_its_start() -> None:
    ours = process_start(os.getpid())
    assert ours is not None
    with subprocess.Popen(["bash", "-c", "exec -a 'x) R 1 (' sleep 100"]) as process:
        theirs = process_start(process.pid)
        process.kill()
    assert theirs is not None
    assert theirs >= ours
    assert process_start(1 << 22) is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb({**dataclasses.asdict(ENTRY), "version": 2}),
        msgpack.packb({**dataclasses.asdict(ENTRY), "version": 1, "job": "other"}),
        msgpack.packb({**dataclasses.asdict(ENTRY), "version": 1, "message": None}),
        msgpack.packb({**dataclasses.asdict(ENTRY), "version": 1, "epoch": -1}),
        msgpack.packb({**dataclasses.asdict(ENTRY), "version": 1})[:-1],
    ],
    ids=["empty", "no msgpack", "no map", "version", "name", "message", "epoch", "cut off"],
)
def test_what_cannot_be_read_is_removed_with_a_warning(
    journal: Journal, directory: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    journal.write(dataclasses.replace(ENTRY, job="good"))
    (directory / "train-1.job").write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert [entry.job for entry in journal.load()] == ["good"]
    assert "train-1.job cannot be read" in caplog.text
    assert names(directory) == {"good.job"}


def test_position_that_cannot_be_read(journal: Journal, directory: Path) -> None:
    journal.write(ENTRY)
    (directory / "train-1.position").write_bytes(msgpack.packb([1, "2"]))
    assert journal.load() == []


def test_files_of_no_job_are_removed(journal: Journal, directory: Path) -> None:
    journal.write(ENTRY)
    for name in ("train-1.job.new", "gone.position", "x"):
        (directory / name).write_bytes(b"1")
    assert journal.load() == [ENTRY]
    assert names(directory) == {"train-1.job"}


def test_one_at_a_time(journal: Journal, directory: Path) -> None:
    with pytest.raises(JournalBusy, match=str(os.getpid())):
        Journal(str(directory))
    journal.close()
    again = Journal(str(directory))
    again.close()
    again._lock_fd = journal._lock_fd = os.open(os.devnull, os.O_RDONLY)  # for the fixture


def test_numbers_go_on(journal: Journal, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From one hintsd to the next, though all jobs have ended; what is lost is made good for."""
    assert [journal.number("") for _ in range(3)] == [1, 2, 3]
    assert journal.load() == []
    journal.close()
    again = Journal(str(directory))
    assert again.number("") == 4
    again.write(dataclasses.replace(ENTRY, job="train-8"))
    (directory / "number").write_bytes(b"no number")
    again.close()
    third = Journal(str(directory))
    assert third.number("") == 9
    assert third.number("train-12") == 13
    assert third.number("train-x1") == 14
    for garbage in (float("inf"), 2**64 - 1):
        (directory / "number").write_bytes(msgpack.packb(garbage))
        assert third._last_number() == 8
    third._directory = "/none"
    with caplog.at_level(logging.WARNING):
        assert third.number("") == 15
    assert "give names again" in caplog.text
    third.close()
    again._lock_fd = journal._lock_fd = third._lock_fd = os.open(os.devnull, os.O_RDONLY)


def test_directory_must_be_private(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="mode 0700"):
        Journal(str(directory))

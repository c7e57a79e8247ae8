"""Whose a request is: the trainer's and all below it, strangers', the hidden and the ended."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from fusecache.base.processes import parent
from hintsd.follow.readers import (
    ANOTHERS,
    KEPT_S,
    KNOWN_MOST,
    OWN,
    STRANGER,
    UNKNOWN,
    Hinted,
    Readers,
)

TRAINER = 100


class Processes:
    """A /proc of numbers: each process and its parent."""

    def __init__(self) -> None:
        self.parents = {
            1: 0,
            TRAINER: 1,
            200: TRAINER,  # a fork server
            201: 200,  # and its worker
            300: 1,  # a shell
            301: 300,  # and what it runs
        }
        self.looks = 0

    def parent_of(self, pid: int) -> int | None:
        self.looks += 1
        return self.parents.get(pid)


def standings(
    readers: Readers, *requests: tuple[int, int], now: float = 0.0, job: int = TRAINER
) -> list[int]:
    """Of requests of (process, parent)."""
    processes, parents = np.array(requests, np.uint32).T
    jobs = {"job": Hinted(job, b"train")}
    return [int(stands) for stands in readers.whose(processes, parents, jobs, now)["job"]]


def test_own_are_the_process_and_all_below() -> None:
    readers = Readers(Processes().parent_of)
    requests = [(301, 300), (100, 1), (200, 100), (201, 200), (301, 300), (1, 0), (100, 1)]
    assert standings(readers, *requests) == [
        *(STRANGER, OWN, OWN, OWN, STRANGER, STRANGER, OWN),
    ]


def test_several_jobs_are_asked_at_once() -> None:
    readers = Readers(Processes().parent_of)
    processes, parents = np.array([201, 301], np.uint32), np.array([200, 300], np.uint32)
    pids = {"a": TRAINER, "b": 300, "c": 1}
    jobs = {name: Hinted(pid, name.encode()) for name, pid in pids.items()}
    found = readers.whose(processes, parents, jobs, 0.0)
    assert {job: stands.tolist() for job, stands in found.items()} == {
        "a": [OWN, STRANGER],
        "b": [STRANGER, OWN],
        "c": [OWN, OWN],
    }
    assert readers.whose(processes, parents, {}, 0.0) == {}


@pytest.mark.parametrize(
    ("root", "told"),
    [(b"train", True), (b"", True), (b"train/cat", True), (b"val", False), (b"tra", False)],
)
def test_another_jobs_processes_tell_of_its_dataset_alone(root: bytes, told: bool) -> None:
    """Of a directory that it is in, or that is in it; and of a job without a process, too."""
    readers = Readers(Processes().parent_of)
    processes, parents = np.array([201, 301, 999], np.uint32), np.array([200, 300, 998], np.uint32)
    jobs = {
        "another": Hinted(TRAINER, b"train"),
        "same": Hinted(TRAINER, root),
        "of a shell": Hinted(300, root),
        "nobody's": Hinted(None, root),
    }
    found = readers.whose(processes, parents, jobs, 0.0)
    assert {job: stands.tolist() for job, stands in found.items()} == {
        "another": [OWN, ANOTHERS if told else STRANGER, UNKNOWN],
        "same": [OWN, ANOTHERS, UNKNOWN],
        "of a shell": [ANOTHERS, OWN, UNKNOWN],
        "nobody's": [ANOTHERS, ANOTHERS, UNKNOWN],
    }


def test_nobody_is_a_stranger_to_a_job_without_a_process() -> None:
    readers = Readers(Processes().parent_of)
    processes, parents = np.array([201, 301], np.uint32), np.array([200, 300], np.uint32)
    jobs = {
        "nobody's": Hinted(None, b"train"),
        "elsewhere": Hinted(TRAINER, b"val"),
        "wrong": Hinted(TRAINER, b"train", is_followed=False),
    }
    assert readers.whose(processes, parents, jobs, 0.0)["nobody's"].tolist() == [UNKNOWN, UNKNOWN]


def test_what_is_told_after_a_job_was_closed_is_that_jobs_still() -> None:
    readers = Readers(Processes().parent_of)
    processes, parents = np.array([201], np.uint32), np.array([200], np.uint32)
    left = {"nobody's": Hinted(None, b"train")}
    both = left | {"read": Hinted(TRAINER, b"train")}
    assert readers.whose(processes, parents, both, 0.0)["nobody's"].tolist() == [ANOTHERS]
    assert readers.whose(processes, parents, left, 4.9)["nobody's"].tolist() == [ANOTHERS]
    assert readers.whose(processes, parents, left, 5.0)["nobody's"].tolist() == [UNKNOWN]
    wrong = left | {"read": Hinted(TRAINER, b"train", is_followed=False)}
    readers.whose(processes, parents, both, 6.0)
    assert readers.whose(processes, parents, wrong, 6.1)["nobody's"].tolist() == [UNKNOWN]


def test_who_has_ended_is_known_by_its_parent() -> None:
    readers = Readers(Processes().parent_of)
    assert standings(readers, (999, 300), (998, 201), (997, TRAINER)) == [STRANGER, OWN, OWN]


def test_the_hidden_and_those_nobody_knows_are_unknown() -> None:
    processes = Processes()
    del processes.parents[1]  # hidden: the trainer might be above it
    readers = Readers(processes.parent_of)
    assert standings(readers, (0, 0), (999, 998), (301, 300), (201, 200)) == [
        *(UNKNOWN, UNKNOWN, UNKNOWN, OWN),
    ]


def test_a_parent_outside_the_namespace_is_the_end_of_the_line() -> None:
    assert standings(Readers(Processes().parent_of), (400, 0), (TRAINER, 0)) == [STRANGER, OWN]


def test_a_number_that_is_used_again_is_not_believed_for_long() -> None:
    processes = Processes()
    readers = Readers(processes.parent_of)
    assert standings(readers, (201, 200)) == [OWN]
    processes.parents[200] = 300
    assert standings(readers, (201, 200), now=0.9) == [OWN]
    assert standings(readers, (201, 200), now=1.0) == [STRANGER]


def test_a_parent_that_has_ended_is_remembered_for_a_while() -> None:
    processes = Processes()
    readers = Readers(processes.parent_of)
    assert standings(readers, (301, 300)) == [STRANGER]
    del processes.parents[300]
    assert standings(readers, (302, 300), now=KEPT_S - 1) == [STRANGER]
    assert standings(readers, (302, 300), now=KEPT_S) == [UNKNOWN]


def test_ancestors_are_looked_up_once_a_second() -> None:
    processes = Processes()
    readers = Readers(processes.parent_of)
    for n in range(100):
        standings(readers, (201, 200), (1000 + n, 300), now=n / 100)
    assert processes.looks == 3 + 2


def test_what_is_remembered_is_bounded() -> None:
    processes = Processes()
    processes.parents |= dict.fromkeys(range(1000, 4000 + KNOWN_MOST), TRAINER)
    readers = Readers(processes.parent_of)
    for pid in range(1000, 4000 + KNOWN_MOST):
        assert standings(readers, (7, pid)) == [OWN]
    assert len(readers._known) <= KNOWN_MOST


def test_a_loop_of_parents_ends() -> None:
    assert standings(Readers(lambda pid: pid ^ 1), (5, 6)) == [UNKNOWN]


def _work(pipe: Connection) -> None:
    pipe.send((os.getpid(), os.getppid()))
    pipe.recv()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_real_workers(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    worker = context.Process(target=_work, args=(there,))
    worker.start()
    request = here.recv()
    own = os.getpid(), os.getppid()
    assert standings(Readers(), request, own, job=os.getpid()) == [OWN, OWN]
    assert standings(Readers(), request, own, job=request[0]) == [OWN, STRANGER]
    here.send(None)
    worker.join()
    assert parent(request[0]) is None


def test_a_real_stranger() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as trainer:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stranger:
            assert parent(stranger.pid) == os.getpid()
        requests = (stranger.pid, os.getpid()), (trainer.pid, os.getpid())  # it has ended
        assert standings(Readers(), *requests, job=trainer.pid) == [STRANGER, OWN]

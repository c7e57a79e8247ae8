"""Which chunk a job reads next: by where the other jobs of its dataset are."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import trio

from hintsd.daemon.hinted_job import HintedJob
from hintsd.daemon.messages import JobRefused
from hintsd.daemon.planning import Coming, Planning
from hintsd.orders.hint import Hint

ALL = list(range(10))
FILES = np.arange(1, 31, dtype=np.uint32)


def job_of(name: str, files: Any = FILES) -> HintedJob:
    job = HintedJob(name, cast(Hint, None), b"", (0, 0), False)
    if files is not None:
        job.resolve(np.array(files))
    return job


def planning_of(*jobs: HintedJob) -> Planning:
    async def make() -> Planning:
        return Planning({job.name: job for job in jobs}, Coming(), lambda: None)

    return trio.run(make)


def test_a_job_goes_where_the_others_of_its_dataset_are() -> None:
    first, second = job_of("a"), job_of("b")
    planning = planning_of(first, second)
    assert planning.next_chunk("a", 10, ALL[3:]) == 3
    assert planning.next_chunk("b", 10, ALL) == 3
    assert planning.next_chunk("b", 10, ALL[4:]) == 4
    assert planning.next_chunk("b", 10, ALL[5:]) == 5
    assert planning.next_chunk("a", 10, ALL[4:]) == 5  # it is behind


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job.resolve(FILES[1:]),
        lambda job: job.resolve(FILES[::-1]),
        lambda job: job.note({"state": "idle", "epoch": 0, "index": 0}),
        lambda job: job.note({"state": "wrong", "epoch": 0, "index": 0}),
        lambda job: job.go_on(5, [4], []),
    ],
)
def test_others_are_those_that_read_the_same_chunks_now(change: Any) -> None:
    first, second = job_of("a"), job_of("b")
    planning = planning_of(first, second, job_of("c"))
    assert planning.next_chunk("a", 10, ALL[7:]) == 7
    change(first)
    assert planning.next_chunk("b", 10, ALL) == 0


def test_a_job_without_files_is_refused() -> None:
    """It was mounted anew; or there is no such job."""
    planning = planning_of(job_of("a", None))
    for name in "ab":
        with pytest.raises(JobRefused, match="not known now"):
            planning.next_chunk(name, 10, ALL)

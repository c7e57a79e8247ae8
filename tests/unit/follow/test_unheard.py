"""When it is said that a job's files are read, though it has announced nothing."""

from __future__ import annotations

import numpy as np
import pytest

from hintsd.follow.sequence import Inos
from hintsd.follow.unheard import READS_LEAST, SPAN_LEAST_S, Unheard

DATASET = np.arange(10, 110, dtype=np.uint32)


def inos(*numbers: int) -> Inos:
    return np.array(numbers, np.uint32)


def test_after_the_first_second_of_reads_once() -> None:
    unheard = Unheard()
    assert not unheard.take(DATASET[:READS_LEAST], DATASET, 5.0)
    assert not unheard.take(inos(20), DATASET, 5.0 + SPAN_LEAST_S - 0.01)
    assert not unheard.take(inos(), DATASET, 5.0 + SPAN_LEAST_S)
    assert unheard.take(inos(20), DATASET, 5.0 + SPAN_LEAST_S)
    assert unheard.is_said
    assert not unheard.take(DATASET, DATASET, 9.0)


def test_a_few_reads_say_nothing_for_however_long() -> None:
    unheard = Unheard()
    for read in range(READS_LEAST - 1):
        assert not unheard.take(inos(10 + read), DATASET, float(read))
    assert unheard.take(inos(10), DATASET, 99.0)


@pytest.mark.parametrize("others", [inos(1, 9, 110), inos(2**32 - 1)], ids=["others", "beyond"])
def test_files_of_other_datasets_do_not_count(others: Inos) -> None:
    unheard = Unheard()
    for second in range(2 * READS_LEAST):
        assert not unheard.take(others, DATASET, float(second))
    assert not unheard.take(DATASET[:READS_LEAST], DATASET, 50.0), "the second begins here"
    assert not unheard.take(inos(10), np.zeros(0, np.uint32), 60.0)
    assert unheard.take(inos(10), DATASET, 50.0 + SPAN_LEAST_S)

"""A hint whose files are not all read: wires that the reader has left behind unopened."""

from __future__ import annotations

import numpy as np
import pytest

from hintsd.follow.passed import LEFT_OUT, Passed
from hintsd.policies import Mask


def opened(share: float, wires: int, seed: int) -> Mask:
    return np.random.default_rng(seed).random(wires) < share


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("share", "most"), [(0.5, 160), (0.2, 240)])
def test_it_tells_soon_where_much_is_left_out(share: float, most: int, seed: int) -> None:
    passed = Passed()
    passed.weigh(opened(share, most, seed))
    assert passed.is_much_left_out
    assert passed.unopened / passed.wires == pytest.approx(1 - share, abs=0.15)


@pytest.mark.parametrize("share", [0.9, 0.95, 1.0])
def test_it_says_nothing_where_little_is(share: float) -> None:
    """Of 1.3 million samples."""
    passed = Passed()
    for wire in opened(share, 20_000, 7):
        passed.weigh(np.array([wire]))
        assert not passed.is_much_left_out


def test_what_nobody_opens_any_more_is_one_gap() -> None:
    """However long: a server that was late, or files that stay open."""
    passed = Passed()
    passed.weigh(np.ones(1000, np.bool_))
    for _ in range(3):
        passed.weigh(np.zeros(1000, np.bool_))
        passed.weigh(np.ones(3, np.bool_))
        assert not passed.is_much_left_out


def test_what_comes_before_the_first_that_is_opened_is_no_gap() -> None:
    passed = Passed()
    for _ in range(LEFT_OUT):
        passed.skip()
        passed.weigh(np.array([False, False, True]))
    assert not passed.is_much_left_out
    assert (passed.wires, passed.unopened) == (0, 0)


def test_what_was_opened_before_is_no_credit() -> None:
    passed = Passed()
    alternating = np.arange(4 * LEFT_OUT) % 2 == 1
    passed.weigh(alternating[:LEFT_OUT])
    is_credit = Passed()
    is_credit.weigh(np.ones(1000, np.bool_))
    is_credit.weigh(alternating[:LEFT_OUT])
    assert passed.is_much_left_out
    assert is_credit.is_much_left_out
    passed.forget()
    assert not passed.is_much_left_out
    assert (passed.wires, passed.unopened) == (0, 0)

"""Promises: one reads at the origin, the others are told; nobody holds others up for long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fusecache.cached import promises as module
from fusecache.cached.promises import BROKEN_MOST, BROKEN_S, PROMISE_S, PROMISES_MOST, Promises


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def is_promised(promises: Promises, which: bytes) -> bool:
    """Found out by one who gets nothing that is not promised: his promises are ended at once."""
    told = promises.ask(which, "a third", 3)
    promises.end(which, "a third")
    return told


def test_who_asks_second_is_told_and_who_has_it_is_not(clock: Clock) -> None:
    promises = Promises()
    assert not promises.ask(name(1), "a", 1)
    assert promises.ask(name(1), "b", 2)
    assert promises.ask(name(1), "b", 1), "another mount of the same user is told, too"
    assert not promises.ask(name(1), "a", 1)
    assert not promises.ask(name(2), "b", 2), "another block"


def test_a_promise_ends_with_its_time_and_asking_again_does_not_prolong_it(clock: Clock) -> None:
    promises = Promises()
    promises.ask(name(1), "a", 1)
    clock.now_s += PROMISE_S - 0.01
    assert not promises.ask(name(1), "a", 1)
    assert promises.ask(name(1), "b", 2)
    clock.now_s += 0.02
    assert not promises.ask(name(1), "b", 2), "it is b's now"
    assert promises.ask(name(1), "a", 1)


def test_what_was_put_is_promised_no_more(clock: Clock) -> None:
    promises = Promises()
    promises.ask(name(1), "a", 1)
    promises.end(name(1))
    assert not promises.ask(name(1), "b", 2)
    promises.end(name(7))  # that nobody has


def test_an_end_by_another_holder_is_ignored(clock: Clock) -> None:
    promises = Promises()
    promises.ask(name(1), "a", 1)
    promises.end(name(1), "b")
    assert promises.ask(name(1), "b", 2)
    promises.end(name(1), "a")
    assert not promises.ask(name(1), "b", 2)


def test_promises_go_with_the_last_connection(clock: Clock) -> None:
    promises = Promises()
    for _ in range(2):
        promises.came("a")
    promises.came("b")
    promises.ask(name(1), "a", 1)
    promises.ask(name(2), "b", 2)
    promises.went("a")
    assert is_promised(promises, name(1))
    promises.went("a")
    assert not is_promised(promises, name(1))
    assert is_promised(promises, name(2)), "another holder's"


@pytest.mark.parametrize("how", ["time", "end"])
def test_who_breaks_many_promises_gets_none_for_a_while(clock: Clock, how: str) -> None:
    promises = Promises()

    def break_one(number: int) -> None:
        promises.came("a")
        promises.ask(name(number), "a", 1)
        assert is_promised(promises, name(number))
        if how == "end":
            promises.went("a")
        else:
            clock.now_s += PROMISE_S / 100

    def let_expire() -> None:
        clock.now_s += PROMISE_S
        promises.ask(name(9999), "x", 9)

    for number in range(BROKEN_MOST - 1):
        break_one(number)
    let_expire()
    break_one(BROKEN_MOST)
    let_expire()
    promises.ask(name(5000), "a", 1)
    assert not is_promised(promises, name(5000)), "nothing is promised to him"
    promises.ask(name(5000), "another mount of his", 1)
    assert not is_promised(promises, name(5000))
    promises.ask(name(5001), "b", 2)
    assert is_promised(promises, name(5001)), "another user has broken none"
    clock.now_s += BROKEN_S
    promises.ask(name(5002), "a", 1)
    assert is_promised(promises, name(5002))


def test_promises_broken_now_and_then_are_forgiven(clock: Clock) -> None:
    promises = Promises()
    for number in range(3 * BROKEN_MOST):
        promises.ask(name(number), "a", 1)
        assert is_promised(promises, name(number))
        clock.now_s += PROMISE_S + 0.1


def test_kept_promises_are_not_counted(clock: Clock) -> None:
    promises = Promises()
    for number in range(3 * BROKEN_MOST):
        promises.ask(name(number), "a", 1)
        assert is_promised(promises, name(number))
        promises.end(name(number), *(("a",) if number % 2 else ()))


def expire(clock: Clock, promises: Promises) -> None:
    clock.now_s += PROMISE_S + 0.01
    promises.ask(name(9999), "x", 9)


def test_a_promise_that_is_kept_late_is_not_counted(clock: Clock) -> None:
    promises = Promises()
    for number in range(2 * BROKEN_MOST):
        promises.ask(name(number), "a", 1)
    expire(clock, promises)
    promises.ask(name(5000), "a", 1)
    assert not is_promised(promises, name(5000)), "none was kept yet"
    for number in range(2 * BROKEN_MOST):
        promises.end(name(number))
    promises.ask(name(5000), "a", 1)
    assert is_promised(promises, name(5000))


@pytest.mark.parametrize("how", ["refused", "one again and again", "of another user"])
def test_a_promise_that_is_not_kept_stays_counted(clock: Clock, how: str) -> None:
    promises = Promises()
    for number in range(BROKEN_MOST + 1):
        promises.ask(name(number), "a", 1)
        promises.ask(name(1000 + number), "b", 2)
    expire(clock, promises)
    for number in range(BROKEN_MOST + 1):
        if how == "refused":
            promises.end(name(number), "a")
        else:
            promises.end(name(0 if how == "one again and again" else 1000 + number))
    promises.ask(name(5000), "a", 1)
    assert not is_promised(promises, name(5000))


def test_of_what_may_come_late_not_too_much_is_remembered(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LATE_MOST", 10)
    promises = Promises()
    for number in range(BROKEN_MOST + 20):
        promises.ask(name(number), "a", 1)
    expire(clock, promises)
    assert len(promises._late) == 10
    for number in range(BROKEN_MOST + 20):
        promises.end(name(number))
    assert not promises._late
    promises.ask(name(5000), "a", 1)
    assert not is_promised(promises, name(5000)), "ten were forgiven"


def test_a_user_has_so_many_promises_at_a_time_and_no_more(clock: Clock) -> None:
    promises = Promises()
    for number in range(PROMISES_MOST):
        promises.ask(name(number), f"mount {number % 3}", 1)
    assert is_promised(promises, name(PROMISES_MOST - 1))
    promises.ask(name(6000), "mount 0", 1)
    assert not is_promised(promises, name(6000))
    promises.ask(name(6000), "b", 2)
    assert is_promised(promises, name(6000)), "another user may"
    promises.end(name(0))
    promises.ask(name(6001), "mount 0", 1)
    assert is_promised(promises, name(6001))

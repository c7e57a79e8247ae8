"""Which servers are away, as most hosts see it."""

from __future__ import annotations

import random

import pytest

from fusecache.pool.slots import SLOTS, place
from fusecache.pool.view import REMEMBERED_S, Looks, Members, agreed, ranked

SERVERS = ["a:1", "b:1", "c:1"]


def test_one_failure_is_none() -> None:
    looks = Looks()
    assert looks.note({"a:1": False, "b:1": True}) == []
    assert looks.note({"a:1": True, "b:1": False}) == []
    assert looks.note({"a:1": False, "b:1": False}) == ["b:1"]
    assert looks.note({"a:1": False, "b:1": False}) == ["a:1", "b:1"]
    assert looks.note({"a:1": True, "b:1": False}) == ["b:1"]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], set()),
        ([["a:1"]], {"a:1"}),
        ([["a:1"], []], set()),
        ([["a:1"], ["a:1"], []], {"a:1"}),
        ([["a:1", "a:1"], [], []], set()),
        ([["a:1", "b:1"], ["a:1"], ["b:1"]], {"a:1", "b:1"}),
        ([["a:1", "elsewhere:1"]], {"a:1"}),
        ([SERVERS], set()),
    ],
)
def test_more_than_half_decide(reports: list[list[str]], expected: set[str]) -> None:
    assert agreed(reports, SERVERS) == expected


def test_all_look_in_the_same_place() -> None:
    mixed = SERVERS[:]
    random.Random(3).shuffle(mixed)
    assert ranked("fusecache:x:members", mixed) == ranked("fusecache:x:members", SERVERS)
    assert sorted(ranked("fusecache:x:members", SERVERS)) == SERVERS
    firsts = {ranked(f"fusecache:{n}:members", SERVERS)[0] for n in range(50)}
    assert firsts == set(SERVERS)


def test_who_is_away_has_no_slots_and_the_others_keep_theirs() -> None:
    names = [f"10.0.0.{n}:6379" for n in range(8)]
    before, after = place(names), place(names, {names[3]})
    assert 3 not in after
    kept = sum(old == new for old, new in zip(before, after, strict=True))
    assert kept >= 0.9 * (SLOTS - before.count(3))
    assert place(names, set()) == before


def test_one_that_sees_itself_alone_decides_nothing() -> None:
    members = Members()
    assert members.count(["a", "b", "c"], 0.0) == 3
    count = members.count(["a"], 30.0)
    assert count == 3
    assert agreed([["a:1"]], SERVERS, count) == set()
    count = members.count(["a"], 30.0 + REMEMBERED_S)
    assert count == 1
    assert agreed([["a:1"]], SERVERS, count) == {"a:1"}

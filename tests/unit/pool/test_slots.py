"""Which server has a slot: the same on each host, evenly, and little moves."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from fusecache.pool.slots import LOAD_MOST, NO_SERVER, SLOTS, place, place_with_heirs, slot_of


@pytest.mark.parametrize(
    ("key", "slot"),
    [
        (b"", 0),
        (b"123456789", 0x31C3),  # the Cluster's specification: CRC-16 XMODEM
        (b"foo", 12182),  # CLUSTER KEYSLOT foo, and so on
        (b"bar", 5061),
        (b"hello", 866),
    ],
)
def test_known_slots(key: bytes, slot: int) -> None:
    assert slot_of(key) == slot


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_all_slots_are_placed_evenly(count: int) -> None:
    loads = Counter(place([f"pool-{n}:6379" for n in range(count)]))
    assert sorted(loads) == list(range(count))
    assert loads.total() == SLOTS
    assert max(loads.values()) <= math.ceil(LOAD_MOST * SLOTS / count)


def test_the_order_of_the_names_does_not_matter() -> None:
    names = [f"pool-{n}:6379" for n in range(9)]
    expected = [names[server] for server in place(names)]
    random.Random(1).shuffle(names)
    assert [names[server] for server in place(names)] == expected


def test_hosts_of_all_versions_agree() -> None:
    """Where this fails, a new format of keys is needed: hosts would not find each other's."""
    placed = place(["a:6379", "b:6379", "c:6379"])
    assert placed[:24].hex() == "020101020001020000010001020200020202000100000000"
    assert [placed.count(server) for server in range(3)] == [5550, 5493, 5341]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_new_server_takes_its_share_alone(count: int) -> None:
    names = [f"10.0.0.{n}:6379" for n in range(count)]
    before, after = place(names), place([*names, "10.0.0.99:6379"])
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    to_it = sum(new == count for _, new in moved)
    share = SLOTS / (count + 1)
    assert share / LOAD_MOST**2 <= to_it <= math.ceil(LOAD_MOST * share)
    # Slots that a full server had pushed on are few.
    assert len(moved) - to_it <= 0.1 * SLOTS


def test_an_heir_is_another_one_and_mostly_has_the_slot_for_good() -> None:
    names = [f"pool-{n}:6379" for n in range(5)]
    placed, heirs = place_with_heirs(names)
    assert placed == place(names)
    assert all(heir != server for heir, server in zip(heirs, placed, strict=True))
    for away, name in enumerate(names):
        after = place(names, [name])
        of_it = [slot for slot in range(SLOTS) if placed[slot] == away]
        assert {heirs[slot] for slot in of_it} == {0, 1, 2, 3, 4} - {away}
        assert sum(heirs[slot] == after[slot] for slot in of_it) > 0.9 * len(of_it)


def test_heirs_are_none_that_are_away() -> None:
    names = ["a:6379", "b:6379", "c:6379"]
    placed, heirs = place_with_heirs(names, ["b:6379"])
    assert {*zip(placed, heirs, strict=True)} == {(0, 2), (2, 0)}
    assert place_with_heirs(names[:1]) == (bytes(SLOTS), bytes([NO_SERVER]) * SLOTS)
    assert place_with_heirs(names, names[:2])[1] == bytes([NO_SERVER]) * SLOTS

"""The numbers of the plan channel: the C part and docs/WIRE.md have the same."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fusecache import _native
from fusecache.base import wire

WIRE = (Path(__file__).resolve().parents[3] / "docs/WIRE.md").read_text()
ALL = (
    wire.Result, wire.Observed, wire.Standing, wire.Wish, wire.Packing,
)  # fmt: skip


def numbers(of: type) -> dict[str, int]:
    return {name: value for name, value in vars(of).items() if name.isupper()}


def in_c(prefix: str) -> dict[str, int]:
    return {
        name.removeprefix(prefix): getattr(_native, name)
        for name in dir(_native)
        if name.startswith(prefix)
    }


def table(title: str) -> dict[int, str]:
    """The rows of docs/WIRE.md that follow this line: a number, and what it means."""
    rows = re.search(rf"^{re.escape(title)}\n\n((?:\|.*\n)+)", WIRE, re.MULTILINE)
    assert rows is not None
    found = re.findall(r"^\| (\d+) \| ([^|]+?) \|", rows[1], re.MULTILINE)
    return {int(number): what for number, what in found}


def test_the_c_part_has_the_same() -> None:
    assert in_c("PLAN_") == numbers(wire.Standing)
    assert in_c("SEEN_") == {
        name: number for name, number in numbers(wire.Observed).items() if name != "MASK"
    }


def test_the_page_of_the_wire_has_the_same() -> None:
    results = {
        number: what.replace(" ", "_").upper() for number, what in table("`done` results:").items()
    }
    assert results == {number: name for name, number in numbers(wire.Result).items()}
    packing = table("`packing` of a state:")
    assert packing.pop(3) == "not used"
    assert sorted(packing) == sorted(numbers(wire.Packing).values())
    said = re.search(r"The upper bits say how the inode stood: (.*?)\. ", WIRE, re.DOTALL)
    assert said is not None
    carried = [number for number in numbers(wire.Standing).values() if number > wire.Observed.MASK]
    assert [int(number) for number in re.findall(r"\b\d+\b", said[1])] == carried
    wishes = re.search(r"`store` is a sum:\n\n((?:\*.*\n|  .*\n)+)", WIRE)
    assert wishes is not None
    found = re.findall(r"^\* (\d+):", wishes[1], re.MULTILINE)
    assert sorted(map(int, found)) == sorted(numbers(wire.Wish).values())


@pytest.mark.parametrize("of", ALL)
def test_arrays_of_bytes_stay_arrays_of_bytes(of: type) -> None:
    for number in numbers(of).values():
        assert (np.zeros(1, np.uint8) | number).dtype == np.uint8

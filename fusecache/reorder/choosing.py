"""Which segments are to be emptied, with little room for what moves (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Use(NamedTuple):
    """What locations lead to in a segment: `to_come` of the `files` are going to be moved yet."""

    segno: int
    files: int
    bytes: int
    to_come: int


class Candidates(NamedTuple):
    """Segments that can become empty in this epoch."""

    dead: list[Use]
    """Less than half alive."""
    next: list[Use]
    """Of the log that is read now, in the order in which they are read."""
    scattered: list[Use]
    """Others: read all epoch long."""


def choose(candidates: Candidates, budget_bytes: int) -> list[int]:
    """Which segments to empty with so much credit: what is nearly empty gives most for it, what is
    read next gives it back first. Until the epoch ends, half of what is left goes to what is
    scattered: it could not begin later.
    """
    chosen: list[int] = []
    by_size = sorted(candidates.dead, key=lambda use: use.bytes)
    others = sorted(candidates.scattered, key=lambda use: use.bytes)

    def take(uses: Iterable[Use], most_bytes: int) -> int:
        left = most_bytes
        for use in uses:
            if use.segno in chosen or use.bytes > most_bytes:
                continue
            if use.bytes > left:
                break  # its turn comes when another has given its room back
            chosen.append(use.segno)
            left -= use.bytes
        return most_bytes - left

    budget_bytes -= take(by_size, budget_bytes)
    budget_bytes -= take(candidates.next, budget_bytes // 2 if others else budget_bytes)
    budget_bytes -= take(others, budget_bytes)
    take(candidates.next, budget_bytes)
    return chosen

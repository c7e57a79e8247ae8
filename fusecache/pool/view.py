"""Which servers are away: not as one host sees it, but as most of them do.

Hosts that judged alone would ask other servers for the same blocks, and fetch what others have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import xxhash

FAILURES: Final = 2
"""Looks in a row, before a host says that a server is away."""
REMEMBERED_S: Final = 60.0
"""A member that is not seen any more counts as one that says nothing."""


class Looks:
    """What one host has seen."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()

    def note(self, answered: Mapping[str, bool]) -> list[str]:
        """Of each server, by name, whether it has answered now. Those that are away."""
        for name, has_answered in answered.items():
            self._failures[name] = 0 if has_answered else self._failures[name] + 1
        return sorted(name for name, count in self._failures.items() if count >= FAILURES)


class Members:
    """Those that were seen of late: one that sees itself alone is no majority."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}

    def count(self, names: Iterable[str], now_s: float) -> int:
        """`names` are seen now. How many there were in the last minute."""
        self._seen_s |= dict.fromkeys(names, now_s)
        return sum(now_s - at_s <= REMEMBERED_S for at_s in self._seen_s.values())


def agreed(
    reports: Sequence[Collection[str]], servers: Collection[str], members: int | None = None
) -> frozenset[str]:
    """Of `servers` those that more than half of the members name; none if that is all.
    `members`: how many there are, if not all have reported.
    """
    members = len(reports) if members is None else members
    votes = Counter(name for report in reports for name in set(report) if name in servers)
    found = frozenset(name for name, count in votes.items() if 2 * count > members)
    return found if len(found) < len(servers) else frozenset()


def ranked(key: str, names: Iterable[str]) -> list[str]:
    """Where all look for what is in one place: the first of these that answers."""
    return sorted(names, key=lambda name: xxhash.xxh3_64_intdigest(f"{key} {name}".encode()))

"""Which directories make up a cache, and which of them is home: decided from what each says of
itself (docs/FORMAT.md, "Several directories"). Touches no file.

INVARIANT: directories whose segment numbers may mean different contents are never used together
with what they hold: one of them is discarded, or refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fusecache.base.errors import UserError
from fusecache.store.segment.format import SetLine

_NO_LINEAGE = bytes(8)


@dataclass(frozen=True, slots=True)
class Said:
    """What a directory that can be used says. `uuid` None: it holds no cache; `line` None: it was
    never one of several, or does not know any more (then `is_further` tells).
    """

    path: Path
    uuid: bytes | None = None
    line: SetLine | None = None
    is_further: bool = False

    @property
    def lineage(self) -> tuple[int, bytes]:
        if self.line is not None:
            return self.line.age, self.line.lineage
        return -self.is_further, _NO_LINEAGE

    @property
    def is_home(self) -> bool:
        if self.line is not None:
            return self.line.own == self.line.ids[0]
        return self.uuid is not None and not self.is_further


@dataclass(frozen=True, slots=True)
class Membership:
    """`lines`: what each directory is to say from now, in the order of `decide`'s argument."""

    home: int
    lines: list[SetLine | None]
    discarded: list[int]  # what these hold is of no use
    is_promoted: bool  # home holds no index of this lineage yet
    listed: int  # directories that the cache had until now; 0: there was none, or only one ever
    lost: int  # of those: not given now
    fresh: list[int]  # hold no cache
    returned: list[int]  # join with what they hold, and were not listed
    is_change: bool  # of what any of the directories says


def decide(found: Sequence[Said], left_out: int = 0) -> Membership:
    """The membership of these directories; so many others were given, and cannot be used.

    UserError: two of them belong to different caches, or are copies.
    """
    assert found
    holders = [said for said in found if said.uuid is not None]
    for said in holders:
        if said.uuid != holders[0].uuid:
            raise UserError(
                f"cache directories {holders[0].path} and {said.path} hold two different caches:"
                " give one of them with an empty or a new directory"
            )
    if len(found) == 1 and left_out == 0 and found[0].line is None and not found[0].is_further:
        return Membership(
            0,
            [None],
            [],
            is_promoted=False,
            listed=0,
            lost=0,
            fresh=[],
            returned=[],
            is_change=False,
        )
    latest = max((said.lineage for said in holders), default=(0, _NO_LINEAGE))
    homes = [said for said in holders if said.lineage == latest and said.is_home]
    kept = [said for said in holders if _is_kept(said, latest, homes[0] if homes else None)]
    ids = [said.line.own if said.line is not None and said in kept else None for said in found]
    for said, own in zip(found, ids, strict=True):
        if len(homes) > 1 or (own is not None and ids.count(own) > 1):
            raise UserError(
                f"{said.path} is a copy of another cache directory: empty it, or leave it out"
            )
    names = [own if own is not None else secrets.token_bytes(8) for own in ids]
    home = found.index(homes[0]) if homes else 0
    age, lineage = latest
    before = homes[0].line.before if homes and homes[0].line is not None else _NO_LINEAGE
    if not homes or lineage == _NO_LINEAGE:
        before, age, lineage = lineage, age + 1, secrets.token_bytes(8)
    # Without home any other of the lineage tells who belonged to it.
    teller = next((said.line for said in [*homes, *kept] if said.line is not None), None)
    listed = teller.ids if teller is not None else ()
    absent = [own for own in listed if own not in names]
    lost = max(0, len(absent) - left_out)
    if lost or not homes:
        absent = []
    uuid = (holders[0].uuid if holders else None) or secrets.token_bytes(16)
    members = (names[home], *sorted({*names, *absent} - {names[home]}))
    lines: list[SetLine | None] = [
        SetLine(uuid, age, lineage, before, own, members) for own in names
    ]
    discarded = [n for n, said in enumerate(found) if said.uuid is not None and said not in kept]
    is_change = bool(discarded) or lines != [said.line for said in found]
    fresh = [n for n, said in enumerate(found) if said.uuid is None]
    returned = [n for n, own in enumerate(ids) if listed and own is not None and own not in listed]
    is_promoted = not homes and bool(holders)
    return Membership(
        home, lines, discarded, is_promoted, len(listed), lost, fresh, returned, is_change
    )


def _is_kept(said: Said, latest: tuple[int, bytes], home: Said | None) -> bool:
    if said.lineage == latest:
        return True
    # Whoever wrote the new lineage was ended before all of them had it.
    line, first = said.line, home.line if home is not None else None
    return (
        line is not None
        and first is not None
        and line.lineage == first.before
        and line.lineage != _NO_LINEAGE
        and line.own in first.ids
    )

"""What a pool's engine holds about the sweep: one host writes it, the others read it. Its bytes are
in docs/POOL.md, "One sweep for all". All is blocking, and raises Away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgpack  # type: ignore[import-untyped]
import xxhash

from fusecache.pool.keys import Away

FORMAT: Final = "FCS1"
LEASE_LEAST_S: Final = 2.0
NOTE_LEAST_S: Final = 60.0
SWEPT_LEAST_S: Final = 3600.0
NOTE_BYTES: Final = 256 << 10
VALUE_BYTES_MOST: Final = 1 << 20
PART: Final = 65_536
"""Hashes in one value."""
DIRECTORIES_MOST: Final = 4 * PART
PATH_BYTES_MOST: Final = 4096
NAME_MOST: Final = 320
"""Characters of a member's name."""

Times: TypeAlias = tuple[int, int]
"""mtime and ctime, in ns."""
Name: TypeAlias = tuple[bytes, bytes]
"""Path of its directory below the source, and itself."""
Changes: TypeAlias = dict[bytes, list[bytes]]
"""Names, by the path of their directory."""


class Values(Protocol):
    """`Keys` is one."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, value: bytes, expires_s: float, is_new: bool = False) -> bool: ...
    def remove(self, key: str) -> None: ...


class Lease(NamedTuple):
    token: str
    leader: str
    notes: int
    """How many there were."""
    swept: int
    """How many directories are told."""
    root: Times


class Board:
    """Of the hosts with one period."""

    def __init__(self, values: Values, prefix: str, period_s: float) -> None:
        """`prefix`: of the pool's keys."""
        self.lease_s = max(LEASE_LEAST_S, period_s / 2)
        self._values, self._period_s = values, period_s
        self._prefix = f"{prefix}{FORMAT}:"
        self._lease_key = f"{self._prefix}{int(period_s * 1000)}"
        self._wanted_key = f"{self._lease_key}:wanted"

    def _key(self, token: str, kind: str, number: int) -> str:
        return f"{self._prefix}{token}:{kind}:{number}"

    # ---- the lease -------------------------------------------------------------------------------

    def lease(self) -> Lease | None:
        """None: nobody has it. Away: also if what is there cannot be read."""
        value = self._values.get(self._lease_key)
        if value is None:
            return None
        match unseal(value):
            case [str(token), str(leader), int(notes), int(swept), [int(mtime), int(ctime)]]:
                if notes >= 0 and 0 <= swept <= DIRECTORIES_MOST:
                    return Lease(token, _printable(leader), notes, swept, (mtime, ctime))
        raise Away("the lease of the sweep cannot be read")

    def put_lease(self, lease: Lease, is_new: bool) -> bool:
        """False: `is_new`, but somebody has it."""
        return self._values.put(self._lease_key, seal(list(lease)), self.lease_s, is_new)

    def remove_lease(self) -> None:
        self._values.remove(self._lease_key)

    # ---- notes -----------------------------------------------------------------------------------

    def put_note(self, token: str, number: int, note: Iterable[Name]) -> None:
        changes: Changes = {}
        for directory, name in note:
            changes.setdefault(directory, []).append(name)
        value = seal([token, number, changes])
        expires_s = max(NOTE_LEAST_S, 2 * self._period_s)
        self._values.put(self._key(token, "note", number), value, expires_s)

    def notes(self, token: str, numbers: range) -> Changes | None:
        """None: one of them is missing."""
        changes: Changes = {}
        for number in numbers:
            found = self._get(token, "note", number)
            if not _are_changes(found):
                return None
            for directory, names in found.items():
                changes.setdefault(directory, []).extend(names)
        return changes

    # ---- directories -----------------------------------------------------------------------------

    def put_swept(self, token: str, number: int, hashes: Sequence[int]) -> None:
        expires_s = max(SWEPT_LEAST_S, 20 * self._period_s)
        value = seal([token, number, list(hashes)])
        self._values.put(self._key(token, "swept", number), value, expires_s)

    def swept(self, token: str, number: int, count: int) -> list[int] | None:
        """None: it is missing, or has less than `count`."""
        found = self._get(token, "swept", number)
        if not isinstance(found, list) or not count <= len(found) <= PART:
            return None
        return [one for one in found if isinstance(one, int)]

    def want(self, paths: Iterable[bytes]) -> None:
        """As many as one value holds, unless another host wants some just now."""
        wants, length = [], 0
        for path in paths:
            length += len(path) + 5
            if length <= NOTE_BYTES and _is_path(path):
                wants.append(path)
        if wants:
            self._values.put(self._wanted_key, seal(wants), self.lease_s, is_new=True)

    def take_wanted(self) -> tuple[bytes, ...]:
        fields = unseal(self._values.get(self._wanted_key))
        if fields is None:
            return ()
        self._values.remove(self._wanted_key)
        return tuple(path for path in fields if _is_path(path))

    def _get(self, token: str, kind: str, number: int) -> Any:
        """None: it is missing."""
        fields = unseal(self._values.get(self._key(token, kind, number)))
        is_it = fields is not None and len(fields) == 3 and fields[:2] == [token, number]
        return fields[2] if fields is not None and is_it else None


# ---- values --------------------------------------------------------------------------------------


def hash_of(path: bytes) -> int:
    """Of a directory's path below the source."""
    return xxhash.xxh3_64_intdigest(path)


def seal(fields: list[Any]) -> bytes:
    """A value: docs/POOL.md."""
    body: bytes = msgpack.packb(fields)
    return FORMAT.encode() + xxhash.xxh3_64_digest(body)[::-1] + body


def unseal(value: bytes | None) -> list[Any] | None:
    """None: it is none, or damaged."""
    if value is None or len(value) > VALUE_BYTES_MOST or value[:4] != FORMAT.encode():
        return None
    if value[4:12] != xxhash.xxh3_64_digest(value[12:])[::-1]:
        return None
    try:
        fields = msgpack.unpackb(value[12:])
    except Exception:  # of the library, about bytes that are none
        return None
    return fields if isinstance(fields, list) else None


def pieces(names: Iterable[Name]) -> Iterator[list[Name]]:
    """Notes: of NOTE_BYTES each, at most."""
    piece: list[Name] = []
    length = 0
    for directory, name in names:
        more = len(directory) + len(name) + 10
        if piece and length + more > NOTE_BYTES:
            yield piece
            piece, length = [], 0
        piece.append((directory, name))
        length += more
    if piece:
        yield piece


def _is_path(path: object) -> bool:
    return isinstance(path, bytes) and len(path) <= PATH_BYTES_MOST


def _are_changes(found: object) -> bool:
    return isinstance(found, dict) and all(
        isinstance(directory, bytes)
        and isinstance(names, list)
        and all(isinstance(name, bytes) for name in names)
        for directory, names in found.items()
    )


def _printable(name: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in name[:NAME_MOST])

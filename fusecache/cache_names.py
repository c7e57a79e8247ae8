"""Whether a directory is a cache, or may become one: by the names in it (docs/FORMAT.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

CHECK_PREFIX: Final = ".fusecache-check-"  # of a file that `mount` makes to see whether it can

# What a cache directory may hold before it has its `format` and segments: `probe` is of a command,
# lost+found mkfs's.
_BEGINNINGS: Final = frozenset(("lock", "index", "high", "format.tmp", "probe", "lost+found"))


def is_cache(names: Iterable[str]) -> bool:
    """Or empty, or what is left of one that was just begun. False: other people's files."""
    names = set(names)
    return bool(names & {"format", "segments"}) or all(
        name in _BEGINNINGS or name.startswith(CHECK_PREFIX) for name in names
    )

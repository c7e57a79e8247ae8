"""hintsd: the planning daemon that tells fusecache what will be read next.

This module is what a training script imports: `attach` a torch DataLoader, or `connect` to the
dataset's mount and describe the order by hand; both give a `Job`.

INVARIANT: importing it costs nothing; numpy and msgpack come with the first use of a name, torch
never comes unless the script has it already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hintsd.client import Job, connect
    from hintsd.loaders import attach

__all__ = ["Job", "attach", "connect"]

_HOMES = {"Job": "hintsd.client", "attach": "hintsd.loaders", "connect": "hintsd.client"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hintsd' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)

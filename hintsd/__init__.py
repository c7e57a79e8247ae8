"""hintsd: the planning daemon that tells fusecache what will be read next.

This module is what a training script imports: `attach` a torch DataLoader, or `connect` to the
dataset's mount and describe the order by hand; both give a `Job`. An `ImportanceSampler` chooses
what a training reads by what it loses; a `SubstitutableSampler` reads all, what is cached earlier;
with a `ChunkedSampler` trainings of one dataset read the same part of it at a time.

INVARIANT: importing it costs nothing; numpy and msgpack come with the first use of a name, torch
never comes unless the script has it already. It is a part of both distributions, and runs on
Python 3.9 (docs/PACKAGES.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusecache import __version__

__all__ = [
    "ChunkedSampler",
    "ImportanceSampler",
    "Job",
    "Ranges",
    "SubstitutableSampler",
    "__version__",
    "attach",
    "connect",
    "files",
    "order_of",
    "paths_of",
    "rows_of",
]

if TYPE_CHECKING:
    from hintsd.client.client import Job, connect, files
    from hintsd.client.importance.chunked import ChunkedSampler
    from hintsd.client.importance.sampler import ImportanceSampler
    from hintsd.client.importance.substitutable import SubstitutableSampler
    from hintsd.client.known.extending import order_of, paths_of
    from hintsd.client.loaders import attach
    from hintsd.client.ranges.rows import Ranges, rows_of
else:  # unseen by type checkers, to which it would give every name
    _HOMES = {
        "ChunkedSampler": "hintsd.client.importance.chunked",
        "ImportanceSampler": "hintsd.client.importance.sampler",
        "Job": "hintsd.client.client",
        "Ranges": "hintsd.client.ranges.rows",
        "SubstitutableSampler": "hintsd.client.importance.substitutable",
        "attach": "hintsd.client.loaders",
        "connect": "hintsd.client.client",
        "files": "hintsd.client.client",
        "order_of": "hintsd.client.known.extending",
        "paths_of": "hintsd.client.known.extending",
        "rows_of": "hintsd.client.ranges.rows",
    }

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'hintsd' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)  # what Tab shows: they are not there before their first use

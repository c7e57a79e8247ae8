"""Whether the files of this installation belong together (docs/PACKAGES.md).

The distribution hintsd holds some of fusecache's files. One of another version, installed over
fusecache, leaves a mixture, whose parts do not fit: no command runs with it.

It looks at what pip names beside the packages, no more: a checkout or a link to one has nothing
there, and is whole.
"""

from __future__ import annotations

import os

from fusecache import __version__


def mixture(directory: str | None = None) -> str:
    """A line for the user; "": there is none. `directory`: where the packages lie."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    directory = directory or root
    prefix, suffix = "fusecache-", ".dist-info"
    try:
        names = os.listdir(directory)
    except OSError:  # it may be searched, not listed; or is none
        return ""
    versions = [
        name[len(prefix) : -len(suffix)]
        for name in names
        if name.startswith(prefix) and name.endswith(suffix)
    ]
    if not versions or __version__ in versions:
        return ""
    return (
        f"this is fusecache {versions[0]}, with files of hintsd {__version__}: install the same "
        f"version of both (pip install --force-reinstall --no-deps fusecache=={versions[0]} brings "
        "this one back)"
    )

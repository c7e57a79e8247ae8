"""An inode table in the test's own process, without a mount."""

import os
from pathlib import Path

from fusecache import _native

ROOT = 1


def attach(source: Path) -> None:
    """A table of its own over `source`, scanned."""
    source_fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    table_fd = os.memfd_create("table")
    _native.attach(table_fd, source_fd, True)
    _native.scan(ROOT)
    os.close(source_fd)
    os.close(table_fd)

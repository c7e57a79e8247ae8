"""Where this hintsd's log goes, for lines that send their reader there."""

from __future__ import annotations

import logging
import os
import stat
from typing import TextIO

from fusecache.base import trust


def internal_error() -> str:
    """What a client hears of a fault of ours, which the log tells."""
    return f"internal error: see hintsd's log, {_place()}"


def open_file(path: str) -> TextIO:
    """That logging writes to. OSError; trust.Untrusted: it is another user's."""
    return open(path, "a", opener=lambda name, _: trust.open_log(name))


def _place() -> str:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and os.path.isabs(handler.stream.name):
            return str(handler.stream.name)
    try:
        if stat.S_ISREG(os.fstat(2).st_mode):  # `fusecache mount` gives it a file
            return os.readlink("/proc/self/fd/2")
    except OSError:
        pass
    return "which is its stderr"

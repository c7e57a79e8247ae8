"""The exception tree, and the log of a server's faults.

FusecacheError
├── UserError          a mistake the user can mend: one line, exit code, no traceback
│   └── ConfigError    a flag or configuration key (names it)
├── OriginError        the origin answered with an errno, or not at all (carries errno)
│   ├── OriginTimeout  no answer within --origin-timeout (EIO)
│   └── OriginChanged  the file's version is not the one asked for (refresh and ask again)
├── UnknownInode       the table has no inode of this number (also a LookupError)
└── CacheFault         the cache is broken somewhere; never reaches a reader while the origin works
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from typing import Final

log = logging.getLogger(__name__)

LOG_AGAIN_AFTER_S = 60.0

# Of an origin that is away, and may come back.
AWAY_ERRNOS = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT})

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_A_MOUNT: Final = 3
EXIT_BUSY: Final = 4
EXIT_INTERRUPTED: Final = 130


class FusecacheError(Exception):
    """Everything this package raises on purpose."""


class UserError(FusecacheError):
    """One line that says what is wrong and what to do; `exit_code` is the process's."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ConfigError(UserError):
    """A flag or configuration key that cannot be used; the message names it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=EXIT_USAGE)


class OriginError(FusecacheError):
    """The origin failed; `errno` is what the reader gets."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message or os.strerror(number))
        self.errno = number


class OriginTimeout(OriginError):
    """The origin did not answer in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(errno.EIO, f"origin did not answer within {seconds:g} s")


class OriginChanged(OriginError):
    """The file at the origin is not the version that was asked for."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "file changed at the origin")


class UnknownInode(FusecacheError, LookupError):
    """The table has no inode of this number. The C part (`fusecache._native`) raises it."""


class CacheFault(FusecacheError):
    """The cache could not do its part; the caller goes to the origin."""


class FaultLog:
    """Counts faults by kind and logs each kind once, and again at most every LOG_AGAIN_AFTER_S
    seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, float] = {}

    def report(self, kind: str, message: str) -> None:
        with self._lock:
            self._counts[kind] += 1
            count = self._counts[kind]
            now = time.monotonic()
            # One of several directories is told of by its own line, and that once.
            key = message if kind == "directory" else kind
            if now - self._logged.get(key, -LOG_AGAIN_AFTER_S) < LOG_AGAIN_AFTER_S:
                return
            self._logged[key] = now
        log.warning("%s fault (number %d): %s", kind, count, message)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

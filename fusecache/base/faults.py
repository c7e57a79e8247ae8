"""The log of a server's faults: counted always, written once per kind and minute."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

log = logging.getLogger(__name__)

LOG_AGAIN_AFTER_S = 60.0


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

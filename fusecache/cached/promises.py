"""Who reads what at the origin, so that nobody else does at the same time. Any thread.

INVARIANT: a promise ends after PROMISE_S, whatever its holder does; who breaks many gets none for a
while. So nobody waits for others longer than that, time and again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Hashable
from typing import Final

log = logging.getLogger(__name__)

PROMISE_S: Final = 5.0
BROKEN_MOST: Final = 64
"""By a user within BROKEN_S: then that user's mounts are promised nothing for as long."""
LATE_MOST: Final = 4096
BROKEN_S: Final = 30.0
PROMISES_MOST: Final = 512
"""Of a user, at a time."""


class Promises:
    """By digest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[bytes, tuple[Hashable, int, float]] = {}  # holder, uid, until; by age
        self._connections: Counter[Hashable] = Counter()
        self._counts: Counter[int] = Counter()  # by uid
        self._late: dict[bytes, int] = {}  # uid; by age: what may still be put
        self._broken: dict[int, tuple[int, float]] = {}  # by uid: how many, since when

    def ask(self, name: bytes, holder: Hashable, uid: int) -> bool:
        """Whether another holder has it: else it is this holder's from now on, if that may be."""
        now = time.monotonic()
        with self._lock:
            self._expire(now)
            held = self._held.get(name)
            if held is not None:
                return held[0] != holder
            if self._may_promise(uid, now):
                self._held[name] = holder, uid, now + PROMISE_S
                self._counts[uid] += 1
            return False

    def end(self, name: bytes, holder: Hashable | None = None) -> None:
        """It was put; or this holder will not bring it."""
        with self._lock:
            held = self._held.get(name)
            if holder is None and name in self._late:
                uid = self._late.pop(name)
                count, since = self._broken.get(uid, (1, 0.0))
                self._broken[uid] = max(0, count - 1), since
            if held is not None and holder in (None, held[0]):
                del self._held[name]
                self._counts[held[1]] -= 1

    def came(self, holder: Hashable) -> None:
        """A connection of this holder's; `went` when it has ended."""
        with self._lock:
            self._connections[holder] += 1

    def went(self, holder: Hashable) -> None:
        """With the last one go the promises."""
        with self._lock:
            self._connections[holder] -= 1
            if self._connections[holder]:
                return
            del self._connections[holder]
            for name in [name for name, held in self._held.items() if held[0] == holder]:
                self._break(name, time.monotonic())

    def _expire(self, now: float) -> None:
        while self._held:
            name, (_, uid, until) = next(iter(self._held.items()))
            if until > now:
                break
            self._late[name] = uid
            if len(self._late) > LATE_MOST:
                del self._late[next(iter(self._late))]
            self._break(name, now)

    def _break(self, name: bytes, now: float) -> None:
        _, uid, _ = self._held.pop(name)
        self._counts[uid] -= 1
        count, since = self._broken.get(uid, (0, now))
        self._broken[uid] = (count + 1, since) if now - since < BROKEN_S else (1, now)
        if count + 1 == BROKEN_MOST:
            log.info("uid %d has broken %d promises: it is promised nothing now", uid, count + 1)

    def _may_promise(self, uid: int, now: float) -> bool:
        count, since = self._broken.get(uid, (0, now))
        if count >= BROKEN_MOST and now - since < BROKEN_S:
            return False
        return self._counts[uid] < PROMISES_MOST

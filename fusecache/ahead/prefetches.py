"""Files that are being fetched: each has left the queues, and is not reported yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import trio

from fusecache import _native
from fusecache.ahead.marks import Answers, mark, refusal
from fusecache.base.wire import Result, Standing
from fusecache.read.fetcher import Fetcher, Flight
from fusecache.store.types import Version
from fusecache.table import namespace

WAITING = -1


@dataclass(eq=False, slots=True)
class Prefetch:
    """`push` and `stored`: None: not asked for (so far); WAITING; else the result."""

    ino: int
    store: bool
    plan: int  # number of the plan that wants it
    version: Version
    begun_s: float
    attempts: int
    flight: Flight | None = None  # ours, or a reader's that has landed
    push: int | None = None
    stored: int | None = None


class Prefetches:
    """Of the one plan there is. Prefetches of an ended one go on, and are not reported."""

    def __init__(
        self, fetcher: Fetcher, answers: Answers, push: Callable[[Prefetch, memoryview], None]
    ) -> None:
        """`push(prefetch, data)` has a file staged; `pushed` is called when that is done."""
        self._fetcher = fetcher
        self._answers = answers
        self._push = push
        self._by_ino: dict[int, Prefetch] = {}

    def __contains__(self, ino: object) -> bool:
        return ino in self._by_ino

    def has_any(self, inos: set[int]) -> bool:
        return not self._by_ino.keys().isdisjoint(inos)

    def is_current(self, prefetch: Prefetch) -> bool:
        return prefetch.plan == self._answers.plan

    def clear(self) -> None:
        for prefetch in self._by_ino.values():
            self.land(prefetch)
        self._by_ino.clear()

    # ---- the life of one -------------------------------------------------------------------------

    def begin(self, ino: int, store: bool, attempts: int) -> Prefetch:
        mark(ino, Standing.FLYING, Standing.QUEUED)
        version, now = namespace.version(ino), trio.current_time()
        prefetch = self._by_ino[ino] = Prefetch(
            ino, store, self._answers.plan, version, now, attempts
        )
        return prefetch

    def fly(self, prefetch: Prefetch) -> Flight | None:
        """It gets a flight of its own: it can be joined, and has a `flight` to be ended. Else
        somebody else's that brings the file.
        """
        flight, is_ours = self._fetcher.claim(prefetch.ino)
        if not is_ours:
            return flight
        prefetch.flight = flight
        flight.when_landed(partial(self._landed, prefetch, flight))
        return None

    def store(self, ino: int) -> None:
        """A file that is being fetched is to be stored, too."""
        self._by_ino[ino].store = True
        mark(ino, 0, Standing.QUEUED)

    def stage(self, ino: int) -> None:
        """A file that is being fetched is to be staged, too. While its bytes are not here this
        comes again, for then it is WANTED.
        """
        prefetch = self._by_ino[ino]
        mark(ino, 0, Standing.QUEUED)
        if (
            prefetch.push is None
            and prefetch.flight is not None
            and prefetch.flight.data is not None
        ):
            prefetch.push = WAITING
            self._push(prefetch, prefetch.flight.data)

    def brought(self, prefetch: Prefetch, flight: Flight) -> None:
        """A fetch of somebody else's has brought what is to be staged."""
        prefetch.flight = flight
        prefetch.stored = Result.STORED if flight.stored or flight.was_stored else None
        self.stage(prefetch.ino)

    def arrived(self, prefetch: Prefetch, is_wanted: bool) -> None:
        """Its own fetch has brought it. `is_wanted`: to be staged."""
        prefetch.stored = (
            WAITING if prefetch.flight is not None and prefetch.flight.is_queued else None
        )
        if is_wanted:
            self.stage(prefetch.ino)
        else:
            self._end_if_done(prefetch)

    def _landed(self, prefetch: Prefetch, flight: Flight) -> None:
        """Our flight can be joined no more: it is stored, or never will be."""
        if prefetch.stored == WAITING and self.is_current(prefetch):
            prefetch.stored = Result.STORED if flight.stored else Result.NO_ROOM
            self._end_if_done(prefetch)

    def pushed(self, prefetch: Prefetch, result: int) -> None:
        """`result`: _native.PUSHED and such."""
        prefetch.push = result
        self._end_if_done(prefetch)

    def queue_again(self, prefetch: Prefetch) -> None:
        """It goes back to a queue."""
        del self._by_ino[prefetch.ino]
        mark(prefetch.ino, Standing.QUEUED, Standing.FLYING)

    # ---- its end ---------------------------------------------------------------------------------

    def _end_if_done(self, prefetch: Prefetch) -> None:
        if prefetch.push == WAITING or prefetch.stored == WAITING:
            return
        if prefetch.push is None:
            # neither: it was dropped while it was on its way
            result = prefetch.stored or Result.NOT_PUSHED
        elif prefetch.push not in (_native.PUSHED, _native.PUSH_READ):
            result = refusal(prefetch.ino)
        elif prefetch.stored is None:
            result = Result.STAGED
        else:
            is_stored = prefetch.stored == Result.STORED
            result = Result.STAGED_AND_STORED if is_stored else Result.NO_ROOM
        self.end(prefetch, result)

    def land(self, prefetch: Prefetch) -> None:
        """Until its file is pushed, a reader's miss joins the flight that has brought it."""
        if prefetch.flight is not None:
            self._fetcher.land(prefetch.ino, prefetch.flight)

    def end(self, prefetch: Prefetch, result: int) -> None:
        self.land(prefetch)
        if self._by_ino.get(prefetch.ino) is prefetch:
            del self._by_ino[prefetch.ino]
        mark(prefetch.ino, 0, Standing.FLYING)
        self._answers.tell(prefetch.ino, result)

"""What hintsd says that readers have passed, on its way from the plan channel to a recording
(docs/TRACES.md).

INVARIANT: it never blocks, and holds at most WAITING_MOST samples. What does not fit is left out;
the positions of what follows tell.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import trio

from fusecache.base.wire import Fields

WAITING_MOST: Final = 1 << 20
JOB_CHARACTERS_MOST: Final = 256
COUNT_MOST: Final = 1 << 62


class Passed(NamedTuple):
    """A stretch of a job's access sequence, within one epoch."""

    job: str
    position: int
    begin: int
    """Position of its epoch."""
    samples: int
    """Of its epoch."""
    inos: npt.NDArray[np.uint32]
    time_ns: int  # when it was told


class Passings:
    """One mount's."""

    def __init__(self) -> None:
        self.recording = 0
        """The number of the recording that runs and wants hints; 0: none."""
        self.changed = trio.Event()
        """`recording` is another; then there is another event."""
        self.told = trio.Event()
        """hintsd knows of the recording."""
        self._recordings = 0
        self._waiting: list[Passed] = []
        self._samples = 0

    def begin(self) -> None:
        self._recordings += 1
        self.told = trio.Event()
        self._change(self._recordings)

    def end(self) -> None:
        self.take()
        self._change(0)

    def _change(self, recording: int) -> None:
        self.recording = recording
        self.changed.set()
        self.changed = trio.Event()

    def put(self, fields: Fields) -> None:
        """A `passed` frame (docs/WIRE.md). WireError."""
        position, samples = (
            fields.int("position", 0, COUNT_MOST),
            fields.int("samples", 1, COUNT_MOST),
        )
        begin = fields.optional_int("begin", 0, position)
        passed = Passed(
            job=fields.str("job", JOB_CHARACTERS_MOST),
            position=position,
            begin=position - position % samples if begin is None else begin,
            samples=samples,
            inos=fields.array("inos", np.uint32),
            time_ns=time.monotonic_ns(),
        )
        is_of_this = fields.int("recording", 1, COUNT_MOST) == self.recording
        if is_of_this and self._samples + len(passed.inos) <= WAITING_MOST:
            self._waiting.append(passed)
            self._samples += len(passed.inos)

    def take(self) -> list[Passed]:
        taken, self._waiting, self._samples = self._waiting, [], 0
        return taken

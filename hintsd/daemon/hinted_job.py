"""A job of one mount: what was asked for, what was found, and what is known of it now.

INVARIANT: `is_planned`: the planner of its mount knows it, by its name.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hintsd.daemon.datasets import Guest
from hintsd.daemon.messages import JobRefused, Sampled
from hintsd.daemon.mount_link import Inos
from hintsd.follow import unheard
from hintsd.follow.readers import Hinted
from hintsd.follow.unheard import Unheard
from hintsd.orders.drawing import Order
from hintsd.orders.hint import Hint
from hintsd.orders.spec import OrderSpec, samples_per_epoch
from hintsd.plan import status
from hintsd.sampling.chunks import next_chunk

Scores: TypeAlias = npt.NDArray[np.float32]

EPOCH_SAMPLES_LEAST: Final = 1 << 24  # an epoch may always be so long, and longer ...
EPOCH_REPEATS_MOST: Final = 4  # ... as long as each file comes so often on average
POSITION_EVERY_S: Final = 1.0
SHORT_EPOCH: Final = 1 << 18  # samples; a longer one is not read between two looks
_UNPLANNED: Final = {
    **{"state": "waiting", "reason": "", "window_bytes": 0, "ahead_bytes": 0},
    **{"predicted_stall_s": 0.0, "samples_per_s": 0.0},
}
"""Of a job that was read before its mount went."""
_SILENT: Final = "no epoch's order was announced yet"


@dataclass(eq=False, slots=True)
class HintedJob:
    name: str
    hint: Hint
    """Its `pid` is the trainer's, whoever sent it."""
    root: bytes
    """The dataset's directory relative to its mount."""
    place: tuple[int, int]
    """(epoch, index) to begin at, and then the latest known."""
    is_lost: bool
    """Its reader may have gone on from there."""
    uid: int = 0
    """Of its user."""
    guest: Guest | None = None
    """Its user, if that is none of hintsd's own."""
    samples: int = 0
    inos: Inos = field(default_factory=lambda: np.empty(0, np.uint32))
    order: Order | None = None
    """None: each epoch is announced, and none has been."""
    scores: Scores | None = None
    """Expected uses of each index in an epoch that is not known; None: none were told."""
    known_from: int = 0
    """The first epoch that `order` is asked for."""
    epoch_samples: int = 0
    has_files: bool = False  # `inos` are theirs, in the mount that there is
    is_planned: bool = False
    is_finished: bool = False
    is_warned: bool = False  # that the origin has changed
    fault: str = ""  # why it is not planned any more
    refused: str = ""  # why an order was refused, while there is no other one
    status: dict[str, Any] = field(default_factory=dict)
    chunk: int | None = None
    """The one that it chose last, of `chunks`; None: it has not been asked for."""
    chunks: int = 0
    _unheard: Unheard = field(default_factory=Unheard)
    _begun_s: float = field(default_factory=time.monotonic)
    _scored_s: float = 0.0
    _sampled: Sampled = field(default_factory=Sampled)
    _reported_s: float = -math.inf
    _reported: tuple[int, int] | None = None

    # ---- its dataset and its orders --------------------------------------------------------------

    def resolve(self, inos: Inos) -> None:
        """These are its files, index by index."""
        self.samples = self.epoch_samples = len(inos)
        self.inos, self.has_files = inos, True

    def lose_files(self) -> None:
        """It was mounted anew: they have other numbers, and nothing of it is planned."""
        self.has_files = self.is_planned = False

    def resolve_anew(self, inos: Inos) -> None:
        """The same files have other numbers."""
        self.inos, self.has_files = inos, True
        self.is_lost = self.is_lost or self.order is not None

    def score(self, uses: Scores, sampled: Sampled) -> None:
        """What was told before is forgotten. JobRefused: not of this dataset."""
        if len(uses) != self.samples:
            raise JobRefused(
                f"{len(uses)} scores, but {os.fsdecode(self.hint.path)} has {self.samples} samples"
            )
        self.scores, self._scored_s, self._sampled = uses, time.monotonic(), sampled

    def samples_of(self, spec: OrderSpec) -> int:
        """Samples an epoch. JobRefused: not an order of this dataset."""
        if spec.length > self.samples:
            raise JobRefused(
                f"the order is of {spec.length} samples, but {os.fsdecode(self.hint.path)} has "
                f"{self.samples}"
            )
        count = samples_per_epoch(spec)
        if count == 0:
            raise JobRefused("the order has no samples: a batch is larger than the dataset")
        if count > max(EPOCH_SAMPLES_LEAST, EPOCH_REPEATS_MOST * self.samples):
            raise JobRefused(
                f"an epoch of {count} samples of {self.samples} files is too long to plan"
            )
        return count

    def describe(self, order: Order, *, is_new: bool) -> list[str]:
        """`order` is that of all its epochs; what its user should know. `is_new`: it begins where
        the hint says. JobRefused.
        """
        spec, hint = order.spec, self.hint
        self.epoch_samples, self.order = self.samples_of(spec), order
        if is_new:
            batches = -(-self.epoch_samples // spec.batch_size)
            if hint.start_batch > batches:
                raise JobRefused(
                    f"start_batch {hint.start_batch} lies beyond the epoch's {batches} batches"
                )
            self.place = hint.start_epoch, hint.start_batch * spec.batch_size
        if spec.length < self.samples and spec.sampler in ("sequential", "random"):
            return [f"the order is of {spec.length} of the {self.samples} samples"]
        return []

    def announce(self, order: Order, epoch: int) -> None:
        """From this epoch on it goes by another order, or by its first one."""
        is_first = self.order is None
        self.order, self.known_from, self.epoch_samples = order, epoch, self.samples_of(order.spec)
        if is_first:
            self.status, self.refused = {}, ""
        if self.is_planned or self.fault:
            return
        if self.place[0] != epoch:
            self.place = epoch, 0
        elif is_first and self.place[1] == 0:
            self.place = epoch, self.hint.start_batch * order.spec.batch_size

    def knows(self, epoch: int) -> bool:
        """Whether its order tells this epoch, as far as anybody has said."""
        return self.order is not None and epoch >= self.known_from

    def tidy_place(self) -> tuple[int, int]:
        epoch, index = self.place
        samples = self.status.get("samples") or self.epoch_samples  # of that epoch
        place = epoch + index // samples, index % samples
        epochs = self.hint.epochs
        return place if epochs is None else min(place, (epochs, 0))

    def go_on(self, chunks: int, unread: list[int], others: Iterable[HintedJob]) -> int:
        """The chunk that it reads next, by where these others are."""
        self.chunks = chunks
        places = [one.chunk for one in others if one.chunk is not None and self._is_beside(one)]
        self.chunk = next_chunk(unread, places, chunks)
        return self.chunk

    def _is_beside(self, other: HintedJob) -> bool:
        """Whether the other one is read, and has the same chunks of the same files."""
        return (
            other.chunks == self.chunks
            and other.status.get("state") not in ("idle", "wrong")
            and (other.inos is self.inos or np.array_equal(other.inos, self.inos))
        )

    # ---- what becomes of it ----------------------------------------------------------------------

    def plan(self) -> None:
        """The planner knows it."""
        self.is_planned = True

    def unplan(self) -> None:
        self.is_planned = False

    def give_up(self, fault: str) -> None:
        """It is not planned any more, until it is closed."""
        self.is_planned, self.fault = False, fault
        self.status = {**self.status, "state": "wrong", "reason": fault}

    def refuse(self, refusal: JobRefused) -> None:
        """An order of it could not be taken."""
        self.refused = f"an order was refused: {refusal}"

    def finish(self) -> bool:
        """All its epochs are read; whether that is new."""
        is_new, self.is_finished = not self.is_finished, True
        return is_new

    def warn(self) -> bool:
        """The origin has changed; whether that is new."""
        is_new, self.is_warned = not self.is_warned, True
        return is_new

    def note(self, figures: dict[str, Any]) -> None:
        """The planner's, as they are now."""
        self.status = figures
        self.place = figures["epoch"], figures["index"]

    def take_moved(self, now: float) -> bool:
        """Whether its place is to be told: it has moved, and was not told for a while."""
        is_due = now - self._reported_s >= POSITION_EVERY_S
        if not (is_due and self.is_planned and self.place != self._reported):
            return False
        self._reported, self._reported_s = self.place, now
        return True

    def hear(
        self, own: Inos, told: npt.NDArray[np.bool_], now: float, *, is_more_to_come: bool
    ) -> str:
        """Before its first order: what its own processes read, and which of it was announced. Why
        that is wrong; "": it is not, or that was said.
        """
        if is_more_to_come or (self._unheard.is_said and told.any()):
            # what is read may be what will be announced in a moment, or was after all
            self._unheard, self.status = Unheard(), {}
        elif self._unheard.take(own[~told], self.inos, now):
            self.status = {"state": "wrong", "reason": unheard.SAID}
            return unheard.SAID
        return ""

    # ---- what others ask -------------------------------------------------------------------------

    @property
    def hinted(self) -> Hinted:
        """Whose readers are its own."""
        return Hinted(self.hint.pid, self.root, self.status.get("state") != "wrong")

    def shown(self, mountpoint: str, *, is_gone: bool) -> dict[str, Any]:
        """Its status; `is_gone`: its mount is."""
        now = time.monotonic()
        silent = (self.refused or _SILENT) if self.order is None else ""
        shown = self.status or {"state": "waiting", "reason": silent}
        if (is_gone or not self.is_planned) and shown["state"] in ("running", "idle"):
            shown = {**shown, **_UNPLANNED}
        return {
            **status.unknown(),
            **shown,
            "name": self.name,
            "path": os.fsdecode(self.hint.path),
            "mountpoint": mountpoint,
            "pid": self.hint.pid,
            "uid": self.uid,
            "age_s": round(now - self._begun_s, 3),
            "scores_age_s": None if self.scores is None else round(now - self._scored_s, 3),
            "substituted": self._sampled.substituted,
            "h_list": self._sampled.h_list,
        }

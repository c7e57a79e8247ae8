"""What is known of one training job on one mount: its sequence, its reader's place, its window, its
wires (pure).

Whoever plans for the job reads and moves these marks: hintsd/planner.py its window and its state,
hintsd/wires.py its wires, hintsd/layout.py its log, hintsd/placement.py what is fetched ahead.

INVARIANT: begin ≤ sent ≤ end; a job that is not live has an empty window.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import NamedTuple

from hintsd.packing import Log
from hintsd.progress import Progress
from hintsd.search import DENSE_SPACING, DENSE_WIRES, REST_FIRST_S, WIRES, WIRES_EVERY_S, Search
from hintsd.sequence import NO_POSITIONS, Inos, Sequence
from hintsd.trail import Trail

SENTINELS_EVERY_S = 1.0


class Fired(NamedTuple):
    """A wire whose file was looked up."""

    is_sure: bool  # for this use of the file, by this job
    first: int  # the use it was, or may have been: this one or an earlier one


class Job:
    """One job; which marks are whose is said above."""

    def __init__(
        self,
        name: str,
        sequence: Sequence,
        epochs: int | None,
        batch_size: int,
        progress: Progress,
        dataset: Inos,
    ) -> None:
        """`dataset`: all files that its orders may have."""
        self.name = name
        self.sequence = sequence
        self.epochs = epochs
        self.batch_size = batch_size
        self.progress = progress
        self.dataset = dataset
        self.trail: Trail | None = None  # while a recording runs
        self.opened_at = progress.confirmed_at
        self.state = "waiting"
        self.reason = ""
        self.running_since = 0.0  # while `state` is running
        self.yields = False  # its share of RAM is the others'
        self.unknown: set[int] = set()
        self.counted: set[int] = set()  # epochs whose uses are in the counts
        self.unplaced = False
        # window: [begin, end) is referenced, [begin, sent) has been looked at for staging
        self.begin = self.end = self.sent = self.fetched = progress.low
        self.reach = 0  # samples in the last window that was not empty
        self.window_bytes = self.sent_bytes = 0
        self.needs_bytes = (0, 0)  # what the window needs: in the epoch before, and in this one
        self.known_mean_bytes = 0.0  # of RAM, that a sample of its last window took
        self.spare: deque[Inos] = deque()
        self.sentinel_epoch = -1
        self.unwire()
        # wires from `low` on that fired in order: not laid again
        self.fired: dict[int, Fired] = {}
        # wires from `low` on that a stranger has fired: its reader may have passed meanwhile
        self.stolen: set[int] = set()
        self.is_read = False  # its own process, or one that this has started, was seen to read
        self.is_swayed = False  # before that, reads that may be others' were weighed
        self.search: Search | None = None
        # the reader's place is not known, or the hint is taken for wrong: nothing moves `low`
        self.is_lost = False
        self.check_at = 0.0  # when he is looked for next, in a short epoch
        self.rest_s = REST_FIRST_S  # of a search, once more taken for wrong
        self.log = Log()
        self.laid_out: dict[str, str] = {}  # of a job that is done: `Layout.status` before
        self.order_bytes: int | None = None  # of RAM, that an epoch would take as a whole
        # a chunk at this position needs so much room in the windows
        self.lacking: tuple[int, int] | None = None
        self.misses = 0
        self.waited = 0  # of them, for the disk or the origin: were not in RAM already
        self.late: Counter[str] = Counter()
        self.late_at = -math.inf  # when one was, last
        self.is_late = False  # was one just now
        self.unplanned: Counter[str] = Counter()

    @property
    def live(self) -> bool:
        """Whether it is planned for."""
        return self.state in ("waiting", "running", "idle")

    @property
    def total(self) -> int | None:
        """Its samples; None: nobody knows how many epochs it has."""
        return None if self.epochs is None else self.epochs * self.sequence.samples_per_epoch

    def chunk_end(self, position: int) -> int | None:
        """End of the chunk at `position`, if its epoch is cut."""
        epoch, index = divmod(position, self.sequence.samples_per_epoch)
        chunks = self.log.chunks.get(epoch)
        return None if chunks is None else position - index + chunks.end_of(index)

    def last(self, position: int) -> int:
        """`position`, or the job's end if that comes first."""
        return position if self.total is None else min(position, self.total)

    def unwire(self) -> None:
        """No wires are laid."""
        self.wired = self.progress.high  # they are laid up to here
        self.wires = NO_POSITIONS  # those laid from `low` on, sorted
        self.wired_from: int | None = None  # where they begin; from there on there is no gap
        self.sentinels_at = -SENTINELS_EVERY_S

    def restart(self) -> None:
        """The window begins anew at the present position."""
        self.begin = self.end = self.sent = self.fetched = self.last(self.progress.low)
        self.window_bytes = self.sent_bytes = 0
        self.unwire()
        self.fired.clear()
        self.stolen.clear()
        self.log.keeps_order = True

    def end_search(self, now: float) -> None:
        """The reader is not looked for any more, and for a while not again."""
        self.search, self.is_lost = None, False
        self.check_at = now + WIRES_EVERY_S

    @property
    def search_spacing(self) -> int:
        """Samples between two wires of a search: the disorder is an eighth of what is compared
        first; a batch has eight where it is read in turn, but the epoch is not.
        """
        n = self.sequence.samples_per_epoch
        wide = max(1, n // WIRES)
        if self.search is not None and self.search.is_resting:
            return wide
        in_turn = self.batch_size if self.progress.is_scattered else self.progress.disorder
        return min(wide, max(DENSE_SPACING, in_turn // 8, -(-n // DENSE_WIRES)))

    @property
    def mean_bytes(self) -> float:
        """Of RAM, that a sample of its window takes."""
        return self.window_bytes / max(1, self.end - self.begin)

    @property
    def at_once_bytes(self) -> float:
        """Of RAM: twice what its readers read at once."""
        return 2 * self.progress.at_once * self.known_mean_bytes

    @property
    def takes_share(self) -> bool:
        """Whether it has a share of the RAM for windows."""
        return self.live and not self.yields

    @property
    def can_grow(self) -> bool:
        """Whether more of its sequence is known than its window covers."""
        return self.last(self.sequence.known_until(self.end)) > self.end

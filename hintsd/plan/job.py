"""What is known of one training job on one mount, and how far each part of the plan has come with
it (pure).

The marks of each part are an object, and change by its methods alone. These call them:

* `Window`: windows.py (staging.py: what is sent of it)
* `Reached`: lanes.py
* `Placed`: placement.py (followers.py and planner.py: an order is new, fetches were taken back)
* `Log`: layout.py (staging.py: what has moved)
* `Wiring`: followers.py
* `Tally`: followers.py (planner.py: time passes)
* `Need`: windows.py
* `Scores`: planner.py

`Job` says what becomes of the job, and changes what several parts go by.

INVARIANT: begin ≤ sent ≤ end; a job that is not live has an empty window.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hintsd.follow.progress import Progress
from hintsd.follow.search import (
    AWAKE_S,
    DENSE_SPACING,
    DENSE_WIRES,
    REST_FIRST_S,
    REST_MOST_S,
    WIRES,
    WIRES_EVERY_S,
    Search,
)
from hintsd.follow.sequence import NO_INOS, NO_POSITIONS, Inos, Positions, Sequence, Uses
from hintsd.follow.wiring import Wiring
from hintsd.keeping.shares import Need
from hintsd.plan.files import Wires
from hintsd.reorder.log import Log

FOLLOWED_S = 60.0  # a hint that was followed for so long is looked for as at first
LATE_LATELY_S = 5.0  # a late read is no more told of then


class Cause(enum.Enum):
    """Why a job is taken for wrong."""

    STRAYS = enum.auto()
    """Too much that was seen was not in order (hintsd/follow/evidence.py)."""
    SEARCH = enum.auto()
    """Its epochs are short, and its reader is in none of them (hintsd/follow/search.py)."""
    UNREAD = enum.auto()
    """Too much of it is not read (hintsd/follow/passed.py)."""


class Window:
    """Positions [begin, end) are referenced, [begin, sent) have been looked at for staging. What
    lies before `passed` the reader has passed, or it is given up.
    """

    def __init__(self, position: int, mean_bytes: float) -> None:
        """`mean_bytes`: of RAM, that a sample takes, as far as is known."""
        self.begin = self.end = self.sent = self.passed = position
        self.size_bytes = self.sent_bytes = 0
        self.reach = 0  # samples in the last window that was not empty
        self.known_mean_bytes = mean_bytes  # of RAM, that a sample of its last window took
        # a chunk at this position needs so much room in the windows
        self._lacking: tuple[int, int] | None = None
        self._needs_bytes = (0, 0)  # in the epoch before, and in this one

    def restart(self, position: int) -> None:
        """It is empty."""
        self.begin = self.end = self.sent = self.passed = position
        self.size_bytes = self.sent_bytes = 0

    def leave_behind(self, position: int) -> None:
        """All before that is about to be shed."""
        self.passed = position

    def grow(self, samples: int, size_bytes: int) -> None:
        self.end += samples
        self.size_bytes += size_bytes

    def change(self, size_bytes: int) -> None:
        """As many other files are in it: none of them has been looked at."""
        self.size_bytes = size_bytes
        self.sent, self.sent_bytes = self.begin, 0

    def shed(self, size_bytes: int, sent_bytes: int) -> None:
        """Bytes of what leaves it; of them, what was looked at."""
        self.size_bytes -= size_bytes
        self.sent_bytes -= sent_bytes

    def begin_at(self, position: int) -> None:
        """All before that was shed."""
        self.begin = position
        self.end = max(self.end, position)
        if self.sent < position:
            self.sent, self.sent_bytes = position, 0

    def end_at(self, position: int) -> None:
        """All from there on was shed."""
        self.end = position
        self.sent = min(self.sent, position)

    def send(self, samples: int, size_bytes: int) -> None:
        """So much more has been looked at for staging."""
        self.sent += samples
        self.sent_bytes += size_bytes

    def note_reach(self) -> None:
        self.reach = self.end - self.begin or self.reach

    def note_mean(self) -> None:
        self.known_mean_bytes = self.mean_bytes or self.known_mean_bytes

    def lack(self, needed_bytes: int | None) -> None:
        """There is no room for the chunk at its end; None: what there is none for is no chunk."""
        self._lacking = None if needed_bytes is None else (self.end, needed_bytes)

    def is_lacking(self, room_bytes: int) -> bool:
        """Whether there was no room for the chunk at its end, and is none in so many bytes."""
        if self._lacking is None:
            return False
        position, needed_bytes = self._lacking
        return position == self.end and needed_bytes > room_bytes

    def need(self, need_bytes: int, *, is_next_epoch: bool) -> None:
        """What it needs now, at the beginning of another epoch or not."""
        before, most = self._needs_bytes
        if is_next_epoch:
            before, most = most, 0
        self._needs_bytes = before, max(most, need_bytes)

    def forget_needs(self) -> None:
        self._needs_bytes = (0, 0)

    @property
    def need_bytes(self) -> int:
        """The most of this epoch and of the one before."""
        return max(self._needs_bytes)

    @property
    def mean_bytes(self) -> float:
        """Of RAM, that a sample of it takes."""
        return self.size_bytes / max(1, self.end - self.begin)


class Reached:
    """Where its readers were seen in each batch, and what is held for them."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}  # by the batch's begin
        self._passed: dict[int, int] = {}  # and what of it was kept, or let go
        self.held = NO_INOS  # in the order of their need
        self.rest = NO_INOS  # was so before, and is held still
        self.missing_share = 1.0  # of what lanes cover: it is to be staged

    def restart(self) -> None:
        self.seen.clear()
        self._passed.clear()
        self.held = self.rest = NO_INOS

    def see(self, starts: Positions, positions: Positions) -> None:
        """A reader was at each of these, in the batch that begins at `starts`."""
        for start, position in zip(starts.tolist(), positions.tolist(), strict=True):
            self.seen[start] = max(self.seen.get(start, start), position)

    def forget_before(self, position: int) -> None:
        """Batches that begin there, or before."""
        self.seen = {start: at for start, at in self.seen.items() if start > position}
        self._passed = {start: at for start, at in self._passed.items() if start in self.seen}

    def take_passed(self, begin: int, end: int) -> Positions:
        """What of [begin, end) they have passed since last asked."""
        parts = [NO_POSITIONS]
        for start, at in self.seen.items():
            first = max(self._passed.get(start, start), begin)
            stop = min(at, end)
            if first < stop:
                parts.append(np.arange(first, stop))
                self._passed[start] = stop
        return np.concatenate(parts)

    def hold(self, inos: Inos, rest: Inos) -> None:
        self.held, self.rest = inos, rest

    def note_missing(self, share: float) -> None:
        self.missing_share = share


class Placed:
    """How far its files were chosen for SSD, and fetched."""

    def __init__(self, position: int) -> None:
        self.is_due = False
        """Whether residents are to be chosen among the files of its orders."""
        self.counted: set[int] = set()  # epochs whose uses are in the counts
        self.fetched = position  # what is ahead was looked at up to here

    def demand(self) -> None:
        """Its orders are new, or the room is."""
        self.is_due = True

    def settle(self) -> None:
        self.is_due = False

    def count(self, epoch: int) -> None:
        self.counted.add(epoch)

    def fetch_from(self, position: int) -> None:
        self.fetched = position


class Tally:
    """Its READs (docs/HINTS.md rule 7)."""

    def __init__(self) -> None:
        self.misses = 0
        self.waited = 0  # of them, for the disk or the origin: were not in RAM already
        self.late: Counter[str] = Counter()
        self.unplanned: Counter[str] = Counter()
        self._late_at = -math.inf  # when one was, last
        self.is_late = False  # was one just now

    def miss(self, misses: int, waited: int) -> None:
        self.misses += misses
        self.waited += waited

    def add_late(self, reasons: dict[str, int], now: float) -> None:
        if any(reasons.values()):
            self._late_at = now
        self.late.update(reasons)

    def add_unplanned(self, reasons: dict[str, int]) -> None:
        self.unplanned.update(reasons)

    def tick(self, now: float) -> None:
        self.is_late = now - self._late_at < LATE_LATELY_S


class Scores:
    """How often its trainer expects to use each file in an epoch that is not known."""

    def __init__(self) -> None:
        self._uses: npt.NDArray[np.float32] | None = None  # by inode number

    @property
    def are_told(self) -> bool:
        """Else all are used once."""
        return self._uses is not None

    def tell(self, inos: Inos, uses: npt.NDArray[np.float32]) -> None:
        """Of these files; what is not among them is not used. Shapes (files,), 0 or more; a file
        may stand there twice.
        """
        self._uses = np.zeros(int(inos.max(initial=0)) + 1, np.float32)
        np.add.at(self._uses, inos, uses)

    def of(self, inos: Inos) -> Uses:
        """Of each, shape (files,)."""
        if self._uses is None:
            return np.ones(len(inos))
        is_scored = inos < len(self._uses)
        return np.where(is_scored, self._uses[np.where(is_scored, inos, 0)], 0.0)


class Job:
    """One job: what it is, what becomes of it, and the marks of each part of the plan."""

    def __init__(
        self,
        name: str,
        sequence: Sequence,
        batch_size: int,
        progress: Progress,
        dataset: Inos,
        wires: Wires,
        *,
        mean_bytes: float,
        owner: int = 0,
    ) -> None:
        """`dataset`: all files that its orders may have; `mean_bytes`: of RAM, that one takes.
        `owner`: whose it is.
        """
        self.name, self.owner = name, owner
        self.sequence = sequence
        self.batch_size = batch_size
        self.progress = progress
        self.dataset = dataset
        self.window = Window(progress.low, mean_bytes)
        self.wiring = Wiring(sequence, progress, wires.are_armed)
        self.reached = Reached()
        self.placed = Placed(progress.low)
        self.tally = Tally()
        self.need = Need()
        self.scores = Scores()
        self.log = Log()
        self.opened_at = progress.confirmed_at
        self.state = "waiting"
        self.reason = ""
        self.running_since = 0.0  # while `state` is running
        self.yields = False  # its share of RAM is the others'
        self.sharers = 1
        """Jobs that have a part of its owner's share of RAM, it among them."""
        self.is_read = False  # its own process, or one that this has started, was seen to read
        self._is_swayed = False  # before that, reads that may be others' were weighed
        self.search: Search | None = None
        # the reader's place is not known, or the hint is taken for wrong: nothing moves `low`
        self.is_lost = False
        self._check_at = 0.0  # when it is looked for next, in a short epoch
        self._rest_s = REST_FIRST_S  # of a search, once more taken for wrong
        self.laid_out: dict[str, str] = {}  # of a job that is done: `Layout.status` before

    @property
    def live(self) -> bool:
        """Whether it is planned for."""
        return self.state in ("waiting", "running", "idle")

    @property
    def takes_share(self) -> bool:
        """Whether it has a share of the RAM for windows."""
        return self.live and not self.yields

    @property
    def can_grow(self) -> bool:
        """Whether more of its sequence is known than its window covers."""
        end = self.window.end
        return self.sequence.last(self.sequence.known_until(end)) > end

    @property
    def at_once_bytes(self) -> float:
        """Of RAM: twice what its readers read at once."""
        return 2 * self.progress.at_once * self.window.known_mean_bytes

    def chunk_end(self, position: int) -> int | None:
        """End of the chunk at `position`, if its epoch is cut."""
        epoch, index = self.sequence.at(position)
        chunks = self.log.chunks.get(epoch)
        return None if chunks is None else position - index + chunks.end_of(index)

    def move_on(self, begin: int) -> None:
        """Its window begins there, and has shed all before, which is known no more."""
        self.window.begin_at(begin)
        epoch = self.sequence.epoch_of(begin)
        if self.search is not None and min(self.sequence.orders, default=epoch) < epoch:
            self.search.begin_again()
        self.sequence.forget_before(epoch)
        self.log.forget_before(epoch)

    def restart(self) -> None:
        """The plan for it begins anew at the present position, with an empty window."""
        position = self.sequence.last(self.progress.low)
        self.window.restart(position)
        self.placed.fetch_from(position)
        self.wiring.restart()
        self.reached.restart()
        self.log.keep_order()

    def disconnected(self) -> None:
        """Nothing of it is staged or armed any more."""
        self.placed.fetch_from(self.window.begin)
        self.wiring.unlay()

    # --- what becomes of it

    def wake(self, now: float) -> None:
        """Something of it was read."""
        if self.live and self.progress.begun:
            self.run(now)

    def run(self, now: float) -> None:
        """Its reader is there."""
        if self.state != "running":
            self.state, self.reason, self.running_since = "running", "", now

    def rest(self) -> None:
        """Nothing was read for long: no fault, a validation waits."""
        which = "has been read for a while" if self.progress.begun else "of it was read yet"
        self.state, self.reason = "idle", f"nothing {which}"

    def wait(self) -> None:
        """It is about to be read."""
        self.state, self.reason = "waiting", ""

    def finish(self, laid_out: dict[str, str]) -> None:
        self.state, self.laid_out = "done", laid_out

    def share(self, *, yields: bool, sharers: int) -> None:
        """Whether its share of RAM is the others'; `sharers`: as the attribute."""
        self.yields, self.sharers = yields, sharers

    def believe(self) -> None:
        """What was taken for wrong is to be judged anew, from where the trainer said last."""
        self.wait()
        self.search, self.is_lost = None, False
        self.wiring.passed.forget()

    def condemn(self, now: float, cause: Cause) -> None:
        """It is taken for wrong: its reader is looked for less and less; not at all if it is
        UNREAD: that its reader follows the order says nothing then.
        """
        seen, passed = self.progress.evidence, self.wiring.passed
        self.state, self.is_lost = "wrong", True
        if cause is Cause.UNREAD:
            self.reason = (
                f"{passed.unopened} of {passed.wires} files that were watched were never opened: "
                "does the dataset leave files out (a filter, a subset, a cache of its own)?"
            )
            self.search = None
            return
        self.reason = (
            "what was read last is in turn in none of the epochs that are known"
            if cause is Cause.SEARCH
            else f"{seen.strays} of {seen.observations} reads seen were not in the hinted order"
        ) + ": another seed, rank, world size or directory, no shuffling, or other readers?"
        if self.running_since and now - self.running_since > FOLLOWED_S:
            self._rest_s = REST_FIRST_S
        # where it is known that its own readers strayed, and have before, they soon would again
        is_known = self.is_read and self._rest_s > REST_FIRST_S
        awake_s = 0.0 if is_known else AWAKE_S
        self.search = Search(now, span=self.batch_size, rest_s=self._rest_s, awake_s=awake_s)
        self._rest_s = min(2 * self._rest_s, REST_MOST_S)

    def sway(self) -> None:
        """Reads that may be others' are weighed."""
        self._is_swayed = True

    def see_read(self) -> bool:
        """Its own process is seen to read; whether what was weighed before may be others'."""
        self.is_read = True
        return self._is_swayed

    # --- a reader whose place is not known

    def lose(self, now: float) -> None:
        """Its reader may be anywhere beyond."""
        self.search, self.is_lost = Search(now, span=self.batch_size), True

    def seek_on(self, now: float) -> None:
        """Its reader was found elsewhere; whether it is there the search will say, if there was one
        still.
        """
        self.is_lost = self.search is not None
        if self.is_lost:
            self.search = Search(now, span=self.batch_size)

    def check(self, now: float) -> None:
        """Where much of an epoch is in order, that says little, and a reader may be lost by chance:
        it is looked for again and again, and that decides.
        """
        if self.search is None and now >= self._check_at:
            self.search = Search(now, span=self.batch_size)

    def end_search(self, now: float) -> None:
        """The reader is not looked for any more, and for a while not again."""
        self.search, self.is_lost = None, False
        self._check_at = now + WIRES_EVERY_S

    def give_up(self, now: float) -> None:
        """A lost reader is not found. It is judged by what is seen from now on, as any job's."""
        self.end_search(now)
        self._check_at = now
        self.progress.evidence.forget()

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


def samples_read(job: Job) -> int:
    """Since it was opened, also what was read twice."""
    progress = job.progress
    return progress.passed_samples + progress.high - progress.low


def owner_count(jobs: Iterable[Job]) -> int:
    """Whose jobs have shares of RAM: each of these has an equal part of it. At least 1."""
    return max(1, len({job.owner for job in jobs if job.takes_share}))

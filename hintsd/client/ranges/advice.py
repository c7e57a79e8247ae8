"""The reader of byte ranges is read ahead of, by this process: `Advice`, which a Job of them speaks
to instead of hintsd.

A thread behind the trainer's back tells the kernel which ranges come next (POSIX_FADV_WILLNEED). It
asks the mount for their pages and waits for none, so whatever reads them later, a worker or a map,
finds them in the page cache. The mount does with these READs what it does with any: of a range it
asks the origin for the range, until a block is worth having (docs/ARCHITECTURE.md, *Large files*).

INVARIANT: as of hintsd/client/link.py: nothing here raises into the trainer or holds it up, and
what goes wrong is one warning. A forked child inherits the object, but not the thread.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from typing import Final

import numpy as np

from fusecache.base import mounts
from hintsd.client.finding import NotMounted
from hintsd.client.link import JobState
from hintsd.client.ranges.rows import Numbers, Ranges
from hintsd.client.warning import script_place, warn_once
from hintsd.orders.drawing import Order
from hintsd.orders.spec import OrderSpec

AHEAD_BYTES: Final = 64 << 20
"""What is asked for beyond what the loader has drawn."""
BLOCK_BYTES: Final = 4 << 20
"""Of the mount: what the first range in one may cost."""
PIECE_BYTES: Final = 8 << 20  # of a range, in one call
FILES_OPEN_MOST: Final = 64

_advices: set[Advice] = set()  # those with a thread, for the children of a fork


class Epoch:
    """The ranges of one epoch, in order, and how far ahead of its reader they are asked for."""

    def __init__(self, ranges: Ranges, order: Numbers, met: Numbers) -> None:
        """`met`: blocks of which a range was asked for before (sorted; `blocks`)."""
        self.files, self.offsets, self.lengths = (column[order] for column in ranges.table)
        costs = self.lengths.sum(axis=1)
        blocks, first = np.unique(self._blocks(), return_index=True)
        first = first[~np.isin(blocks, met, assume_unique=True)]
        np.add.at(costs, first // self.lengths.shape[1], BLOCK_BYTES)
        self.blocks = np.union1d(blocks, met)
        self._cost = np.concatenate([[0], np.cumsum(costs)])

    def __len__(self) -> int:
        """Samples."""
        return len(self._cost) - 1

    def _blocks(self) -> Numbers:
        """The one in which each range begins: shape (ranges,)."""
        numbers: Numbers = (self.files << 40) + self.offsets // BLOCK_BYTES
        return numbers.ravel()

    def until(self, drawn: int) -> int:
        """The first sample that is not asked for yet, when so many have been drawn."""
        begin = min(drawn, len(self))
        end = np.searchsorted(self._cost, self._cost[begin] + AHEAD_BYTES, "right") - 1
        return min(len(self), max(int(end), begin + 1))


class Advice:
    """Of one job. What it takes and tells is what a Link does."""

    def __init__(self, ranges: Ranges, drawn_ahead: int) -> None:
        """`drawn_ahead`: samples that the loader draws before it hands out the first of them."""
        self._ranges = ranges
        self._drawn_ahead = drawn_ahead
        self._warn = functools.partial(warn_once, place=script_place())
        self.state = JobState()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._is_stopping = False
        self._told: tuple[int, OrderSpec] | None = None  # the epoch that was announced last
        self._position = (0, 0)  # epoch, batch
        self._files: OrderedDict[int, int] = OrderedDict()  # those that are open: descriptors
        self._latest: tuple[int, int, int] | None = None  # the range that was asked for last
        self._thread = threading.Thread(target=self._run, name="hintsd-ranges", daemon=True)

    @property
    def job(self) -> None:
        """No hintsd knows it."""

    @property
    def is_over(self) -> bool:
        return self.state.is_over

    def __str__(self) -> str:
        state, reason = self.state.shown
        return f"ranges below {self._ranges.root}: {state}{f' ({reason})' if reason else ''}"

    def start(self) -> None:
        """Begin, if all is on a mount."""
        try:
            check_mounted(self._ranges)
            self._thread.start()
        except (NotMounted, OSError, RuntimeError) as problem:
            self._end(str(problem))
            return
        _advices.add(self)
        self.state.tell("hinted")

    def announce(self, epoch: int, spec: OrderSpec) -> None:
        """The order of an epoch that begins."""
        if not self.is_over:
            with self._lock:
                self._told, self._position = (epoch, spec), (epoch, 0)
            self._work.set()

    def step(self, epoch: int, batch: int) -> None:
        """So many batches of it have been handed out."""
        if not self.is_over:
            with self._lock:
                self._position = (epoch, batch)
            self._work.set()

    def drawn(self, epoch: int, batches: int) -> None:
        """Nothing is behind them."""

    def score(self, scores: object) -> None:
        """Nobody here keeps anything."""

    def asking(self, *kinds: str) -> None:
        """There is nobody to be asked."""

    def hear(self, timeout_s: float = 0.0) -> bool:
        """Whether it is known what becomes of it: it is."""
        return True

    def stop(self, wait_s: float = 0.0) -> None:
        self._is_stopping = True
        self._work.set()
        if wait_s > 0 and self._thread.is_alive():
            self._thread.join(wait_s)
        self.state.end()

    def give_up(self, why: str) -> None:
        """End, with a warning that says why."""
        if not self.is_over:
            self.stop()
            self._end(f"{why}; going on without hints")

    def leave(self, why: str) -> None:
        """Be over without a word: in a forked child."""
        self.state.explain(why)
        self.state.end()
        self._close_files()

    def _end(self, why: str) -> None:
        self.state.fail(why)
        self.state.end()
        self._warn(why)

    # Everything below runs in the thread.

    def _run(self) -> None:
        try:
            self._advise_until_stopped()
        except OSError as error:
            name = os.fsdecode(error.filename or self._ranges.root)
            self._end(f"{name}: {error.strerror}; going on without hints")
        except Exception as error:  # a fault of ours must not reach the trainer
            self._end(f"going on without hints after an internal error: {error!r}")
        finally:
            self.state.end()
            _advices.discard(self)
            self._close_files()

    def _advise_until_stopped(self) -> None:
        told, asked, met = None, 0, np.zeros(0, np.int64)
        while True:
            self._work.wait()
            self._work.clear()
            if self._is_stopping:
                return
            with self._lock:
                latest, (number, batch) = self._told, self._position
            if latest is None or latest[0] != number:
                continue
            if latest is not told:
                told, asked = latest, 0
                order = np.asarray(Order(told[1]).sequence(number), np.int64)
                epoch = Epoch(self._ranges, order, met)
                met = epoch.blocks
            handed_out = batch * told[1].batch_size
            until = epoch.until(handed_out + self._drawn_ahead)
            for sample in range(max(asked, handed_out), until):
                if self._is_stopping or self._told is not latest:
                    break
                self._ask(epoch, sample)
                asked = sample + 1

    def _ask(self, epoch: Epoch, sample: int) -> None:
        """Have the mount asked for a sample's pages. OSError: a file cannot be opened."""
        columns = (
            column[sample].tolist() for column in (epoch.files, epoch.offsets, epoch.lengths)
        )
        for file, offset, length in zip(*columns):
            if not length or (file, offset, length) == self._latest:  # rows of one row group
                continue
            self._latest = (file, offset, length)
            descriptor = self._opened(file)
            for begin in range(offset, offset + length, PIECE_BYTES):
                size_bytes = min(PIECE_BYTES, offset + length - begin)
                os.posix_fadvise(descriptor, begin, size_bytes, os.POSIX_FADV_WILLNEED)

    def _opened(self, file: int) -> int:
        descriptor = self._files.pop(file, None)
        if descriptor is None:
            descriptor = os.open(self._ranges.paths[file], os.O_RDONLY | os.O_CLOEXEC)
        self._files[file] = descriptor
        if len(self._files) > FILES_OPEN_MOST:
            os.close(self._files.popitem(last=False)[1])
        return descriptor

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def check_mounted(ranges: Ranges) -> None:
    """NotMounted: its files do not lie on a fusecache mount, all of them."""
    path = ranges.root
    if mounts.find(path) is None:
        raise NotMounted(f"{path} is not on a fusecache mount; going on without hints")


def _leave_all() -> None:
    for advice in list(_advices):
        advice.leave("in a forked process")
    _advices.clear()


os.register_at_fork(after_in_child=_leave_all)

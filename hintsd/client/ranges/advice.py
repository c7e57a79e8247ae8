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

import contextlib
import functools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

import numpy as np

from hintsd.client.finding import NotMounted, Unhinted, mount_of
from hintsd.client.link import JobState
from hintsd.client.ranges.rows import Numbers, Ranges
from hintsd.client.warning import script_place, warn_once
from hintsd.orders.drawing import Order
from hintsd.orders.spec import OrderSpec

AHEAD_BYTES: Final = 16 << 20
"""What is asked for beyond what the loader has drawn."""
BLOCK_BYTES: Final = 4 << 20
"""Of the mount: it may fetch one for the first ranges in it."""
FIRST_BYTES: Final = 1 << 20
"""The first range in a block counts so much more: so 15 blocks may be on their way."""
READ_AHEAD_BYTES: Final = 128 << 10
"""What the kernel asks for in one call at most, if it does not say so."""
NEAR_BYTES: Final = 64 << 10
"""Ranges of one sample that lie so near to each other are asked for as one."""
FILES_OPEN_MOST: Final = 64
FILES_CHECKED_MOST: Final = 256  # an origin may take milliseconds for each

Asked = list[tuple[int, int, int]]
"""File, offset, length of each range of a sample."""

_advices: set[Advice] = set()  # those with a thread, for the children of a fork


class Epoch:
    """The ranges of one epoch, in order, and how far ahead of its reader they are asked for."""

    def __init__(self, ranges: Ranges, order: Numbers, met: Numbers) -> None:
        """`met`: blocks of which a range was asked for before (sorted; `blocks`)."""
        self._ranges, self._order = ranges, order
        files, offsets, lengths = ranges.table
        costs = lengths.sum(axis=1)[order]
        # It begins there. The mount's blocks: of a file's offset.
        numbers = ((files << 40) + offsets // BLOCK_BYTES)[order].ravel()
        blocks, first = np.unique(numbers, return_index=True)
        first = first[~np.isin(blocks, met, assume_unique=True)]
        np.add.at(costs, first // lengths.shape[1], FIRST_BYTES)
        self.blocks = np.union1d(blocks, met)
        are_alike = np.ones(max(0, len(order) - 1), np.bool_)
        for column in ranges.table:
            are_alike &= (column[order[1:]] == column[order[:-1]]).all(axis=1)
        costs[1:][are_alike] = 0  # rows of one group
        self._cost = np.concatenate([[0], np.cumsum(costs)])

    def __len__(self) -> int:
        """Samples."""
        return len(self._order)

    def until(self, drawn: int) -> int:
        """The first sample that is not asked for yet, when so many have been drawn."""
        begin = min(drawn, len(self))
        end = np.searchsorted(self._cost, self._cost[begin] + AHEAD_BYTES, "right") - 1
        return min(len(self), max(int(end), begin + 1))

    def ranges_of(self, sample: int) -> Asked:
        """Sorted, those that are near to each other as one."""
        row = self._order[sample]
        found: Asked = []
        for file, offset, length in sorted(zip(*(c[row].tolist() for c in self._ranges.table))):
            if not length:
                continue
            if found and found[-1][0] == file and offset <= sum(found[-1][1:]) + NEAR_BYTES:
                begin = found[-1][1]
                found[-1] = (file, begin, max(sum(found[-1][1:]), offset + length) - begin)
            else:
                found.append((file, offset, length))
        return found


class Advice:
    """Of one job. What it takes and tells is what a Link does."""

    def __init__(self, ranges: Ranges, drawn_ahead: Callable[[OrderSpec], int]) -> None:
        """`drawn_ahead`: a method: samples that the loader draws before it hands out the first of
        them. Its object is not kept alive: what holds it must not hold us.
        """
        self._ranges = ranges
        self._drawn_ahead = weakref.WeakMethod(drawn_ahead)
        self._warn = functools.partial(warn_once, place=script_place())
        self.state = JobState()
        self._orders: dict[int, tuple[OrderSpec, int]] = {}  # by epoch; and what is drawn ahead
        self._position = (-1, 0)  # epoch, batch; of none yet
        self._is_stopping = False
        # What wakes the thread may be a collection within it: no lock of threading's would do.
        self._work: SimpleQueue[None] = SimpleQueue()
        self._files: OrderedDict[int, int] = OrderedDict()  # those that are open: descriptors
        self._root: int | None = None  # a descriptor: the mount is in use
        self._piece_bytes = 0  # as the mount has it; 0: not looked at
        self._figures = {"ranges": 0, "bytes": 0}
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
            self._root = os.open(self._ranges.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._thread.start()
        except (NotMounted, OSError, RuntimeError) as problem:
            self._close_files(ended=True)
            self._end(str(problem))
            return
        _advices.add(self)
        self.state.tell("hinted")

    def announce(self, epoch: int, spec: OrderSpec) -> None:
        """The order of an epoch that begins now, or later."""
        if self.is_over:
            return
        drawn_ahead = self._drawn_ahead()
        self._orders[epoch] = spec, 0 if drawn_ahead is None else drawn_ahead(spec)
        for old in [known for known in self._orders if known < self._position[0]]:
            del self._orders[old]
        self._work.put(None)

    def step(self, epoch: int, batch: int) -> None:
        """So many batches of it have been handed out."""
        if not self.is_over:
            self._position = (epoch, batch)
            self._work.put(None)

    def drawn(self, epoch: int, batches: int) -> None:
        """Nothing is behind them."""

    def score(self, scores: object) -> None:
        """Nobody here keeps anything."""

    def asking(self, *kinds: str) -> None:
        """There is nobody to be asked."""

    def figures(self) -> dict[str, int]:
        """Of what was asked for: ranges and bytes."""
        return dict(self._figures)

    def hear(self, timeout_s: float = 0.0) -> bool:
        """Whether it is known what becomes of it: it is."""
        return True

    def stop(self, wait_s: float = 0.0) -> None:
        if self.is_over:
            return
        self._is_stopping = True
        self._work.put(None)
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
        self._close_files(ended=True)

    def _end(self, why: str) -> None:
        self.state.fail(why)
        self.state.end()
        self._warn(why)

    # Everything below runs in the thread.

    def _run(self) -> None:
        try:
            self._advise_until_stopped()
        except Wrong as error:
            self._end(f"{error}; going on without hints")
        except OSError as error:
            name = os.fsdecode(error.filename or self._ranges.root)
            self._end(f"{name}: {error.strerror}; going on without hints")
        except Exception as error:  # a fault of ours must not reach the trainer
            self._end(f"going on without hints after an internal error: {error!r}")
        finally:
            self.state.end()
            _advices.discard(self)
            self._close_files(ended=True)

    def _advise_until_stopped(self) -> None:
        check_files(self._ranges)
        told, asked, met = None, 0, np.zeros(0, np.int64)
        latest: Asked = []
        while True:
            self._wait()
            number, batch = self._position
            found = self._orders.get(number)
            if self._is_stopping:
                return
            if found is None:
                continue
            spec, drawn_ahead = found
            if spec is not told:
                told, asked, latest = spec, 0, []
                order = np.asarray(Order(spec).sequence(number), np.int64)
                epoch = Epoch(self._ranges, order, met)
                met = epoch.blocks
            handed_out = batch * spec.batch_size
            until = epoch.until(handed_out + drawn_ahead)
            for sample in range(max(asked, handed_out), until):
                if self._is_stopping or self._has_passed(number, sample, spec):
                    self._work.put(None)  # what is behind that is next
                    break
                ranges = epoch.ranges_of(sample)
                if ranges != latest:
                    self._ask(ranges)
                latest, asked = ranges, sample + 1
            if asked == len(epoch):
                self._close_files()

    def _wait(self) -> None:
        self._work.get()
        while not self._work.empty():
            self._work.get()

    def _has_passed(self, epoch: int, sample: int, spec: OrderSpec) -> bool:
        """Whether the reader has."""
        now, batch = self._position
        return now != epoch or batch * spec.batch_size > sample

    def _ask(self, ranges: Asked) -> None:
        """Have the mount asked for these pages. OSError: a file cannot be opened.

        Of a range in pieces the last one comes first: one that continues another would look like
        the beginning of the whole file.
        """
        for file, offset, length in ranges:
            self._figures["ranges"] += 1
            self._figures["bytes"] += length
            descriptor = self._opened(file)
            for begin in reversed(range(offset, offset + length, self._piece_bytes)):
                size_bytes = min(self._piece_bytes, offset + length - begin)
                os.posix_fadvise(descriptor, begin, size_bytes, os.POSIX_FADV_WILLNEED)

    def _opened(self, file: int) -> int:
        descriptor = self._files.pop(file, None)
        if descriptor is None:
            descriptor = os.open(self._ranges.paths[file], os.O_RDONLY | os.O_CLOEXEC)
            self._piece_bytes = self._piece_bytes or read_ahead_bytes(descriptor)
        self._files[file] = descriptor
        if len(self._files) > FILES_OPEN_MOST:
            os.close(self._files.popitem(last=False)[1])
        return descriptor

    def _close_files(self, *, ended: bool = False) -> None:
        while self._files:
            os.close(self._files.popitem()[1])
        if ended and self._root is not None:
            os.close(self._root)
            self._root = None


def read_ahead_bytes(descriptor: int) -> int:
    """What the kernel asks for in one call at most, where this file lies."""
    device = os.fstat(descriptor).st_dev
    with contextlib.suppress(OSError, ValueError):
        name = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        with open(name) as said:
            return max(int(said.read()) << 10, 4096)
    return READ_AHEAD_BYTES


class Wrong(Unhinted):
    """Ranges that their files do not have."""

    advice = "see docs/LOADERS.md"


def check_files(ranges: Ranges) -> None:
    """Of the first FILES_CHECKED_MOST. Wrong: one is not there, or a range reaches beyond it."""
    files, offsets, lengths = (column.ravel() for column in ranges.table)
    ends = np.zeros(len(ranges.paths), np.int64)
    np.maximum.at(ends, files, offsets + lengths)
    for number, path in enumerate(ranges.paths[:FILES_CHECKED_MOST]):
        try:
            size_bytes = os.stat(path).st_size
        except OSError as error:
            raise Wrong(f"{os.fsdecode(path)}: {error.strerror}") from None
        if ends[number] > size_bytes:
            is_beyond = (files == number) & (offsets + lengths > size_bytes)
            sample = int(np.argmax(is_beyond)) // ranges.table[0].shape[1]
            end = offsets[is_beyond][0] + lengths[is_beyond][0]
            shown = os.fsdecode(path)
            raise Wrong(
                f"sample {sample} reaches to byte {end:,} of {shown}, which has {size_bytes:,}"
            )


def check_mounted(ranges: Ranges) -> None:
    """NotMounted: its files do not lie on a fusecache mount, all of them."""
    mount_of(ranges.root)


def _leave_all() -> None:
    for advice in list(_advices):
        advice.leave("in a forked process")
    _advices.clear()


os.register_at_fork(after_in_child=_leave_all)

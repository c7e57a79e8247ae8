"""What the store does by itself, once a second: keep limits, follow what other processes did to the
directory, and mend.
"""

from __future__ import annotations

import math
import time
from typing import Final

from fusecache.store.attachment import Attachment
from fusecache.store.capacity import Place
from fusecache.store.directory import Directory
from fusecache.store.log import Logs
from fusecache.store.reading import Quarantine, Reads
from fusecache.store.reconcile import adopt, tidy, unsealed
from fusecache.store.writing import OpenSegment

_RECONCILE_SECONDS: Final = 30.0
_USES_SECONDS: Final = 5.0  # after so long others know which segments we read
# A process that was killed before we began lets go of its segments so soon, or it lives.
_DYING_SECONDS: Final = 10.0
_DYING_PAUSE_SECONDS: Final = 1.0
_ADOPTED_WITHIN_SECONDS: Final = 1.0
_ADOPTION_PAUSE_SECONDS: Final = 0.001
_ADOPTION_SECONDS: Final = 0.5  # of each second of housekeeping: readers want the processors, too


class Reconciler:
    """When index and files are compared. `adopted`: segments of dead writers, since the start of
    this process.
    """

    def __init__(self, attachment: Attachment, segment: OpenSegment, logs: Logs) -> None:
        self.adopted = 0
        self._attachment = attachment
        self._segment = segment
        self._logs = logs
        self._at = 0.0
        self._dying_until = time.monotonic() + _DYING_SECONDS

    def run_if_due(self) -> None:
        if self._attachment.take_suspicion() or time.monotonic() >= self._at:
            self.run(_ADOPTION_SECONDS)

    def run(self, within_s: float = math.inf) -> bool:
        """Whether others write segments, or have not died yet. The lock is let go between the
        segments that are adopted: a log leaves many of them. If that takes longer, the rest is left
        to the next call.
        """
        attachment, others_write, took_s = self._attachment, False, 0.0
        with attachment.contained():
            self._at = time.monotonic() + _RECONCILE_SECONDS
            attachment.take_suspicion()
            with attachment.lock:
                place = attachment.sound_place()
                segnos = unsealed(place, self._segment.writer) if place is not None else []
                ours = self._logs.segnos()
            for segno in segnos:
                with attachment.lock:
                    if attachment.is_current(place):
                        begin = time.monotonic()
                        if adopt(place, segno):
                            self.adopted += 1
                            took_s += time.monotonic() - begin
                        else:  # it stays, however often it is looked at
                            others_write |= segno not in ours
                if took_s > within_s:
                    self._at = 0.0
                    return others_write
                time.sleep(_ADOPTION_PAUSE_SECONDS)  # a lock is not handed over
            if others_write and time.monotonic() < self._dying_until:
                self._at = time.monotonic() + _DYING_PAUSE_SECONDS
            with attachment.lock:
                self._tidy(place)
        return others_write

    def _tidy(self, place: Place | None) -> None:
        if self._attachment.is_current(place):
            tidy(place, self._segment.writer)
            self._attachment.saw(place.directory.segment_numbers())

    def adopt_orphans(self) -> None:
        """Take over what dead writers have left. For a while after our start it waits a second for
        those that seem to live: the threads of a process that was killed may be in the kernel
        still.
        """
        end = min(time.monotonic() + _ADOPTED_WITHIN_SECONDS, self._dying_until)
        while self.run() and time.monotonic() < end:
            time.sleep(_ADOPTED_WITHIN_SECONDS / 10)


class Housekeeping:
    """See `run`."""

    def __init__(
        self,
        attachment: Attachment,
        segment: OpenSegment,
        reads: Reads,
        quarantine: Quarantine,
        reconciler: Reconciler,
    ) -> None:
        self._attachment = attachment
        self._segment = segment
        self._reads = reads
        self._quarantine = quarantine
        self._reconciler = reconciler
        self._uses_at = 0.0

    def run(self) -> None:
        """To be called about once a second, from any thread. May take seconds (rebuild)."""
        attachment, is_off = self._attachment, False
        with attachment.lock, attachment.contained():
            is_off = attachment.is_closed or not self._mend()
            if not is_off:
                self._catch_up()
        if is_off:
            return
        self._reconciler.run_if_due()
        with attachment.lock, attachment.contained():
            self._segment.keep_limits()

    def _mend(self) -> bool:
        """Follow what became of the directories and the index. False: there is nothing sound."""
        attachment, directory = self._attachment, self._attachment.given.opened
        if directory is not None:
            self._follow_failures(directory)
        if directory is not None and not directory.is_present():
            attachment.lose()
            directory = None
        if directory is None:
            directory = attachment.reattach()
            if directory is None:
                return False
        attachment.current.mend(directory)
        return attachment.current.is_sound()

    def _follow_failures(self, directory: Directory) -> None:
        """What a directory that was put out of service held is gone."""
        failed = self._attachment.given.newly_failed(directory)
        if not failed:
            return
        self._attachment.suspect()
        self._segment.abandon_in(failed)
        self._reads.announce_gone(
            lambda segno: (
                bool(directory.member_of(segno).why_out)
                or not directory.segment_path(segno).exists()
            )
        )

    def _catch_up(self) -> None:
        """With what this process has to tell the others, and they us."""
        attachment, index = self._attachment, self._attachment.current.index
        assert index is not None
        if attachment.follow_limit():
            self._segment.seal_if_larger(attachment.segment_bytes)
        self._quarantine.drain(attachment)
        if attachment.reuse is not None and time.monotonic() >= self._uses_at:
            self._uses_at = time.monotonic() + _USES_SECONDS
            now_ns = time.time_ns()
            for segno in attachment.reuse.take_used(now_ns):
                index.pending.touch(segno, now_ns)
        index.flush()
        present = {row.segno for row in index.segments.all()}
        attachment.saw(present)
        self._reads.announce_gone(lambda segno: segno not in present)

"""The Director: the jobs of all mounts, and what mounts share (docs/HINTS.md).

What becomes of a job: mount.py. What a client may say is messages.py's and server.py's.

INVARIANT: all mounts with jobs together hold no more RAM than the Director may.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import trio

from hintsd.daemon.datasets import Guest, locate, locate_for
from hintsd.daemon.mount import JobInfo, Mount
from hintsd.daemon.ordering import Ordering
from hintsd.keeping import AUTO
from hintsd.orders.hint import Hint
from hintsd.orders.own_drawing import OwnDrawing
from hintsd.orders.torch_process import TorchProcess

log = logging.getLogger(__name__)

RESOLVING_AT_ONCE: Final = 4


class Director:
    """The jobs of all mounts. Its methods belong to the trio task that runs it."""

    def __init__(
        self,
        *,
        ram_bytes: int | None = None,
        keep: str = AUTO,
        on_position: Callable[[str, int, int], None] | None = None,
        on_notice: Callable[[str, str], None] | None = None,
        on_finished: Callable[[str], None] | None = None,
    ) -> None:
        """`ram_bytes`: most that all mounts together hold for jobs; None: what each mount may.
        `keep`: whose rule says what stays, of `hintsd.keeping.NAMES`.
        `on_position(job, epoch, index)`, at most once a second each; `on_notice(job, line)`;
        `on_finished(job)`, once, when all its epochs are read. None of them may open or close jobs.
        """
        self.ram_bytes, self.keep = ram_bytes, keep
        self._on_position = on_position or (lambda job, epoch, index: None)
        self._on_notice = on_notice or (lambda job, line: None)
        self._on_finished = on_finished or (lambda job: None)
        self._mounts: dict[str, Mount] = {}
        self._failed: list[Mount] = []  # which have jobs, but no task
        self.ordering = Ordering()
        self.resolving = trio.CapacityLimiter(RESOLVING_AT_ONCE)
        self.torch = TorchProcess()
        self.drawing = OwnDrawing(self.torch)
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the links to the mounts, and the process that draws; until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.torch.end()

    async def open_job(
        self,
        job: str,
        hint: Hint,
        *,
        uid: int = 0,
        guest: Guest | None = None,
        resume_at: tuple[int, int] | None = None,
    ) -> JobInfo:
        """Plan a job from its start, or from (epoch, index) `resume_at` on. JobRefused.

        `uid`: of its user. `guest`: that is another user than ours, and may read less.
        """
        if guest is None:
            mountpoint, root = await locate(hint.path)
        else:
            mountpoint, root = await locate_for(guest, hint)
        with self._user_of(mountpoint) as mount:
            return await mount.open_job(job, hint, root, resume_at, uid=uid, guest=guest)

    def status(self) -> dict[str, Any]:
        """{"mounts": […], "jobs": […]}, as JSON has it; at most REPORT_EVERY_S old."""
        self._failed = [mount for mount in self._failed if mount.jobs]
        shown = [*self._mounts.values(), *self._failed]
        return {
            "mounts": [mount.status() for mount in shown],
            "jobs": [status for mount in shown for status in mount.job_statuses()],
        }

    @contextmanager
    def _user_of(self, mountpoint: str) -> Iterator[Mount]:
        """The mount's task, which stays as long as it is used here or has jobs."""
        assert self._nursery is not None, "the Director runs"
        mount = self._mounts.get(mountpoint)
        if mount is None:
            mount = self._mounts[mountpoint] = Mount(self, mountpoint)
            self._nursery.start_soon(self._run_mount, mount)
        mount.use(1)
        try:
            yield mount
        finally:
            mount.use(-1)

    async def _run_mount(self, mount: Mount) -> None:
        try:
            await mount.run()
        except Exception:
            log.exception(
                "%s: a fault in its plan",
                mount.mountpoint,
                extra={"mount": mount.mountpoint},
            )
            self.forget(mount)
            mount.fail()
            self._failed.append(mount)
        finally:
            self.forget(mount)

    def forget(self, mount: Mount) -> None:
        """A job that comes now begins with a new task."""
        if self._mounts.get(mount.mountpoint) is mount:
            del self._mounts[mount.mountpoint]

    # ---- for the mounts --------------------------------------------------------------------------

    def _peers(self, mount: Mount) -> list[Mount]:
        """The mounts with jobs, this one among them."""
        peers = [peer for peer in self._mounts.values() if peer.takes_share]
        return peers if mount in peers else [*peers, mount]

    def sharers(self, mount: Mount) -> int:
        """How many of them are on its cache directory."""
        facts = mount.server.facts
        assert facts is not None
        return sum(
            peer.server.facts is not None and peer.server.facts.cache_dir == facts.cache_dir
            for peer in self._peers(mount)
        )

    def budgets(self, mount: Mount) -> tuple[int, int]:
        """Bytes of RAM for a mount's jobs, and of SSD beyond what is stored."""
        facts, values = mount.server.facts, mount.server.values
        assert facts is not None
        ram_bytes = facts.ram_bytes
        every = [peer.server.facts for peer in self._peers(mount)]
        total_bytes = sum(peer.ram_bytes for peer in every if peer is not None)
        if self.ram_bytes is not None and total_bytes > self.ram_bytes:
            ram_bytes = self.ram_bytes * ram_bytes // total_bytes
        return ram_bytes, values.get("ssd_room_bytes", 0) // self.sharers(mount)

    def tell_position(self, job: str, epoch: int, index: int) -> None:
        self._on_position(job, epoch, index)

    def tell_notice(self, job: str, line: str) -> None:
        self._on_notice(job, line)

    def tell_finished(self, job: str) -> None:
        self._on_finished(job)

"""The composition root: opens everything a mount needs, wires it, owns the one nursery.

Imported by `entry.py` after the C extension was loaded in the way its mode demands; nothing else
imports it.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pyfuse3
import trio

from fusecache import __version__, _native
from fusecache.ahead.depth import threads_most
from fusecache.ahead.plan import Plan
from fusecache.ahead.prefetcher import Prefetcher
from fusecache.ahead.stored import Evictions, Preloading, Stored
from fusecache.base import metrics, mounts, processes, wire
from fusecache.base.disk.probe import Device
from fusecache.base.errors import FaultLog, UserError
from fusecache.base.metrics import Metrics
from fusecache.cached import shared
from fusecache.cached.talk import is_of_service
from fusecache.config.settings import Config
from fusecache.control.control import ControlServer, Message, Operation, Send
from fusecache.control.public_status import PublicStatus
from fusecache.peers.read_through import ReadThrough
from fusecache.read.directories import Revalidation
from fusecache.read.fetch_threads import FetchThreads
from fusecache.read.fetcher import Fetcher, read_so_far
from fusecache.read.kernel import Kernel
from fusecache.read.misses import Misses
from fusecache.read.operations import FOREVER_S, Operations
from fusecache.read.origin import Origin, file_system_of
from fusecache.read.reader import Reader
from fusecache.read.sources import LogBuffers, OriginFiles, Pool, Sources, SsdSource
from fusecache.read.stager import Stager
from fusecache.recording.passings import Passings
from fusecache.recording.recording import Recording
from fusecache.reorder.packer import Packer
from fusecache.server import figures, pooling
from fusecache.server.evicting import Evicting
from fusecache.server.launch import Launch
from fusecache.server.maintenance import Maintenance
from fusecache.server.pinning import Pinning
from fusecache.server.remount import Remount
from fusecache.server.saved import SavedTable
from fusecache.store import Store
from fusecache.store.reuse import Reuse
from fusecache.store.types import RecordFault, StoreSettings
from fusecache.table import namespace
from fusecache.table.pins import Pins, UserPins

log = logging.getLogger(__name__)

ORDINARY = 0  # _native.table_mode
HOUSEKEEPING_S = 1.0
REMOVE_ROUNDS = 30  # of housekeeping, from one look for dead segments to the next
RETRY_TASK_S = 1.0
DRAINERS = 4  # each may be held up by one inode whose page is being fetched
RESUME_STORE_WAIT_S = 0.5
MANIFEST_WAIT_S = 10.0  # of `fusecache mount`, so that the first read knows it
FRONT_THREADS = 8
SLOW_REQUESTS_MOST = 10_000  # waiting for the origin; the kernel sends no more than its own limit


class Server:
    """Everything one mount needs, opened and wired."""

    def __init__(self, launch: Launch, config: Config, why_ordinary: str) -> None:
        self.launch = launch
        self.config = config
        self.metrics = _metrics()
        self.faults = FaultLog()
        self._said: list[str] = []  # of cache directories, until we are announced
        self._is_announced = False
        if not why_ordinary and _native.table_mode(launch.table_fd) == ORDINARY:
            why_ordinary = "this mount began in ordinary mode"
        self.why_ordinary = why_ordinary
        self.dataset = namespace.dataset_id(config.source)
        self._releasing: set[int] = set()  # segments that no reader loses
        # A mount that is live must stay so, whatever became of its cache directory; a setting that
        # was just given is refused if it cannot be used. No cache is begun for a live mount.
        open_store: Callable[..., Store] = partial(Store.open, create=not launch.resume)
        if launch.resume and not launch.planned:
            open_store = Store.reopen
        knows_reuse = config.policy == "reuse"
        reuse = Reuse(config.ssd_bytes, _native.segment_reads) if knows_reuse else None
        self.user_pins = UserPins()
        self.store = open_store(
            Path(config.cache_dir),
            StoreSettings(
                limit_bytes=config.ssd_bytes,
                keep_free_bytes=config.keep_free_bytes,
                policy=config.policy,
                digest=config.digest,
            ),
            further=[Path(path) for path in config.further_cache_dirs],
            reuse=reuse,
            pinned=self.user_pins.segments,
            on_fault=self._report_fault,
            on_segment_gone=self._lose_segment,
        )
        self.saved = SavedTable(
            self.store, self.dataset, launch.source_identity, config.revalidate_s is not None
        )
        self.census = figures.Census(self.store, self.dataset, self.saved)
        self.kernel = Kernel(launch.fuse_fd)
        identity = launch.source_identity or {}
        self.origin = Origin(
            launch.source_fd,
            identity.get("filesystem") or file_system_of(launch.source_device),
            config.origin_threads,
            config.origin_timeout_s,
            self.metrics,
        )
        pins = Pins()
        self.packer = Packer(self.store, self.dataset, self._releasing, pins)
        self.evictions = evictions = Evictions(
            self.store, self.packer, self.dataset, self.metrics, self.user_pins
        )
        self.manifest, self.shared = shared.join(config, launch.source_fd, self.metrics)
        self.segments = segments = SsdSource(
            self.store, self.dataset, self.manifest, self.metrics, self.shared
        )
        self.hosts = pooling.join(config, self.metrics, launch, self.store)
        self.shared_sweep = pooling.share_sweep(config, self.hosts)
        pool = Pool(self.hosts.has_peers) if self.hosts else None
        # native/ahead/fetch.c (`fetch_one`) repeats the far ones: the fetch threads see no list.
        sources = Sources([LogBuffers(), segments], [OriginFiles()], self.faults, pool, self.shared)
        self.fetcher = Fetcher(
            self.origin, self.store, self.packer, self.kernel, self.dataset, sources, self.metrics,
            pins, self.shared,
        )  # fmt: skip
        self.stager = Stager(self.kernel, config.ram_bytes, self.metrics)
        self.reader = Reader(self.fetcher, sources, segments, self.stager, self.metrics)
        self.revalidation = Revalidation(
            self.origin, config.revalidate_s, self.metrics, launch.resume, self.shared_sweep
        )
        self.remount = Remount(
            config.source, launch.source_fd, launch.source_identity, self.origin.timeout_s
        )
        self.fetch_threads = FetchThreads(self.origin, self.hosts.patience_s if self.hosts else 0.0)
        self.misses = Misses(self.fetcher, self.origin, sources, self.fetch_threads)
        self.preloading = Preloading(self.store, self.dataset, segments)
        self.prefetcher = Prefetcher(
            fetcher=self.fetcher,
            reader=self.reader,
            stager=self.stager,
            origin=self.origin,
            misses=self.misses,
            fetch_threads=self.fetch_threads,
            segments=segments,
            packer=self.packer,
            preloaded=self.preloading,
            evictions=evictions,
            kernel=self.kernel,
            metrics=self.metrics,
            mountpoint=os.fsencode(config.mountpoint),
            depth_most=config.prefetch_depth,
            bytes_per_s=config.prefetch_bytes_per_s,
        )
        plan = self.prefetcher
        self.read_through = ReadThrough(
            self.fetcher, config.origin_threads, plan.tells_owned, plan.stored_for_others
        )
        self._started_s = time.monotonic()

    async def run(self) -> int:
        """Serve until the mount is gone or SIGTERM. Returns the exit code."""
        with trio.move_on_after(RESUME_STORE_WAIT_S):
            # Locks that the dead server's stuck threads hold are let go only when we answer.
            await trio.to_thread.run_sync(self.store.attach, abandon_on_cancel=True)
        is_over = False
        async with trio.open_nursery() as nursery:
            preload = self.preloading.preload
            operations = Operations(
                origin=self.origin,
                reader=self.reader,
                revalidation=self.revalidation,
                source_fd=self.launch.source_fd,
                nursery=nursery,
                on_listed=lambda directory: nursery.start_soon(preload, directory),
                hintsd=self._hintsd_socket(),
            )
            _native.configure_answers(self._hintsd_socket(), self.config.allow_other)
            self._open_session(operations)
            await self.remount.look()  # the keeper knows the source as it was first mounted
            self.pinning = _pinning(self, operations)
            passings = Passings()
            recording = Recording(
                operations, self.launch.fuse_fd, passings, lambda: self.plan.is_connected
            )
            self.plan = Plan(
                operations=operations,
                prefetcher=self.prefetcher,
                packer=self.packer,
                preload=preload,
                store=self.store,
                metrics=self.metrics,
                passings=passings,
                shared=self.shared,
                located=self.hosts.until_located if self.hosts and self.hosts.has_peers else None,
                mount={
                    "identity": f"{self.launch.keeper_pid}-{self.launch.mounted_at!r}",
                    "mountpoint": self.config.mountpoint,
                    "source": self.config.source,
                    "cache_dir": self.config.cache_dir,
                    "ram_bytes": self.config.ram_bytes,
                    "layout": self.config.layout,
                    "pid_namespace": wire.pid_namespace(),
                    "pins": 1,
                },
                device=Device([Path(path) for path in self.config.cache_dirs]),
            )
            control = ControlServer(
                self.launch.control_fd,
                _commands(self, operations),
                {"plan": self.plan.serve, "trace": recording.serve},
            )
            public = None
            if self.config.allow_other and os.geteuid() == 0 and self.launch.device:
                public = PublicStatus(self.launch.device, partial(self.status, {}, _send_nothing))
            nursery.start_soon(self._end_on_signal, nursery.cancel_scope)
            self.fetch_threads.start(threads_most(self.config.prefetch_depth))
            for task in (
                control.serve_forever,
                *[self.kernel.drain_forever] * DRAINERS,
                self.origin.probe_forever,
                self.remount.watch_forever,
                self.fetcher.publish_forever,
                self.stager.push_forever,
                self.stager.drop_forever,
                self.revalidation.sweep_forever,
                self.revalidation.share_forever,
                self.fetch_threads.land_forever,
                self.misses.run_forever,
                self.prefetcher.run_forever,
                self.packer.run_forever,
                self.pinning.keep_forever,
                self._keep_house,
                self._take_events,
                *([self.hosts.watch_forever] if self.hosts else []),
                *([self.read_through.serve_forever] if self.config.pool_listen else []),
            ):
                nursery.start_soon(_keep_running, task)
            if public is not None:
                nursery.start_soon(_keep_running, public.serve_forever)
            nursery.start_soon(self._announce, operations.initialized)
            await pyfuse3.main(max_tasks=SLOW_REQUESTS_MOST)
            log.info("unmounted")
            await self.pinning.finish()
            nursery.cancel_scope.cancel()
            is_over = True
        self.packer.end()
        if is_over:
            self.saved.save()
            if self.shared_sweep is not None:
                self.shared_sweep.leave()
            if public is not None:
                public.remove()
        self.store.close()
        return 0

    def _hintsd_socket(self) -> bytes:
        chosen = self.config.hintsd
        if chosen == "none":
            return b""
        return os.fsencode(mounts.hintsd_socket(os.getuid()) if chosen == "auto" else chosen)

    def _report_fault(self, kind: str, message: str) -> None:
        self.faults.report(kind, message)
        if kind == "directory" and not self._is_announced:
            self._said.append(message)

    def _lose_segment(self, segno: int) -> None:
        if segno not in self._releasing:
            self.metrics.add(metrics.SEGMENTS_LOST)
        _native.segment_drop(segno)

    def _open_session(self, operations: Operations) -> None:
        """Bind pyfuse3 to the keeper's descriptor and map the inode table, in the mode that is
        possible.
        """
        period_s = self.config.revalidate_s
        negative_s = FOREVER_S if period_s is None else period_s / 2
        _native.configure_session(not self.why_ordinary, FRONT_THREADS, negative_s)
        pyfuse3.init(operations, f"/dev/fd/{self.launch.fuse_fd}", set())
        why_not = _native.why_not_interposed()
        if why_not and self.config.allow_other and not self.launch.resume:
            raise UserError(
                f"--allow-other: the origin's access control lists would not be honoured: {why_not}"
            )
        self.why_ordinary = self.why_ordinary or why_not
        zero_open = not self.why_ordinary
        operations.begin(zero_open)
        try:
            highest = _native.attach(self.launch.table_fd, self.launch.source_fd, zero_open)
        except ValueError as error:
            raise UserError(f"cannot go on with this mount: {error}") from error
        if self.launch.resume:
            # What locations of this mount name must not be given out again, even if no directory
            # that is left knows of it.
            self.store.saw(n for n, *_ in _native.log_survey() if not is_of_service(n))
            _native.resume_session()
            self.kernel.resend()  # before anything is received: see docs/ARCHITECTURE.md
        else:
            self.saved.load()
            highest = _native.count()
        log.info(
            "%s: %s open mode%s, %d inodes known",
            self.config.mountpoint,
            "zero" if zero_open else "ordinary",
            f" ({self.why_ordinary})" if self.why_ordinary else "",
            highest,
        )

    async def _announce(self, initialized: trio.Event) -> None:
        await initialized.wait()
        warnings = []
        if self.why_ordinary and self.config.zero_open:
            warnings.append(f"ordinary open mode, reads are slower: {self.why_ordinary}")
        self.manifest.begin()
        if not self.launch.resume or self.launch.planned:
            line = await trio.to_thread.run_sync(
                self.manifest.wait, MANIFEST_WAIT_S, abandon_on_cancel=True
            )
            self._said += [line] if line else []
            self._said += await self.shared.lines() if self.shared else []
        if self.hosts is not None:
            await self.hosts.until_located()
        self._is_announced = True
        self.launch.report(
            ready=True, zero_open=not self.why_ordinary, warnings=warnings, logged=self._said
        )
        while self.launch.beat():
            await trio.sleep(processes.BEAT_S)

    async def _end_on_signal(self, scope: trio.CancelScope) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("asked to stop (%s)", signal.Signals(number).name)
                scope.cancel()
                return

    # ---- background ----------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        for round_ in itertools.count():
            await trio.to_thread.run_sync(self.store.housekeeping)
            if round_ % REMOVE_ROUNDS == 0:
                await trio.to_thread.run_sync(self.packer.remove_dead)
            await trio.sleep(HOUSEKEEPING_S)

    async def _take_events(self) -> None:
        """What the front noticed: broken records and sequential readers."""
        event_fd, stream_block = _native.event_fd(), self.reader.stream_block
        async with trio.open_nursery() as nursery:
            while True:
                await trio.lowlevel.wait_readable(event_fd)
                os.read(event_fd, 8)
                self.kernel.notice_stale()
                for event in _native.take_events():
                    if event[0] == _native.EVENT_STREAM:
                        nursery.start_soon(self.stager.stream, *event[1:3], stream_block)
                    else:
                        note_record(event, self.store.forget, self.quarantine)

    def quarantine(self, fault: RecordFault, segno: int, offset: int, when: str) -> str:
        """Count, log and forget a record; returns the line of the log."""
        line = f"record at byte {offset} of segment {segno} "
        if fault == "read":
            line += f"cannot be read ({when})"
        else:
            self.metrics.add(metrics.MISMATCHES)
            line += f"is bad ({when})"
        self.faults.report(fault, line)
        owner = self.shared if self.shared and is_of_service(segno) else self.store
        owner.quarantine(segno, offset)
        return line

    # ---- what the command line asks --------------------------------------------------------------

    async def sweep(self, request: Message, send: Send) -> Message:
        """Look at the origin now instead of at the next sweep; returns when the kernel was told."""
        del request, send
        await self.revalidation.sweep()
        await self.kernel.drain_all()
        return {}

    async def status(self, request: Message, send: Send) -> Message:
        del request, send
        usage = await trio.to_thread.run_sync(self.store.usage)
        directories = await trio.to_thread.run_sync(self.store.directories)
        full_disk_bytes = await trio.to_thread.run_sync(self.store.full_disk_bytes)
        packed = await trio.to_thread.run_sync(self.packer.progress)
        config, now = self.config, self.metrics.read()
        origin_files, origin_bytes = read_so_far(now)
        return {
            "status": {
                "version": __version__,
                "mountpoint": config.mountpoint,
                "source": config.source,
                "cache_dir": config.cache_dir,
                "keeper_pid": self.launch.keeper_pid,
                "keeper_alive": os.getppid() == self.launch.keeper_pid,
                "server_pid": os.getpid(),
                "restarts": self.launch.restarts,
                "zero_open": not self.why_ordinary,
                "uptime_s": round(time.time() - self.launch.mounted_at, 3),
                "counted_s": round(time.monotonic() - self._started_s, 3),
                "inodes": now[metrics.INODES],
                "table_bytes": now[metrics.TABLE_BYTES],
                "ram": {"bytes": now[metrics.RAM_BYTES], "limit_bytes": config.ram_bytes},
                "ssd": {
                    "bytes": usage.bytes,
                    "reserved_bytes": usage.reserved_bytes,
                    "limit_bytes": usage.limit_bytes,
                    "given_bytes": config.ssd_bytes,
                    "blocks": usage.blocks,
                    "segments": usage.segments,
                    "evicted_files": now[metrics.EVICTED_FILES],
                    "evicted_bytes": now[metrics.EVICTED_BYTES],
                    "policy": config.policy,
                    "full_disk_bytes": full_disk_bytes,
                    "keep_free_bytes": self.store.settings.keep_free_bytes,
                    "directories": [asdict(directory) for directory in directories],
                },
                "dataset": await self.census.figures(),
                "pins": self.pinning.status(),
                "layout": {
                    "setting": config.layout,
                    "probe_fault": self.plan.device.fault,
                    "ssd_needed_bytes": self.packer.ssd_needed_bytes,
                    **self.packer.state(),
                    **packed,
                },
                "reads": figures.reads(now, is_ordinary=bool(self.why_ordinary)),
                "metadata": figures.metadata(now),
                "origin": {
                    "files": origin_files,
                    "bytes": origin_bytes,
                    "errors": now[metrics.ORIGIN_ERRORS],
                    "available": self.origin.available,
                    "last_error": self.origin.last_error,
                    "read_s": figures.latency(_native.origin_reads()),
                },
                "pool": pooling.status(self.hosts, now),
                "manifest": figures.manifest(self.manifest.files, now),
                "service": shared.status(self.shared, now),
                "prefetch": {"connected": self.plan.is_connected, **figures.prefetch(now)},
                "integrity": {
                    "mismatches": now[metrics.MISMATCHES],
                    "faults": self.faults.counts(),
                },
                "revalidate": {
                    "period_s": config.revalidate_s,
                    "sweeps": now[metrics.SWEEPS],
                    "last_sweep_s": round(self.revalidation.last_sweep_s, 3),
                    "changes_seen": now[metrics.CHANGES_SEEN],
                    "swept": now[metrics.SWEPT],
                    "shared": self.shared_sweep.status() if self.shared_sweep else None,
                },
            }
        }


def note_record(
    event: tuple[int, int, int, int],
    forget: Callable[[int, int], object],
    quarantine: Callable[[RecordFault, int, int, str], object],
) -> None:
    """What the front says of a record in a segment. An event of an unknown kind changes nothing."""
    kind, segno, offset, ino = event
    if kind == _native.EVENT_PUNCHED:
        forget(segno, offset)
    elif kind in (_native.EVENT_FAULT, _native.EVENT_UNREAD):
        path = _native.path(ino).decode(errors="backslashreplace")
        fault: RecordFault = "read" if kind == _native.EVENT_UNREAD else "checksum"
        quarantine(fault, segno, offset, f"read for {path}")
    else:
        log.warning("the front told of an event of kind %d, which is not known here", kind)


def _pinning(server: Server, operations: Operations) -> Pinning:
    return Pinning(
        operations=operations,
        store=server.store,
        dataset=server.dataset,
        pins=server.user_pins,
        metrics=server.metrics,
        locate_all=Stored(server.segments, server.packer, server.preloading).locate_all,
    )


def _commands(server: Server, operations: Operations) -> dict[str, Operation]:
    """What the command line may ask, but for what takes the connection over."""
    maintenance = Maintenance(
        operations,
        server.reader,
        server.store,
        server.config.origin_threads,
        server.quarantine,
        server.user_pins,
        server.shared,
    )
    evicting = Evicting(
        operations=operations,
        prefetcher=server.prefetcher,
        fetcher=server.fetcher,
        evictions=server.evictions,
        store=server.store,
        packer=server.packer,
        pinning=server.pinning,
    )
    return {
        "status": server.status,
        "warm": maintenance.warm,
        "warm_paths": maintenance.warm_paths,
        "evict": evicting.evict,
        "pin": server.pinning.pin,
        "verify": maintenance.verify,
        "sweep": server.sweep,
    }


async def _send_nothing(message: Message) -> None:
    """Of operations that have no progress."""


def _metrics() -> Metrics:
    """Those of the C part are there from the beginning."""
    found = Metrics(_native.counters)
    found.watch(metrics.INODES, _native.count)
    found.watch(metrics.TABLE_BYTES, _native.memory_bytes)
    found.watch(metrics.RAM_BYTES, _native.ram_bytes)
    return found


async def _keep_running(task: Callable[[], Awaitable[None]]) -> None:
    """A background task that fails is logged and begun again: readers must not notice."""
    while True:
        try:
            await task()
        except Exception:
            log.exception("%s failed", task.__qualname__)
            await trio.sleep(RETRY_TASK_S)
        else:
            return

"""The daemon's front: connections of trainers and commands, and the life of each job.

A job is a task here. It begins when hintsd is asked for it, or finds it in the journal, and ends
with `close`, `end`, the trainer's process (a pidfd: DataLoader workers are forked and keep the
socket open, so its end alone says nothing), its last epoch, or, if it is not detached, GRACE_S
after its connection. What a job does to the caches is the Director's; the bytes of frames are
fusecache.wire's.

INVARIANT: whatever a client sends or fails to send, it loses at most its own connection.
A Server that is cancelled leaves the journal as it is: the next one takes the jobs up.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import resource
import signal
import socket
import stat
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import trio

from fusecache import __version__, mounts, wire
from fusecache.errors import UserError
from fusecache.wire import Fields, WireError
from fusecache.wire_trio import FrameStream
from hintsd import figures, messages
from hintsd.arrays import Arrays
from hintsd.director import Director, JobInfo, JobRefused, NotHere
from hintsd.journal import Entry, Journal, JournalBusy, process_start
from hintsd.messages import JobRequest
from hintsd.orders import OrderSpec
from hintsd.own_log import internal_error
from hintsd.status import unknown

log = logging.getLogger(__name__)

CONNECTIONS_MOST: Final = 256
READING_AT_ONCE: Final = 2  # jobs and orders whose arrays are read: copies of those are made
ARRAYS_TIMEOUT_S: Final = 30.0
JOBS_MOST: Final = 256
NOTICES_MOST: Final = 16  # on their way to one client; more are left to the log
STATES_INTERVAL_S: Final = 0.5  # between looks at whether what clients were told still holds
ENDED_MOST: Final = 16  # jobs that status still shows
GRACE_S: Final = 1.0  # for a client to come back
RESTART_GRACE_S: Final = 30.0  # the same, for the clients of the hintsd before: all may be busy
CLOSE_TIMEOUT_S: Final = 5.0
LAST_WORDS_TIMEOUT_S: Final = 1.0
UNMOUNTED_INTERVAL_S = 2.0
SWITCH_INTERVAL_S: Final = 0.001  # who answers waits so long for a thread that computes
JOURNAL_DIRECTORY: Final = "jobs"
_BACKLOG: Final = 128

OpenDirector = Callable[..., Director]
Standing = tuple[str, str]  # state and reason of a `state` message
_HINTED: Final[Standing] = ("hinted", "")


class CannotServe(UserError):
    """The daemon cannot begin."""


class Refusal(Exception):
    """This request is answered with `rejected`; one line."""


@dataclass(eq=False, slots=True)
class _Job:
    name: str
    uid: int
    pid: int | None  # of the process whose end is the job's
    detached: bool
    identity: bytes
    connection: _Connection | None = None
    info: JobInfo | None = None  # once it is open
    refusal: str = ""  # why it never was
    reason: str = "its connection was lost"  # of its end, unless another is set
    is_kept: bool = False  # in the journal, for a hintsd that can open it
    is_done: bool = False  # all its epochs are read
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    opened: trio.Event = field(default_factory=trio.Event)  # or refused
    ended: trio.Event = field(default_factory=trio.Event)

    def end(self, reason: str) -> None:
        self.reason = reason
        self.scope.cancel()


@dataclass(eq=False, slots=True)
class _Connection:
    frames: FrameStream
    peer: wire.Peer
    job: _Job | None = None
    arrays: Arrays = field(default_factory=Arrays)
    notices: int = 0  # that are being sent
    told: Standing | None = None  # what its job is; None: it is not to be told


def is_allowed(peer_uid: int, own_uid: int) -> bool:
    """Whether a hintsd of user `own_uid` serves this peer: the same user, or root."""
    return peer_uid in (own_uid, 0)


def serve(
    socket_path: str, *, ram_bytes: int | None, until_unmounted: bool, ready: Callable[[], None]
) -> None:
    """Be the daemon at the absolute `socket_path`, until SIGTERM or SIGINT. CannotServe.

    `ready` is called when clients are answered. `ram_bytes`, `until_unmounted`: see
    `hintsd serve --help`.
    """
    directory = os.path.dirname(socket_path)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if not os.path.isdir(directory):
        raise CannotServe(f"{directory} is no directory: make one first (mkdir -m 700)")
    try:
        journal = Journal(os.path.join(directory, JOURNAL_DIRECTORY))
    except (OSError, JournalBusy) as error:
        raise CannotServe(_line(directory, error)) from None
    with contextlib.closing(journal):
        try:
            listener = listen(socket_path)
        except OSError as error:
            raise CannotServe(_line(socket_path, error)) from None
        try:
            server = Server(listener, journal, functools.partial(Director, ram_bytes=ram_bytes))
            trio.run(_serve_until_told, server, until_unmounted, ready)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(socket_path)


def _line(path: str, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror}"
    return f"{path}: {error}"


async def _serve_until_told(
    server: Server, until_unmounted: bool, ready: Callable[[], None]
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            ready()
            if until_unmounted:
                nursery.start_soon(_until_unmounted, server, nursery.cancel_scope)
            async for number in signals:
                log.info("ends with %s", signal.Signals(number).name)
                break
            nursery.cancel_scope.cancel()


async def _until_unmounted(server: Server, scope: trio.CancelScope) -> None:
    await server.until_unmounted()
    log.info("ends: there is no mount any more")
    scope.cancel()


def listen(socket_path: str) -> socket.socket:
    """A listening socket, mode 0600; one that a dead hintsd left is replaced.

    The caller holds the journal's lock, so no hintsd that listens there lives. OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(socket_path).st_mode):
            raise FileExistsError(errno.EEXIST, "is no socket, and left as it is", socket_path)
    umask = os.umask(0o177)
    try:
        return mounts.listen(*os.path.split(socket_path), _BACKLOG)
    finally:
        os.umask(umask)


class Server:
    """See the module."""

    def __init__(
        self, listener: socket.socket, journal: Journal, open_director: OpenDirector
    ) -> None:
        """`open_director(on_position=, on_notice=, on_finished=)`: a Director with these calls."""
        self._listener = listener
        self._journal = journal
        self._director = open_director(
            on_position=self._on_position, on_notice=self._on_notice, on_finished=self._on_finished
        )
        self._jobs: dict[str, _Job] = {}
        self._connections: set[_Connection] = set()
        self._ended: deque[tuple[float, dict[str, Any]]] = deque(maxlen=ENDED_MOST)
        self._begun_s = time.monotonic()
        self._reading = trio.CapacityLimiter(READING_AT_ONCE)
        self._nursery: trio.Nursery  # set by `run`

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Started: clients are answered."""
        self._listener.setblocking(False)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener))
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self._director.run)
            nursery.start_soon(self._tell_states)
            for entry in await trio.to_thread.run_sync(self._journal.load):
                await self._take_up(entry)
            task_status.started()
            await trio.serve_listeners(self._serve, [listener], handler_nursery=nursery)

    async def until_unmounted(self) -> None:
        """Return when this user has no fusecache mount any more. Whoever is connected then has no
        use for us: a job of a mount that is gone, or somebody who looks on.
        """
        misses = 0
        while misses < 2:  # twice: a mount that is replaced is away for a moment
            await trio.sleep(UNMOUNTED_INTERVAL_S)
            mounted = any(
                mount.is_fusecache and mount.uid == os.getuid() for mount in mounts.mounts()
            )
            misses = 0 if mounted else misses + 1

    def status(self) -> dict[str, Any]:
        """What `hintsd status --json` prints."""
        now_s = time.monotonic()
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": round(now_s - self._begun_s, 3),
            "connections": len(self._connections),
            **self._director.status(),
            "ended": [
                {**job, "ended_ago_s": round(now_s - ended_s, 3)} for ended_s, job in self._ended
            ],
        }

    # ---- connections -----------------------------------------------------------------------------

    async def _serve(self, stream: trio.SocketStream) -> None:
        frames = FrameStream(stream, frame_bytes_most=wire.CLIENT_FRAME_BYTES_MOST)
        try:
            peer = wire.peer_of(cast(socket.socket, stream.socket))
        except OSError as error:
            log.warning("a connection whose peer is unknown: %s", error)
            await frames.aclose()
            return
        connection = _Connection(frames, peer)
        last_words = ""
        try:
            if not is_allowed(peer.uid, os.geteuid()):
                raise WireError("permission denied: this hintsd serves another user")
            if len(self._connections) >= CONNECTIONS_MOST:
                raise WireError(f"there are {CONNECTIONS_MOST} connections already")
            self._connections.add(connection)
            await self._converse(connection)
        except WireError as error:
            log.info("process %d of user %d: %s", peer.pid, peer.uid, error)
            last_words = str(error)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except Exception:
            log.exception("a fault in the conversation with process %d", peer.pid)
            last_words = internal_error()
        finally:
            self._connections.discard(connection)
            self._release(connection)
            if last_words:
                with (
                    trio.move_on_after(LAST_WORDS_TIMEOUT_S),
                    contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError),
                ):
                    await frames.send("error", message=last_words)
            await frames.aclose()

    def _release(self, connection: _Connection) -> None:
        connection.arrays.clear()
        job = connection.job
        connection.job = None
        if job is not None and job.connection is connection:
            job.connection = None
            if not job.detached:
                job.scope.deadline = trio.current_time() + GRACE_S

    async def _converse(self, connection: _Connection) -> None:
        frame = None
        with trio.move_on_after(wire.FRAME_TIMEOUT_S):
            frame = await connection.frames.receive()
        if frame is None:
            return
        if frame.type != "hello":
            raise WireError(f"{frame.type} before hello")
        version = frame.fields.int("version", 0, 1 << 32)
        if version != wire.VERSION:
            raise WireError(f"version {version} of the protocol; this hintsd speaks {wire.VERSION}")
        await connection.frames.send(
            "welcome", version=wire.VERSION, pid=os.getpid(), hintsd=__version__
        )
        while (frame := await self._receive(connection)) is not None:
            try:
                await self._answer(connection, frame)
            except Refusal as refusal:
                await connection.frames.send("rejected", message=str(refusal))

    async def _receive(self, connection: _Connection) -> wire.Frame | None:
        """The next frame; None: there is no other. Who has sent a part of arrays goes on."""
        if not len(connection.arrays):
            return await connection.frames.receive()
        with trio.move_on_after(ARRAYS_TIMEOUT_S):
            return await connection.frames.receive()
        raise WireError(f"arrays were begun, and nothing came in {ARRAYS_TIMEOUT_S:g} s")

    async def _answer(self, connection: _Connection, frame: wire.Frame) -> None:
        send, fields = connection.frames.send, frame.fields
        match frame.type:
            case "job":
                connection.told = None
                wants_state = messages.wants_state(fields)
                job = await self._open(connection, fields)
                assert job.info is not None
                await send(
                    "accepted",
                    job=job.name,
                    mountpoint=job.info.mountpoint,
                    samples_per_epoch=job.info.samples_per_epoch,
                    warnings=list(job.info.warnings),
                )
                connection.told = _HINTED if wants_state else None
            case "array":
                await trio.to_thread.run_sync(connection.arrays.add, fields)
            case "order":
                await send("planned", epoch=await self._order(connection, fields))
            case "step":
                epoch, batch = messages.step(fields)
                if self._is_live(connection.job):
                    assert connection.job is not None
                    self._director.step(connection.job.name, epoch, batch)
            case "close":
                if connection.job is not None:
                    await self._end(connection.job, "closed by its trainer")
                    connection.job = None
                await send("closed")
            case "status":
                await send("status", **self.status())
            case "end":
                name = fields.str("job", messages.NAME_LENGTH_MOST)
                ended = self._jobs.get(name)
                if ended is None:
                    raise Refusal(f"there is no job {name}; hintsd status shows the jobs")
                self._on_notice(name, f"job {name} was ended by process {connection.peer.pid}")
                await self._end(ended, "ended by a user")
                await send("ended")
            case _:
                raise WireError(f"unknown message {frame.type}")

    def _is_live(self, job: _Job | None) -> bool:
        """Whether it may still be told something; from the next await on it may not."""
        return job is not None and not job.scope.cancel_called and not job.ended.is_set()

    async def _order(self, connection: _Connection, fields: Fields) -> int:
        def read() -> tuple[int, OrderSpec]:
            try:
                return messages.order_spec(fields, connection.arrays)
            finally:
                connection.arrays.clear()

        try:
            epoch, spec = await trio.to_thread.run_sync(read, limiter=self._reading)
        except ValueError as error:
            raise Refusal(f"order: {error}") from None
        job = connection.job
        if job is None or not self._is_live(job):
            raise Refusal("order: there is no job, or it has ended")
        try:
            await self._director.order(job.name, epoch, spec)
        except JobRefused as refusal:
            raise Refusal(str(refusal)) from None
        return epoch

    # ---- jobs ------------------------------------------------------------------------------------

    async def _open(self, connection: _Connection, fields: Fields) -> _Job:
        """The job of a `job` message, open: a new one, or the one that it resumes."""
        if self._is_live(connection.job):
            raise WireError("job: this connection has one")
        peer = connection.peer
        resumed = messages.resumed_job(fields)
        pid = self._trainer(fields, peer)
        message, identity, request = await self._read(connection, fields, pid)
        job = self._jobs.get(resumed) if resumed is not None else None
        if job is None or (job.uid, job.pid) != (peer.uid, pid):
            job = None  # not known here, or not this client's
        elif job.identity != identity or job.scope.cancel_called:
            await self._end(job, "its trainer describes another one")
            job = None
        if job is None:
            if len(self._jobs) >= JOBS_MOST:
                raise Refusal(f"there are {JOBS_MOST} jobs already")
            name = self._name(request.name, pid, resumed or "")
            job = _Job(name, peer.uid, pid, request.detached, identity)
            batch_size = request.spec.batch_size if request.spec is not None else 0
            place = request.start_epoch, request.start_batch * batch_size
            entry = Entry(name, peer.uid, pid or 0, 0, message, *place)
            self._begin(job, request, entry, None)
        job.scope.deadline = float("inf")
        if job.connection is not None:
            job.connection.job = None  # this client's, of which it knows the end before we do
        job.connection, connection.job = connection, job
        await job.opened.wait()
        if job.info is None:
            connection.job = None
            raise Refusal(job.refusal or job.reason)
        return job

    def _trainer(self, fields: Fields, peer: wire.Peer) -> int | None:
        """The process whose end is to end the job. Refusal."""
        pid = messages.trainer_pid(fields)
        if pid is None:
            if fields.bool("detached") or messages.is_of_others(fields):
                return None
            pid = peer.pid
            if pid == 0:
                raise Refusal("hintsd cannot see your process: it is in another pid namespace")
        elif peer.uid != 0 and _owner(pid) not in (peer.uid, None):
            raise Refusal(f"process {pid} is not yours")
        return pid

    async def _read(
        self, connection: _Connection, fields: Fields, pid: int | None
    ) -> tuple[dict[str, Any], bytes, JobRequest]:
        uid, arrays = connection.peer.uid, connection.arrays

        def read() -> tuple[dict[str, Any], bytes, JobRequest]:
            try:
                message = messages.job_message(fields, arrays)
            finally:
                arrays.clear()
            request = messages.job_request(message, uid, pid)
            return message, messages.identity(message), request

        try:
            return await trio.to_thread.run_sync(read, limiter=self._reading)  # arrays may be long
        except ValueError as error:
            raise Refusal(f"job: {error}") from None

    def _name(self, wanted: str, pid: int | None, before: str) -> str:
        program = wanted or (_program(pid) if pid is not None else "") or "job"
        program = re.sub(r"[^A-Za-z0-9._-]+", "-", program)[:64].strip(".-") or "job"
        return f"{program}-{self._journal.number(before)}"

    async def _take_up(self, entry: Entry) -> None:
        """Go on with a job of the hintsd before; its client will come back, if it has one."""
        try:
            request = await trio.to_thread.run_sync(
                messages.job_request, entry.message, entry.uid, entry.pid or None
            )
        except (ValueError, WireError) as error:
            log.warning("journal: job %s cannot be used and is removed: %s", entry.job, error)
            self._journal.remove(entry.job)
            return
        identity = messages.identity(entry.message)
        job = _Job(entry.job, entry.uid, entry.pid or None, request.detached, identity)
        if not job.detached:
            job.scope.deadline = trio.current_time() + RESTART_GRACE_S
        self._begin(job, request, entry, (entry.epoch, entry.position))

    def _begin(
        self, job: _Job, request: JobRequest, entry: Entry, resume_at: tuple[int, int] | None
    ) -> None:
        self._jobs[job.name] = job
        self._nursery.start_soon(self._live, job, request, entry, resume_at)

    async def _live(
        self, job: _Job, request: JobRequest, entry: Entry, resume_at: tuple[int, int] | None
    ) -> None:
        """The task of a job. Cancelled from outside, it leaves the journal's entry."""
        with job.scope:
            async with trio.open_nursery() as nursery:
                try:
                    if job.pid is not None:
                        nursery.start_soon(_watch, job, _open_process(job.pid))
                        start = process_start(job.pid)  # of the one that is watched
                        if resume_at is None:
                            entry = replace(entry, pid_start=start or 0)
                        elif start != entry.pid_start:
                            raise JobRefused(f"its process {job.pid} is gone")
                    job.info = await self._director.open_job(job.name, request, resume_at=resume_at)
                    if resume_at is None:
                        await self._record(entry)
                except JobRefused as refusal:
                    job.refusal = str(refusal)
                    # None else would tell it again.
                    job.is_kept = (
                        resume_at is not None and job.detached and (isinstance(refusal, NotHere))
                    )
                except Exception:
                    log.exception("job %s cannot be opened", job.name)
                    job.refusal = internal_error()
                del request, entry  # they may be long
                if job.refusal:
                    job.end(f"refused: {job.refusal}")
                else:
                    log.info("job %s has begun", job.name)
                    job.opened.set()
                await trio.sleep_forever()
        status: dict[str, Any] = {}
        with trio.move_on_after(CLOSE_TIMEOUT_S):
            try:
                status = await self._director.close_job(job.name)
            except Exception:
                log.exception("job %s cannot be closed", job.name)
        if job.info is None:
            log.info("job %s has ended: %s", job.name, job.reason)
            if job.refusal:
                state = "refused" if resume_at is None else "ended"  # it had begun before
                self._note_end(job, {}, state, job.refusal)
        else:
            log.info("job %s has ended: %s: %s", job.name, job.reason, figures.reads(status))
            is_done = job.is_done or status.get("state") == "done" or _is_read(status)
            state = "done" if is_done else "ended"
            self._note_end(job, status, state, job.reason)
        self._forget(job)

    def _note_end(self, job: _Job, status: dict[str, Any], state: str, why: str) -> None:
        known = {**unknown(), "pid": job.pid, **status, "name": job.name, "state": state}
        self._ended.append((time.monotonic(), {**known, "why_ended": why}))

    def _forget(self, job: _Job) -> None:
        try:
            if not job.is_kept:
                self._journal.remove(job.name)
        except OSError as error:
            log.warning("journal: %s", error)
        del self._jobs[job.name]
        job.opened.set()
        job.ended.set()

    async def _record(self, entry: Entry) -> None:
        try:
            await trio.to_thread.run_sync(self._journal.write, entry)
        except OSError as error:
            log.warning("journal: job %s will not survive this hintsd: %s", entry.job, error)

    async def _end(self, job: _Job, reason: str) -> None:
        job.end(reason)
        await job.ended.wait()

    # ---- what the Director tells -----------------------------------------------------------------

    def _on_position(self, name: str, epoch: int, index: int) -> None:
        job = self._jobs.get(name)
        if job is None or job.info is None:
            return
        try:
            self._journal.move(name, epoch, index)
        except OSError as error:
            log.warning("journal: %s", error)

    def _on_notice(self, name: str, line: str) -> None:
        log.info("%s: %s", name, line)
        job = self._jobs.get(name)
        connection = job.connection if job is not None else None
        if connection is not None and connection.notices < NOTICES_MOST:
            connection.notices += 1
            self._nursery.start_soon(
                functools.partial(self._notify, connection, "warning", message=line)
            )

    async def _tell_states(self) -> None:
        """Clients learn what has become of their jobs."""
        while True:
            await trio.sleep(STATES_INTERVAL_S)
            status: dict[str, Any] | None = None
            for connection in list(self._connections):
                job, told = connection.job, connection.told
                if job is None or told is None or connection.notices >= NOTICES_MOST:
                    continue
                status = status or self._director.status()
                standing = _standing(job, status)
                if standing != told:
                    connection.told = standing
                    connection.notices += 1
                    state, reason = standing
                    self._nursery.start_soon(
                        functools.partial(
                            self._notify, connection, "state", state=state, reason=reason
                        )
                    )

    async def _notify(self, connection: _Connection, kind: str, **fields: str) -> None:
        try:
            await connection.frames.send(kind, **fields)
        except (WireError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the task that receives will notice
        finally:
            connection.notices -= 1

    def _on_finished(self, name: str) -> None:
        job = self._jobs.get(name)
        if job is not None:
            job.is_done = True
            job.end("all its epochs are read")


def _standing(job: _Job, status: dict[str, Any]) -> Standing:
    """What a client is told of its job, by the Director's `status`."""
    if job.scope.cancel_called or job.ended.is_set():
        return "over", job.reason
    for mount in status["mounts"]:
        is_its = job.info is not None and mount["mountpoint"] == job.info.mountpoint
        if is_its and not mount["connected"]:
            return "waiting", f"{mount['mountpoint']} {mount.get('reason', '')}"
    for known in status["jobs"]:
        if known["name"] != job.name:
            continue
        reason = known.get("reason") or ""
        if known["state"] == "wrong" or (known["state"] == "waiting" and reason):
            return known["state"], reason
    return _HINTED


def _is_read(status: dict[str, Any]) -> bool:
    """Are all epochs of a job read, by its last status?"""
    epoch, epochs = status.get("epoch", 0), status.get("epochs")
    if epochs is None:
        return False
    is_last = epoch == epochs - 1 and status.get("index") == status.get("samples")
    return bool(is_last or epoch >= epochs)


def _open_process(pid: int) -> int:
    """A pidfd. JobRefused: there is no such process."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise JobRefused(f"process {pid} cannot be watched: {error.strerror}") from None


async def _watch(job: _Job, pidfd: int) -> None:
    """End the job with its process."""
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
    job.end(f"its process {job.pid} has ended")


def _owner(pid: int) -> int | None:
    """The user that a process runs as; None: it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith(b"Uid:"))


def _program(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""

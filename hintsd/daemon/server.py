"""The daemon's front: connections of trainers and commands.

What becomes of a job that is asked for: jobs.py; the bytes of frames are fusecache.base.wire's.

INVARIANT: whatever a client sends or fails to send, it loses at most its own connection.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import trio

from fusecache import __version__
from fusecache.base import mounts, processes, wire
from fusecache.base.errors import UserError
from fusecache.base.wire import Fields, WireError
from fusecache.base.wire_trio import FrameStream
from hintsd.daemon import datasets, messages
from hintsd.daemon.datasets import Guest, is_guests
from hintsd.daemon.director import Director
from hintsd.daemon.jobs import Jobs, LiveJob, OpenDirector
from hintsd.daemon.journal import Journal, JournalBusy
from hintsd.daemon.messages import Arrays, JobRefused, internal_error
from hintsd.daemon.mount import Mount
from hintsd.orders.hint import NAME_LENGTH_MOST, Hint
from hintsd.users import public, quota
from hintsd.users.identity import identity_of
from hintsd.users.public import Others

log = logging.getLogger(__name__)

CONNECTIONS_MOST: Final = 256
READING_AT_ONCE: Final = 2  # jobs and orders whose arrays are read: copies of those are made
ARRAYS_TIMEOUT_S: Final = 30.0
PIECE_BYTES: Final = 1 << 20  # of what is cached
NOTICES_MOST: Final = 16  # on their way to one client; more are left to the log
STATES_INTERVAL_S: Final = 0.5  # between looks at whether what clients were told still holds
LAST_WORDS_TIMEOUT_S: Final = 1.0
UNMOUNTED_INTERVAL_S = 2.0
SWITCH_INTERVAL_S: Final = 0.001  # a thread that answers waits so long for one that computes
JOURNAL_DIRECTORY: Final = "jobs"
_BACKLOG: Final = 128
_KNOWN: Final = {"scores": True, "cached": True, "staged": True, "chunks": True}
"""Messages that came later than version 1."""

T = TypeVar("T")
JobState = tuple[str, str]  # state and reason of a `state` message
_HINTED: Final[JobState] = ("hinted", "")


class CannotServe(UserError):
    """The daemon cannot begin."""


class Refusal(Exception):
    """This request is answered with `rejected`; one line."""


@dataclass(eq=False, slots=True)
class _Connection:
    frames: FrameStream
    peer: wire.Peer
    guest: Guest | None = None
    """Its user, if that is none of ours."""
    job: LiveJob | None = None
    arrays: Arrays = field(default_factory=Arrays)
    notices: int = 0  # that are being sent
    told: JobState | None = None  # what its job is; None: it is not to be told


def serve(
    socket_path: str,
    *,
    ram_bytes: int | None,
    keep: str,
    until_unmounted: bool,
    others: Others | None,
    ready: Callable[[], None],
) -> None:
    """Be the daemon at the absolute `socket_path`, until SIGTERM or SIGINT. CannotServe.

    `ready` is called when clients are answered. `others`: who is served at the public socket; None:
    nobody. `ram_bytes`, `keep`, `until_unmounted`: see `hintsd serve --help`.
    """
    directory, watchdog_s = os.path.dirname(socket_path), processes.watchdog_s()
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
        kept = _handed_over(socket_path)
        try:
            listener = kept or listen(socket_path)
        except OSError as error:
            raise CannotServe(_line(socket_path, error)) from None
        try:
            director = functools.partial(Director, ram_bytes=ram_bytes, keep=keep)
            server = Server(listener, journal, director, _public(socket_path, others))
            trio.run(_serve_until_told, server, until_unmounted, ready, watchdog_s)
        finally:
            if kept is None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(socket_path)


def _handed_over(socket_path: str) -> socket.socket | None:
    """The listening socket of hintsd.socket, which stays when we end; None: systemd has none for
    us. CannotServe: it is another one.
    """
    handed = processes.handed_over()
    if not handed:
        return None
    names = [each.getsockname() for each in handed]
    if names != [socket_path] or not handed[0].getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise CannotServe(f"systemd listens on {names}: ListenStream= is to be {socket_path} alone")
    return handed[0]


def _public(socket_path: str, others: Others | None) -> socket.socket | None:
    """The socket for other users. One that cannot be had costs ours nothing."""
    try:
        if others is not None:
            return public.listen(socket_path, others)
        public.close(socket_path)
    except OSError as error:
        log.warning("other users are not served: %s", _line(socket_path, error))
    return None


def _line(path: str, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror}"
    return f"{path}: {error}"


async def _serve_until_told(
    server: Server,
    until_unmounted: bool,
    ready: Callable[[], None],
    watchdog_s: float | None,
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            ready()
            if watchdog_s is not None:
                nursery.start_soon(_ping, watchdog_s)
            if until_unmounted:
                nursery.start_soon(_until_unmounted, server, nursery.cancel_scope)
            async for number in signals:
                log.info("ends with %s", signal.Signals(number).name)
                break
            nursery.cancel_scope.cancel()


async def _ping(every_s: float) -> None:
    """Tell systemd's watchdog that this event loop goes round."""
    while True:
        processes.tell_systemd("WATCHDOG=1")
        await trio.sleep(every_s)


async def _until_unmounted(server: Server, scope: trio.CancelScope) -> None:
    await server.until_unmounted()
    log.info("ends: there is no mount any more")
    scope.cancel()


def listen(socket_path: str) -> socket.socket:
    """A listening socket, mode 0600; one that a dead hintsd left is replaced.

    The caller holds the journal's lock, so no hintsd that listens there lives. OSError.
    """
    return mounts.listen_privately(*os.path.split(socket_path), _BACKLOG)


class Server:
    """See the module."""

    def __init__(
        self,
        listener: socket.socket,
        journal: Journal,
        open_director: OpenDirector,
        public_listener: socket.socket | None = None,
    ) -> None:
        """`open_director(on_position=, on_notice=, on_finished=)`: a Director with these calls.
        Both sockets listen; other users are served at `public_listener` alone.
        """
        self._listener, self._public_listener = listener, public_listener
        self._jobs = Jobs(journal, open_director, self._on_notice)
        self._director = self._jobs.director
        self._connections: set[_Connection] = set()
        self._begun_s = time.monotonic()
        self._reading = trio.CapacityLimiter(READING_AT_ONCE)
        self._nursery: trio.Nursery  # set by `run`

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Started: clients are answered."""
        serve_public = functools.partial(self._serve, is_public=True)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._tell_states)
            await self._jobs.run(nursery)
            if (at := self._public_listener) is not None:
                nursery.start_soon(trio.serve_listeners, serve_public, [_listening(at)])
            task_status.started()
            await trio.serve_listeners(self._serve, [_listening(self._listener)])

    async def until_unmounted(self) -> None:
        """Return when this user has no fusecache mount any more. Whoever is connected then has no
        use for us: a job of a mount that is gone, or a client that looks on.
        """
        misses = 0
        while misses < 2:  # twice: a mount that is replaced is away for a moment
            await trio.sleep(UNMOUNTED_INTERVAL_S)
            mounted = any(
                mount.is_fusecache and mount.uid == os.getuid() for mount in mounts.mounts()
            )
            misses = 0 if mounted else misses + 1

    def status(self, guest: Guest | None = None) -> dict[str, Any]:
        """What `hintsd status --json` prints. A guest sees their own jobs, and where these are."""
        known = self._director.status()
        uid = None if guest is None else guest.identity.uid
        if uid is not None:
            known["jobs"] = [job for job in known["jobs"] if job["uid"] == uid]
            where = {job["mountpoint"] for job in known["jobs"]}
            known["mounts"] = [mount for mount in known["mounts"] if mount["mountpoint"] in where]
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._begun_s, 3),
            "connections": len(self._connections),
            **known,
            "ended": list(self._jobs.ended(uid)),
        }

    # ---- connections -----------------------------------------------------------------------------

    async def _serve(self, stream: trio.SocketStream, *, is_public: bool = False) -> None:
        frames = FrameStream(stream, frame_bytes_most=wire.CLIENT_FRAME_BYTES_MOST)
        try:
            peer = wire.peer_of(cast(socket.socket, stream.socket))
            guest = self._guest(cast(socket.socket, stream.socket), peer)
        except OSError as error:
            log.warning("a connection whose peer is unknown: %s", error)
            await frames.aclose()
            return
        connection = _Connection(frames, peer, guest)
        last_words = ""
        try:
            if guest is not None and not is_public:
                raise WireError("permission denied: this hintsd serves another user")
            if why := self._excess(connection):
                raise WireError(why)
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

    def _guest(self, connected: socket.socket, peer: wire.Peer) -> Guest | None:
        """Who that is, if none of ours. OSError."""
        if not is_guests(peer.uid):
            return None
        return Guest(identity_of(connected), self._jobs.rights)

    def _excess(self, connection: _Connection) -> str:
        """Why there cannot be this connection, too; "": there can."""
        if len(self._connections) >= CONNECTIONS_MOST:
            return f"there are {CONNECTIONS_MOST} connections already"
        if connection.guest is None:
            return ""
        uids = [other.peer.uid for other in self._connections if other.guest is not None]
        most = quota.CONNECTIONS_MOST, quota.CONNECTIONS_OF_ALL
        return quota.excess("connections", connection.peer.uid, uids, *most)

    def _array_bytes_most(self, connection: _Connection) -> tuple[int, int]:
        """Of the arrays of this connection: what they have, and what they take in the file."""
        if connection.guest is None:
            return messages.ARRAY_BYTES_MOST, messages.ENDS_MOST
        uid = connection.peer.uid
        others = (other for other in self._connections if other is not connection)
        held = sum(other.arrays.held_bytes for other in others if other.peer.uid == uid)
        most = max(0, quota.BYTES_MOST - held)
        return most, most

    def _release(self, connection: _Connection) -> None:
        connection.arrays.clear()
        job = connection.job
        connection.job = None
        if job is not None:
            job.detach()

    def _client_of(self, job: LiveJob | None) -> _Connection | None:
        """The connection that has this job."""
        has_it = (connection for connection in self._connections if connection.job is job)
        return None if job is None else next(has_it, None)

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
            "welcome", version=wire.VERSION, pid=os.getpid(), hintsd=__version__, **_KNOWN
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
                    mountpoint=job.info.mount.mountpoint,
                    samples_per_epoch=job.info.samples_per_epoch,
                    warnings=list(job.info.warnings),
                )
                connection.told = _HINTED if wants_state else None
            case "array":
                most = self._array_bytes_most(connection)
                await trio.to_thread.run_sync(connection.arrays.add, fields, *most)
            case "order":
                await send("planned", epoch=await self._order(connection, fields))
            case "scores":
                await self._score(connection, fields)
                await send("scored")
            case "cached":
                await self._tell_cached(connection, fields)
            case "chunk":
                number, chunk = self._next_chunk(connection, fields)
                await send("chunk", number=number, chunk=chunk)
            case "step":
                epoch, batch = messages.step(fields)
                if (live := connection.job) is not None and live.info and not live.is_over:
                    live.info.mount.step(live.name, epoch, batch)
            case "close":
                if connection.job is not None:
                    await self._jobs.end(connection.job, "closed by its trainer")
                    connection.job = None
                await send("closed")
            case "status":
                await send("status", **self.status(connection.guest))
            case "end":
                name = fields.str("job", NAME_LENGTH_MOST)
                ended = self._jobs.get(name)
                if ended is None or not _may_end(connection, ended):
                    raise Refusal(f"there is no job {name}; hintsd status shows the jobs")
                self._on_notice(name, f"job {name} was ended by process {connection.peer.pid}")
                await self._jobs.end(ended, "ended by a user")
                await send("ended")
            case _:
                raise WireError(f"unknown message {frame.type}")

    async def _order(self, connection: _Connection, fields: Fields) -> int:
        epoch, spec = await self._read(connection, "order", messages.order_spec, fields)
        name, mount = self._planned_by(connection, "order")
        try:
            self._jobs.admit(name, epoch, spec)
            await mount.order(name, epoch, spec)
        except JobRefused as refusal:
            raise Refusal(str(refusal)) from None
        return epoch

    async def _score(self, connection: _Connection, fields: Fields) -> None:
        sampled = messages.sampled(fields)
        uses = await self._read(connection, "scores", messages.scores, fields)
        name, mount = self._planned_by(connection, "scores")
        try:
            await mount.score(name, uses, sampled)
        except JobRefused as refusal:
            raise Refusal(f"scores: {refusal}") from None
        if (job := self._jobs.get(name)) is not None:
            job.score(uses)

    async def _tell_cached(self, connection: _Connection, fields: Fields) -> None:
        number, staged = messages.number(fields), messages.with_staged(fields)
        name, mount = self._planned_by(connection, "cached")
        try:
            samples, bits = await mount.cached(name, staged=staged)
        except JobRefused as refusal:
            raise Refusal(f"cached: {refusal}") from None
        for offset in range(0, len(bits), PIECE_BYTES):
            piece = bits[offset : offset + PIECE_BYTES]
            await connection.frames.send(
                "cached", number=number, samples=samples, offset=offset, data=piece
            )

    def _next_chunk(self, connection: _Connection, fields: Fields) -> tuple[int, int]:
        """The request's number, and the answer. Refusal."""
        number, (chunks, unread) = messages.number(fields), messages.unread_chunks(fields)
        name, mount = self._planned_by(connection, "chunk")
        try:
            return number, mount.next_chunk(name, chunks, unread)
        except JobRefused as refusal:
            raise Refusal(f"chunk: {refusal}") from None

    @staticmethod
    def _planned_by(connection: _Connection, kind: str) -> tuple[str, Mount]:
        """Its job's name, and the mount that plans it. Refusal."""
        job = connection.job
        if job is None or job.info is None or job.is_over:
            raise Refusal(f"{kind}: there is no job, or it has ended")
        return job.name, job.info.mount

    # ---- jobs ------------------------------------------------------------------------------------

    async def _open(self, connection: _Connection, fields: Fields) -> LiveJob:
        """The job of a `job` message, open: a new one, or the one that it resumes."""
        if connection.job is not None and not connection.job.is_over:
            raise WireError("job: this connection has one")
        peer = connection.peer
        resumed, is_of_others = messages.resumed_job(fields), messages.is_of_others(fields)
        hint = await self._read(connection, "job", messages.hint, fields)
        hint = await self._placed(hint, fields, connection.guest)
        pid = self._trainer(hint, peer, is_of_others=is_of_others)
        job = await self._jobs.resume(resumed, peer.uid, pid, hint)
        if job is None:
            try:
                job = self._jobs.begin(hint, peer.uid, pid, resumed or "", connection.guest)
            except JobRefused as refusal:
                raise Refusal(str(refusal)) from None
        del hint  # it may be long
        job.attach()
        if (before := self._client_of(job)) is not None:
            before.job = None  # this client's, of which it knows the end before we do
        connection.job = job
        await job.opened.wait()
        if job.info is None or job.refusal:
            connection.job = None
            raise Refusal(job.refusal or job.reason)
        return job

    @staticmethod
    async def _placed(hint: Hint, fields: Fields, guest: Guest | None) -> Hint:
        """With the path at which we see its dataset. Refusal."""
        try:
            place = messages.place(fields)
            return hint if place is None else await datasets.placed(hint, *place, guest)
        except (JobRefused, ValueError) as error:
            raise Refusal(str(error)) from None

    def _trainer(self, hint: Hint, peer: wire.Peer, *, is_of_others: bool) -> int | None:
        """The process whose end is to end the job. Refusal."""
        pid = hint.pid
        if pid is None:
            if hint.detached or is_of_others:
                return None
            pid = peer.pid
            if pid == 0:
                raise Refusal("hintsd cannot see your process: it is in another pid namespace")
        return pid

    async def _read(
        self, connection: _Connection, kind: str, read: Callable[[Fields, Arrays], T], of: Fields
    ) -> T:
        """What a message says, with the arrays that came before it: they may be long. Refusal."""

        def read_once() -> T:
            try:
                return read(of, connection.arrays)
            finally:
                connection.arrays.clear()

        try:
            return await trio.to_thread.run_sync(read_once, limiter=self._reading)
        except ValueError as error:
            raise Refusal(f"{kind}: {error}") from None

    # ---- what the Director tells -----------------------------------------------------------------

    def _on_notice(self, name: str, line: str) -> None:
        log.info("%s: %s", name, line)
        job = self._jobs.get(name)
        connection = self._client_of(job)
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
                is_now = _job_state(job, status)
                if is_now != told:
                    connection.told = is_now
                    connection.notices += 1
                    state, reason = is_now
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


def _listening(listener: socket.socket) -> trio.SocketListener:
    listener.setblocking(False)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener))


def _may_end(connection: _Connection, job: LiveJob) -> bool:
    return connection.guest is None or job.uid == connection.peer.uid


def _job_state(job: LiveJob, status: dict[str, Any]) -> JobState:
    """What a client is told of its job, by the Director's `status`."""
    if job.is_over:
        return "over", job.reason
    for mount in status["mounts"]:
        is_its = job.info is not None and mount["mountpoint"] == job.info.mount.mountpoint
        if is_its and not mount["connected"]:
            return "waiting", f"{mount['mountpoint']} {mount.get('reason', '')}"
    for known in status["jobs"]:
        if known["name"] != job.name:
            continue
        reason = known.get("reason") or ""
        if known["state"] == "wrong" or (known["state"] == "waiting" and reason):
            return known["state"], reason
    return _HINTED

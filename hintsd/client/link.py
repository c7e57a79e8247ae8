"""Link: what one job has to say to hintsd, and a thread behind the trainer's back that says it.

The trainer hands over what it has to say (`announce`, `step`) and goes on at once; the thread
connects, sends, reads the answers, and when hintsd goes away connects again and repeats what the
new hintsd has to know: the job, the last position, the orders from there on.

INVARIANT: nothing here raises into the trainer, and only `start` and `stop(wait_s)` wait, for at
most the time they are given (and who asks: `asking`). What goes wrong is told by one RuntimeWarning
per process and reason.
A forked child (a DataLoader worker) inherits the object, but neither thread nor connection.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, Literal, NoReturn, Protocol, get_args

from fusecache.base import wire
from hintsd.client.asking import Asking
from hintsd.client.connection import TEXT_BYTES_MOST, Connection, Stopped, fail, said
from hintsd.client.finding import (
    SOCKET_VARIABLE,
    NotMounted,
    Unhinted,
    find_socket,
    place_of,
)
from hintsd.client.summary import FAILED
from hintsd.client.warning import script_place, warn_once, was_warned
from hintsd.orders.hint import Files, Hint
from hintsd.orders.spec import OrderSpec, to_message

CONNECT_TIMEOUT_S: Final = 5.0  # of a hintsd that listens, and may be busy
ABSENT_S: Final = 0.5  # without any: a mount starts one a moment after it is there
STEP_INTERVAL_S: Final = 0.02
PAUSE_LEAST_S: Final = 0.05
PAUSE_MOST_S: Final = 1.0
LAST_ANSWER_TIMEOUT_S: Final = 0.5
ARRAY_PIECE_BYTES: Final = 1 << 20
INLINE_BYTES_MOST: Final = 1 << 16

State = Literal["waiting", "hinted", "wrong", "over"]

Listener = Callable[[str, str], object]
"""Takes a State, or FAILED, and why."""

Ways = tuple[Callable[[], Files], ...]
"""To say which files, tried in turn until one is accepted. Called in the thread: may be slow."""

_links: set[Link] = set()  # those with a thread, for the children of a fork


class JobState:
    """What a job is, and why."""

    def __init__(self) -> None:
        self._told: tuple[State, str] = ("waiting", "")  # by hintsd, on this connection
        self.is_over = False  # no thread will ever look again
        self._why_over = "closed"  # where hintsd has not said it
        self._listener: Listener | None = None
        self._lock = threading.Lock()  # what the listener is told comes in order

    def watch(self, listener: Listener) -> None:
        """It is told the state now, and when it changes: in the thread. What it holds, we hold."""
        with self._lock:
            self._listener = listener
            listener(*self.shown)

    def _notify(self, state: str, why: str) -> None:
        with self._lock:
            if self._listener is not None:
                self._listener(state, why)

    @property
    def shown(self) -> tuple[State, str]:
        told = self._told
        is_ours = self.is_over and told[0] != "over"
        return ("over", self._why_over) if is_ours else told

    def tell(self, state: str, reason: str = "") -> None:
        """hintsd says so; a state that is not known changes nothing."""
        for known in get_args(State):
            if state == known:
                self._told = known, reason
                self._notify(known, reason)

    def wait(self, why: str) -> None:
        """There is no connection."""
        if self._told[0] != "over":
            self._told = "waiting", why
            if why:
                self._notify("waiting", why)

    def explain(self, why: str) -> None:
        """Why it will be over, if hintsd says nothing."""
        self._why_over = why

    def fail(self, why: str) -> None:
        """It will be over because of that."""
        self.explain(why)
        self._notify(FAILED, why)

    def end(self) -> None:
        self.is_over = True


class _Agenda:
    """What is to be sent: orders, and the position. The trainer adds, the thread takes."""

    def __init__(self, epoch: int, batch: int) -> None:
        self.position = (epoch, batch)
        self._drawn = self.position  # told at the end, where it is further
        self.is_step_pending = False
        self._lock = threading.Lock()
        self._orders: dict[int, OrderSpec] = {}  # by epoch, from the position's epoch on
        self._unsent: list[int] = []
        self._scores: dict[str, Any] = {}  # the latest message; and whether it is to be sent
        self._are_scores_due = False

    def score(self, scores: dict[str, Any]) -> None:
        """What was told before is forgotten."""
        with self._lock:
            self._scores, self._are_scores_due = scores, True

    def take_scores(self) -> dict[str, Any]:
        """{}: there are none to be told."""
        with self._lock:
            is_due, self._are_scores_due = self._are_scores_due, False
            return self._scores if is_due else {}

    def announce(self, epoch: int, spec: OrderSpec) -> None:
        """What was told of epochs before the position is forgotten."""
        with self._lock:
            self._orders[epoch] = spec
            for old in [known for known in self._orders if known < self.position[0]]:
                del self._orders[old]
            if epoch not in self._unsent:
                self._unsent.append(epoch)

    def step(self, epoch: int, batch: int) -> bool:
        """Whether the thread has to be woken for it."""
        self.position = (epoch, batch)
        is_new, self.is_step_pending = not self.is_step_pending, True
        return is_new

    def draw(self, epoch: int, batches: int) -> None:
        self._drawn = (epoch, batches)

    def take_step(self) -> bytes:
        self.is_step_pending = False  # before the position is read: none is missed
        epoch, batch = self.position
        return wire.encode("step", {"epoch": epoch, "batch": batch})

    def take_last_step(self) -> bytes:
        """b"": there is none to be told."""
        if self._drawn > self.position:
            self.step(*self._drawn)
        return self.take_step() if self.is_step_pending else b""

    def take_order(self) -> tuple[int, OrderSpec] | None:
        with self._lock:
            while self._unsent:
                epoch = self._unsent.pop(0)
                spec = self._orders.get(epoch)
                if spec is not None:  # else the position has passed it
                    return epoch, spec
        return None

    def repeat(self) -> None:
        """All is to be sent, to another hintsd."""
        with self._lock:
            self._unsent = sorted(self._orders)
            self._are_scores_due = bool(self._scores)

    def clear(self) -> None:
        with self._lock:
            self._orders.clear()
            self._scores, self._are_scores_due = {}, False


class Teller(Protocol):
    """What a Job speaks to: a Link, or what takes its place."""

    @property
    def job(self) -> str | None: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def state(self) -> JobState: ...
    def start(self) -> None: ...
    def announce(self, epoch: int, spec: OrderSpec) -> None: ...
    def score(self, scores: dict[str, Any]) -> None: ...
    def asking(self, *kinds: str) -> Asking | None: ...
    def step(self, epoch: int, batch: int) -> None: ...
    def drawn(self, epoch: int, batches: int) -> None: ...
    def figures(self) -> dict[str, int] | None: ...
    def hear(self, timeout_s: float = 0.0) -> bool: ...
    def stop(self, wait_s: float = 0.0) -> None: ...
    def give_up(self, why: str) -> None: ...
    def leave(self, why: str) -> None: ...


class Link:
    """See the module. One job, one connection, one thread."""

    def __init__(self, hint: Hint, ways: Ways) -> None:
        self._hint = hint  # but for its files
        self._shown_path = os.fsdecode(hint.path)
        # no method of ours: what holds it must not keep us alive
        self._warn = functools.partial(warn_once, place=script_place())
        self._settled = threading.Event()  # welcome, or known to be without hints for now
        self._told = threading.Event()  # accepted, or a warning has said why not
        self._agenda = _Agenda(hint.start_epoch, hint.start_batch)
        self.state = JobState()
        """Looked at, and watched, by whoever wants."""
        self._ways = list(ways)
        self._job: str | None = None
        self._path = self._shown_path  # without links, once it was found
        self._is_described = False  # on this connection, so that there is something to close
        self._connection = Connection(self._warn)
        self._asking = Asking(self._connection.wake)
        self._thread = threading.Thread(target=self._run, name="hintsd", daemon=True)

    @property
    def job(self) -> str | None:
        """hintsd's name for the job; None before it was accepted, and when it never will be."""
        return None if self.is_over else self._job

    @property
    def is_over(self) -> bool:
        """Whether nothing that is said now will ever be sent."""
        return self.state.is_over

    def __str__(self) -> str:
        of = f" of {self._shown_path}" if self._shown_path else ""
        state, reason = self.state.shown
        why = f" ({reason})" if reason else ""
        return f"{self._job or 'unnamed'}{of}: {state}{why}"

    def start(self) -> None:
        """Begin; waits at most CONNECT_TIMEOUT_S for a hintsd that listens, some ABSENT_S without
        one, and not again in a process that has waited in vain."""
        try:
            self._connection.prepare()
            self._thread.start()
        except (OSError, RuntimeError) as error:  # no descriptor, or no thread, to be had
            self.state.fail(str(error))
            self.state.end()
            warn_once(f"going on without hints: {error}", "no resources")
            return
        _links.add(self)
        if not was_warned("absent") and not self._settled.wait(CONNECT_TIMEOUT_S):
            warn_once(
                f"no answer for {self._shown_path}; going on without hints until it comes",
                "absent",
            )
            self._told.set()

    def announce(self, epoch: int, spec: OrderSpec) -> None:
        """Tell the order of `epoch`; what was told of epochs before the position is forgotten."""
        if not self.is_over:
            self._agenda.announce(epoch, spec)
            self._connection.wake()

    def score(self, scores: dict[str, Any]) -> None:
        """Tell the scores (docs/WIRE.md); what was told before is forgotten."""
        if not self.is_over:
            self._agenda.score(scores)
            self._connection.wake()

    def asking(self, *kinds: str) -> Asking | None:
        """By which hintsd is asked; None: there is none, or it does not know of all these kinds."""
        return None if self.is_over or not self._connection.known >= {*kinds} else self._asking

    def step(self, epoch: int, batch: int) -> None:
        """Tell the position: `batch` batches of `epoch` have been handed out."""
        if not self.is_over and self._agenda.step(epoch, batch):
            self._connection.wake()

    def drawn(self, epoch: int, batches: int) -> None:
        """As `step`, of batches that are drawn and need not have been handed out: the job's last
        step, if none of a later epoch follows."""
        self._agenda.draw(epoch, batches)

    def figures(self) -> None:
        """hintsd has them."""

    def hear(self, timeout_s: float = 0.0) -> bool:
        """Wait so long at most for an answer, or a warning that there is none; whether one came."""
        return self._told.wait(timeout_s)

    def stop(self, wait_s: float = 0.0) -> None:
        """End the job; waits at most `wait_s` for hintsd to confirm it."""
        if self.is_over:
            return
        self._connection.stop()
        if wait_s > 0:
            self._thread.join(wait_s)

    def give_up(self, why: str) -> None:
        """End the job, with a warning that says why."""
        if not self.is_over and not self._connection.is_stopping:
            self.state.fail(why)
            self._warn(f"{why}; going on without hints")
            self.stop()

    def leave(self, why: str) -> None:
        """Be over without a word. In a forked child: the connection is the parent's."""
        self.state.explain(why)
        self.state.end()
        self._connection.leave()
        self.state.wait("")

    # Everything below runs in the thread.

    def _run(self) -> None:
        try:
            self._keep_up()
        except Stopped:
            self._say_goodbye()
        except Unhinted as problem:
            self.state.fail(str(problem))
            self._warn(str(problem), problem.reason)
        except wire.WireError as error:
            why = _not_understood(error)
            self.state.fail(why)
            self._warn(why, "protocol")
        except Exception as error:  # a fault of ours must not reach the trainer either
            why = f"going on without hints after an internal error: {error!r}"
            self.state.fail(why)
            self._warn(why)
        finally:
            self.state.end()
            self._disconnect()
            _links.discard(self)
            self._agenda.clear()
            self._settled.set()
            self._told.set()

    def _keep_up(self) -> NoReturn:
        """Connect again and again. Stopped; Unhinted, WireError: for good."""
        pause_s = PAUSE_LEAST_S
        started_s = time.monotonic()
        while True:
            begun_s = time.monotonic()
            try:
                self._connect()
                self._open_job()
                self._converse()
            except OSError as error:
                self._connection.hear_last_words()
                if self._connection.is_stopping:
                    self._connection.disconnect()
                    raise Stopped from None
                is_gone = error.filename == self._shown_path
                self._disconnect(
                    f"{error.filename} {error.strerror}" if is_gone else "no hintsd answers"
                )
                self._report(error, time.monotonic() - started_s)
            if time.monotonic() - begun_s > PAUSE_MOST_S:  # it was no failure at once
                pause_s = PAUSE_LEAST_S
            self._connection.pause(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MOST_S)

    def _disconnect(self, why: str = "") -> None:
        self.state.wait(why)
        self._connection.disconnect()
        self._asking.give_up()

    def _report(self, error: OSError, elapsed_s: float) -> None:
        if self._job is not None:
            self._warn("the connection was lost; going on without hints until it is back", "lost")
        elif elapsed_s >= ABSENT_S or was_warned("absent"):
            self._warn(_none_answers(self._shown_path, error), "absent")
            self._settled.set()
            self._told.set()

    def _connect(self) -> None:
        path = self._shown_path
        try:
            address, self._path = find_socket(path)
        except NotMounted:
            if self._job is None:
                raise
            # It was one: whoever mounts it again goes on with the job.
            raise FileNotFoundError(errno.ENOENT, "is not mounted any more", path) from None
        self._is_described = False
        self._connection.connect(address, CONNECT_TIMEOUT_S)
        self._settled.set()

    def _open_job(self) -> None:
        while True:
            for frame in self._job_frames(self._ways[0]()):
                self._connection.send(frame)
            self._is_described = True
            # Resolving millions of files takes its time; the connection's end is noticed anyway.
            answer = self._connection.expect("accepted", None, "rejected")
            if answer.type == "accepted":
                break
            if len(self._ways) == 1:
                fail(answer)
            del self._ways[0]
        self._job = answer.fields.str("job", wire.FRAME_BYTES_MOST)
        self.state.tell("hinted")
        for warning in answer.fields.strings("warnings", 64, wire.FRAME_BYTES_MOST):
            self._warn(warning)
        self._told.set()
        self._agenda.repeat()

    def _job_frames(self, files: Files) -> Iterator[bytes]:
        path, (epoch, batch) = os.fsencode(self._path), self._agenda.position
        hint = replace(self._hint, path=path, files=files, start_epoch=epoch, start_batch=batch)
        message = hint.to_message()
        arrays: dict[str, bytes] = {}
        message["files"] = _by_name(message["files"], arrays, 0)
        if message["spec"]:
            message["spec"] = _by_name(message["spec"], arrays, INLINE_BYTES_MOST)
        message.update(resume=self._job, tell_state=True, **place_of(self._path))
        yield from _array_frames(arrays)
        yield wire.encode("job", message)

    def _converse(self) -> None:
        """Until `stop`, before which all that is due is told; or OSError: the connection ends.

        To send may use up a `wake`: a round that has sent something is followed by another look.
        """
        next_step_s = 0.0
        while True:
            is_stopping = self._connection.is_stopping  # what is said after that may be lost
            step, timeout_s, has_sent = b"", None, False
            if self._agenda.is_step_pending:
                timeout_s = next_step_s - time.monotonic()
                if timeout_s <= 0:
                    step = self._agenda.take_step()  # and then its epoch's order, told before it
            for told in _told_frames(self._agenda, "scores" in self._connection.known):
                self._connection.send(told, is_last=True)
                has_sent = True
            if step:
                self._connection.send(step, is_last=True)
                next_step_s = time.monotonic() + STEP_INTERVAL_S
                has_sent = True
            if not is_stopping and (question := self._asking.take()):
                self._connection.send(question)
                has_sent = True
            if has_sent:
                continue
            if is_stopping:
                raise Stopped
            for frame in self._connection.hear(timeout_s):
                self._take_in(frame)

    def _take_in(self, frame: wire.Frame) -> None:
        """What hintsd says of its own accord. Stopped: it has ended the job."""
        if frame.type == "rejected":
            why = said(frame)
            if why.startswith(("cached: ", "chunk: ")):
                self._asking.give_up()
                return
            self._warn(why if why.startswith("scores: ") else f"an order was refused: {why}")
        elif frame.type == "warning":
            self._warn(said(frame))
        elif frame.type == "state":
            state = frame.fields.str("state", 64)
            self.state.tell(state, frame.fields.str("reason", TEXT_BYTES_MOST))
            if state == "over":
                raise Stopped
        elif frame.type == "cached":
            self._asking.take_in_cached(frame.fields)
        elif frame.type == "chunk":
            self._asking.take_in_chunk(frame.fields)
        elif frame.type == "error":
            fail(frame)
        elif frame.type not in ("planned", "scored"):
            raise wire.WireError(f"unexpected {frame.type}")

    def _say_goodbye(self) -> None:
        connection = self._connection
        with contextlib.suppress(OSError, wire.WireError, Unhinted):
            if connection.is_up and self._is_described:
                if step := self._agenda.take_last_step():
                    connection.send(step, is_last=True)
                connection.send(wire.encode("close", {}), is_last=True)
                connection.expect("closed", CONNECT_TIMEOUT_S, is_last=True)


def greet(path: str) -> None:
    """Have hintsd answer for the dataset at `path`, and tell it nothing. Unhinted: as a link of
    that dataset would warn now."""
    deadline = time.monotonic() + ABSENT_S
    while True:
        connection = Connection(lambda line: None)
        try:
            connection.prepare()
            connection.connect(find_socket(path)[0], CONNECT_TIMEOUT_S)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise Unhinted(_none_answers(path, error)) from None
        except wire.WireError as error:
            raise Unhinted(_not_understood(error)) from None
        finally:
            connection.disconnect()
        time.sleep(PAUSE_LEAST_S)


def _none_answers(path: str, error: OSError) -> str:
    return (
        f"none answers for {path} ({error.strerror or error}): hintsd "
        "serve, or fusecache mount of it, starts one; a container needs the directory of "
        f"its socket ({SOCKET_VARIABLE}); going on without hints until one does"
    )


def _not_understood(error: wire.WireError) -> str:
    return f"not understood, going on without hints: {error}"


def _told_frames(agenda: _Agenda, takes_scores: bool) -> Iterator[bytes]:
    """Of the scores, then of orders."""
    if (scores := agenda.take_scores()) and takes_scores:
        yield from scores_frames(scores)
    while (order := agenda.take_order()) is not None:
        epoch, spec = order
        arrays: dict[str, bytes] = {}
        named = _by_name(to_message(spec), arrays, INLINE_BYTES_MOST)
        yield from _array_frames(arrays)
        yield wire.encode("order", {"epoch": epoch, "spec": named})


def scores_frames(scores: dict[str, Any]) -> Iterator[bytes]:
    """A `scores` message, and before it the array that it names. `uses`: f4, little-endian."""
    arrays: dict[str, bytes] = {}
    named = _by_name(scores, arrays, INLINE_BYTES_MOST)
    yield from _array_frames(arrays)
    yield wire.encode("scores", named)


def _by_name(values: dict[str, Any], arrays: dict[str, bytes], length_most: int) -> dict[str, Any]:
    """`values`, its byte strings longer than `length_most` moved to `arrays` and named instead."""
    named = dict(values)
    for field, value in values.items():
        if isinstance(value, bytes) and len(value) > length_most:
            arrays[field] = value
            named[field] = {"array": field}
    return named


def _array_frames(arrays: dict[str, bytes]) -> Iterator[bytes]:
    for name, data in arrays.items():
        for offset in range(0, len(data), ARRAY_PIECE_BYTES):
            piece = memoryview(data)[offset : offset + ARRAY_PIECE_BYTES]
            fields = {"name": name, "total": len(data), "offset": offset, "data": piece}
            yield wire.encode("array", fields)


def _leave_all() -> None:
    for link in _links:
        link.leave("in a forked process")
    _links.clear()


def _end_all() -> None:
    """The interpreter ends: what is due to be said is said now, or never."""
    end_s = time.monotonic() + LAST_ANSWER_TIMEOUT_S
    links = list(_links)
    with contextlib.suppress(KeyboardInterrupt):
        for link in sorted(links, key=lambda link: not link.hear()):  # no link waits for another
            if link.hear(max(0.0, end_s - time.monotonic())):
                link.stop()
    for link in links:
        link.stop()
    with contextlib.suppress(KeyboardInterrupt):
        for link in links:  # a thread that has not said it by then never will
            link.stop(max(0.0, end_s - time.monotonic()))


atexit.register(_end_all)
os.register_at_fork(after_in_child=_leave_all)

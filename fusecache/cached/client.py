"""A mount's end of the cache service. Blocking; any thread.

INVARIANT: the service costs a mount time, never an error: what fails is a block that is not there.
A request takes REQUEST_S at most, one for many blocks MANY_S, a put PUT_S. After one that has
failed the service is left alone for AGAIN_S.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from fusecache import _native
from fusecache.base.digest import digest
from fusecache.base.units import BLOCK_BYTES
from fusecache.base.wire import Frame, WireError, peer_of
from fusecache.cached.group import BLAKE3, Data
from fusecache.cached.talk import (
    FINDS_MOST,
    NAME_BYTES,
    PUTS_MOST,
    Channel,
    Found,
    is_of_service,
    unpack_found,
)
from fusecache.store.types import Location

log = logging.getLogger(__name__)

REQUEST_S: Final = 0.9
MANY_S = PUT_S = 5.0
MAKE_S: Final = 60.0
AGAIN_S: Final = 10.0
"""One that failed a request is left alone so long."""
LOOK_S: Final = 2.0
"""It is asked so often what room there is."""
IDLE_MOST: Final = 4
SERVICE_USER: Final = "fusecache-cached"
PIECE_BYTES: Final = 1 << 20
_NOTHING: Final = Found(None)


class Refused(Exception):
    """By the service; one line."""


class CacheService:
    """Of one mount: the group of its manifest. Nothing is there before `use`."""

    def __init__(self, path: str) -> None:
        """`path`: of the socket."""
        self.path = path
        self.why_not = ""
        """Why it is not used; "": it is."""
        self.room_bytes = 0
        self._set = b""
        self._name = b""
        self._idle: list[Channel] = []
        self._lock = threading.Lock()
        self._off_until = 0.0
        self._is_used = False
        self._first = threading.Event()

    # ---- which group -----------------------------------------------------------------------------

    def use(self, digests: bytes) -> None:
        """From now on: the group with this set (sorted, each once), in a thread of its own."""
        self._set, self._name = digests, digest(BLAKE3, digests)
        self.why_not = f"--cache {self.path}: it has not answered yet"
        threading.Thread(target=self._watch_forever, name="cache service", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Until it was tried once, so long at most."""
        self._first.wait(seconds)

    @property
    def is_used(self) -> bool:
        return self._is_used and time.monotonic() >= self._off_until

    def _watch_forever(self) -> None:
        while True:
            with contextlib.suppress(OSError, WireError, Refused):
                self._look()
                if self.is_used:
                    self.forget_gone()
            self._first.set()
            time.sleep(LOOK_S if self._is_used else AGAIN_S)

    def _look(self) -> None:
        """Join the group, or see how it is. Raises what is wrong, which is noted."""
        try:
            with self._channel(partial(self._connect, MAKE_S)) as channel:
                answer = _ask(channel, "group", name=self._name)
                if not answer.fields.bool("known"):
                    self._make(channel)
                    answer = _ask(channel, "group", name=self._name)
                self.room_bytes = answer.fields.int("room", 0, 1 << 60)
        except (OSError, WireError, Refused) as error:
            self._is_used = False
            why = f"--cache {self.path}: {getattr(error, 'strerror', None) or error}"
            if why != self.why_not:
                log.warning("%s: the mount's own cache is used", why)
            self.why_not = why
            raise
        if not self._is_used:
            log.info("cache service %s: it is used", self.path)
        self.why_not, self._is_used = "", True

    def _make(self, channel: Channel) -> None:
        _ask(channel, "make", name=self._name, count=len(self._set) // NAME_BYTES)
        view = memoryview(self._set)
        for at in range(0, len(view), PIECE_BYTES):
            channel.send_bytes(view[at : at + PIECE_BYTES])
        _answer(channel)

    # ---- connections -----------------------------------------------------------------------------

    def _connect(self, timeout_s: float) -> Channel:
        """OSError, also where somebody else serves."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(REQUEST_S)
            if not stat.S_ISSOCK(os.stat(self.path).st_mode):
                raise OSError("it is no socket")
            connection.connect(self.path)
            uid = peer_of(connection).uid
            if uid not in (0, os.geteuid()) and _user(uid) != SERVICE_USER:
                raise PermissionError(f"{_user(uid)} serves it: not root, {SERVICE_USER} or you")
        except BaseException:
            connection.close()
            raise
        return Channel(connection, timeout_s)

    def _join(self) -> Channel:
        """A connection about our group."""
        channel = self._connect(REQUEST_S)
        try:
            if not _ask(channel, "group", name=self._name).fields.bool("known"):
                raise Refused("the group is gone")
        except BaseException:
            channel.close()
            raise
        return channel

    @contextlib.contextmanager
    def _channel(
        self, new: Callable[[], Channel] | None = None, wait_s: float = REQUEST_S
    ) -> Iterator[Channel]:
        """One that nobody else has, an idle one or a `new` one; closed if the block fails. Answers
        are waited for so long.
        """
        with self._lock:
            channel = self._idle.pop() if self._idle and new is None else None
        if channel is None:
            channel = (new or self._join)()
        if new is None:
            channel.wait_at_most(wait_s)
        try:
            yield channel
        except BaseException:
            channel.close()
            raise
        with self._lock:
            if len(self._idle) < IDLE_MOST and new is None:
                self._idle.append(channel)
                return
        channel.close()

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, WireError, Refused) as error:
            with self._lock:
                idle, self._idle = self._idle, []
            for channel in idle:
                channel.close()
            self._off_until = time.monotonic() + AGAIN_S
            log.warning("cache service %s: %s; not asked for %g s", self.path, error, AGAIN_S)

    # ---- blocks ----------------------------------------------------------------------------------

    def find(
        self, names: Sequence[bytes], lengths: Sequence[int], promise: bool = False
    ) -> list[Found]:
        """Where these blocks lie in the service's segments. With `promise` those that are nowhere
        will be read and `put` by us, unless another mount has promised that.
        """
        found: list[Found] = []
        with self._contained():
            while self.is_used and len(found) < len(names):
                some = slice(len(found), len(found) + FINDS_MOST)
                # A reader waits for a single one.
                with self._channel(wait_s=REQUEST_S if len(names) == 1 else MANY_S) as channel:
                    answer = _ask(
                        channel,
                        "find",
                        digests=b"".join(names[some]),
                        lengths=np.array(lengths[some], "u4"),
                        promise=promise,
                    )
                    places = answer.fields.bytes("at", 1 << 20)
                    found += unpack_found(places, lengths[some])
        return found + [_NOTHING] * (len(names) - len(found))

    def open_segment(self, segno: int) -> int | None:
        """A read-only descriptor, the caller's; None: it is gone."""
        descriptor = -1
        if self.is_used:
            with self._contained(), self._channel() as channel:
                channel.send("segment", segno=segno)
                frame, descriptor = _received(channel)
                if frame.type != "ok" and descriptor >= 0:
                    os.close(descriptor)
                    descriptor = -1
                if frame.type not in ("ok", "gone"):
                    raise WireError(f"segment: {frame.type}")
        return descriptor if descriptor >= 0 else None

    def put(self, blocks: Sequence[tuple[bytes, Data]]) -> list[Location | None]:
        """(digest, bytes): where each lies now; None: the service would not have it."""
        found: list[Location | None] = []
        with self._contained():
            while self.is_used and len(found) < len(blocks):
                some = _first(blocks[len(found) :])
                lengths = [len(data) for _, data in some]
                with self._channel(wait_s=PUT_S) as channel:
                    answer = _ask(
                        channel,
                        "put",
                        b"".join(data for _, data in some),
                        digests=b"".join(name for name, _ in some),
                        lengths=np.array(lengths, "u4"),
                    )
                    places = unpack_found(answer.fields.bytes("at", 1 << 20), lengths)
                found += [each.at for each in places]
                self.room_bytes = max(0, self.room_bytes - sum(lengths))
        return found + [None] * (len(blocks) - len(found))

    def doubt(self, segno: int, offset: int) -> None:
        """The record there was bad."""
        if self.is_used:
            with self._contained(), self._channel(wait_s=PUT_S) as channel:
                _ask(channel, "bad", segno=segno, offset=offset)

    def forget_gone(self) -> None:
        """Segments that the service has removed are open here no more."""
        known = [segno for segno in _native.segment_reads() if is_of_service(segno)]
        for at in range(0, len(known), FINDS_MOST):
            some = known[at : at + FINDS_MOST]
            with self._channel() as channel:
                answer = _ask(channel, "living", segnos=np.array(some, "u4"))
            living = set(answer.fields.array("segnos", "u4").tolist())
            for segno in set(some) - living:
                _native.segment_drop(segno)


def _first(blocks: Sequence[tuple[bytes, Data]]) -> Sequence[tuple[bytes, Data]]:
    """As many as go in one request, at least one."""
    count = total = 0
    for _, data in blocks[:PUTS_MOST]:
        total += len(data)
        if count and total > BLOCK_BYTES:
            break
        count += 1
    return blocks[:count]


def _ask(channel: Channel, type_: str, data: bytes = b"", **fields: Any) -> Frame:
    """OSError, WireError, Refused."""
    channel.send(type_, data, **fields)
    return _answer(channel)


def _answer(channel: Channel) -> Frame:
    frame, descriptor = _received(channel)
    if descriptor >= 0:
        os.close(descriptor)
        raise WireError(f"{frame.type}: a descriptor that was not asked for")
    if frame.type == "refused":
        raise Refused(frame.fields.str("why", 1000))
    if frame.type not in ("ok", "found"):
        raise WireError(f"an answer that is none: {frame.type}")
    return frame


def _received(channel: Channel) -> tuple[Frame, int]:
    received = channel.receive()
    if received is None:
        raise ConnectionResetError("the service has closed the connection")
    return received


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"

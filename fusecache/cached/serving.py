"""The process `fusecache cached`: a thread a connection; docs/CACHED.md, The socket.

INVARIANT: whatever a connection says, it costs no other connection more than its share of the
processors: what it sends is bounded, and it ends with the first request that is none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from fusecache.base.digest import digest
from fusecache.base.units import BLOCK_BYTES
from fusecache.base.wire import Fields, Peer, WireError, peer_of
from fusecache.cached.group import BLAKE3, Group, NotAGroup
from fusecache.cached.groups import Groups, NoRoom
from fusecache.cached.talk import (
    FINDS_MOST,
    NAME_BYTES,
    PUTS_MOST,
    Channel,
    Found,
    names_of,
    pack_found,
)

log = logging.getLogger(__name__)

REQUEST_S: Final = 10.0
CONNECTIONS_MOST, CONNECTIONS_OF_USER = 1024, 64
DIGESTS_MOST: Final = 1 << 28
"""Of a group: 8 GB of them."""
PIECE_BYTES: Final = 1 << 20
HOUSEKEEPING_S: Final = 1.0
_FINDING: Final = threading.BoundedSemaphore(4)  # more threads at it are slower, all of them


class Service:
    """One service on one socket."""

    def __init__(self, groups: Groups, listener: socket.socket) -> None:
        """`listener` listens."""
        self._groups = groups
        self._listener = listener
        listener.setblocking(False)
        self._told, self._tell = socket.socketpair()
        self._lock = threading.Lock()
        self._open: dict[Channel, int] = {}  # uid
        self._is_over = threading.Event()

    def run(self) -> None:
        """Until `stop`."""
        house = threading.Thread(target=self._keep_house, name="housekeeping", daemon=True)
        house.start()
        while not self._is_over.is_set():
            select.select([self._listener, self._told], [], [])
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError:
                time.sleep(0.1)  # no descriptor is left
                continue
            self._begin(connection)
        house.join()
        self._told.close()
        self._tell.close()
        with self._lock:
            channels = list(self._open)
        for channel in channels:
            channel.shut_down()
        self._groups.close()

    def stop(self) -> None:
        """Any thread, a signal's handler too. The socket goes on to listen: it may be systemd's."""
        self._is_over.set()
        with contextlib.suppress(OSError):  # it has ended
            self._tell.send(b".")

    def _keep_house(self) -> None:
        fault = ""
        while not self._is_over.wait(HOUSEKEEPING_S):
            try:
                self._groups.keep_house()
                fault = ""
            except OSError as error:
                if fault != str(error):
                    log.error("housekeeping: %s", error)
                fault = str(error)
            except Exception:
                log.exception("housekeeping")

    # ---- connections -----------------------------------------------------------------------------

    def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        channel = Channel(connection, REQUEST_S)
        try:
            peer = peer_of(connection)
            with self._lock:
                users = Counter(self._open.values())
                if len(self._open) >= CONNECTIONS_MOST or users[peer.uid] >= CONNECTIONS_OF_USER:
                    raise OSError("too many connections")
                self._open[channel] = peer.uid
            threading.Thread(target=self._serve, args=(channel, peer), daemon=True).start()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread is to be had
            log.warning("a connection is refused: %s", error)
            with self._lock:
                self._open.pop(channel, None)
            channel.close()

    def _serve(self, channel: Channel, peer: Peer) -> None:
        conversation = Conversation(self._groups, channel, peer)
        try:
            conversation.run()
        except WireError as error:
            log.info("uid %d: %s", peer.uid, error)
        except OSError as error:
            log.debug("uid %d: %s", peer.uid, error)
        except Exception:
            log.exception("uid %d", peer.uid)
        finally:
            conversation.end()
            with self._lock:
                del self._open[channel]
            channel.close()


class Conversation:
    """One connection; its thread's alone."""

    def __init__(self, groups: Groups, channel: Channel, peer: Peer) -> None:
        self._groups, self._channel, self._uid = groups, channel, peer.uid
        # Of promises: a mount has several connections.
        self._holder = (peer.pid, peer.uid)
        self._group: Group | None = None
        groups.promises.came(self._holder)

    def run(self) -> None:
        """WireError, OSError: it is over."""
        requests = {
            "group": self._use,
            "make": self._make,
            "find": self._find,
            "segment": self._segment,
            "put": self._put,
            "bad": self._doubt,
            "living": self._living,
        }
        while (received := self._channel.receive(waits=True)) is not None:
            frame, descriptor = received
            if descriptor >= 0:
                os.close(descriptor)
            if frame.type not in requests:
                raise WireError(f"no request: {frame.type}")
            requests[frame.type](frame.fields)

    def end(self) -> None:
        """Of the connection."""
        self._leave()
        self._groups.promises.went(self._holder)

    def _leave(self) -> None:
        if self._group is not None:
            self._groups.leave(self._group)
            self._group = None

    def _ours(self, frame: str) -> Group:
        if self._group is None:
            raise WireError(f"{frame}: no group was named")
        if self._group.is_closed:  # the mount is to make it anew
            raise WireError(f"{frame}: the group is gone")
        return self._group

    # ---- requests --------------------------------------------------------------------------------

    def _use(self, fields: Fields) -> None:
        name = _name(fields, "name")
        self._leave()
        self._group = group = self._groups.use(name)
        room = self._groups.room_bytes(group) if group is not None else 0
        self._channel.send("ok", known=group is not None, room=room)

    def _make(self, fields: Fields) -> None:
        name, count = _name(fields, "name"), fields.int("count", 1, DIGESTS_MOST)
        try:
            new = self._groups.begin(name, self._uid, count * NAME_BYTES)
        except (NoRoom, OSError) as error:
            self._channel.send("refused", why=str(error))
            return
        try:
            self._channel.send("ok")
            left = count * NAME_BYTES
            while left:
                piece = self._channel.bytes(min(left, PIECE_BYTES))
                new.add(piece)
                left -= len(piece)
            self._groups.add(new)
            self._channel.send("ok")
        except NotAGroup as error:
            self._channel.send("refused", why=str(error))
        except OSError as error:  # of the disk; the connection, if it was that, ends
            self._channel.send("refused", why=f"it cannot be made: {error.strerror or error}")
        finally:
            self._groups.end(new)

    def _find(self, fields: Fields) -> None:
        group, names = self._ours("find"), names_of(fields)
        lengths = _lengths(fields, names)
        promise = fields.bool("promise")
        with _FINDING:
            found = self._groups.find(group, names, lengths, self._holder, self._uid, promise)
        self._channel.send("found", at=pack_found(found))

    def _segment(self, fields: Fields) -> None:
        # Descriptors that nobody takes count for the service's user.
        if self._channel.unread_bytes():
            raise WireError("segment: the answers before it were not read")
        fd = self._ours("segment").open_segment(fields.int("segno", 1, (1 << 32) - 1))
        if fd is None:
            self._channel.send("gone")
            return
        try:
            self._channel.send("ok", descriptor=fd)
        finally:
            os.close(fd)

    def _put(self, fields: Fields) -> None:
        group, names = self._ours("put"), names_of(fields, PUTS_MOST)
        lengths = _lengths(fields, names)
        if not all(lengths) or sum(lengths) > BLOCK_BYTES:
            raise WireError("put: nothing, or more than a block has")
        data = memoryview(self._channel.bytes(sum(lengths)))
        good: dict[int, tuple[bytes, memoryview]] = {}  # by its number in the request
        for number, (name, length) in enumerate(zip(names, lengths, strict=True)):
            block, data = data[:length], data[length:]
            if name in group and digest(BLAKE3, block) == name:
                good[number] = name, block
            else:
                self._groups.promises.end(name, self._holder)
        places = self._groups.put(group, list(good.values())) if good else []
        at = dict(zip(good, places, strict=True))
        found = [Found(at.get(number)) for number in range(len(names))]
        self._channel.send("found", at=pack_found(found))

    def _doubt(self, fields: Fields) -> None:
        group, segno = self._ours("bad"), fields.int("segno", 1, (1 << 32) - 1)
        group.doubt(segno, fields.int("offset", 0, (1 << 63) - 1))
        self._channel.send("ok")

    def _living(self, fields: Fields) -> None:
        segnos = fields.array("segnos", "u4")
        if len(segnos) > FINDS_MOST:
            raise WireError("living: too many")
        living = self._ours("living").living(frozenset(segnos.tolist()))
        self._channel.send("ok", segnos=np.array(sorted(living), "u4"))


def _lengths(fields: Fields, names: Sequence[bytes]) -> list[int]:
    lengths: list[int] = fields.array("lengths", "u4").tolist()
    if len(lengths) != len(names):
        raise WireError("lengths: not one for each digest")
    return lengths


def _name(fields: Fields, field: str) -> bytes:
    name = fields.bytes(field, NAME_BYTES)
    if len(name) != NAME_BYTES:
        raise WireError(f"{field}: not 32 bytes")
    return name

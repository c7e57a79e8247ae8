"""Commands to servers of the engine, other than for blocks: slots, members, figures.

All is blocking, for at most a few seconds a server: for worker threads and for the command line.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, Self, TypeVar

import valkey
from valkey.exceptions import ResponseError, ValkeyError

from fusecache.pool.address import SERVERS_MOST, Credentials, PoolAddress
from fusecache.pool.slots import NO_SERVER, SLOTS, slot_of
from fusecache.pool.view import ranked

TIMEOUT_S: Final = 2.0
ANSWER_BYTES_MOST: Final = 64 << 20
MEMBER_S: Final = 15.0
"""A member that has not written for so long is gone."""

Server = tuple[str, str]  # host, port
T = TypeVar("T")


class Unreachable(Exception):
    """A server that does not answer, or not this; one line."""


class Cluster(NamedTuple):
    servers: list[Server]
    slots: bytes
    """The index of each slot's server; NO_SERVER: none has it."""


class _Bounded:
    """A socket by which an answer ends at ANSWER_BYTES_MOST, whatever length it begins with."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._left = ANSWER_BYTES_MOST

    def sendall(self, *sent: Any) -> None:
        self._left = ANSWER_BYTES_MOST
        self._sock.sendall(*sent)

    def recv(self, *how: Any) -> bytes:
        found: bytes = self._sock.recv(*how)
        self._count(len(found))
        return found

    def recv_into(self, *how: Any) -> int:
        length: int = self._sock.recv_into(*how)
        self._count(length)
        return length

    def _count(self, length: int) -> None:
        self._left -= length
        if self._left < 0:
            raise OSError("an answer of more than 64 MiB")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class _PlainConnection(valkey.Connection):
    def _connect(self) -> Any:
        return _Bounded(super()._connect())  # type: ignore[no-untyped-call]


class _TlsConnection(valkey.Connection):
    """The library's own trusts all that the system trusts, besides the CA that it is given."""

    def __init__(self, *, credentials: Credentials, **how: Any) -> None:
        super().__init__(**how)  # type: ignore[no-untyped-call]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # it compares names, too
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(credentials.ca)
        if credentials.certificate is not None:
            context.load_cert_chain(credentials.certificate, credentials.private_key)
        self._context = context

    def _connect(self) -> Any:
        sock = super()._connect()  # type: ignore[no-untyped-call]
        try:
            return _Bounded(self._context.wrap_socket(sock, server_hostname=self.host))
        except BaseException:
            sock.close()
            raise


class Engine:
    """The way into one pool. It keeps a connection to each server that it has asked until `close`,
    or until that fails: with TLS one costs more than all that is asked.
    """

    def __init__(
        self, address: PoolAddress, credentials: Credentials, password: str | None
    ) -> None:
        self._address = address
        self._password = password
        self._credentials = credentials
        self._members = f"{address.prefix}members"
        self._clients: dict[Server, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for server in list(self._clients):
            self._forget(server)

    def _open(self, server: Server) -> Any:
        how: dict[str, Any] = {
            "host": server[0], "port": int(server[1]), "username": self._credentials.user,
            "password": self._password, "socket_timeout": TIMEOUT_S,
            "socket_connect_timeout": TIMEOUT_S, "lib_name": None, "lib_version": None,
            "connection_class": _PlainConnection,
        }  # fmt: skip
        if self._address.is_tls:
            how |= {"connection_class": _TlsConnection, "credentials": self._credentials}
        pool = valkey.ConnectionPool(**how)
        return valkey.Valkey.from_pool(pool)

    def _ask(self, server: Server, *command: Any, read: Callable[[Any], T]) -> T:
        """What `read` makes of the answer. Unreachable: there is none, or none that it can read."""
        try:
            if server not in self._clients:
                self._clients[server] = self._open(server)
            return read(self._clients[server].execute_command(*command))
        except ResponseError as error:  # an answer, too
            raise Unreachable(f"{server[0]}:{server[1]}: {_line(error)}") from error
        except (ValkeyError, OSError) as error:
            self._forget(server)
            raise Unreachable(f"{server[0]}:{server[1]}: {_line(error)}") from error
        except Exception as error:  # of the library, and ours, about answers that are none
            self._forget(server)
            raise Unreachable(f"{server[0]}:{server[1]}: no answer to {command[0]}") from error

    def _forget(self, server: Server) -> None:
        if (client := self._clients.pop(server, None)) is not None:
            client.close()

    def cluster(self, server: Server) -> Cluster | None:
        """None: it is an independent server. Unreachable."""

        def read(ranges: Any) -> Cluster:
            servers: list[Server] = []
            slots = bytearray([NO_SERVER]) * SLOTS
            for first, last, (host, port, *_), *_ in ranges:
                name = ((host or b"").decode() or server[0], str(int(port)))
                if name not in servers:
                    servers.append(name)
                for slot in range(first, last + 1):
                    slots[slot] = servers.index(name)
            return Cluster(servers, bytes(slots))

        try:
            found = self._ask(server, "CLUSTER", "SLOTS", read=read)
        except Unreachable as error:
            if isinstance(error.__cause__, ResponseError):
                return None
            raise
        if len(found.servers) > SERVERS_MOST:
            where = f"{server[0]}:{server[1]}"
            raise Unreachable(f"{where}: a Cluster of {len(found.servers)}: at most {SERVERS_MOST}")
        return found

    # ---- members ---------------------------------------------------------------------------------

    @property
    def members_slot(self) -> int:
        """Of a Cluster."""
        return slot_of(self._members.encode())

    def members_at(self, names: Iterable[str]) -> list[str]:
        """Of independent servers: members are with the first of these that answers."""
        return ranked(self._members, names)

    def answers(self, server: Server) -> bool:
        try:
            self._now(server)
        except Unreachable:
            return False
        return True

    def _now(self, server: Server) -> float:
        return self._ask(server, "TIME", read=lambda time: float(time[0]))

    def write_member(self, server: Server, name: str, figures: Mapping[str, Any]) -> None:
        """Unreachable."""
        text = json.dumps({**figures, "at": self._now(server)})
        self._ask(server, "HSET", self._members, name, text, read=int)
        self._ask(server, "EXPIRE", self._members, int(20 * MEMBER_S), read=bool)

    def members(self, server: Server) -> dict[str, dict[str, Any]]:
        """Those that live, by name: what they wrote last, with `age_s`. Unreachable."""
        now = self._now(server)
        return self._ask(server, "HGETALL", self._members, read=partial(_living, now_s=now))

    # ---- small values ----------------------------------------------------------------------------

    def get(self, server: Server, key: str) -> bytes | None:
        """Unreachable."""

        def read(value: Any) -> bytes | None:
            return None if value is None else bytes(memoryview(value))

        return self._ask(server, "GET", key, read=read)

    def put(self, server: Server, key: str, value: bytes, milliseconds: int, is_new: bool) -> bool:
        """It expires. False: `is_new`, but the key was there. Unreachable."""
        new = ["NX"] if is_new else []
        return self._ask(server, "SET", key, value, "PX", milliseconds, *new, read=bool)

    def remove(self, server: Server, key: str) -> None:
        """Unreachable."""
        self._ask(server, "UNLINK", key, read=int)

    # ---- figures ---------------------------------------------------------------------------------

    def figures(self, server: Server) -> dict[str, Any]:
        """Of one server, those of INFO that an administrator asks for. Of a host: blocks that it
        was asked for, had on SSD, and has read for that. Unreachable.
        """
        begun = time.monotonic()
        found = self._ask(server, "INFO", "everything", read=_info)
        return {
            "answers_in_s": time.monotonic() - begun,
            "version": found.get(
                "fusecache_version", found.get("valkey_version", found.get("redis_version"))
            ),
            "used_bytes": found.get("used_memory"),
            "limit_bytes": found.get("maxmemory"),
            "policy": found.get("maxmemory_policy"),
            "evicted": found.get("evicted_keys"),
            "clients": found.get("connected_clients"),
            "requests": found.get("requests"),
            "hits": found.get("hits"),
            "fetched": found.get("fetched"),
        }


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _living(found: dict[bytes, bytes], now_s: float) -> dict[str, dict[str, Any]]:
    members: dict[str, dict[str, Any]] = {}
    for name, text in found.items():
        try:
            figures = json.loads(text)
            age_s = now_s - float(figures.pop("at"))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # not ours, or of another version
        if age_s <= MEMBER_S:
            members[name.decode(errors="replace")] = {**figures, "age_s": max(0.0, age_s)}
    return members


def _info(text: bytes | dict[str, Any]) -> dict[str, Any]:
    if isinstance(text, dict):
        return text
    pairs = (
        line.split(":", 1) for line in text.decode(errors="replace").splitlines() if ":" in line
    )
    return {name: int(value) if value.isdigit() else value for name, value in pairs}

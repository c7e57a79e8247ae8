"""One mount's part in a pool: where its servers are, and what the other hosts are told of us.

The blocks themselves are C's (native/pool). Whatever fails here leaves things as they were.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import trio

from fusecache import __version__, _native
from fusecache.pool.address import Credentials, PoolAddress
from fusecache.pool.slots import NO_SERVER, place_with_heirs, slot_of
from fusecache.pool.view import Looks, Members, agreed

if TYPE_CHECKING:
    from fusecache.pool.engine import Engine

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
REFRESH_S: Final = 5.0
LOOKS_MOST: Final = 8
LOCATE_WAIT_S: Final = 2.0

Server = tuple[str, str]  # host, port


class Hosts:
    """Of one mount."""

    def __init__(
        self,
        address: PoolAddress,
        credentials: Credentials,
        name: str,
        figures: Callable[[], dict[str, Any]],
        min_age_s: float,
        patience_s: float,
        listen: Server | None = None,
        held: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        """`name`: of this member, unique. `figures`: what it tells of itself. `patience_s`: what is
        done for one block takes no longer. Of peers: `listen`: where others are answered; `held`:
        bytes on SSD, and their limit.

        ValueError: a file of the credentials is no good; one line.
        """
        credentials.open_all()
        self._address = address
        self._credentials = credentials
        self._password = credentials.password()
        self._name = name
        self._figures = figures
        self.patience_s = patience_s
        self._listen, self._held = listen, held
        self._is_listening = False
        self._is_cluster = False
        self._away: dict[str, str] = {}  # by server, why
        self._fault = ""  # of the last refresh
        self._moved = 0
        self._answered: Server | None = None
        self._first: Server | None = None  # has the members, where servers are independent
        self._looks, self._members = Looks(), Members()
        self._without: frozenset[str] = frozenset()
        self._located = trio.Event()
        try:
            _native.pool_begin(
                address.dataset, credentials.user, self._password, credentials.ca,
                credentials.certificate, credentials.private_key, int(min_age_s * 1e9),
                int(patience_s * 1e9), address.has_peers,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"--pool: {error}") from None
        self._slots = b""
        self._share_out_evenly(frozenset())

    # ---- as long as the mount lives --------------------------------------------------------------

    @property
    def has_peers(self) -> bool:
        return self._address.has_peers

    async def watch_forever(self) -> None:
        await trio.to_thread.run_sync(self._begin, abandon_on_cancel=True)
        self._located.set()
        while True:
            await trio.to_thread.run_sync(self._refresh, abandon_on_cancel=True)
            until = trio.current_time() + REFRESH_S
            while trio.current_time() < until:
                self._tell_changes()
                if (moved := _native.pool_counters()["moved"]) != self._moved:
                    self._moved = moved
                    break
                await trio.sleep(LOOK_S)

    async def until_located(self) -> None:
        """Addresses of the servers were looked for, or that takes long."""
        with trio.move_on_after(LOCATE_WAIT_S):
            await self._located.wait()

    def _begin(self) -> None:
        """Blocking: before the first read, so that this host does not ask itself."""
        if fault := self._reach():
            self._fault = fault
            log.warning("pool: %s", fault)

    def _reach(self) -> str:
        """Where the servers are, and our own port, whichever of them fails. What was wrong; "":
        nothing.
        """
        faults = [self._resolve(self._address.servers), self._answer_others()]
        return next(filter(None, faults), "")

    def _answer_others(self) -> str:
        """Listen, as soon as the address is free, and find out which server we are. What is wrong;
        "": nothing.
        """
        if self._listen is None:
            return ""
        host, port = self._listen
        if not self._is_listening:
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                _native.serve_begin(str(found[0][4][0]), port)
            except (OSError, UnicodeError) as error:
                why = getattr(error, "strerror", None) or error
                return f"--pool-listen {host}:{port}: {why}"
            self._is_listening = True
        _native.serve_holds(*self._held(), __version__)
        if self._self is None:
            with ThreadPoolExecutor(LOOKS_MOST) as threads:
                ours = [_native.pool_server(*server) for server in self._address.servers]
                list(threads.map(_native.pool_meet, ours))
        return "" if self._self else "this host is none of the servers that the URL names"

    @property
    def _self(self) -> str | None:
        """The server that this process is."""
        ours = {(row["host"], row["port"]) for row in _native.pool_servers() if row["is_self"]}
        return next(
            (f"{host}:{port}" for host, port in self._address.servers if (host, port) in ours), None
        )

    def _refresh(self) -> None:
        """Blocking: names, slots, our own record, the others'."""
        from fusecache.pool.engine import Engine  # 0.1 s, for mounts with a pool alone

        before = self._fault
        try:
            with Engine(self._address, self._credentials, self._password) as engine:
                self._fault = self._look_around(engine)
        except Exception as error:  # INVARIANT: nothing that servers and resolvers say ends a mount
            self._fault = f"{type(error).__name__}: {error}"
            log.debug("pool", exc_info=True)
        if self._fault and self._fault != before:
            log.warning("pool: %s", self._fault)

    def _look_around(self, engine: Engine) -> str:
        """What was wrong; "": nothing."""
        from fusecache.pool.engine import Unreachable

        fault = self._reach()
        if not self.has_peers:
            fault = self._find_cluster(engine) or fault
        try:
            if self._is_cluster:
                self._tell_cluster(engine)
            else:
                self._agree(engine)
        except Unreachable as error:
            fault = fault or str(error)
        return fault

    def _find_cluster(self, engine: Engine) -> str:
        """What was wrong; "": nothing."""
        from fusecache.pool.engine import Unreachable

        fault = ""
        for server in sorted(self._address.servers, key=lambda one: one != self._answered):
            try:
                cluster = engine.cluster(server)
            except Unreachable as error:
                fault = str(error)
                continue
            self._answered = server  # is asked first: others may hang
            if cluster is not None:
                self._share_out(cluster.servers, cluster.slots)
                self._is_cluster = True
                fault = self._resolve(cluster.servers) or fault
            break
        return fault

    def _tell_cluster(self, engine: Engine) -> None:
        """Unreachable."""
        index = self._slots[engine.members_slot]
        if index != NO_SERVER:
            at = _native.pool_servers()[index]
            engine.write_member((at["host"], at["port"]), self._name, self._record())

    def _agree(self, engine: Engine) -> None:
        """Independent servers: those that most members say are away have no slots. Unreachable."""
        servers = {f"{host}:{port}": (host, port) for host, port in self._address.servers}
        with ThreadPoolExecutor(LOOKS_MOST) as threads:
            looks = threads.map(engine.answers, servers.values())
            answered = dict(zip(servers, looks, strict=True))
        away = self._looks.note(answered)
        first = next((name for name in engine.members_at(servers) if answered[name]), None)
        self._first = servers[first] if first is not None else None
        if first is None:
            return  # nobody is asked, and nothing changes
        engine.write_member(servers[first], self._name, self._record() | {"away": away})
        members = engine.members(servers[first])
        reports = [_words(member.get("away")) for member in members.values()]
        count = self._members.count(members, time.monotonic())
        found = agreed(reports, servers, count)
        if found != self._without:
            log.info("pool: without %s", ", ".join(sorted(found)) or "none: all servers are there")
            self._without = found
            self._share_out_evenly(found)

    def _record(self) -> dict[str, Any]:
        counted = _native.pool_counters()
        named = ",".join(sorted(f"{host}:{port}" for host, port in self._address.servers))
        return {
            **self._figures(),
            "servers": named,  # all must name the same
            "without": sorted(self._without),
            "bytes_written": counted["bytes_written"],
            "failures": counted["failures"],
        }

    @staticmethod
    def _resolve(servers: Sequence[Server]) -> str:
        """What was wrong; "": nothing."""
        fault = ""
        for host, port in servers:
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                fault = f"{host}: {getattr(error, 'strerror', None) or error}"
            else:
                _native.pool_address(_native.pool_server(host, port), str(found[0][4][0]), port)
        return fault

    def _share_out_evenly(self, without: frozenset[str]) -> None:
        """Independent servers. OSError: they are too many; nothing changes."""
        servers = self._address.servers
        slots, heirs = place_with_heirs([f"{host}:{port}" for host, port in servers], without)
        # A host that is not the owner would not read a block for others.
        self._share_out(servers, slots, None if self.has_peers else heirs)

    def _share_out(
        self, servers: Sequence[Server], slots: bytes, heirs: bytes | None = None
    ) -> None:
        """`slots`, `heirs`: of each the index in `servers`. OSError: they are too many; nothing
        changes.
        """
        indices = [_native.pool_server(host, port) for host, port in servers]
        numbers = bytes([*indices, *[NO_SERVER] * (256 - len(indices))])
        self._slots = slots.translate(numbers)
        _native.pool_slots(self._slots, None if heirs is None else heirs.translate(numbers))

    def _tell_changes(self) -> None:
        for server in _native.pool_servers():
            name = f"{server['host']}:{server['port']}"
            if server["is_left_alone"] and name not in self._away:
                self._away[name] = server["why"]
                log.warning("pool: %s is left alone: %s", name, server["why"])
            elif not server["is_left_alone"] and self._away.pop(name, None) is not None:
                log.info("pool: %s is back", name)

    # ---- small values (keys.py) ------------------------------------------------------------------

    def server_of(self, key: str) -> Server | None:
        """Who has it: in a Cluster by its slot, else who has the members. None: nobody is known."""
        if not self._is_cluster:
            return self._first
        index = self._slots[slot_of(key.encode())]
        if index == NO_SERVER:
            return None
        at = _native.pool_servers()[index]
        return at["host"], at["port"]

    def open_engine(self) -> Engine:
        from fusecache.pool.engine import Engine

        return Engine(self._address, self._credentials, self._password)

    # ---- what is asked ---------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return {
            "dataset": self._address.dataset,
            "is_tls": self._address.is_tls,
            "is_cluster": self._is_cluster,
            "has_peers": self.has_peers,
            "self": self._self,
            "served": _native.serve_counters(),
            "without": sorted(self._without),
            "fault": self._fault,
            "servers": _native.pool_servers(),
            **_native.pool_counters(),
        }


def _words(value: object) -> list[str]:
    """What another member wrote, be it of another version."""
    return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []


def member_name(mountpoint: str) -> str:
    return f"{socket.gethostname()}:{mountpoint}"

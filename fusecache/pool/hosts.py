"""One mount's part in a pool: where its servers are, and what the other hosts are told of us.

The blocks themselves are C's (native/pool). Whatever fails here leaves things as they were.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import trio
import xxhash

from fusecache import _native
from fusecache.pool.address import Credentials, PoolAddress
from fusecache.pool.slots import NO_SERVER, place
from fusecache.pool.view import Looks, agreed

if TYPE_CHECKING:
    from fusecache.pool.engine import Engine

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
REFRESH_S: Final = 5.0
LOOKS_MOST: Final = 8
LOCATE_WAIT_S: Final = 2.0


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
    ) -> None:
        """`name`: of this member, unique. `figures`: what it tells of itself.

        ValueError, OSError: a file of the credentials is no good; one line.
        """
        self._address = address
        self._credentials = credentials
        self._password = credentials.password()
        self._name = name
        self._figures = figures
        self._is_cluster = False
        self._slots = place([f"{host}:{port}" for host, port in address.servers])
        self._away: dict[str, str] = {}  # by server, why
        self._fault = ""  # of the last refresh
        self._moved = 0
        self._looks = Looks()
        self._without: frozenset[str] = frozenset()
        self._located = trio.Event()
        _native.pool_begin(
            address.dataset, credentials.user, self._password, credentials.ca,
            credentials.certificate, credentials.private_key, int(min_age_s * 1e9),
            int(patience_s * 1e9),
        )  # fmt: skip
        for host, port in address.servers:
            _native.pool_server(host, port)
        _native.pool_slots(self._slots)

    # ---- as long as the mount lives --------------------------------------------------------------

    async def watch_forever(self) -> None:
        await trio.to_thread.run_sync(self._locate, abandon_on_cancel=True)
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

    def _locate(self) -> None:
        """Blocking, for as long as names take."""
        self._fault = ""
        for index, (host, port) in enumerate(self._address.servers):
            self._resolve(index, host, port)

    def _refresh(self) -> None:
        """Blocking: names, slots, our own record, the others'."""
        from fusecache.pool.engine import Engine, Unreachable  # 0.1 s, for mounts with a pool alone

        engine = Engine(self._address, self._credentials, self._password)
        self._locate()
        self._look_for_cluster(engine)
        try:
            if self._is_cluster:
                self._tell_cluster(engine)
            else:
                self._agree(engine)
        except Unreachable as error:
            self._fault = str(error)

    def _look_for_cluster(self, engine: Engine) -> None:
        from fusecache.pool.engine import Unreachable

        for server in self._address.servers:
            try:
                cluster = engine.cluster(server)
            except Unreachable as error:
                self._fault = str(error)
                continue
            if cluster is not None:
                self._take_slots(cluster.servers, cluster.slots)
            return

    def _agree(self, engine: Engine) -> None:
        """Independent servers: those that most members say are away have no slots. Unreachable."""
        names = {f"{host}:{port}": (host, port) for host, port in self._address.servers}
        with ThreadPoolExecutor(LOOKS_MOST) as threads:
            answered = dict(zip(names, threads.map(engine.answers, names.values()), strict=True))
        away = self._looks.note(answered)
        place_of_members = next((n for n in engine.members_at(names) if answered[n]), None)
        if place_of_members is None:
            return  # no server answers: nobody is asked, and nothing is changed
        at = names[place_of_members]
        engine.write_member(at, self._name, self._record() | {"away": away})
        members = engine.members(at)
        found = agreed([member.get("away") or [] for member in members.values()], names)
        if found != self._without:
            log.info("pool: without %s", ", ".join(sorted(found)) or "none: all servers are there")
            self._without = found
            self._slots = place(list(names), found)
            _native.pool_slots(self._slots)

    def _tell_cluster(self, engine: Engine) -> None:
        """Unreachable."""
        index = self._slots[engine.members_slot]
        if index != NO_SERVER:
            server = _native.pool_servers()[index]
            engine.write_member((server["host"], server["port"]), self._name, self._record())

    def _record(self) -> dict[str, Any]:
        counted = _native.pool_counters()
        named = " ".join(sorted(f"{host}:{port}" for host, port in self._address.servers))
        return {
            **self._figures(),
            "servers": xxhash.xxh3_64_hexdigest(named.encode()),  # all must name the same
            "bytes_written": counted["bytes_written"],
            "failures": counted["failures"],
        }

    def _resolve(self, index: int, host: str, port: str) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            self._fault = f"{host}: {error.strerror or error}"
            return
        _native.pool_address(index, str(found[0][4][0]), port)

    def _take_slots(self, servers: list[tuple[str, str]], slots: bytes) -> None:
        indices = []
        for host, port in servers:
            indices.append(_native.pool_server(host, port))
            self._resolve(indices[-1], host, port)
        table = bytes([*indices, *[NO_SERVER] * (256 - len(indices))])
        self._slots = slots.translate(table)
        self._is_cluster = True
        _native.pool_slots(self._slots)

    def _tell_changes(self) -> None:
        for server in _native.pool_servers():
            name = f"{server['host']}:{server['port']}"
            if server["is_left_alone"] and name not in self._away:
                self._away[name] = server["why"]
                log.warning("pool: %s is left alone: %s", name, server["why"])
            elif not server["is_left_alone"] and self._away.pop(name, None) is not None:
                log.info("pool: %s is back", name)

    # ---- what is asked ---------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return {
            "dataset": self._address.dataset,
            "is_tls": self._address.is_tls,
            "is_cluster": self._is_cluster,
            "without": sorted(self._without),
            "fault": self._fault,
            "servers": _native.pool_servers(),
            **_native.pool_counters(),
        }


def member_name(mountpoint: str) -> str:
    return f"{socket.gethostname()}:{mountpoint}:{os.getpid()}"

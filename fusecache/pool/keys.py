"""Small values in a pool's engine, each with the server that has its key (docs/POOL.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from fusecache.pool.hosts import Hosts

if TYPE_CHECKING:
    from fusecache.pool.engine import Engine, Server

T = TypeVar("T")


class Away(Exception):
    """No server has answered, or none that may be told this; one line."""


class Keys:
    """Of one mount. All is blocking, for a few seconds at most, and of one thread at a time."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._engine: Engine | None = None

    def get(self, key: str) -> bytes | None:
        """None: there is none. Away."""
        return self._ask(key, lambda engine, server: engine.get(server, key))

    def put(self, key: str, value: bytes, expires_s: float, is_new: bool = False) -> bool:
        """False: `is_new`, but the key was there. Away."""
        milliseconds = max(1, int(expires_s * 1000))
        return self._ask(
            key, lambda engine, server: engine.put(server, key, value, milliseconds, is_new)
        )

    def remove(self, key: str) -> None:
        """Away."""
        self._ask(key, lambda engine, server: engine.remove(server, key))

    def _ask(self, key: str, command: Callable[[Engine, Server], T]) -> T:
        from fusecache.pool.engine import Unreachable  # 0.1 s, for mounts with a pool alone

        if self._engine is None:
            self._engine = self._hosts.open_engine()
        server = self._hosts.server_of(key)
        if server is None:
            raise Away("no server is known yet, or none answers")
        try:
            return command(self._engine, server)
        except Unreachable as error:
            raise Away(str(error)) from error

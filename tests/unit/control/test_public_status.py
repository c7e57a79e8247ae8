"""The status for other users of root's mount."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from fusecache.base import mounts
from fusecache.base.errors import UserError
from fusecache.control import control_client
from fusecache.control.public_status import PublicStatus
from tests.support import PATIENCE_S


async def _status() -> dict[str, Any]:
    return {"status": {"cache_dir": "/secret", "uptime_s": 1}}


async def _asked(path: str) -> dict[str, Any]:
    async with await trio.open_unix_socket(path) as stream:
        told = b"".join([part async for part in stream])
    answer: dict[str, Any] = json.loads(told)
    return answer


@pytest.mark.claim("G5")
def test_a_newer_mount_s_socket_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same number: when the older mount's server ends, that is later."""
    path = str(tmp_path / "public/0:40.status")
    monkeypatch.setattr(mounts, "status_socket", lambda device: path)

    async def story() -> None:
        older, newer = PublicStatus("0:40", _status), PublicStatus("0:40", _status)
        async with trio.open_nursery() as nursery:
            for one in (older, newer):
                nursery.start_soon(one.serve_forever)
                await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(PATIENCE_S):
                older.remove()
                assert await _asked(path) == {"ok": True, "status": {"uptime_s": 1}}
            newer.remove()
            newer.remove()
            assert not os.path.lexists(path)
            nursery.cancel_scope.cancel()

    trio.run(story)


def test_too_many_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "0:40.status")
    monkeypatch.setattr(mounts, "status_socket", lambda device: path)
    monkeypatch.setattr(os, "getuid", lambda: 1)
    monkeypatch.setattr(control_client, "RECONNECT_PAUSE_S", 0.001)
    mount = mounts.Mount(1, "0:40", "/data", mounts.FILESYSTEM_TYPE, "/source")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(path)
        with pytest.raises(UserError, match="/data is root's, and its server does not answer"):
            control_client.status(control_client.Target(mount, None))

"""What the command line makes of an answer: an old hintsd leaves keys out, a new one has null."""

from __future__ import annotations

from typing import Any

import pytest

from fusecache.control import hintsd_client
from fusecache.control.control_client import Target

MOUNTPOINT = "/mnt/data"


@pytest.mark.parametrize("unknown", [{}, {"epoch": None, "layout": None, "layout_why": None}])
def test_a_job_that_has_not_begun(monkeypatch: pytest.MonkeyPatch, unknown: dict[str, Any]) -> None:
    packed = {"layout": "reorder", "layout_why": "it pays", "epochs": 3}
    waiting = {"name": "waiting", "mountpoint": MOUNTPOINT, "state": "waiting", **unknown}
    coming = {"name": "coming", "mountpoint": MOUNTPOINT, "state": "running", **unknown, **packed}
    ended = {"name": "ended", "mountpoint": MOUNTPOINT, "ended_ago_s": 1.0, **unknown}
    status: dict[str, Any] = {}
    monkeypatch.setattr(hintsd_client, "setting", lambda target: "auto")
    monkeypatch.setattr(hintsd_client, "socket_of", lambda target: "socket")
    monkeypatch.setattr(hintsd_client, "status", lambda path: status)
    target: Any = type("Named", (), {"mountpoint": MOUNTPOINT})

    def layout(*jobs: dict[str, Any]) -> dict[str, Any]:
        status.update(jobs=jobs, ended=[ended])
        named: Target = target
        return hintsd_client.told(named).layout

    assert layout(waiting) == {}
    assert layout(waiting, coming) == {"chosen": "reorder", "why": "it pays", "job": "coming"}

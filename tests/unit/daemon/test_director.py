"""What the Director says without a mount, and how it shares budgets between mounts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from hintsd.daemon.director import Director
from hintsd.daemon.messages import JobRefused
from hintsd.daemon.mount import Mount
from hintsd.daemon.mount_link import MountFacts
from hintsd.orders.spec import OrderSpec
from tests.support.directed import Directed, request


def test_no_mount(tmp_path: Path) -> None:
    with Directed() as directed:
        with pytest.raises(JobRefused, match="is not in a fusecache mount"):
            directed.open("job", request(tmp_path, OrderSpec("sequential", 3)))
        assert directed.status() == {"mounts": [], "jobs": []}
        assert not directed.finished


def mounted(owner: Director, name: str, cache_dir: str, ram_bytes: int) -> Mount:
    mount = Mount(owner, name)
    mount.server.learn(MountFacts(name, name, cache_dir, ram_bytes, 0))
    mount.server.values = {"ssd_room_bytes": 900}
    mount.jobs["job"] = cast(Any, None)
    owner._mounts[name] = mount
    return mount


def test_budgets_are_shared() -> None:
    owner = Director(ram_bytes=1000)
    first = mounted(owner, "/a", "/cache", 800)
    assert owner.budgets(first) == (800, 900)
    second = mounted(owner, "/b", "/cache", 1200)
    third = mounted(owner, "/c", "/elsewhere", 2000)
    assert [owner.budgets(mount) for mount in (first, second, third)] == [
        (200, 450), (300, 450), (500, 900)
    ]  # fmt: skip
    third.jobs.clear()  # without jobs it needs nothing
    assert owner.budgets(first) == (400, 450)
    second.server.go()  # its job waits for it to be mounted again
    assert owner.budgets(first) == (800, 900)

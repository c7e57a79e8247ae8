"""What another user's server says can be anything: it is silent then, and breaks nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fusecache.control import control_client, hintsd_client
from fusecache.observe import asking, exposition, findings, rates, shapes, summary
from fusecache.observe.asking import Host
from tests.support import recorded_status

WRONG: tuple[Any, ...] = ("text", [1], {"a": "b"}, float("nan"), 10**400)


def paths(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything in it."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [found for key, one in items for found in [(*above, key), *paths(one, (*above, key))]]


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    found = copy.deepcopy(value)
    part = found
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = to
    return found


def test_what_was_recorded_is_sound() -> None:
    shapes.check_mount(recorded_status.mount_status())
    shapes.check_hintsd(recorded_status.hintsd_status())


@pytest.mark.claim("S10")
def test_whatever_a_status_holds_root_sees_all_other_mounts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: dict[str, Any] = {}
    monkeypatch.setattr(control_client, "find_all", lambda: [recorded_status.target()])
    monkeypatch.setattr(control_client, "is_kept", lambda target: True)
    monkeypatch.setattr(control_client, "status", lambda target, timeout_s: said["mount"])
    monkeypatch.setattr(hintsd_client, "socket_of", lambda target: recorded_status.SOCKET)
    monkeypatch.setattr(hintsd_client, "status", lambda path: said["hintsd"])
    monkeypatch.setattr(findings, "disk", lambda *_: findings.Finding("ok", "disk", ""))
    monkeypatch.setattr(findings, "clock", lambda *_: findings.Finding("ok", "clock", ""))
    mount, hintsd = recorded_status.mount_status(), recorded_status.hintsd_status()
    good = recorded_status.host()
    count = 0
    for whole in ("mount", "hintsd"):
        for path in paths({"mount": mount, "hintsd": hintsd}[whole]):
            for wrong in WRONG:
                said |= {"mount": mount, "hintsd": hintsd}
                said[whole] = changed(said[whole], path, wrong)
                found = asking.look()
                both = Host(good.mounts + found.mounts, {"/good": hintsd, **found.hintsds})
                assert rates.screen(rates.figures(rates.Look(good, 0), rates.Look(both, 1)))
                assert summary.table(both)
                assert summary.as_json(both)
                assert [*findings.of_mount(found.mounts[0], found)]
                count += 1
                if count % 20 == 0:  # it takes long
                    assert "fusecache_up" in exposition.text(exposition.registry(lambda: both))  # noqa: B023
    assert count > 500

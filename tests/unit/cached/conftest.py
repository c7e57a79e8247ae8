"""Tests of the cache service sync nothing: no power fails here, and disks take their time."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(f"os.{name}", lambda _: None)

"""What is decided by the origin's file system. Its faults: mount/test_origin_faults.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusecache import origin
from fusecache.origin import LOCAL_TICK_NS, NETWORK_TICK_NS, Origin, file_system_of
from fusecache.stats import Stats


@pytest.mark.parametrize(
    ("file_system", "reads_direct", "tick_ns"),
    [
        ("nfs", True, NETWORK_TICK_NS),
        ("nfs4", True, NETWORK_TICK_NS),
        ("fuse", True, NETWORK_TICK_NS),
        ("fuse.sshfs", True, NETWORK_TICK_NS),
        ("fuseblk", False, NETWORK_TICK_NS),  # a disk, which asks for alignment
        ("lustre", False, NETWORK_TICK_NS),
        ("beegfs", False, NETWORK_TICK_NS),
        ("ext4", False, LOCAL_TICK_NS),
        ("", False, NETWORK_TICK_NS),
    ],
)
def test_what_the_file_system_decides(
    monkeypatch: pytest.MonkeyPatch, file_system: str, reads_direct: bool, tick_ns: int
) -> None:
    monkeypatch.setattr(origin, "file_system_of", lambda device: file_system)
    made = Origin(-1, "0:1", 1, 1.0, Stats())
    assert (made.reads_direct, made.tick_ns) == (reads_direct, tick_ns)


def test_the_file_system_is_the_mount_tables() -> None:
    device = Path("/proc").stat().st_dev
    assert file_system_of(f"{os.major(device)}:{os.minor(device)}") == "proc"
    assert file_system_of("4095:1") == ""

"""What is decided by the origin's file system. Its faults: mount/test_origin_faults.py."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fusecache import _native
from fusecache.base.metrics import Metrics
from fusecache.read import access_lists
from fusecache.read.origin import GONE, LOCAL_TICK_NS, NETWORK_TICK_NS, Origin, file_system_of
from tests.support.mounted import errno_of


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
def test_what_the_file_system_decides(file_system: str, reads_direct: bool, tick_ns: int) -> None:
    made = Origin(-1, file_system, 1, 1.0, Metrics())
    assert (made.reads_direct, made.tick_ns) == (reads_direct, tick_ns)


def test_the_file_system_is_the_mount_tables() -> None:
    device = Path("/proc").stat().st_dev
    assert file_system_of(f"{os.major(device)}:{os.minor(device)}") == "proc"
    assert file_system_of("4095:1") == ""


@pytest.mark.claim("X7")
def test_a_list_that_is_not_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never "none", and never ENOSYS, after which the kernel would not ask again."""
    version = (1, 2, 3, 4)

    def read(number: int, now: tuple[int, ...] = version, refreshed: int = 0) -> str:
        def getxattr(path: str, name: bytes) -> bytes:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "getxattr", getxattr)
        monkeypatch.setattr(_native, "open", lambda ino, flags: os.open("/", flags))
        monkeypatch.setattr(_native, "version", lambda ino: version)
        monkeypatch.setattr(_native, "version_of_fd", lambda fd: (*now, 0o100644))
        monkeypatch.setattr(_native, "refresh", lambda ino: refreshed)
        return errno_of(access_lists.read, 7, b"system.posix_acl_access")

    assert read(errno.ENODATA) == read(errno.EOPNOTSUPP) == ""
    assert read(errno.EACCES) == "EACCES"
    assert read(errno.EIO) == read(errno.ENOSYS) == "EIO"
    assert read(errno.ENODATA, (9, 2, 3, 4), refreshed=GONE) == "ESTALE"
    assert read(errno.ENODATA, (1, 2, 3, 5), refreshed=1) == ""

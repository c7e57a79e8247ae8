"""What other users put in the way of a mount: caches, links, log files (SECURITY.md)."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.base import mounts
from fusecache.store import Store, StoreSettings, Version
from fusecache.table import namespace
from tests.conftest import Mounting, OrdinaryUser, Place, in_one_mode
from tests.support.mounted import Mount, command, errno_of, eventually, is_mounted, watched

STRANGER = 1234


@pytest.fixture
def scratch(place: Place) -> Path:
    """A directory where everybody may put things."""
    path = place.base / "scratch"
    path.mkdir()
    path.chmod(0o1777)
    return path


def give(path: Path) -> None:
    """All of it is the stranger's."""
    for below in [path, *path.rglob("*")]:
        os.chown(below, STRANGER, STRANGER, follow_symlinks=False)


def mount_line(place: Place, cache_dir: Path, *flags: str | Path) -> tuple[int, str]:
    """Exit code and stderr of a mount that is to be refused."""
    done = command(
        *("mount", place.source, place.mountpoint, "--cache-dir", cache_dir),
        *("--ssd", "64M", "--hintsd", "none", "--allow-empty", *flags),
    )
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not is_mounted(place.mountpoint)
    return done.returncode, done.stderr


@pytest.mark.claim("S1")
def test_a_planted_cache_is_refused(place: Place, scratch: Path) -> None:
    """Made with the product's own means, sound in itself: other bytes for a file of the source."""
    file = place.write("file", b"the bytes of the origin")
    cache, status = scratch / "fusecache", file.stat()
    version = Version(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    with Store.open(
        cache,
        StoreSettings(limit_bytes=64 << 20, keep_free_bytes=0),
        on_fault=lambda kind, message: None,
        on_segment_gone=lambda segno: None,
    ) as store:
        planted = b"x" * status.st_size
        assert store.put(namespace.dataset_id(str(place.source)), b"file", version, 0, planted)
    give(cache)
    code, line = mount_line(place, cache)
    assert code == 1
    assert f"{cache} belongs to uid {STRANGER}" in line
    for arguments in (("gc", cache), ("gc", "--compact", cache), ("probe", cache)):
        done = command(*arguments)
        assert done.returncode == 1
        assert f"{cache} belongs to uid {STRANGER}" in done.stderr


@pytest.mark.claim("S1", "S2")
@pytest.mark.parametrize("name", ["index", "segments", "lock", "high", ""])
def test_a_planted_link_is_not_followed(place: Place, scratch: Path, name: str) -> None:
    victim, cache = place.base / "victim", scratch / "fusecache"
    if name in ("lock", "high"):
        victim.write_bytes(b"victim")
    else:
        victim.mkdir(mode=0o755)
    if name:
        cache.mkdir()
    (cache / name if name else cache).symlink_to(victim)
    give(scratch / "fusecache")
    code, line = mount_line(place, cache)
    assert code == 1
    assert f"uid {STRANGER}" in line
    if victim.is_dir():
        assert list(victim.iterdir()) == []
        assert stat.S_IMODE(victim.stat().st_mode) == 0o755
    else:
        assert victim.read_bytes() == b"victim"


@pytest.mark.claim("S2")
def test_a_cache_below_what_others_may_replace_is_refused(place: Place, scratch: Path) -> None:
    (scratch / "open").mkdir()
    (scratch / "open").chmod(0o777)
    code, line = mount_line(place, scratch / "open/cache")
    assert code == 1
    assert f"chmod +t {scratch}/open" in line
    assert list((scratch / "open").iterdir()) == []


@pytest.mark.claim("S1", "S2")
@in_one_mode
def test_a_cache_of_ours_in_a_sticky_directory(
    place: Place, scratch: Path, mounting: Mounting
) -> None:
    """Made by the mount itself, by way of our own link; it opens warm the next time."""
    place.write("file", b"bytes")
    (place.base / "link").symlink_to(scratch)
    for turn in range(2):
        mount = mounting(cache_dir=place.base / "link/fusecache")
        mount.read_until_stored("file", blocks=1)
        assert mount.value("reads", "from_origin") == (0 if turn else 1) or not turn
        mount.umount()
    assert stat.S_IMODE((scratch / "fusecache").stat().st_mode) == 0o700


@pytest.mark.claim("S3")
@in_one_mode
def test_a_directory_that_took_the_place_of_the_cache_is_left_alone(
    place: Place, mounting: Mounting
) -> None:
    place.write("file", b"bytes")
    home = place.base / "home"
    home.mkdir()
    home.chmod(0o755)
    (home / "letter").write_bytes(b"private")
    mount = mounting(allow_log=["cache"])
    mount.read_until_stored("file", blocks=1)
    place.cache_dir.rename(place.base / "aside")
    place.cache_dir.symlink_to(home)

    def why_out() -> str:
        (part,) = mount.value("ssd", "directories")
        return str(part["why_out"])

    eventually(lambda: "holds other files" in why_out())
    assert (mount.path / "file").read_bytes() == b"bytes"
    mount.kill_server()
    eventually(lambda: why_out() != "")
    assert [path.name for path in home.iterdir()] == ["letter"]
    assert stat.S_IMODE(home.stat().st_mode) == 0o755
    place.cache_dir.unlink()
    (place.base / "aside").rename(place.cache_dir)
    eventually(lambda: not why_out())
    assert mount.value("ssd", "blocks") == 1


@pytest.mark.claim("S5")
@pytest.mark.parametrize("kind", ["link", "file", "fifo"])
def test_a_log_file_that_another_user_prepared_is_refused(
    place: Place, scratch: Path, kind: str
) -> None:
    log, victim = scratch / "log", place.base / "victim"
    victim.write_bytes(b"victim")
    reader = -1
    if kind == "link":
        log.symlink_to(victim)
    elif kind == "file":
        log.write_bytes(b"")
    else:
        os.mkfifo(log)
        reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    give(log)
    code, line = mount_line(place, place.cache_dir, "--log-file", log)
    assert code == 1
    assert f"cannot write the log {log}: {log} " in line
    assert f"uid {STRANGER}" in line
    assert victim.read_bytes() == b"victim"
    if reader >= 0:
        assert errno_of(os.read, reader, 100) in ("", "EAGAIN")
        os.close(reader)


@pytest.mark.claim("S5")
def test_the_log_may_go_to_a_fifo_of_ours_by_a_link_of_ours(place: Place) -> None:
    fifo, link = place.base / "fifo", place.base / "link"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with watched(place.mountpoint):
        done = command(
            *("mount", place.source, place.mountpoint, "--cache-dir", place.cache_dir),
            *("--ssd", "64M", "--hintsd", "none", "--allow-empty", "--log-file", link),
        )
        try:
            assert done.returncode == 0, done.stderr
            assert b"open mode" in eventually(lambda: os.read(reader, 1 << 16))
        finally:
            command("umount", place.mountpoint)
            os.close(reader)
    assert link.is_symlink()


@pytest.fixture
def strangers_mount(ordinary_user: OrdinaryUser, zero_open: bool) -> Iterator[Mount]:
    source = ordinary_user.directory("source")
    (source / "file").write_bytes(b"theirs")
    with ordinary_user.mount(source, zero_open=zero_open) as mount:
        yield mount


@pytest.mark.claim("S4")
@in_one_mode
def test_root_is_not_led_to_other_mounts_by_a_users_runtime_directory(
    ordinary_user: OrdinaryUser, strangers_mount: Mount, place: Place, mounting: Mounting
) -> None:
    """Links in it to the sockets of root's mount, and a record that nobody can read."""
    place.write("file", b"ours")
    ours = mounting()
    theirs = strangers_mount
    mounted = mounts.at(str(theirs.path))
    assert mounted is not None
    directory = Path(f"/tmp/fusecache-{ordinary_user.uid}/{mounted.device}")
    assert (directory / "keeper.sock").exists()
    own = place.mountpoint.stat().st_dev
    target = Path(f"/run/fusecache/{os.major(own)}:{os.minor(own)}")
    for name in ("keeper.sock", "control.sock"):
        (directory / name).rename(directory / f"{name}.aside")
        (directory / name).symlink_to(target / name)
    record = (directory / "keeper.json").read_bytes()
    (directory / "keeper.json").unlink()
    os.mkfifo(directory / "keeper.json")
    for arguments in (("status",), ("restart",), ("verify",)):
        done = command(*arguments, theirs.path)
        assert done.returncode == 1
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert command("list").returncode == 0
    assert (ours.path / "file").read_bytes() == b"ours"
    assert ours.value("restarts") == 0
    (directory / "keeper.json").unlink()
    (directory / "keeper.json").write_bytes(record)
    os.chown(directory / "keeper.json", ordinary_user.uid, ordinary_user.gid)
    for name in ("keeper.sock", "control.sock"):
        (directory / f"{name}.aside").rename(directory / name)


@pytest.mark.claim("S6", "S7")
@in_one_mode
def test_the_runtime_directory_and_the_descriptors_are_kept_to_themselves(
    place: Place, mounting: Mounting
) -> None:
    mount = mounting("--hintsd", "auto")
    number = place.mountpoint.stat().st_dev
    runtime = Path(f"/run/fusecache/{os.major(number)}:{os.minor(number)}")
    for directory in (runtime, runtime.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    names = ("keeper.sock", "control.sock", "keeper.json", "../hintsd.sock")
    paths = [runtime / name for name in names]
    eventually(lambda: all(path.exists() for path in paths))  # hintsd may still start
    as_stranger = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    for path in paths:
        done = subprocess.run([*as_stranger, "stat", path], capture_output=True, text=True)
        assert "Permission denied" in done.stderr
    table = memory_of(mount.keeper_pid)
    assert len(table) == 1
    holders = {
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdigit() and memory_of(int(process.name)) & table
    }
    assert holders == {mount.keeper_pid, mount.server_pid()}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and b"\0hintsd\0serve" in (process / "cmdline").read_bytes():
                assert "/dev/fuse" not in {os.readlink(fd) for fd in (process / "fd").iterdir()}


def memory_of(pid: int) -> set[tuple[int, int]]:
    """The inode tables that a process holds a descriptor of."""
    found = set()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:fusecache-table" in os.readlink(fd):
                    status = fd.stat()
                    found.add((status.st_dev, status.st_ino))
    return found

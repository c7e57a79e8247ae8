"""Which paths are used: those that nobody else chose. Other users are played with chown."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fusecache.base import mounts, trust
from fusecache.base.disk import cache_names
from fusecache.base.errors import UserError
from tests.support.store_support import opened, version_of

STRANGER = 1234


def give(path: Path, uid: int = STRANGER) -> Path:
    os.chown(path, uid, uid, follow_symlinks=False)
    return path


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A directory where everybody may put things."""
    path = tmp_path / "scratch"
    path.mkdir()
    path.chmod(0o1777)
    return path


def cache_in(scratch: Path) -> Path:
    """A sound cache of ours."""
    with opened(scratch / "cache") as store:
        store.put(b"file", b"bytes", version_of(b"bytes"))
        store.store.save_table(bytes(16), 5, lambda fd: os.write(fd, b"table"))
    return scratch / "cache"


def link_to_victim(path: Path) -> Path:
    victim = path.parent / "victim"
    victim.mkdir()
    path.symlink_to(victim)
    return give(path)


def theirs(name: str) -> Callable[[Path], object]:
    return lambda cache: give(cache / name)


def their_link(name: str) -> Callable[[Path], object]:
    """They exchange something in a directory that was once open to them."""

    def plant(cache: Path) -> None:
        (cache / name).rename(cache.parent / "moved")
        (cache / name).symlink_to(cache.parent / "moved")
        give(cache / name)

    return plant


def hard_link(cache: Path) -> None:
    (cache.parent / "victim").write_bytes(b"victim")
    (cache / "high").unlink()
    os.link(cache.parent / "victim", cache / "high")


PLANTS: dict[str, Callable[[Path], object]] = {
    "directory": lambda cache: give(cache),
    **{f"{name} owner": theirs(name) for name in ("segments", "index", "lock", "format", "high")},
    **{f"{name} link": their_link(name) for name in ("segments", "index", "lock", "format")},
    "hard link": hard_link,
    "segment": lambda cache: give(next((cache / "segments").iterdir())),
    "open segment": lambda cache: next((cache / "segments").iterdir()).chmod(0o666),
    "index": lambda cache: give(next((cache / "index").glob("*.db"))),
    "table": lambda cache: give(next((cache / "tables").iterdir())),
    "open table": lambda cache: next((cache / "tables").iterdir()).chmod(0o666),
}


@pytest.mark.claim("S1")
@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_a_cache_that_another_user_had_a_hand_in_is_refused(
    scratch: Path, plant: Callable[[Path], object]
) -> None:
    cache = cache_in(scratch)
    plant(cache)
    before = {path: path.lstat() for path in sorted(scratch.rglob("*"))}
    with pytest.raises(UserError, match=r"not used: \S+ .*; choose one") as caught, opened(cache):
        pass
    assert "\n" not in str(caught.value)
    after = {path: path.lstat() for path in sorted(scratch.rglob("*"))}
    changed = [path for path, status in after.items() if status.st_mtime != before[path].st_mtime]
    assert before.keys() == after.keys()
    assert changed == []


@pytest.mark.claim("S1")
def test_a_cache_of_ours_opens_warm_again(scratch: Path) -> None:
    cache = cache_in(scratch)
    cache.chmod(0o777)  # as an umask or an administrator may have left it
    with opened(cache) as store:
        assert store.get(b"file", version_of(b"bytes")) == b"bytes"
        assert store.faults == []
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.claim("S1")
def test_our_own_links_lead_where_they_did(scratch: Path, tmp_path: Path) -> None:
    cache = cache_in(scratch)
    (cache / "segments").rename(tmp_path / "elsewhere")
    (cache / "segments").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to("scratch/cache")
    with opened(tmp_path / "link") as store:
        assert store.get(b"file", version_of(b"bytes")) == b"bytes"
        assert store.faults == []
    assert trust.real_path(str(tmp_path / "link/new/one")) == str(cache / "new/one")


@pytest.mark.claim("S2")
def test_the_way_to_a_cache_must_be_ours(scratch: Path, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(trust.Untrusted) as caught:
            trust.real_path(str(path))
        with pytest.raises(trust.Untrusted):
            os.close(trust.open_directory(str(path), make=True))
        return str(caught.value.strerror)

    assert f"{scratch}/link is a link of" in refused(link_to_victim(scratch / "link") / "cache")
    (scratch / "theirs/cache").mkdir(parents=True)
    give(scratch / "theirs")
    assert f"{scratch}/theirs belongs to" in refused(scratch / "theirs/cache")
    (scratch / "open").mkdir()
    (scratch / "open").chmod(0o777)
    assert f"chmod +t {scratch}/open" in refused(scratch / "open/cache")
    (scratch / "open").chmod(0o775)
    os.chown(scratch / "open", 0, STRANGER)
    assert f"chmod g-w {scratch}/open" in refused(scratch / "open/cache")
    assert not (scratch / "open/cache").exists()
    os.chown(scratch / "open", 0, 0)  # a group with one member
    (scratch / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        trust.real_path(str(scratch / "loop"))
    for path in (scratch / "open", scratch / "new"):
        os.close(trust.open_directory(str(path), make=True))
    assert stat.S_IMODE((scratch / "new").stat().st_mode) == 0o700


@pytest.mark.claim("S2")
@pytest.mark.parametrize("kind", ["fuse", "fuse.x", "fuseblk", "fuseblk.x"])
def test_a_file_system_of_another_user_says_what_owners_it_likes(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    device = os.stat("/proc").st_dev  # as if it were theirs
    name = f"{os.major(device)}:{os.minor(device)}"
    table = [mounts.Mount(1, name, "/proc", kind, "s", {"user_id": str(STRANGER)})]
    monkeypatch.setattr(mounts, "mounts", lambda: table)
    with pytest.raises(trust.Untrusted, match="/proc is on a FUSE file system of uid 1234"):
        trust.real_path("/proc/sys")
    table[0] = mounts.Mount(1, name, "/proc", kind, "s", {"user_id": "0"})
    assert trust.real_path("/proc/sys") == "/proc/sys"


@pytest.mark.claim("S8")
def test_a_file_of_ours_on_a_file_system_of_another_user_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"bytes")
    file.chmod(0o600)
    os.close(trust.open_file(str(file)))
    device = os.stat(file).st_dev  # as if it were theirs
    name = f"{os.major(device)}:{os.minor(device)}"
    table = [mounts.Mount(1, name, "/", "fuse.x", "s", {"user_id": str(STRANGER)})]
    monkeypatch.setattr(mounts, "mounts", lambda: table)
    with pytest.raises(trust.Untrusted, match="is on a FUSE file system of uid 1234"):
        trust.open_file(str(file))
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(trust.Untrusted, match="shown is on a FUSE file system of uid 1234"):
            trust.open_in(directory, "file", "shown")
    finally:
        os.close(directory)


@pytest.mark.claim("S2")
def test_owners_that_a_user_namespace_does_not_know(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch / "outside/cache").mkdir(parents=True)
    give(scratch / "outside", 65534)
    with pytest.raises(trust.Untrusted):
        trust.real_path(str(scratch / "outside/cache"))
    monkeypatch.setattr(trust, "_unknown_owner", lambda: 65534)
    assert trust.real_path(str(scratch / "outside/cache")) == str(scratch / "outside/cache")
    give(scratch / "outside/cache", 65534)
    with pytest.raises(UserError):
        cache_names.check(str(scratch / "outside/cache"))


@pytest.mark.claim("S5")
def test_a_log_file_is_ours_and_no_link_of_others(scratch: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"victim")
    (scratch / "link").symlink_to(victim)
    give(scratch / "link")
    (scratch / "theirs").write_bytes(b"")
    give(scratch / "theirs")
    os.link(victim, scratch / "hard")
    os.mkfifo(scratch / "fifo")
    give(scratch / "fifo")
    for name in ("link", "theirs", "hard"):
        with pytest.raises(trust.Untrusted):
            trust.open_log(str(scratch / name), 1)
    reader = os.open(scratch / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(trust.Untrusted):
        trust.open_log(str(scratch / "fifo"), 1)
    os.close(reader)
    assert victim.read_bytes() == b"victim"
    assert not list(scratch.glob("*.1"))


@pytest.mark.claim("S5")
def test_a_log_file_may_be_a_link_or_fifo_of_ours_or_a_device(
    scratch: Path, tmp_path: Path
) -> None:
    (scratch / "link").symlink_to(tmp_path / "log")
    for text in (b"first", b"second"):
        fd = trust.open_log(str(scratch / "link"), 1)
        os.write(fd, text)
        os.close(fd)
    assert (tmp_path / "log").read_bytes() == b"second"  # a large one goes aside
    assert (tmp_path / "log.1").read_bytes() == b"first"
    assert (scratch / "link").is_symlink()
    os.mkfifo(scratch / "fifo")
    with pytest.raises(OSError, match="No such device or address"):
        trust.open_log(str(scratch / "fifo"), 1)
    reader = os.open(scratch / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    fd = trust.open_log(str(scratch / "fifo"), 1)
    assert os.get_blocking(fd)
    os.write(fd, b"line")
    assert os.read(reader, 9) == b"line"
    os.close(fd)
    os.close(reader)
    for path in ("/dev/null", "/dev/stderr", "/proc/self/fd/2"):
        os.close(trust.open_log(path, 1))
    with pytest.raises(IsADirectoryError):
        trust.open_log(str(tmp_path), 1)


def test_a_log_file_in_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        trust.open_log(str(tmp_path / "gone" / "log"), 1)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        trust.open_log(str(tmp_path / "file" / "log"), 1)

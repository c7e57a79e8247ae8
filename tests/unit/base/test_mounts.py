"""Finding mounts in mountinfo, and their runtime directories."""

import dataclasses
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusecache.base import mounts

TABLE = r"""22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
40 22 0:35 / /data/a ro,nosuid - fuse.fusecache /mnt/nfs ro,user_id=1000,group_id=1000
41 40 0:36 / /data/a/below rw shared:7 master:1 - tmpfs tmpfs rw
42 22 0:37 / /with\040space\134\012 ro - fuse.fusecache /src\040x ro,user_id=0
43 22 0:38 / /twice rw - tmpfs tmpfs rw
44 43 0:39 / /twice ro - fuse.fusecache /twice ro,user_id=0
not a line
"""


def test_fields_and_escapes() -> None:
    table = mounts.parse(TABLE)
    assert [m.mount_id for m in table] == [22, 40, 41, 42, 43, 44]
    assert table[1].uid == 1000
    assert table[1].device == "0:35"
    assert (table[3].mountpoint, table[3].source) == ("/with space\\\n", "/src x")
    assert [m.is_fusecache for m in table] == [False, True, False, True, False, True]


def test_bytes_that_are_no_utf8_survive() -> None:
    raw = b"9 1 0:9 / /x\xff\\040\xc3\xa4 ro - fuse.fusecache s ro"
    (mount,) = mounts.parse(os.fsdecode(raw))
    assert os.fsencode(mount.mountpoint) == b"/x\xff \xc3\xa4"


@pytest.mark.parametrize(
    ("path", "device"),
    [
        ("/data/a", "0:35"),
        ("/data/a/deep/er", "0:35"),
        ("/data/a/below/x", "0:36"),
        ("/data/ab", "8:1"),
        ("/data", "8:1"),
        ("/twice", "0:39"),
        ("/twice/x", "0:39"),
        ("/", "8:1"),
    ],
)
def test_the_mount_that_holds_a_path(path: str, device: str) -> None:
    mount = mounts.holding(path, mounts.parse(TABLE))
    assert mount is not None
    assert mount.device == device


MOVED = r"""22 1 8:1 / / rw - ext4 /dev/sda1 rw
50 51 0:50 / /b rw - tmpfs moved rw
51 22 0:51 / /b rw - tmpfs below rw
60 22 0:60 / /c/d rw - fuse.fusecache /hidden rw
61 22 0:61 / /c rw - tmpfs over rw
62 50 0:62 /e//deleted /b/f rw - tmpfs bound rw
"""


def test_what_is_on_top_is_known_by_what_it_is_on() -> None:
    table = mounts.parse(MOVED)

    def source(path: str) -> str | None:
        mount = mounts.holding(path, table)
        return None if mount is None else mount.source

    assert [source(path) for path in ("/b", "/b/x", "/b/f", "/c/d", "/c/d/x", "/c", "/x")] == [
        *("moved", "moved", "bound", "over", "over", "over", "/dev/sda1")
    ]
    top = mounts.at("/b", table)
    assert top is not None
    assert top.source == "moved"
    assert [m.mount_id for m in mounts.fusecaches_on("/c/d", table)] == [60]  # it can be unmounted


def test_a_deleted_root_is_no_directory_of_that_name() -> None:
    mount = mounts.holding("/b/f/x", mounts.parse(MOVED))
    assert mount is not None
    assert mount.is_deleted
    assert mounts.inside("/b/f/x", mount) == "/e//deleted/x"
    root = mounts.holding("/", mounts.parse(MOVED))
    assert root is not None
    assert (mounts.inside("/", root), mounts.inside("/a/b", root)) == ("/", "/a/b")


def test_of_two_on_one_mount_point_the_later_is_on_top() -> None:
    mount = mounts.at("/twice", mounts.parse(TABLE))
    assert mount is not None
    assert mount.is_fusecache
    assert mounts.at("/twice/x", mounts.parse(TABLE)) is None


def test_links_are_followed_up_to_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("/data/a/x")
    (tmp_path / "relative").symlink_to("link")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr(mounts, "mounts", lambda: mounts.parse(TABLE))
    for name in ("link", "relative", "relative/deep"):
        found = mounts.find(str(tmp_path / name))
        assert found is not None, name
        assert found.device == "0:35"
    assert mounts.find(str(tmp_path)) is None
    assert mounts.find(str(tmp_path / "loop")) is None


@pytest.mark.claim("S6")
def test_a_runtime_directory_of_somebody_else_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.getuid()
    mount = mounts.Mount(1, "0:77", "/m", mounts.FILESYSTEM_TYPE, "/s", {"user_id": str(uid)})
    base = tmp_path / "base"
    monkeypatch.setattr(mounts, "runtime_bases", lambda _: [str(base)])
    assert mounts.make_runtime_base() == str(base)
    assert base.stat().st_mode & 0o777 == 0o700
    assert mounts.runtime_directory(mount) is None
    (base / "0:77").mkdir(mode=0o700)
    assert mounts.runtime_directory(mount) == str(base / "0:77")
    (base / "0:77").chmod(0o755)
    assert mounts.runtime_directory(mount) is None
    base.chmod(0o777)
    with pytest.raises(PermissionError):
        mounts.make_runtime_base()


def test_processes_are_looked_at_only_where_the_usual_place_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a large host that takes long, and each command that names a mount asks."""
    here, elsewhere, asked = tmp_path / "here", tmp_path / "elsewhere", list[int]()

    def bases_of_keepers(uid: int) -> Iterator[str]:
        asked.append(uid)
        yield str(elsewhere)

    monkeypatch.setattr(mounts, "runtime_bases", lambda uid: [str(here)])
    monkeypatch.setattr(mounts, "_bases_of_keepers", bases_of_keepers)
    owner = {"user_id": str(os.getuid())}
    mount = mounts.Mount(1, "0:77", "/m", mounts.FILESYSTEM_TYPE, "/s", owner)
    for base in (elsewhere, here):
        (base / "0:77").mkdir(mode=0o700, parents=True)
        base.chmod(0o700)
        assert mounts.runtime_directory(mount) == str(base / "0:77")
    assert asked == [os.getuid()]


def test_sockets_work_at_any_depth(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    for _ in range(2):  # the second replaces what the first left
        listener = mounts.listen(str(deep), "x.sock", 4)
        with listener, mounts.connect(str(deep), "x.sock", 1.0) as client:
            accepted, _address = listener.accept()
            with accepted:
                accepted.sendall(b"hello")
                assert client.recv(16) == b"hello"
    with pytest.raises(ConnectionRefusedError):
        mounts.connect(str(deep), "x.sock", 1.0)
    assert isinstance(listener, socket.socket)


@pytest.mark.claim("S4")
def test_a_keeper_record_may_be_anything(tmp_path: Path) -> None:
    """Root reads those of other users, who may put there what they like."""
    record = tmp_path / mounts.KEEPER_FILE
    assert mounts.keeper_record(str(tmp_path)) == {}
    for content in ("", "[1]", "{", "[" * 100_000, '{"a": "' + "x" * (2 << 20) + '"}'):
        record.write_text(content)
        assert mounts.keeper_record(str(tmp_path)) == {}
    record.write_text(
        '{"keeper_pid": 7, "server_pid": [], "log": {}, "config": {"ssd_bytes": {}}, "x": [[1]]}'
    )
    assert mounts.keeper_record(str(tmp_path)) == {"keeper_pid": 7}
    config = {"cache_dir": "/c", "further_cache_dirs": ["/d"], "revalidate_s": None}
    record.write_text(json.dumps({"config": config}))
    assert mounts.keeper_record(str(tmp_path)) == {"config": config}
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(tmp_path / "elsewhere")
    assert mounts.keeper_record(str(tmp_path)) == {}
    record.unlink()
    os.mkfifo(record)
    assert mounts.keeper_record(str(tmp_path)) == {}  # and nobody waits for a writer


@pytest.mark.claim("S4")
def test_a_socket_is_of_the_user_who_mounted(tmp_path: Path) -> None:
    """A link in another user's runtime directory may lead to a socket of ours."""
    there = mounts.mounts()[0]
    theirs, ours = (
        dataclasses.replace(there, super_options={"user_id": str(uid)})
        for uid in (1234, os.getuid())
    )
    with mounts.listen(str(tmp_path), "ours", 4) as listener:
        (tmp_path / mounts.KEEPER_SOCKET).symlink_to("ours")
        with pytest.raises(PermissionError, match="not a socket of uid 1234"):
            mounts.connect(str(tmp_path), mounts.KEEPER_SOCKET, 1.0, theirs)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(16) == b""
        mounts.connect(str(tmp_path), mounts.KEEPER_SOCKET, 1.0, ours).close()


@pytest.mark.parametrize("other", [{"mount_id": 1 << 30}, {"device": "0:0"}, {"mountpoint": "/m"}])
def test_an_ended_mounts_directory_is_anothers(tmp_path: Path, other: dict[str, Any]) -> None:
    """The kernel gives its numbers to the next mount: that one's server is asked nothing."""
    options = {"user_id": str(os.getuid())}
    ended = dataclasses.replace(mounts.mounts()[0], super_options=options, **other)
    with mounts.listen(str(tmp_path), "s", 4) as listener:
        with pytest.raises(FileNotFoundError, match=" is mounted no more"):
            mounts.connect(str(tmp_path), "s", 1.0, ended)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(16) == b""


def test_a_newer_mounts_runtime_directory_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ended mount's device number is given to the next; so is an inode number, on ext4."""
    base = tmp_path / "base"
    base.mkdir(mode=0o700)
    monkeypatch.setattr(mounts, "runtime_bases", lambda _: [str(base)])
    directory, older = mounts.make_runtime_directory("0:77")
    again, newer = mounts.make_runtime_directory("0:77")
    assert again == directory
    try:
        mounts.remove_runtime_directory(directory, older)
        assert os.path.isdir(directory)
        mounts.remove_runtime_directory(directory, newer)
        assert not os.path.exists(directory)
        mounts.remove_runtime_directory(directory, newer)  # it is gone: not an error
    finally:
        os.close(older)
        os.close(newer)

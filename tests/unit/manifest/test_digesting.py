"""`fusecache digest`: what it lists, what it reads again, and what it leaves alone."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusecache.base import mounts
from fusecache.base.digest import ALGORITHMS, digest
from fusecache.base.units import BLOCK_BYTES
from fusecache.manifest import digesting
from fusecache.manifest.digesting import Digesting, Progress
from fusecache.manifest.format import HEADER_BYTES, NAME, Entry, Reader, entry_bytes, header
from fusecache.manifest.listed import Listed
from fusecache.manifest.writing import NEW, PARTIAL, Output, copied
from tests.support.mounted import command, environment, eventually
from tests.support.trees import make_files, random_bytes

XXH3 = ALGORITHMS["xxh3-128"]
STRANGER = 1234


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The origin is a local disk, whose clock ticks faster."""
    monkeypatch.setattr(digesting, "SETTLED_NS", 20_000_000)


def run(root: Path, output: Path | None = None, believed: Listed | None = None) -> Progress:
    """A run to its end."""
    out = Output(str(output or root / NAME), XXH3)
    fd = os.open(root, os.O_RDONLY)
    left_out = {os.fsencode(NAME + end) for end in ("", NEW, PARTIAL)}
    try:
        one = Digesting(fd, out, XXH3, believed or Listed(), left_out)
        one.run(lambda progress: None)
        assert out.finish() == ""
    finally:
        out.close()
        os.close(fd)
    return one.progress


def entries(path: Path) -> dict[bytes, Entry]:
    with open(path, "rb") as file:
        reader = Reader(file, path.stat().st_size)
        return {entry.path: entry for entry in reader.entries()}


def expected(root: Path, name: bytes) -> Entry:
    path = os.path.join(os.fsencode(root), name)
    found = os.lstat(path)
    data = Path(os.fsdecode(path)).read_bytes()
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    names = b"".join(digest(XXH3, block) for block in blocks)
    version = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return Entry(name, *version, names)


def test_plain_files_are_listed_with_their_blocks(tmp_path: Path) -> None:
    """Whatever their names; nothing else, and no manifest."""
    names = [b"a", b"empty", b"n\xff\n", b"sub/deep/b", b"sub.x/c", b"large"]
    for number, name in enumerate(names):
        path = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
        path.parent.mkdir(parents=True, exist_ok=True)
        length = {b"empty": 0, b"large": 2 * BLOCK_BYTES + 5}.get(name, 100 + number)
        path.write_bytes(random_bytes(name, length))
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "to directory").symlink_to("sub")
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "socket"))
    (tmp_path / "void").mkdir()
    progress = run(tmp_path)
    assert (progress.files, progress.read_files, progress.special, progress.bad) == (6, 6, 4, 0)
    found = entries(tmp_path / NAME)
    assert found == {name: expected(tmp_path, name) for name in names}
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.glob(".*")) == [NAME]


def test_only_what_has_changed_is_read_again(tmp_path: Path) -> None:
    files = make_files(tmp_path, 60, lambda index: 1000 + index)
    assert run(tmp_path).read_files == 60
    os.chmod(tmp_path / NAME, 0o664)
    assert run(tmp_path).read_files == 60  # others could write to it: it says nothing
    os.chmod(tmp_path / NAME, 0o644)
    assert run(tmp_path).read_files == 0
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o644  # as its owner wanted it
    before = files[0].stat()
    files[0].write_bytes(random_bytes("other", before.st_size))
    os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    files[1].unlink()
    (tmp_path / "more").write_bytes(b"more")
    progress = run(tmp_path)
    assert (progress.files, progress.read_files) == (60, 2)
    found = entries(tmp_path / NAME)
    name = os.fsencode(files[0].relative_to(tmp_path))
    assert found[name] == expected(tmp_path, name)
    assert os.fsencode(files[1].relative_to(tmp_path)) not in found


@pytest.mark.claim("S9")
def test_a_copy_is_believed_by_size_and_mtime_at_a_word(tmp_path: Path) -> None:
    """And has the same digest of the whole. Not of files of others: they may give one the size and
    the mtime of what they may not read.
    """
    first, copy = tmp_path / "first", tmp_path / "copy"
    files = make_files(first, 20, lambda index: 1000 + index)
    run(first)
    subprocess.run(["cp", "-a", first, copy], check=True)
    other = copy / files[3].relative_to(first)
    os.utime(other, ns=(0, 5))
    os.chown(copy / files[4].relative_to(first), STRANGER, STRANGER)
    believed = copied(str(copy / NAME), XXH3)
    progress = run(copy, believed=believed)
    assert (progress.files, progress.read_files) == (20, 2)
    assert entries(copy / NAME) == {
        os.fsencode(path.relative_to(first)): expected(copy, os.fsencode(path.relative_to(first)))
        for path in files
    }
    ends = [(path / NAME).read_bytes()[-24:] for path in (first, copy)]
    assert ends[0] == ends[1]
    assert run(copy).read_files == 0


def test_inode_numbers_that_are_made_up_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = os.stat(tmp_path).st_dev  # as if it were sshfs
    name = f"{os.major(device)}:{os.minor(device)}"
    table = [mounts.Mount(1, name, "/", "fuse.sshfs", "s", {"user_id": "0"})]
    monkeypatch.setattr(mounts, "mounts", lambda: table)
    (tmp_path / "file").write_bytes(b"bytes")
    run(tmp_path)
    found = entries(tmp_path / NAME)
    assert found == {b"file": expected(tmp_path, b"file")._replace(ino=0)}


def test_a_file_that_changes_or_ends_early_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_files(tmp_path, 3, lambda _: 1000)
    changing = tmp_path / "changing"
    changing.write_bytes(b"a" * 100)
    preadv = os.preadv

    def change(fd: int, buffers: list[memoryview], offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path == str(changing):
            os.utime(changing)
        return preadv(fd, buffers, offset) if not path.endswith("00001.jpg") else 0

    monkeypatch.setattr(os, "preadv", change)
    progress = run(tmp_path)
    assert (progress.files, progress.bad) == (2, 2)
    assert progress.messages == [
        "changing: it changes while it is read",
        "class000/00001.jpg: it ends before its size",
    ]
    assert len(entries(tmp_path / NAME)) == 2


def test_a_file_is_not_read_before_its_time_stamps_have_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a change within a tick of the origin's clock would have the same version."""
    monkeypatch.setattr(digesting, "SETTLED_NS", 400_000_000)
    read_at: list[int] = []
    preadv = os.preadv

    def note(fd: int, buffers: list[memoryview], offset: int) -> int:
        read_at.append(time.time_ns())
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", note)
    file = tmp_path / "young"
    file.write_bytes(b"bytes")
    run(tmp_path)
    assert read_at[0] > file.stat().st_ctime_ns + 400_000_000


@pytest.mark.claim("S9")
def test_a_directory_that_became_a_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a file, though both were what they were when they were listed."""
    secret, root = tmp_path / "secret", tmp_path / "root"
    for directory in (secret, root / "sub"):
        directory.mkdir(parents=True)
        (directory / "file").write_bytes(b"of " + os.fsencode(directory))
    (root / "plain").write_bytes(b"plain")
    listed = Digesting._list

    def swap(self: Digesting, fd: int, path: bytes) -> tuple[list[bytes], list[bytes]]:
        found = listed(self, fd, path)
        if path == b"":
            os.rename(root / "sub", tmp_path / "away")
            (root / "sub").symlink_to(secret)
            (root / "plain").unlink()
            (root / "plain").symlink_to(secret / "file")
        return found

    monkeypatch.setattr(Digesting, "_list", swap)
    progress = run(root)
    assert (progress.files, progress.bad) == (0, 2)


@pytest.mark.claim("S9")
@pytest.mark.parametrize("end", ["", PARTIAL])
@pytest.mark.parametrize("how", ["of another", "others may write", "link", "two names"])
def test_what_others_have_put_there_is_not_gone_by(tmp_path: Path, end: str, how: str) -> None:
    """It lies, in this very version of the file; nor is anything written through it."""
    root = tmp_path / "root"
    (file,) = make_files(root, 1, lambda _: 1000)
    name = os.fsencode(file.relative_to(root))
    run(root)
    lie = expected(root, name)._replace(digests=bytes(16))
    planted, other = root / (NAME + end), tmp_path / "other"
    (root / NAME).unlink()
    out = Output(str(planted), XXH3)
    out.add(lie)
    out.finish()
    out.close()
    if end:
        planted.write_bytes(header(XXH3) + entry_bytes(lie))
    if how == "of another":
        os.chown(planted, STRANGER, STRANGER)
    elif how == "others may write":
        planted.chmod(0o622)
    elif how == "link":
        planted.rename(other)
        planted.symlink_to(other)
    else:
        os.link(planted, other)
    before = other.read_bytes() if other.exists() else b""
    if not end and how != "link":
        with pytest.raises(Exception, match=r"belongs to|may write|hard link"):
            copied(str(planted), XXH3)
    assert run(root).read_files == 1
    assert entries(root / NAME) == {name: expected(root, name)}
    assert not other.exists() or other.read_bytes() == before
    assert not (root / NAME).is_symlink()
    assert (root / NAME).stat().st_uid == 0


def test_it_is_believed_by_the_same_rule_where_it_is_ours(tmp_path: Path) -> None:
    """The lie of the test above, in a file of ours: so that test is about whose it is."""
    (file,) = make_files(tmp_path, 1, lambda _: 1000)
    run(tmp_path)
    lie = expected(tmp_path, os.fsencode(file.relative_to(tmp_path)))._replace(digests=bytes(16))
    (tmp_path / (NAME + PARTIAL)).write_bytes(header(XXH3) + entry_bytes(lie))
    (tmp_path / (NAME + PARTIAL)).chmod(0o600)
    assert run(tmp_path).read_files == 0
    assert entries(tmp_path / NAME)[lie.path] == lie


def test_a_torn_partial_goes_on_behind_its_last_whole_entry(tmp_path: Path) -> None:
    make_files(tmp_path, 10, lambda index: 1000 + index)
    run(tmp_path)
    whole = list(entries(tmp_path / NAME).values())
    (tmp_path / NAME).unlink()
    partial = tmp_path / (NAME + PARTIAL)
    partial.write_bytes(header(XXH3) + b"".join(map(entry_bytes, whole[:4])) + b"torn")
    partial.chmod(0o600)
    out = Output(str(tmp_path / NAME), XXH3)
    out.note_read(whole[4])
    out.close()
    data = partial.read_bytes()
    assert data == header(XXH3) + b"".join(map(entry_bytes, whole[:5]))
    assert run(tmp_path).read_files == 5
    assert not partial.exists()


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    out = Output(str(tmp_path / NAME), XXH3)
    try:
        done = command("digest", tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (4, 1)
        assert "is being written by another fusecache digest" in done.stderr
    finally:
        out.close()


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    make_files(tmp_path, 3, lambda _: 1000)
    done = command("digest", tmp_path)
    assert done.returncode == 0, done.stderr
    line = rf"{tmp_path}/{NAME}: 3 files, 2.93 KiB; read 3 files, 2.93 KiB; digest [0-9a-f]{{32}}"
    assert re.fullmatch(line, done.stdout.strip())
    told = json.loads(command("digest", tmp_path, "--json").stdout)
    assert (told["manifest"], told["digest"]) == (f"{tmp_path}/{NAME}", done.stdout.split()[-1])
    assert (told["files"], told["bytes"], told["read_files"], told["bad"]) == (3, 3000, 0, 0)
    again = command("digest", tmp_path, "-o", tmp_path / "sub" / "x")
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    blake3 = command("digest", tmp_path, "-o", tmp_path / "other", "--digest", "blake3")
    assert blake3.stdout.startswith(f"{tmp_path}/other: 3 files")
    refused = command("digest", tmp_path, "--copy-of", tmp_path / "other")
    assert refused.returncode == 1
    assert refused.stderr == (
        f"fusecache: {tmp_path}/other: its digests are blake3, and xxh3-128 is wanted\n"
    )
    for arguments in ((tmp_path / "none",), (tmp_path, "-o", "/dev/null"), (tmp_path / "other",)):
        done = command("digest", *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert command("digest", tmp_path, "--digest", "md5").returncode == 2
    assert os.path.exists("/dev/null")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_was_read_before_an_end_is_not_read_again(tmp_path: Path, number: int) -> None:
    """The run stands still at the last file, and is ended there."""
    root, go_on = tmp_path / "root", tmp_path / "go on"
    make_files(root, 40, lambda index: 1000 + index)
    (root / "zz").mkdir()
    (root / "zz/held").write_bytes(b"held")
    partial = root / (NAME + PARTIAL)

    def is_there() -> bool:
        if partial.stat().st_size < HEADER_BYTES:  # it is being begun
            return False
        with open(partial, "rb") as file:
            return len(list(Reader(file, partial.stat().st_size).sound_entries())) == 40

    process = subprocess.Popen(
        [sys.executable, "-c", _UNTIL_HELD, str(root), str(go_on)],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(is_there)
        process.send_signal(number)
        if number == signal.SIGINT:
            go_on.touch()
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert not (root / NAME).exists()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert said.strip() == "fusecache: interrupted"
        assert not (root / (NAME + NEW)).exists()
    progress = run(root)
    assert progress.files == 41
    held = (1,) if number == signal.SIGKILL else (0, 1)  # it may have been read before the end
    assert progress.read_files in held


_UNTIL_HELD = """
import os, signal, sys, time
preadv = os.preadv
def held(fd, buffers, offset):
    while os.readlink(f"/proc/self/fd/{fd}").endswith("held") and not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    return preadv(fd, buffers, offset)
os.preadv = held
signal.signal(signal.SIGINT, signal.default_int_handler)
from fusecache.base import command
from fusecache.cli.main import cli
command.run("fusecache", lambda: cli(["digest", sys.argv[1]], standalone_mode=False))
"""

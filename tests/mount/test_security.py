"""Who may read what, and that nothing outside the source can be reached."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Mounting, OrdinaryUser, Place, in_one_mode
from tests.support.mounted import Mount, alive, children, errno_of, eventually
from tests.support.trees import assert_same, make_files, random_bytes

# Prints, for every path given, what reading it as this user gives: content or the errno's name.
READ = """
import errno, os, sys
for path in sys.argv[1:]:
    try:
        print(open(path, "rb").read().decode() if not os.path.isdir(path)
              else sorted(os.listdir(path)))
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
STAT = """
import errno, os, sys
for path in sys.argv[1:]:
    try:
        print(oct(os.stat(path).st_mode))
    except OSError as error:
        print(errno.errorcode[error.errno])
"""

# Runs `fusecache`, once for each list of arguments: exit codes, and what each says on stderr.
COMMANDS = """
import json, os, sys, tempfile
from fusecache.cli import main
done = []
os.chdir("/")
for arguments in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(error.fileno(), 2)
            sys.argv = ["fusecache", *arguments]
            try:
                main.main()
            except SystemExit as left:
                sys.stderr.flush()
                os._exit(left.code if isinstance(left.code, int) else left.code is not None)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        error.seek(0)
        done.append((code, error.read().decode()))
print(json.dumps(done))
"""

FIND_SOCKET = """
import sys
from hintsd.client import finding
print(finding.find_socket(sys.argv[1])[0])
"""


@pytest.mark.claim("X1", "X2", "X6", "A3")
@in_one_mode
def test_other_users(ordinary_user: OrdinaryUser, zero_open: bool) -> None:
    source, closed, shared = (ordinary_user.base / name for name in ("source", "closed", "shared"))
    for directory in (source, closed, shared):
        directory.mkdir()
    for name, mode in (("open", 0o644), ("closed", 0o600), ("none", 0o000)):
        (source / name).write_text(name)
        (source / name).chmod(mode)
    (source / "theirs").write_text("theirs")
    os.chown(source / "theirs", ordinary_user.uid, ordinary_user.gid)
    (source / "theirs").chmod(0o400)
    (source / "private").mkdir(mode=0o700)
    (source / "private/file").write_text("hidden")
    cache = ordinary_user.base / "cache"
    with (
        Mount(source, closed, cache, "--ssd", "64M", zero_open=zero_open) as alone,
        Mount(
            *(source, shared, cache, "--ssd", "64M", "--allow-other", "--hintsd", "/run/some.sock"),
            zero_open=zero_open,
        ) as mount,
    ):
        assert (closed / "open").read_text() == "open"
        assert ordinary_user.run(READ, closed, closed / "open").stdout.split() == ["EACCES"] * 2
        assert ordinary_user.run(STAT, closed).stdout.split() == ["EACCES"]
        paths = [shared / name for name in ("open", "closed", "none", "theirs", "private/file")]
        assert ordinary_user.run(READ, *paths).stdout.split() == [
            *("open", "EACCES", "EACCES", "theirs", "EACCES")
        ]
        seen = ordinary_user.run(STAT, *paths[:4]).stdout.split()
        assert seen == ["0o100644", "0o100600", "0o100000", "0o100400"]
        assert (shared / "none").read_text() == "none"  # root may
        assert ordinary_user.run(FIND_SOCKET, shared).stdout == "/run/some.sock\n"
        # Another user cannot command the server, and look only at one that others may read.
        for mounted in (alone, mount):
            asked = [
                [*words, str(mounted.path)]
                for words in (["status", "--json"], ["umount"], ["restart"], ["verify"], ["warm"])
            ]
            told = ordinary_user.run(COMMANDS, json.dumps(asked))
            done = json.loads(told.stdout)
            assert len(done) == len(asked), told
            for arguments, (code, said) in zip(asked, done, strict=True):
                if mounted is mount and arguments[0] == "status":
                    assert code == 0, said
                    continue
                assert code != 0, (arguments, said)
                assert len(said.strip().splitlines()) == 1, (arguments, said)
        assert alone.status()["restarts"] == mount.status()["restarts"] == 0


@pytest.mark.claim("X3")
@in_one_mode
def test_cache_directory_and_its_files_are_private(place: Place, mounting: Mounting) -> None:
    place.write("file", b"secret")
    before = os.umask(0)
    try:
        mount = mounting()
    finally:
        os.umask(before)
    assert (mount.path / "file").read_bytes() == b"secret"
    eventually(lambda: mount.value("ssd", "blocks") == 1)
    assert stat.S_IMODE(place.cache_dir.stat().st_mode) == 0o700
    mount.umount()
    place.cache_dir.chmod(0o755)
    mount.start()
    assert stat.S_IMODE(place.cache_dir.stat().st_mode) == 0o700


@pytest.mark.claim("X4", "N4")
def test_links_that_were_swapped_in_lead_nowhere(place: Place, mounting: Mounting) -> None:
    """Listed as a directory or a file, then replaced by a link to the outside, unread."""
    outside = place.base / "outside"
    make_files(outside, 3, lambda index: 100 + index, seed="outside")
    make_files(place.source, 3, lambda index: 100 + index, seed="inside")
    place.write("file", random_bytes("inside", 100))
    (outside / "file").write_bytes(random_bytes("outside", 100))
    mount = mounting("--revalidate", "never")
    for directory, _, _ in os.walk(mount.path):
        os.listdir(directory)
    held = os.open(mount.path / "class000", os.O_RDONLY | os.O_DIRECTORY)
    file_held = os.open(mount.path / "file", os.O_RDONLY)
    (place.source / "class000").rename(place.base / "aside")
    (place.source / "class000").symlink_to(outside / "class000")
    (place.source / "file").unlink()
    (place.source / "file").symlink_to(outside / "file")
    refused = ("ESTALE", "ENOENT", "ENOTDIR", "ELOOP")
    try:
        for index in range(3):
            path = mount.path / f"class000/{index:05d}.jpg"
            assert errno_of(path.read_bytes) in refused
        assert errno_of(os.stat, mount.path / "class000/new") in refused
        assert errno_of(os.pread, file_held, 100, 0) in refused
        assert errno_of((mount.path / "file").read_bytes) in refused
        for name in os.listdir(held):
            assert name.endswith(".jpg")
    finally:
        os.close(held)
        os.close(file_held)
    assert "outside" not in mount.log()


@pytest.mark.claim("X4")
def test_a_link_swapped_back_and_forth_while_reading(place: Place, mounting: Mounting) -> None:
    """A race on purpose: what is read is never what lies outside."""
    outside = place.base / "outside"
    (outside).mkdir()
    place.write("d/file", b"inside " * 1000)
    (outside / "file").write_bytes(b"OUTSIDE" * 1000)
    mount = mounting("--revalidate", "0.2")
    target, aside = place.source / "d", place.base / "aside"
    link = place.base / "link"
    for turn in range(60):
        if turn % 2 == 0:
            target.rename(aside)
            link.symlink_to(outside)
            link.rename(target)
        else:
            target.unlink()
            aside.rename(target)
        for _ in range(3):
            descriptor = -1
            try:
                directory = os.open(mount.path / "d", os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    descriptor = os.open("file", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
                    assert b"OUTSIDE" not in os.pread(descriptor, 7000, 0)
                finally:
                    os.close(directory)
            except OSError:
                continue
            finally:
                if descriptor >= 0:
                    os.close(descriptor)


@pytest.mark.claim("X4", "N4")
@in_one_mode
def test_dot_dot_and_absolute_links(place: Place, mounting: Mounting) -> None:
    """They lead where the reader's kernel says: beside the mount point, to the reader's root."""
    place.write("inside/file", b"inside")
    (place.base / "beside").write_bytes(b"beside the mount point")
    (place.source / "up").symlink_to("../beside")
    (place.source / "absolute").symlink_to(place.base / "beside")
    mount = mounting()
    assert (mount.path / "inside/../inside/file").read_bytes() == b"inside"
    assert os.path.samefile(mount.path / "..", mount.path.parent)
    assert (mount.path / "up").read_bytes() == b"beside the mount point"
    assert (mount.path / "absolute").read_bytes() == b"beside the mount point"
    assert mount.value("origin", "files") <= 1


@pytest.fixture
def user_mount(ordinary_user: OrdinaryUser, zero_open: bool) -> Iterator[Mount]:
    """A mount by an ordinary user, through fusermount3."""
    source = ordinary_user.directory("source")
    make_files(source, 60, lambda index: 1000 * index)
    (source / "unreadable").write_text("root only")
    (source / "unreadable").chmod(0o600)
    (source / "list only").mkdir()
    (source / "list only/file").write_text("file")
    (source / "list only").chmod(0o744)
    with ordinary_user.mount(source, "--revalidate", "1", zero_open=zero_open) as mount:
        yield mount


READ_TREE = """
import hashlib, os, sys
for directory, below, names in sorted(os.walk(sys.argv[1])):
    below.sort()
    for name in sorted(names):
        path = os.path.join(directory, name)
        if os.access(path, os.R_OK):
            content = hashlib.sha256(open(path, "rb").read()).hexdigest()
            print(os.path.relpath(path, sys.argv[1]), content)
"""


@pytest.mark.claim("A3", "A4", "X2", "X3", "K1")
@in_one_mode
def test_an_ordinary_user_mounts(ordinary_user: OrdinaryUser, user_mount: Mount) -> None:
    mount, run = user_mount, ordinary_user.run
    expected = run(READ_TREE, mount.source).stdout
    assert len(expected.splitlines()) == 60
    assert run(READ_TREE, mount.path).stdout == expected
    assert errno_of(os.stat, mount.path) == "EACCES", "not even root, unless --allow-other"
    assert run(READ, mount.path / "unreadable").stdout.split() == ["EACCES"]
    assert run(STAT, mount.path / "unreadable").stdout.split() == ["0o100600"]
    assert run(READ, mount.path / "list only").stdout.strip() == "['file']"
    assert run(STAT, mount.path / "list only/file").stdout.split() == ["EACCES"]
    assert stat.S_IMODE((ordinary_user.home / "cache").stat().st_mode) == 0o700
    (mount.source / "new").write_text("new")
    eventually(lambda: run(READ, mount.path / "new").stdout.strip() == "new")
    mount.kill_server()
    expected = run(READ_TREE, mount.source).stdout
    assert run(READ_TREE, mount.path).stdout == expected
    mount.restart()
    assert run(READ_TREE, mount.path).stdout == expected
    assert mount.run("verify", mount.path).returncode == 0
    mount.umount()
    mount.start()
    assert run(READ_TREE, mount.path).stdout == expected
    assert mount.value("reads", "from_origin") == 0


@in_one_mode
def test_the_keeper_of_an_ordinary_user_ends_on_sigterm(
    ordinary_user: OrdinaryUser, user_mount: Mount
) -> None:
    servers = children(user_mount.keeper_pid)
    os.kill(user_mount.keeper_pid, signal.SIGTERM)
    user_mount.wait_gone()
    eventually(lambda: not any(alive(pid) for pid in servers))
    assert ordinary_user.run(READ, user_mount.path).stdout.strip() == "[]"


@pytest.mark.claim("W2")
@in_one_mode
def test_the_source_is_untouched(place: Place, mounting: Mounting, tmp_path: Path) -> None:
    make_files(place.source, 20, lambda index: index * 3000)
    before = {path: path.stat() for path in sorted(place.source.rglob("*"))}
    mount = mounting("--revalidate", "0.2")
    assert_same(place.source, mount.path)
    mount.umount()
    for path, found in before.items():
        now = path.stat()
        assert (now.st_mtime_ns, now.st_ctime_ns, now.st_mode) == (
            *(found.st_mtime_ns, found.st_ctime_ns, found.st_mode),
        )

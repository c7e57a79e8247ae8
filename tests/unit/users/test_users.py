"""Other users of a hintsd: who they are, what they may read, where they connect, and how much they
may have. Root is needed, as everywhere in CI.
"""

from __future__ import annotations

import contextlib
import grp
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.base import mounts
from hintsd.users import looking, public, quota, rights
from hintsd.users.identity import Identity, identity_of
from hintsd.users.rights import LIST, SEARCH, CannotLook, Eyes, Rights
from tests.support.mounted import eventually

STRANGER = 4711
FRIENDS = 4712  # a group


def first_denied(who: Identity, paths: list[Path], mode: int) -> bytes | None:
    named = [os.fsencode(path) for path in paths]
    return trio.run(Rights().first_denied, who, named, mode)


def directory(path: Path, mode: int, uid: int = 0, gid: int = 0) -> Path:
    path.mkdir()
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


@pytest.fixture
def base() -> Iterator[Path]:
    """One that others may enter: pytest's own is closed to them."""
    with tempfile.TemporaryDirectory(prefix="fusecache-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.claim("G1")
def test_what_a_user_may_list_and_search(base: Path) -> None:
    stranger = Identity(STRANGER, STRANGER, ())
    friend = Identity(STRANGER, STRANGER, (FRIENDS, FRIENDS + 1))
    opened = directory(base / "open", 0o755)
    known = directory(base / "known", 0o711)  # what has a known name
    closed = directory(base / "closed", 0o700)
    inside = directory(closed / "inside", 0o777)
    shared = directory(base / "shared", 0o750, gid=FRIENDS)
    own = directory(base / "own", 0o700, uid=STRANGER)
    for_all = [opened, own]
    assert first_denied(stranger, for_all, LIST) is None
    assert first_denied(stranger, [], LIST) is None
    assert first_denied(stranger, [*for_all, known], SEARCH) is None
    for path, mode in ((known, LIST), (closed, SEARCH), (inside, SEARCH), (shared, SEARCH)):
        assert first_denied(stranger, [*for_all, path, closed], mode) == os.fsencode(path)
    assert first_denied(friend, [shared], LIST) is None
    assert first_denied(Identity(0, 0, ()), [closed, inside], LIST) is None
    assert first_denied(stranger, [base / "not there"], SEARCH) == os.fsencode(base / "not there")
    (own / "link").symlink_to(closed)
    assert first_denied(stranger, [own / "link"], SEARCH) == os.fsencode(own / "link")


@pytest.mark.claim("G1")
def test_who_looks_keeps_nothing_of_root_s(base: Path) -> None:
    """Neither may the user trace it: what it is, is asked while it waits for its paths."""
    words = [sys.executable, "-I", "-S", looking.__file__, str(STRANGER), str(FRIENDS), "7"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        status = Path(f"/proc/{process.pid}/status")
        eventually(lambda: f"Uid:\t{STRANGER}" in status.read_text(), every_s=0.001)
        lines = dict(
            line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line
        )
        assert lines["Uid"].split() == [str(STRANGER)] * 4
        assert lines["Gid"].split() == [str(FRIENDS)] * 4
        assert lines["Groups"].split() == ["7"]
        assert {int(lines[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {0}
        owner = os.stat(f"/proc/{process.pid}/mem").st_uid  # root's: it is not dumpable
        assert owner == 0
        path = os.fsencode(base)
        out, _ = process.communicate(b"4 %d\n%b" % (len(path), path))
        assert out == b"2\n-1"


@pytest.mark.claim("G1")
def test_links_are_followed_as_the_user_could(base: Path) -> None:
    closed, own = directory(base / "closed", 0o700), directory(base / "own", 0o755, uid=STRANGER)
    for name in ("closed/secret", "own/file"):
        (base / name).write_text("four")
    for name, target in (("a", "file"), ("b", closed / "secret"), ("c", closed), ("d", "nothing")):
        (own / name).symlink_to(target)
    with contextlib.closing(Eyes(Identity(STRANGER, STRANGER, ()))) as eyes:
        seen = os.stat(own / "file")
        assert eyes.stat(os.fsencode(own / "a")) == (seen.st_mode, seen.st_dev, seen.st_ino, 4)
        assert eyes.real(os.fsencode(own / "a")) == os.fsencode(own / "file")
        assert eyes.real(os.fsencode(own / "c")) == os.fsencode(closed)  # its name is no secret
        for name in "bd":
            assert eyes.real(os.fsencode(own / name)) is None
            with pytest.raises(FileNotFoundError):
                eyes.stat(os.fsencode(own / name))
        assert eyes.first_denied([os.fsencode(own / "c")], SEARCH) == os.fsencode(own / "c")


@pytest.mark.claim("G1")
def test_eyes_that_the_user_shuts_see_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may stop or end what is theirs."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        with contextlib.closing(Eyes(Identity(STRANGER, STRANGER, ()))) as eyes:
            assert eyes.first_denied([os.fsencode(base)], LIST) is None
            assert eyes._process is not None
            os.kill(eyes._process.pid, number)
            with monkeypatch.context() as patched:
                patched.setattr(rights, "TIMEOUT_S", 0.2)
                with pytest.raises(CannotLook, match="no answer"):
                    eyes.first_denied([os.fsencode(base)], LIST)


def test_who_looks_long_is_waited_for_by_no_other() -> None:
    looks = Rights()
    one, two = Identity(STRANGER, 1, ()), Identity(STRANGER + 1, 1, ())
    assert looks.limiter(one) is looks.limiter(one._replace(gid=2))
    assert looks.limiter(one) is not looks.limiter(two)


def test_a_user_that_cannot_be_become_has_no_rights(base: Path) -> None:
    with pytest.raises(CannotLook, match="rights cannot be looked at: "):
        first_denied(Identity(1 << 40, 0, ()), [base], LIST)


def test_identity_of_a_peer() -> None:
    code = f"""if True:
        import os, socket, sys
        os.setgroups([5, {FRIENDS}])
        os.setgid(7)
        os.setuid({STRANGER})
        one = socket.socket(socket.AF_UNIX)
        one.connect(sys.argv[1])
        one.recv(1)
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := f"\0fusecache-test-{os.getpid()}")
        listener.listen()
        words = [sys.executable, "-c", code.replace("sys.argv[1]", repr(address))]
        with subprocess.Popen(words) as process:
            connection, _ = listener.accept()
            with connection:
                assert identity_of(connection) == Identity(STRANGER, 7, (5, FRIENDS))
            assert process.wait() == 0


@pytest.mark.claim("G4")
def test_public_socket(base: Path) -> None:
    own = str(directory(base / "run", 0o700) / "sock")
    path = Path(mounts.public_socket(own))
    assert path == base / "run-public/sock"
    group = grp.getgrgid(1)
    for text, mode, gid in (("all", 0o666, 0), (group.gr_name, 0o660, 1), ("1", 0o660, 1)):
        others = public.parse(text)
        assert others is not None
        umask = os.umask(0o077)
        try:
            with contextlib.closing(public.listen(own, others)):
                status = path.stat()
                assert (stat.S_IMODE(status.st_mode), status.st_gid) == (mode, gid)
                assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(path))
        finally:
            os.umask(umask)
    assert path.exists()  # clients wait there for the next one
    public.close(own)
    assert not path.exists()
    public.close(own)
    assert public.parse("none") is None
    for text in ("nobody there", "", "-1", "\u0663", str(2**32 - 1), str(2**32), "9" * 5000):
        with pytest.raises(ValueError, match="is neither all nor none, nor a group"):
            public.parse(text)


@pytest.mark.claim("G4")
@pytest.mark.parametrize("what", ["a stranger's", "others write", "a link", "a file"])
def test_a_public_directory_that_is_not_ours_alone_is_refused(base: Path, what: str) -> None:
    own, there = str(base / "run/sock"), base / "run-public"
    if what == "a link":
        there.symlink_to(directory(base / "elsewhere", 0o755))
    elif what == "a file":
        there.touch()
    else:
        uid = STRANGER if what == "a stranger's" else 0
        directory(there, 0o775 if what == "others write" else 0o755, uid=uid)
    with pytest.raises(PermissionError, match="not a directory that only you can write to"):
        public.listen(own, public.Others(0o666))
    assert what in ("a link", "a file") or not list(there.iterdir())


@pytest.mark.claim("G4")
def test_a_public_directory_that_is_exchanged_meanwhile(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whom the directory above belongs to: nothing that they point at is touched."""
    own, there = str(base / "run/sock"), base / "run-public"
    precious = directory(base / "elsewhere", 0o700) / "sock"
    precious.write_text("precious")
    precious.chmod(0o600)
    real = mounts.listen

    def exchange(*arguments: Any) -> socket.socket:
        there.rename(base / "away")
        there.symlink_to(precious.parent)
        return real(*arguments)

    monkeypatch.setattr(mounts, "listen", exchange)
    public.listen(own, public.Others(0o666)).close()
    assert stat.S_IMODE((base / "away/sock").stat().st_mode) == 0o666
    assert stat.S_IMODE(precious.stat().st_mode) == 0o600
    assert stat.S_IMODE(precious.parent.stat().st_mode) == 0o700
    precious.unlink()
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(str(precious))
        with pytest.raises(PermissionError):
            public.close(own)
        assert precious.is_socket()


def test_what_is_no_socket_is_left(base: Path) -> None:
    own, there = str(base / "run/sock"), directory(base / "run-public", 0o755) / "sock"
    there.write_text("precious")
    with pytest.raises(FileExistsError):
        public.listen(own, public.Others(0o666))
    public.close(own)
    assert there.read_text() == "precious"


def test_quota() -> None:
    held = [1, 1, 2]
    assert quota.excess("jobs", 2, held, 2, 4) == ""
    assert quota.excess("jobs", 1, held, 2, 4) == "you have 2 jobs already"
    assert quota.excess("jobs", 3, held, 2, 3) == "other users have 3 jobs already"

"""Access control lists of the origin, with --allow-other: what it denies, the mount denies."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import Mounting, OrdinaryUser, in_one_mode
from tests.support.faulty_origin import Fault, FaultyOrigin
from tests.support.mounted import Mount, errno_of, eventually

# uid, gid and further groups
WHO = {
    "owner": (2001, 3001, ()),
    "group": (2002, 3002, ()),
    "further group": (2003, 3009, (3002,)),
    "named": (2004, 3004, ()),
    "named group": (2005, 3005, ()),
    "two groups": (2006, 3002, (3005,)),
    "other": (2007, 3007, ()),
}
# of files with owner 2001 and group 3002
ACLS = {
    "mask hides the group": ("0640", "u:2004:r,m::r,g::-"),
    "mask hides the named": ("0600", "u:2004:r,g:3005:r,m::-"),
    "named user": ("0600", "u:2004:r"),
    "named user denied": ("0644", "u:2004:-"),
    "named group": ("0600", "g:3005:r"),
    "named group denied": ("0644", "g:3005:-"),
    "only others": ("0604", "g:3005:-,u:2004:-"),
    "none": ("0640", ""),
    "closed": ("0600", ""),
}


def setfacl(path: Path, acl: str) -> None:
    subprocess.run(["setfacl", "-m", acl, path], check=True)


def prepare(path: Path, mode: str, acl: str) -> None:
    os.chown(path, 2001, 3002)
    path.chmod(int(mode, 8))
    if acl:
        setfacl(path, acl)


def may(who: str, *paths: Path) -> list[bool]:
    """For each path: may that user read it?"""
    uid, gid, groups = WHO[who]
    more = [f"--groups={','.join(map(str, groups))}"] if groups else ["--clear-groups"]
    # `read` is the shell's own: no process for each
    script = 'for p do got=; { read -r got <"$p"; } 2>/dev/null; echo "${got:-0}"; done'
    done = subprocess.run(
        ["setpriv", f"--reuid={uid}", f"--regid={gid}", *more, "sh", "-c", script, "sh", *paths],
        capture_output=True,
        text=True,
        cwd="/",
        check=True,
        timeout=60,
    )
    return [line != "0" for line in done.stdout.split()]


def rights(top: Path) -> dict[str, list[bool]]:
    """Of everybody: which of the files below `top` may be read?"""
    below = [path for path in sorted(top.rglob("*")) if path.is_file()]
    return {who: may(who, *below) for who in WHO}


@pytest.fixture
def origin(ordinary_user: OrdinaryUser) -> Path:
    """Below a directory that everybody may enter: files and directories with each of the lists."""
    source = ordinary_user.base / "source"
    source.mkdir()
    source.chmod(0o755)
    for index, (mode, acl) in enumerate(ACLS.values()):
        (source / f"{index}").write_bytes(b"file")
        prepare(source / f"{index}", mode, acl)
        below = source / f"d{index}"
        below.mkdir()
        (below / "file").write_bytes(b"below")
        (below / "file").chmod(0o644)
        prepare(below, mode.replace("4", "5").replace("6", "7"), acl.replace(":r", ":rx"))
    return source


@pytest.fixture
def mount(ordinary_user: OrdinaryUser, origin: Path, mounting: Mounting) -> Mount:
    mountpoint = ordinary_user.base / "mnt"
    mountpoint.mkdir()
    return mounting("--allow-other", "--revalidate", "0.5", source=origin, mountpoint=mountpoint)


@pytest.mark.claim("X1", "X7")
def test_everybody_may_read_what_the_origin_lets_them_read(mount: Mount, origin: Path) -> None:
    expected = rights(origin)
    assert not expected["group"][0]  # the mode says 0640: its group bits are a mask
    assert expected["named"][2]
    assert sum(map(sum, expected.values())) > 20
    assert rights(mount.path) == expected
    assert rights(mount.path) == expected  # from the kernel's memory
    mount.kill_server()
    mount.drop_kernel_caches()
    assert rights(mount.path) == expected
    mount.restart()
    mount.drop_kernel_caches()
    assert rights(mount.path) == expected


@pytest.mark.claim("X7")
@in_one_mode
def test_the_server_is_killed_while_many_ask(mount: Mount, origin: Path) -> None:
    expected = rights(origin)
    for _ in range(3):
        mount.drop_kernel_caches()
        asking = [
            subprocess.Popen(
                ["setpriv", "--reuid=2002", "--regid=3002", "--clear-groups", "cat", *files],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for files in [[mount.path / str(index) for index in range(len(ACLS))]] * 4
        ]
        mount.kill_server()
        for process in asking:
            _, stderr = process.communicate(timeout=60)
            assert stderr.count(b"Permission denied") == len(ACLS) - sum(expected["group"][:9])
    assert rights(mount.path) == expected


@pytest.mark.claim("C5", "X7")
def test_a_list_that_changes_is_followed_within_the_period(mount: Mount, origin: Path) -> None:
    file, shown = origin / "7", mount.path / "7"
    assert may("group", shown) == [True]
    setfacl(file, "g::-,m::r")  # the mode stays 0640
    assert oct(file.stat().st_mode)[-3:] == "640"
    eventually(lambda: may("group", shown) == [False])
    assert shown.read_bytes() == b"file"
    setfacl(file, "u:2007:r")
    eventually(lambda: may("other", shown) == [True])
    subprocess.run(["setfacl", "-b", file], check=True)
    eventually(lambda: may("other", shown) == [False])
    (origin / "new").write_bytes(b"new")
    prepare(origin / "new", "0640", "u:2004:r,g::-")
    eventually(lambda: may("named", shown.with_name("new")) == [True])
    assert may("group", shown.with_name("new")) == [False]


@pytest.mark.claim("C5", "X7")
@in_one_mode
def test_the_list_of_the_source_directory_is_followed(mount: Mount, origin: Path) -> None:
    """The kernel keeps none of the root: the front answers, as long as it has not changed."""
    shown = mount.path / "6"
    assert may("other", shown, shown) == [True] * 2
    setfacl(origin, "u:2007:-")
    eventually(lambda: may("other", shown) == [False])
    assert rights(mount.path) == rights(origin)
    subprocess.run(["setfacl", "-b", origin], check=True)
    eventually(lambda: may("other", shown) == [True])


@in_one_mode
def test_what_the_kernel_does_not_keep_costs_no_slow_request(mount: Mount) -> None:
    shown, reads = mount.path / "6", Path(f"/proc/{mount.server_pid()}/io")

    def count() -> int:
        return int(reads.read_text().split("syscr: ")[1].split()[0])

    def is_cheap() -> bool:
        """One to receive each question about the root; another for each that pyfuse3 is handed. The
        server has some of its own, all the time.
        """
        before = count()
        assert all(may("other", *[shown] * 300))
        return count() - before < 450

    assert all(may("other", shown, shown))
    eventually(is_cheap)


@pytest.mark.claim("U1", "X7")
def test_lists_are_shown_and_no_other_attribute(mount: Mount, origin: Path) -> None:
    setfacl(origin / "d7", "d:u:2004:rwx,d:g::-")
    os.setxattr(origin / "7", "user.colour", b"red")
    names = ["0", "2", "d1", "d7", "7"]
    for name in names:
        shown, expected = (
            subprocess.run(
                ["getfacl", "-c", "-n", "-p", top / name], capture_output=True, check=True
            ).stdout
            for top in (mount.path, origin)
        )
        assert shown == expected, name
    assert errno_of(os.getxattr, mount.path / "7", "user.colour") == "ENOTSUP"
    assert errno_of(os.listxattr, mount.path / "7") in ("", "ENOTSUP")
    assert errno_of(os.setxattr, mount.path / "7", "system.posix_acl_access", b"") == "EROFS"


@pytest.mark.claim("X7")
def test_the_list_of_another_file_opens_none(mount: Mount, origin: Path) -> None:
    """Another file, open to all, takes the place of one that the kernel has looked at."""
    mount.restart("--revalidate", "never")
    shown = mount.path / "0"
    assert shown.stat().st_size == 4
    (origin / "another").write_bytes(b"open")
    (origin / "another").chmod(0o644)
    (origin / "another").rename(origin / "0")
    uid, gid, _ = WHO["group"]
    as_group = ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups")
    done = subprocess.run([*as_group, "cat", shown], capture_output=True, timeout=60)
    assert done.stdout in (b"", b"open")


@pytest.mark.claim("E3", "X7")
@pytest.mark.parametrize("subtype", ["sshfs", "passthrough"])
@in_one_mode
def test_who_was_let_in_reads_cached_files_while_the_origin_hangs(
    ordinary_user: OrdinaryUser, mounting: Mounting, subtype: str
) -> None:
    """sshfs has no lists: nobody needs to have been let in before."""
    backing, source, mountpoint = (ordinary_user.base / name for name in ("back", "origin", "mnt"))
    for directory in (backing, source, mountpoint):
        directory.mkdir()
        directory.chmod(0o755)
    for name in ("a", "b"):
        (backing / name).write_bytes(name.encode())
        (backing / name).chmod(0o644)
    begun_s = time.time()
    eventually(lambda: time.time() > begun_s + 2.5)  # their time stamps are to be trusted
    with FaultyOrigin(backing, source, ordinary_user.base / "sock", subtype) as faulty:
        mount = mounting(
            "--allow-other",
            *("--origin-timeout", "3"),
            *("--revalidate", "1"),
            source=source,
            mountpoint=mountpoint,
            allow_log=["origin (does not answer|is away)"],
        )
        if subtype == "passthrough":
            assert may("other", mount.path / "a") == [True]
        mount.read_until_stored("a", "b", blocks=2)
        faulty.add(Fault("*", hang=True))
        try:
            mount.drop_kernel_caches()
            shown = [mount.path / "a", mount.path / "b"]
            assert may("other", *shown) == [True, subtype == "sshfs"]
        finally:
            faulty.clear()
            faulty.release()

"""Hosts of a pool sweep the origin together: one does, the others follow it (docs/POOL.md).

Hosts are mounts of one origin. Figures are counted by themselves: directories that a pass has
looked at, and how many passes there were.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Place
from tests.mount.test_pool import Server, loopback, plain, secured, serving, three
from tests.support.mounted import ROOT, Mount, eventually
from tools.cluster_lib.engine import make_access

PERIOD_S = "2"
DIRECTORIES, FILES = 5, 8
HOSTS = 3
WARNINGS = ("fusecache.pool.hosts: pool: ",)


class Host:
    def __init__(self, mount: Mount) -> None:
        self.mount = mount

    @property
    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = self.mount.value("revalidate")
        return found

    @property
    def shared(self) -> dict[str, Any]:
        found: dict[str, Any] = self.figures["shared"]
        return found

    @property
    def looks(self) -> int:
        """Directories that it has swept."""
        return int(self.figures["swept"])

    @property
    def is_leader(self) -> bool:
        return bool(self.shared["role"] == "leader")

    def list_all(self) -> None:
        for _ in os.walk(self.mount.path):
            pass

    def leaves(self, directories: int) -> bool:
        """It follows, and leaves so many."""
        shared = self.shared
        return bool(shared["role"] == "follower" and shared["left"] == directories)

    def names(self, directory: str) -> set[str]:
        return set(os.listdir(self.mount.path / directory))


Mounting = Callable[..., Host]
__all__ = ["three"]  # a fixture


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    access = make_access(tmp_path / "access", [], has_tls=False, acl="")
    with serving(tmp_path / "engine", 5, access) as made:
        yield made


@pytest.fixture
def tree(place: Place) -> Place:
    for directory in range(DIRECTORIES):
        for file in range(FILES):
            place.write(f"d{directory}/{file}", b"%d" % file)
    return place


@pytest.fixture
def mounting(tree: Place, tmp_path: Path) -> Iterator[Mounting]:
    with contextlib.ExitStack() as stack:
        hosts: list[Host] = []

        def start(
            server: Server, *flags: str, below: str = ".", pool: tuple[str, ...] = ()
        ) -> Host:
            path = tmp_path / f"mnt{len(hosts)}"
            path.mkdir()
            mount = Mount(
                tree.source / below, path, tmp_path / f"cache{len(hosts)}", "--ssd", "64M",
                "--revalidate", PERIOD_S, *(pool or server.options("tree")), *flags,
                allow_log=WARNINGS,
            )  # fmt: skip
            hosts.append(Host(stack.enter_context(mount)))
            return hosts[-1]

        yield start


@pytest.fixture
def hosts(mounting: Mounting, server: Server) -> list[Host]:
    """Each has listed all, and all but one leave all to that one."""
    found = [mounting(server) for _ in range(HOSTS)]
    for host in found:
        host.list_all()
    settled(found)
    return found


def settled(hosts: list[Host]) -> tuple[Host, list[Host]]:
    """The leader, and those that leave all to it."""

    def look() -> None:
        leaders = [host for host in hosts if host.is_leader]
        assert len(leaders) == 1
        names = {host.shared["leader"] for host in hosts}
        assert len(names) == 1
        assert all(host.leaves(1 + DIRECTORIES) for host in hosts if host is not leaders[0])

    eventually(look)
    (leader,) = (host for host in hosts if host.is_leader)
    return leader, [host for host in hosts if host is not leader]


def after_passes(host: Host, passes: int) -> tuple[int, int]:
    """(passes, directories looked at) since now: so many at least have begun and ended."""
    before = host.figures
    eventually(lambda: host.figures["sweeps"] >= before["sweeps"] + passes)
    now = host.figures
    return now["sweeps"] - before["sweeps"], now["swept"] - before["swept"]


def test_one_host_sweeps_for_all(hosts: list[Host]) -> None:
    leader, followers = settled(hosts)
    before = [host.figures for host in followers]
    passes, looks = after_passes(leader, 4)
    assert passes >= 4
    # a pass may be under way when the figures are read
    assert 0 <= looks - (passes - 1) * (1 + DIRECTORIES) <= 2 * (1 + DIRECTORIES)
    assert [host.figures for host in followers] == before, "followers have swept"


@pytest.mark.claim("C16")
def test_what_the_leader_finds_the_followers_see(hosts: list[Host], tree: Place) -> None:
    leader, followers = settled(hosts)
    looks = [host.looks for host in followers]
    tree.write("d0/new", b"new")
    tree.write("d1/3", b"longer than it was")
    (tree.source / "d2/5").unlink()
    os.chmod(tree.source / "d3/1", 0o600)
    os.rename(tree.source / "d4/0", tree.source / "d4/renamed")
    (tree.source / "d5").mkdir()
    os.chmod(tree.source, 0o711)

    def sees(host: Host) -> None:
        top = host.mount.path
        assert (top / "d0/new").read_bytes() == b"new"
        assert (top / "d1/3").read_bytes() == b"longer than it was"
        assert "5" not in host.names("d2")
        assert not (top / "d2/5").exists()
        assert (top / "d3/1").stat().st_mode & 0o777 == 0o600
        assert "renamed" in host.names("d4")
        assert "0" not in host.names("d4")
        assert "d5" in host.names("")
        assert top.stat().st_mode & 0o777 == 0o711

    for host in hosts:
        eventually(lambda host=host: sees(host))  # type: ignore[misc]
    # but for d5, which they have listed now: `sees` does not
    assert [host.looks for host in followers] == looks, "followers have swept to find it"
    assert settled(hosts)[0] is leader


def test_what_is_read_on_the_leader_first_is_not_lost(hosts: list[Host], tree: Place) -> None:
    """It finds a change when it reads, before its sweep does, which then sees none."""
    leader, followers = settled(hosts)
    for number in range(20):
        name = f"d0/{number % FILES}"
        tree.write(name, b"x" * (10 + number))
        with contextlib.suppress(OSError):
            (leader.mount.path / name).read_bytes()
    for host in followers:
        for file in range(FILES):
            content = (tree.source / f"d0/{file}").read_bytes()
            eventually(
                lambda host=host, file=file, content=content: (  # type: ignore[misc]
                    (host.mount.path / f"d0/{file}").read_bytes() == content
                )
            )


def test_a_directory_that_only_a_follower_knows(
    mounting: Mounting, server: Server, tree: Place
) -> None:
    """The leader lists it, and sweeps it from then on."""
    leader = mounting(server)
    eventually(lambda: leader.is_leader)
    follower = mounting(server)
    follower.names("d2")
    eventually(lambda: follower.leaves(1))
    before = follower.looks
    tree.write("d2/new", b"new")
    eventually(lambda: "new" in follower.names("d2"))
    assert follower.looks == before


def test_a_directory_that_is_replaced(hosts: list[Host], tree: Place) -> None:
    """What was listed below it counts no more, on any host."""
    for name in ("a", "b"):
        tree.write(f"other/{name}", b"1")
    os.rename(tree.source / "d0", tree.source / "old")
    os.rename(tree.source / "other", tree.source / "d0")
    for host in hosts:
        eventually(lambda host=host: host.names("d0") == {"a", "b"})  # type: ignore[misc]
    tree.write("d0/c", b"1")
    for host in hosts:
        eventually(lambda host=host: "c" in host.names("d0"))  # type: ignore[misc]


def test_thousands_of_changes_at_once(hosts: list[Host], tree: Place) -> None:
    leader, followers = settled(hosts)
    before = [host.looks for host in followers]
    count = 3000
    for number in range(count):
        (tree.source / f"d1/more{number}").touch()
    for host in hosts:
        eventually(lambda host=host: len(host.names("d1")) == FILES + count)  # type: ignore[misc]
    assert [host.looks for host in followers] == before
    assert leader.is_leader


@pytest.mark.claim("C16")
def test_the_leader_is_killed(hosts: list[Host], tree: Place) -> None:
    leader, followers = settled(hosts)
    leader.mount.destroy()
    next_leader, (follower,) = settled(followers)
    tree.write("d0/new", b"new")
    for host in followers:
        eventually(lambda host=host: "new" in host.names("d0"))  # type: ignore[misc]
    before = follower.looks
    after_passes(next_leader, 3)
    assert follower.looks == before


def test_the_leader_is_stopped_and_goes_on(hosts: list[Host], tree: Place) -> None:
    leader, followers = settled(hosts)
    keeper, server = leader.mount.keeper_pid, leader.mount.server_pid()
    for pid in (keeper, server):  # a keeper replaces a server that is stopped
        os.kill(pid, signal.SIGSTOP)
    try:
        settled(followers)
        tree.write("d0/new", b"new")
        for host in followers:
            eventually(lambda host=host: "new" in host.names("d0"))  # type: ignore[misc]
    finally:
        for pid in (server, keeper):
            os.kill(pid, signal.SIGCONT)
    settled(hosts)
    assert "new" in leader.names("d0")


def test_the_leader_ends(hosts: list[Host]) -> None:
    leader, followers = settled(hosts)
    leader.mount.umount()
    settled(followers)


@pytest.mark.claim("C16")
def test_without_an_engine_each_host_sweeps(hosts: list[Host], server: Server, tree: Place) -> None:
    settled(hosts)
    server.engine.kill()
    eventually(lambda: all(host.shared["role"] == "alone" for host in hosts))
    with ThreadPoolExecutor(HOSTS) as threads:
        for passes, looks in threads.map(lambda host: after_passes(host, 3), hosts):
            assert looks >= (passes - 1) * (1 + DIRECTORIES)
    tree.write("d0/new", b"new")
    for host in hosts:
        eventually(lambda host=host: "new" in host.names("d0"))  # type: ignore[misc]
    server.engine.start()
    settled(hosts)


def test_an_engine_that_loses_everything(hosts: list[Host], server: Server, tree: Place) -> None:
    settled(hosts)
    for number in range(5):
        server.client.flushall()
        tree.write(f"d0/new{number}", b"new")
        for host in hosts:
            eventually(
                lambda host=host, number=number: (  # type: ignore[misc]
                    f"new{number}" in host.names("d0")
                )
            )
    settled(hosts)


def sweep_together(hosts: list[Host], tree: Place) -> None:
    """They do, and see what changes."""
    for host in hosts:
        host.list_all()
    _, followers = settled(hosts)
    looks = [host.looks for host in followers]
    tree.write("d0/new", b"new")
    for host in hosts:
        eventually(lambda host=host: "new" in host.names("d0"))  # type: ignore[misc]
    assert [host.looks for host in followers] == looks


def test_with_tls_and_the_rights_of_a_pool_s_user(
    mounting: Mounting, tmp_path: Path, tree: Place
) -> None:
    script = (ROOT / "deploy/pool/certificates").read_text()
    (commands,) = re.findall(r'echo " (\+get .+)"', script)
    acl = f"~fusecache:tree:* -@all {commands}"
    access = make_access(tmp_path / "secure", [loopback(6)], has_tls=True, acl=acl)
    with serving(tmp_path / "engine", 6, access) as server:
        sweep_together([mounting(server, pool=secured(server, "tree")) for _ in range(2)], tree)


def test_in_a_cluster(mounting: Mounting, three: list[Server], tree: Place) -> None:
    options = plain(three[0].place, "tree")
    sweep_together([mounting(three[0], pool=options) for _ in range(2)], tree)


def test_servers_that_are_independent(
    mounting: Mounting, server: Server, tmp_path: Path, tree: Place
) -> None:
    """The one that has the lease goes: the other one has the next."""
    access = make_access(tmp_path / "more", [], has_tls=False, acl="")
    with serving(tmp_path / "other", 7, access) as other:
        options = plain(f"{server.place},{other.place}", "tree")
        hosts = [mounting(server, pool=options) for _ in range(2)]
        sweep_together(hosts, tree)
        (it,) = (one for one in (server, other) if one.client.keys("*FCS1*"))
        it.engine.kill()
        tree.write("d1/new", b"new")
        for host in hosts:
            eventually(lambda host=host: "new" in host.names("d1"))  # type: ignore[misc]
        settled(hosts)


def test_other_periods_and_other_directories_share_nothing(
    hosts: list[Host], mounting: Mounting, server: Server, tree: Place
) -> None:
    settled(hosts)
    slow = mounting(server, "--revalidate", "3")
    eventually(lambda: slow.is_leader)
    other = mounting(server, below="d0")  # a mistake
    other.list_all()
    eventually(lambda: other.shared["role"] == "follower")
    passes, looks = after_passes(other, 3)
    assert looks >= passes - 1
    assert other.shared["left"] == 0
    (tree.source / "d0/new").touch()
    eventually(lambda: "new" in other.names(""))
    settled(hosts)

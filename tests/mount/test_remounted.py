"""An origin that dies and is mounted again at the same place is found again, readers go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.support.faulty_origin import FaultyOrigin
from tests.support.mounted import Mount, errno_of, eventually
from tests.support.trees import assert_same, make_files, random_bytes, snapshot

AWAY = "origin (does not answer|is away)"
EMPTY = "was mounted anew: it cannot be used: it is empty"
PERIOD = ("--revalidate", "1", "--origin-timeout", "10")
LARGE_BYTES = 9 << 20


@pytest.fixture(params=["", "juicefs"], ids=["numbers-change", "numbers-stay"])
def origin(place: Place, request: pytest.FixtureRequest) -> Iterator[FaultyOrigin]:
    mountpoint = place.base / "origin"
    mountpoint.mkdir()
    socket_path = place.base / "origin.sock"
    with FaultyOrigin(place.source, mountpoint, socket_path, request.param) as running:
        yield running


def swept(mount: Mount, times: int = 2) -> None:
    """That many sweeps later."""
    wanted = mount.value("revalidate", "sweeps") + times
    eventually(lambda: mount.value("revalidate", "sweeps") >= wanted)


@pytest.mark.claim("E8", "E6", "R4")
def test_it_is_found_again(place: Place, origin: FaultyOrigin, mounting: Mounting) -> None:
    files = make_files(place.source, 60, lambda index: 5000 + index)
    names = [str(path.relative_to(place.source)) for path in files]
    cached, uncached = names[:50], names[50:]
    large = place.write("large", random_bytes("large", LARGE_BYTES)).read_bytes()
    mount = mounting(*PERIOD, source=origin.mountpoint, allow_log=[AWAY])
    assert_same(place.source, mount.path, content=False)
    mount.read_until_stored(*cached, blocks=50)
    numbers = {name: (mount.path / name).stat().st_ino for name in names}
    held = os.open(mount.path / "large", os.O_RDONLY)
    assert os.pread(held, 4096, 0) == large[:4096]

    def cached_are_served() -> None:
        mount.drop_pages()
        for name in cached:
            assert (mount.path / name).read_bytes() == (place.source / name).read_bytes()

    origin.die()
    eventually(lambda: mount.value("origin", "available") is False)
    cached_are_served()
    assert errno_of((mount.path / uncached[0]).read_bytes) == "ENOTCONN"
    origin.take_off()  # below it there is an empty directory
    swept(mount)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(origin.mountpoint)], check=True)
    (origin.mountpoint / cached[0]).parent.mkdir()
    (origin.mountpoint / cached[0]).write_bytes(b"of another file system")
    swept(mount)
    assert len(os.listdir(mount.path)) == 3
    cached_are_served()
    subprocess.run(["umount", str(origin.mountpoint)], check=True)
    origin.__enter__()
    eventually(lambda: (mount.path / uncached[0]).read_bytes())
    swept(mount)
    cached_are_served()
    assert os.pread(held, LARGE_BYTES, 0) == large
    assert_same(place.source, mount.path)
    assert numbers == {name: (mount.path / name).stat().st_ino for name in names}
    for name in cached:
        assert origin.count("read", name) == 0
    place.write("new", b"new")
    eventually(lambda: (mount.path / "new").read_bytes() == b"new")
    os.close(held)


@pytest.mark.claim("E8", "K1")
@in_one_mode
def test_the_next_server_finds_it_too(
    place: Place, origin: FaultyOrigin, mounting: Mounting
) -> None:
    """What the keeper has is the directory that was there first; and a server may die before."""
    files = make_files(place.source, 20, lambda index: 5000 + index)
    mount = mounting(*PERIOD, source=origin.mountpoint, allow_log=[AWAY])
    assert_same(place.source, mount.path, content=False)
    origin.die()
    mount.kill_server()
    eventually(lambda: mount.value("origin", "available") is False)
    origin.mount_again()
    path = mount.path / files[0].relative_to(place.source)
    eventually(lambda: path.read_bytes() == files[0].read_bytes())
    for _ in range(2):
        mount.restart()
        origin.die()
        origin.mount_again()
        path = mount.path / files.pop().relative_to(place.source)
        eventually(path.read_bytes)
    assert_same(place.source, mount.path)
    for _ in range(2):  # the same server says so each time
        said = mount.log().count("is used from now on")
        origin.die()
        origin.mount_again()
        eventually(lambda said=said: mount.log().count("is used from now on") > said)  # type: ignore[misc]


@pytest.mark.claim("E8")
@in_one_mode
def test_an_empty_one_is_not_taken(place: Place, origin: FaultyOrigin, mounting: Mounting) -> None:
    """The server of the origin may have lost its disk: names and bytes stay until it is back."""
    files = make_files(place.source, 20, lambda index: 5000 + index)
    names = [str(path.relative_to(place.source)) for path in files]
    mount = mounting(*PERIOD, source=origin.mountpoint, allow_log=[AWAY, EMPTY])
    assert_same(place.source, mount.path)
    mount.read_until_stored(*names, blocks=20)
    expected = snapshot(place.source)[0]
    origin.die()
    aside = place.base / "aside"
    place.source.rename(aside)
    place.source.mkdir()
    origin.mount_again()
    eventually(lambda: re.search(f"WARNING .*{EMPTY}", mount.log()) is not None)
    swept(mount)
    mount.drop_pages()
    assert snapshot(mount.path)[0] == expected
    place.source.rmdir()
    aside.rename(place.source)
    origin.reset_counts()
    place.write("new", b"new")
    eventually(lambda: (mount.path / "new").read_bytes() == b"new")
    assert_same(place.source, mount.path)
    assert origin.count("read", "class*") == 0


@pytest.mark.claim("E6")
@in_one_mode
def test_mount_does_not_take_a_mount_of_a_dead_origin_for_dead(
    place: Place, origin: FaultyOrigin, mounting: Mounting
) -> None:
    """sshfs died, and somebody (a user, a unit, cron) mounts once more: the epoch goes on."""
    files = make_files(place.source, 20, lambda index: 30_000 + index)
    mount = mounting(source=origin.mountpoint, allow_log=[AWAY])
    assert_same(place.source, mount.path)
    names = [str(path.relative_to(place.source)) for path in files]
    mount.read_until_stored(*names, blocks=20)
    origin.die()
    for source in (origin.mountpoint, place.source):
        done = mount.run("mount", source, mount.path, "--cache-dir", place.cache_dir)
        assert done.returncode != 0
        assert "dead fusecache" not in done.stderr
    os.kill(mount.keeper_pid, signal.SIGSTOP)  # nor is one whose keeper says nothing
    try:
        done = mount.run("mount", place.source, mount.path, "--cache-dir", place.cache_dir)
        assert done.returncode != 0
    finally:
        os.kill(mount.keeper_pid, signal.SIGCONT)
    assert_same(place.source, mount.path)

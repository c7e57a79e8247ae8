"""Faults of the origin: passed on as they are, never made worse, never remembered."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.support.faulty_origin import Fault, FaultyOrigin
from tests.support.mounted import errno_of, eventually
from tests.support.trees import assert_same, make_files, random_bytes, snapshot

AWAY = "origin (does not answer|is away)"


@pytest.mark.claim("E1", "E2")
@pytest.mark.parametrize("error", ["EIO", "EACCES", "ENOENT", "ESTALE"])
@in_one_mode
def test_an_error_passes_through_and_is_not_remembered(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, error: str
) -> None:
    content = place.write("d/file", random_bytes(error, 200_000)).read_bytes()
    place.write("d/other", b"other")
    mount = mounting("--revalidate", "1", source=faulty.mountpoint, allow_log=[AWAY])
    os.listdir(mount.path / "d")
    path = mount.path / "d/file"
    for op in ("open", "read"):
        faulty.add(Fault(op, "d/file", error=error))
        for _ in range(2):
            assert errno_of(path.read_bytes) == error
        assert (mount.path / "d/other").read_bytes() == b"other"
        faulty.clear()
        assert path.read_bytes() == content
        (place.source / "d/file").write_bytes(content)  # another version: fetched anew
        eventually(lambda: path.stat().st_mtime_ns == (place.source / "d/file").stat().st_mtime_ns)
        mount.drop_pages()


@pytest.mark.claim("E2")
@in_one_mode
def test_estale_once_is_tried_again(place: Place, faulty: FaultyOrigin, mounting: Mounting) -> None:
    for name in ("read", "open", "lookup"):
        place.write(name, random_bytes(name, 100_000))
    mount = mounting(source=faulty.mountpoint, allow_log=[AWAY])
    faulty.add(Fault("read", "read", error="ESTALE", times=1))
    # The kernel of the origin tries an open and a lookup a second time by itself.
    faulty.add(Fault("open", "open", error="ESTALE", times=2))
    faulty.add(Fault("lookup", "lookup", error="ESTALE", times=2))
    for name in ("lookup", "read", "open"):
        assert (mount.path / name).read_bytes() == (place.source / name).read_bytes()


@pytest.mark.claim("E1")
@in_one_mode
def test_a_directory_that_cannot_be_listed(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    make_files(place.source, 60, lambda _: 100)
    mount = mounting(source=faulty.mountpoint, allow_log=[AWAY])
    for error in ("EACCES", "EIO"):
        faulty.add(Fault("readdir", "class000", error=error))
        assert errno_of(os.listdir, mount.path / "class000") == error
        assert len(os.listdir(mount.path / "class001")) == 10
        faulty.clear()
    faulty.add(Fault("lookup", "class000/00001.jpg", error="EIO"))
    assert errno_of(os.stat, mount.path / "class000/00001.jpg") == "EIO"
    faulty.clear()
    assert_same(place.source, mount.path)


READER = """
import sys
while True:
    try:
        open(sys.argv[1], "rb").read()
    except OSError:
        pass
"""


@pytest.mark.claim("E3", "E4", "E5", "K3")
@pytest.mark.parametrize("op", ["read", "open"])
def test_a_hang_ends_in_eio_and_readers_can_be_killed(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, op: str
) -> None:
    for name in ("hangs", "hangs too", "fine", "cached"):
        place.write(name, random_bytes(name, 100_000))
    mount = mounting("--origin-timeout", "3", source=faulty.mountpoint, allow_log=[AWAY])
    mount.read_until_stored("cached", blocks=1)
    eventually(lambda: os.listdir(mount.path))

    def others_are_read() -> None:
        for name in ("fine", "cached"):
            assert (mount.path / name).read_bytes() == (place.source / name).read_bytes()

    faulty.add(Fault(op, "hangs*", hang=True))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(errno_of, (mount.path / "hangs").read_bytes)
        killed = subprocess.Popen([sys.executable, "-c", READER, mount.path / "hangs too"])
        eventually(lambda: faulty.hanging() >= 2)
        eventually(others_are_read)
        killed.kill()
        assert killed.wait(15) == -signal.SIGKILL
        assert waiting.result(30) == "EIO"
    faulty.clear()
    eventually(lambda: assert_same(place.source, mount.path))


TIMEOUT_S = 4.0
LONG_TIMEOUT_S = 30.0  # that nobody waits for


@pytest.mark.claim("E3", "E1")
@pytest.mark.parametrize("is_listed", [True, False], ids=["listed", "unlisted"])
@in_one_mode
def test_a_hang_costs_one_timeout(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, is_listed: bool
) -> None:
    """The kernel reads a page ahead of the reader, and again when the reader comes to it. A busy
    machine may take longer: the best of three counts.
    """
    content = random_bytes("hangs", 300_000)
    names = [place.write(f"d/{n}", content).name for n in range(3)]
    flags = ("--origin-timeout", f"{TIMEOUT_S:g}", "--revalidate", "2")
    mount = mounting(*flags, source=faulty.mountpoint, allow_log=[AWAY])
    for name in names:
        path = mount.path / "d" / name
        path.stat()
        if is_listed:
            os.listdir(mount.path / "d")
        faulty.add(Fault("read", f"d/{name}", hang=True))
        begun_s = time.monotonic()
        assert errno_of(path.read_bytes) == "EIO"
        took_s = time.monotonic() - begun_s
        assert took_s >= TIMEOUT_S
        faulty.clear()  # what hung comes back: the next read asks the origin again
        eventually(lambda path=path: path.read_bytes() == content, 20)  # type: ignore[misc]
        if took_s < 2 * TIMEOUT_S:
            return
    raise AssertionError(f"{took_s} s")


@pytest.mark.claim("E5", "E6")
def test_a_cached_file_is_read_at_once_while_everything_hangs(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    """Nothing watches the directory, so that each look-up asks the origin; and nobody knows yet
    that it hangs.
    """
    names = ["d/cached", "d/e/deeper", "d/e/large"]
    for name in names:
        place.write(name, random_bytes(name, 9 << 20 if "large" in name else 100_000))
    flags = ("--origin-timeout", f"{LONG_TIMEOUT_S:g}", "--revalidate", "1")
    mount = mounting(*flags, source=faulty.mountpoint, allow_log=[AWAY])
    mount.read_until_stored(*names, blocks=5)
    mount.restart()  # where large ones lie is forgotten
    mount.drop_kernel_caches()
    faulty.add(Fault("*", hang=True))
    begun_s = time.monotonic()
    for name in names:
        assert (mount.path / name).read_bytes() == (place.source / name).read_bytes()
    assert time.monotonic() - begun_s < LONG_TIMEOUT_S / 3
    faulty.clear()
    eventually(lambda: mount.value("origin", "available"))
    assert_same(place.source, mount.path)


@pytest.mark.claim("E3", "E5")
@in_one_mode
def test_hanging_metadata(place: Place, faulty: FaultyOrigin, mounting: Mounting) -> None:
    make_files(place.source, 120, lambda _: 100)
    (place.source / "link").symlink_to("class000")
    mount = mounting("--origin-timeout", "3", source=faulty.mountpoint, allow_log=[AWAY])
    for op, path, action in (
        ("readdir", "class000", lambda: os.listdir(mount.path / "class000")),
        ("lookup", "class001/00050.jpg", lambda: os.stat(mount.path / "class001/00050.jpg")),
        ("readlink", "link", lambda: os.readlink(mount.path / "link")),
    ):
        faulty.add(Fault(op, path, hang=True))
        assert errno_of(action) == "EIO", op
        eventually(lambda: len(os.listdir(mount.path / "class002")) == 20)
        faulty.clear()
    eventually(lambda: assert_same(place.source, mount.path))


@pytest.mark.claim("E6", "R4")
@in_one_mode
def test_the_origin_goes_away_and_comes_back(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    files = make_files(place.source, 80, lambda index: 1000 * index)
    mount = mounting(
        *("--origin-timeout", "10", "--revalidate", "1"), source=faulty.mountpoint, allow_log=[AWAY]
    )
    os.listdir(mount.path / "class001")
    names = [str(path.relative_to(place.source)) for path in files]
    mount.read_until_stored(*names[:50], blocks=49)
    expected = {path: path.read_bytes() for path in files[:50]}
    assert mount.value("origin", "available") is True
    listing = sorted(os.listdir(mount.path / "class001"))
    faulty.add(Fault("*", error="EIO"))
    eventually(lambda: mount.value("origin", "available") is False)
    for _ in range(2):
        assert sorted(os.listdir(mount.path / "class001")) == listing
        for path, content in expected.items():
            assert (mount.path / path.relative_to(place.source)).read_bytes() == content
        assert errno_of((mount.path / "class001/00060.jpg").read_bytes) == "EIO"
        mount.drop_kernel_caches()
    mount.kill_server()
    for path, content in expected.items():
        assert (mount.path / path.relative_to(place.source)).read_bytes() == content
    assert mount.value("origin", "errors") > 0
    human = mount.run("status", mount.path)
    assert "away" in human.stdout or "not answer" in human.stdout, human.stdout
    faulty.clear()
    eventually(lambda: mount.value("origin", "available") is True)
    place.write("class000/new", b"new")
    eventually(lambda: assert_same(place.source, mount.path))


@pytest.mark.claim("E7")
@in_one_mode
def test_an_origin_that_ends_files_too_early(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    small = place.write("small", random_bytes("small", 300_000))
    large = place.write("large", random_bytes("large", 9 << 20))
    place.write("fine", b"fine")
    mount = mounting(source=faulty.mountpoint, allow_log=[AWAY])
    faulty.add(Fault("read", "small", short=100_000))
    faulty.add(Fault("read", "large", short=5_000_000))
    for name in ("small", "large"):
        assert errno_of((mount.path / name).read_bytes) == "EIO"
    assert (mount.path / "fine").read_bytes() == b"fine"
    faulty.clear()
    for path in (small, large):
        assert (mount.path / path.name).read_bytes() == path.read_bytes()
    mount.read_until_stored("small", "large", blocks=4)
    mount.drop_kernel_caches()
    for path in (small, large):
        assert (mount.path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.claim("E6")
@in_one_mode
def test_a_dead_origin_process(place: Place, faulty: FaultyOrigin, mounting: Mounting) -> None:
    """ENOTCONN from everything, as from a network file system whose client gave up."""
    files = make_files(place.source, 20, lambda index: 5000 + index)
    expected = snapshot(place.source)[0]
    mount = mounting("--revalidate", "1", source=faulty.mountpoint, allow_log=[AWAY])
    assert snapshot(mount.path)[0].keys() == expected.keys()
    names = [str(path.relative_to(place.source)) for path in files]
    mount.read_until_stored(*names, blocks=len(files))
    faulty.die()
    eventually(lambda: mount.value("origin", "available") is False)
    mount.drop_pages()
    assert snapshot(mount.path)[0] == expected


@pytest.mark.claim("E5")
@in_one_mode
def test_slow_files_do_not_hold_up_others(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    """Ten readers wait in one directory; a reader elsewhere is done before the first of them."""
    for index in range(10):
        place.write(f"slow/{index}", random_bytes(index, 50_000))
        place.write(f"fast/{index}", random_bytes(index + 10, 50_000))
    mount = mounting(source=faulty.mountpoint)
    faulty.add(Fault("read", "slow/*", hang=True))
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        slow = [pool.submit((mount.path / f"slow/{n}").read_bytes) for n in range(10)]
        eventually(lambda: faulty.hanging() == 10)
        for index in range(10):
            assert (mount.path / f"fast/{index}").read_bytes() == random_bytes(index + 10, 50_000)
        assert not any(one.done() for one in slow)
        faulty.clear()
        assert [one.result(60) for one in slow] == [random_bytes(n, 50_000) for n in range(10)]
    assert_same(place.source, mount.path)

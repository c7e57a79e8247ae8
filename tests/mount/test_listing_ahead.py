"""Siblings of what readers list one after another are listed ahead: how many, and what it may not
change.
"""

from __future__ import annotations

import concurrent.futures
import os
import time

import pytest

from fusecache.read.directories import AT_ONCE
from tests.conftest import Mounting, Place, in_one_mode
from tests.support.faulty_origin import Fault, FaultyOrigin
from tests.support.mounted import Mount, errno_of, eventually
from tests.support.trees import assert_same

AWAY = "origin (does not answer|is away)"
DIRECTORIES = 24
FILES = 3
TIMEOUT_S = 8.0


@pytest.fixture
def names(place: Place) -> list[str]:
    found = [f"{number:02d}" for number in range(DIRECTORIES)]
    for name in found:
        for file in range(FILES):
            place.write(f"{name}/{file}", name.encode())
    return found


def listed(faulty: FaultyOrigin, names: list[str]) -> list[str]:
    """Those that the origin was asked for the files of."""
    return [name for name in names if faulty.count("lookup", f"{name}/*")]


def list_some(mount: Mount, names: list[str]) -> None:
    for name in names:
        assert sorted(os.listdir(mount.path / name)) == [str(file) for file in range(FILES)]


def test_siblings_are_listed_once_and_ahead(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, names: list[str]
) -> None:
    mount = mounting(source=faulty.mountpoint)
    os.listdir(mount.path)
    list_some(mount, names[:1])
    assert listed(faulty, names) == names[:1]  # one alone
    # How many exactly: unit/read/test_directories.py. A reader that comes to one which is being
    # listed just now brings more.
    list_some(mount, names[1:2])
    eventually(lambda: len(listed(faulty, names)) >= 3)
    list_some(mount, names[2:4])

    def are_first() -> None:
        """No name after one that was passed over: while some are listed, it may look so."""
        found = listed(faulty, names)
        assert len(found) >= 6
        assert found == names[: len(found)]

    eventually(are_first)
    assert len(listed(faulty, names)) < DIRECTORIES
    list_some(mount, names[4:])
    for name in names:
        assert faulty.count("lookup", f"{name}/0") == 1
    assert_same(place.source, mount.path)


@in_one_mode
def test_a_listing_frozen_for_ever_is_what_the_reader_asked_for(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, names: list[str]
) -> None:
    """C8: what nobody looked at is not kept as it was."""
    mount = mounting("--revalidate", "never", source=faulty.mountpoint)
    os.listdir(mount.path)
    list_some(mount, names[:6])
    assert listed(faulty, names) == names[:6]
    place.write(f"{names[6]}/new", b"new")
    assert "new" in os.listdir(mount.path / names[6])


@pytest.mark.claim("C1")
@in_one_mode
def test_what_was_listed_ahead_is_swept(place: Place, mounting: Mounting, names: list[str]) -> None:
    mount = mounting("--revalidate", "1")
    os.listdir(mount.path)
    list_some(mount, names[:2])
    place.write(f"{names[2]}/new", b"new")
    (place.source / names[3] / "0").unlink()
    eventually(lambda: assert_same(place.source, mount.path))


@pytest.mark.claim("E1")
@in_one_mode
def test_a_sibling_that_fails_harms_nobody(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, names: list[str]
) -> None:
    mount = mounting(source=faulty.mountpoint, allow_log=[AWAY])
    os.listdir(mount.path)
    for name, error in ((names[2], "EIO"), (names[4], "EACCES"), (names[5], "ESTALE")):
        faulty.add(Fault("readdir", name, error=error))
    list_some(mount, names[:2])
    assert errno_of(os.listdir, mount.path / names[2]) == "EIO"
    list_some(mount, names[3:4])
    assert errno_of(os.listdir, mount.path / names[4]) == "EACCES"
    assert errno_of(os.listdir, mount.path / names[5]) == "ESTALE"
    list_some(mount, names[6:])
    faulty.clear()
    assert_same(place.source, mount.path)


@pytest.mark.claim("E3", "E5")
@in_one_mode
def test_siblings_that_hang_cost_one_timeout(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, names: list[str]
) -> None:
    """A reader who comes while they are listed ahead waits with them, not once more after them."""
    flags = ("--origin-timeout", f"{TIMEOUT_S:g}")
    mount = mounting(*flags, source=faulty.mountpoint, allow_log=[AWAY])
    os.listdir(mount.path)
    list_some(mount, names[:1])
    for name in names[2:]:
        faulty.add(Fault("lookup", f"{name}/0", hang=True))
    list_some(mount, names[1:2])
    eventually(lambda: faulty.hanging() == 1)
    begun_s = time.monotonic()

    def fails(name: str) -> bool:
        return errno_of(os.listdir, mount.path / name) == "EIO"

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(fails, name) for name in (names[2], names[2], names[12])]
        list_some(mount, names[:2])
        assert all(reader.result(60) for reader in readers)
    assert time.monotonic() - begun_s < 2 * TIMEOUT_S
    assert faulty.count("lookup", f"{names[2]}/0") == 1
    assert faulty.hanging() <= 2 + AT_ONCE
    faulty.clear()
    assert_same(place.source, mount.path)

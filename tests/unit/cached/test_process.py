"""How `fusecache cached` begins: what it refuses, in one line, and what it leaves as it is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from fusecache.base.errors import EXIT_BUSY, EXIT_USAGE, UserError
from fusecache.cached import process
from fusecache.config import building
from tests.unit.cached.support import MIB


def refused(
    directory: Path, path: Path, *, ssd: str = "64M", quota: str | None = None
) -> UserError:
    with pytest.raises(UserError) as caught:
        process.run(str(directory), str(path), ssd, quota, "0")
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_directory_with_other_files_stays_as_it_is(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    (home / ".ssh").mkdir()
    error = refused(home, tmp_path / "socket")
    assert str(error) == f"--dir {home}: it holds .ssh: name a directory for it alone"
    assert error.exit_code == EXIT_USAGE
    assert home.stat().st_mode & 0o777 == 0o755
    assert os.listdir(home) == [".ssh"]


def test_its_parent_is_not_made(tmp_path: Path) -> None:
    """Its disk may not be mounted."""
    error = refused(tmp_path / "ssd/cached", tmp_path / "socket")
    assert str(error).endswith(f"make {tmp_path}/ssd first")
    assert error.exit_code == EXIT_USAGE
    assert not (tmp_path / "ssd").exists()


@pytest.mark.parametrize(
    ("ssd", "quota", "line"),
    [
        ("1M", None, "--ssd: 1 MiB is too little: at least 64 MiB"),
        ("64M", "65M", "--quota: more than --ssd has (64 MiB)"),
        ("much", None, "--ssd: "),
        ("64M", "nothing", "--quota: "),
    ],
)
def test_sizes_that_cannot_be(tmp_path: Path, ssd: str, quota: str | None, line: str) -> None:
    error = refused(tmp_path / "cached", tmp_path / "socket", ssd=ssd, quota=quota)
    assert str(error).startswith(line)
    assert error.exit_code == EXIT_USAGE
    assert not (tmp_path / "socket").exists()


def test_what_is_free_counts_what_it_holds_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each start without --ssd would take room from what was stored before."""
    root = tmp_path / "cached"
    segments = root / ("0a" * 32) / "store/segments"
    segments.mkdir(parents=True)
    root.chmod(0o700)
    with (segments / "1.seg").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 * MIB)
    disk = building.Disk(1000 * MIB, 100 * MIB)
    monkeypatch.setattr(building, "_disks", lambda directories: [disk])
    given: list[int] = []

    class Stop(Exception):
        pass

    def groups(_: Path, limit_bytes: int, *rest: object) -> None:
        given.append(limit_bytes)
        raise Stop

    monkeypatch.setattr("fusecache.cached.groups.Groups", groups)
    with pytest.raises(Stop):
        process.run(str(root), str(tmp_path / "socket"), None, None, "10M")
    assert given == [(100 + 8 - 10) * MIB]


def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.write_text("mine")
    error = refused(tmp_path / "cached", path)
    assert (str(error), error.exit_code) == (f"--socket {path}: that is no socket", EXIT_USAGE)
    assert path.read_text() == "mine"


def test_a_socket_that_another_one_serves_stays(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        error = refused(tmp_path / "cached", path)
        assert str(error) == f"--socket {path}: another service answers there"
        assert error.exit_code == EXIT_BUSY
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_socket_whose_way_ends_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = refused(tmp_path / "cached", tmp_path / "file/socket")
    assert str(error).startswith(f"--socket {tmp_path}/file/socket: ")
    assert error.exit_code == EXIT_USAGE

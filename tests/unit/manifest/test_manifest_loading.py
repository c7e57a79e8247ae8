"""What a mount takes from its manifest: all of it or nothing, in a thread, with one line."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.base import trust
from fusecache.base.digest import ALGORITHMS
from fusecache.manifest import loading
from fusecache.manifest.format import NAME, Whole, entry_bytes, header
from fusecache.manifest.loading import Manifest
from tests.unit.manifest.test_manifest_format import entry, manifest

XXH3 = ALGORITHMS["xxh3-128"]
ENTRIES = [entry(number) for number in range(1, 6)]


@pytest.fixture
def source_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def load(source: Path, source_fd: int, data: bytes, setting: str = "auto") -> tuple[Manifest, str]:
    path = source / NAME
    path.write_bytes(data)
    path.chmod(0o600)
    found = Manifest(setting, str(source), source_fd, "xxh3-128")
    found.begin()
    return found, found.wait(60)


def test_each_block_has_its_digest(tmp_path: Path, source_fd: int) -> None:
    found, line = load(tmp_path, source_fd, manifest(ENTRIES))
    assert (found.files, line) == (5, "")
    for path, *version, digests in ENTRIES:
        ino, size, mtime_ns, ctime_ns = version
        asked = (ino, size, mtime_ns, ctime_ns)
        blocks = len(digests) // 16
        names = [found.find(path, asked, block) for block in range(blocks)]
        assert b"".join(name or b"" for name in names) == digests
        assert found.find(path, asked, blocks) is None
        assert found.find(path, (ino, size, mtime_ns, ctime_ns + 1), 0) is None


def test_mutations_say_nothing_with_one_line(
    tmp_path: Path, source_fd: int, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(1)
    data = manifest(ENTRIES)
    for _ in range(400):
        changed = bytearray(data)
        match draw.randrange(4):
            case 0:
                del changed[draw.randrange(len(changed)) :]
            case 1:
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            case 2:
                at = draw.randrange(len(changed))
                changed[at : at + draw.randrange(1, 50)] = draw.randbytes(draw.randrange(50))
            case _:
                changed = bytearray(draw.randbytes(draw.randrange(2000)))
        if changed == data:
            continue
        caplog.clear()
        with caplog.at_level(logging.INFO):
            found, line = load(tmp_path, source_fd, bytes(changed))
        assert found.files == 0
        assert [record.message for record in caplog.records] == [line]
        for path, ino, size, mtime_ns, ctime_ns, _ in ENTRIES:
            assert found.find(path, (ino, size, mtime_ns, ctime_ns), 0) is None


def test_none_and_one_that_is_not_there_say_nothing_without_a_line(
    tmp_path: Path, source_fd: int, caplog: pytest.LogCaptureFixture
) -> None:
    found, line = load(tmp_path, source_fd, manifest(ENTRIES), "none")
    assert (found.files, line) == (0, "")
    (tmp_path / NAME).unlink()
    absent = Manifest("auto", str(tmp_path), source_fd, "xxh3-128")
    absent.begin()
    assert (absent.wait(60), absent.files, caplog.records) == ("", 0, [])


def test_a_manifest_of_nothing_is_one(tmp_path: Path, source_fd: int) -> None:
    found, line = load(tmp_path, source_fd, header(XXH3) + Whole(XXH3).end())
    assert (found.files, line) == (0, "")
    assert found.find(b"a", (1, 2, 3, 4), 0) is None
    assert entry_bytes(ENTRIES[0])


def test_while_the_origin_is_away_it_is_tried_again(
    tmp_path: Path, source_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody waits for that."""
    errnos = [errno.EIO, errno.ENOTCONN, errno.ESTALE]
    open_in = trust.open_in

    def away(directory: int, name: str, path: str, flags: int = os.O_RDONLY) -> int:
        if errnos:
            raise OSError(errnos.pop(), "away")
        return open_in(directory, name, path, flags)

    monkeypatch.setattr(trust, "open_in", away)
    monkeypatch.setattr(loading, "AGAIN_S", 0.0)
    found, line = load(tmp_path, source_fd, manifest(ENTRIES))
    found._thread.join(60)
    assert (line, found.files, errnos) == ("", 5, [])

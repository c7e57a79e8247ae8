"""Which names have changed in the table, for the hosts of a pool (docs/POOL.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache import _native
from tests.support.native_table import ROOT, attach

Names = set[tuple[bytes, bytes]]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """All is listed, and the journal begins."""
    top = tmp_path / "source"
    for directory in ("d", "d/below", "e"):
        (top / directory).mkdir(parents=True, exist_ok=True)
    (top / "d/file").write_text("1")
    (top / "d/linked").write_text("1")
    os.link(top / "d/linked", top / "e/link")
    attach(top)
    for path in (b"", b"d", b"d/below", b"e"):
        _native.scan(_native.find_path(path))
    _native.journal(True)
    yield top
    _native.journal(False)


def scanned(*paths: bytes) -> tuple[Names, bool]:
    for path in paths:
        _native.scan(_native.find_path(path))
    names, is_whole = _native.journal_take()
    return set(names), is_whole


def test_what_has_not_changed_is_not_in_it(source: Path) -> None:
    os.utime(source / "d/file", ns=(1, (source / "d/file").stat().st_mtime_ns))
    assert scanned(b"", b"d", b"e")[1]
    assert scanned(b"", b"d", b"e") == (set(), True)


def test_names_that_come_go_and_change(source: Path) -> None:
    (source / "d/new").touch()
    (source / "d/file").write_text("12")
    assert scanned(b"d") == ({(b"", b"d"), (b"d", b"new"), (b"d", b"file")}, True)
    (source / "d/new").unlink()
    os.chmod(source / "d/file", 0o600)
    assert scanned(b"d") == ({(b"", b"d"), (b"d", b"new"), (b"d", b"file")}, True)
    os.rename(source / "d/file", source / "d/other")
    assert scanned(b"d") == ({(b"", b"d"), (b"d", b"file"), (b"d", b"other")}, True)
    (source / "e/second").touch()
    os.rename(source / "e/second", source / "d/other")
    assert scanned(b"d", b"e")[0] >= {(b"d", b"other")}


def test_it_does_not_matter_who_has_looked(source: Path) -> None:
    (source / "d/file").write_text("12")
    _native.refresh(_native.lookup(_native.find_path(b"d"), b"file"))
    (source / "d/new").touch()
    _native.add(_native.find_path(b"d"), b"new")
    names, _ = _native.journal_take()
    assert names == [(b"d", b"file"), (b"d", b"new")]


def test_all_names_of_a_file(source: Path) -> None:
    os.chmod(source / "d/linked", 0o600)
    assert scanned(b"e") == ({(b"d", b"linked"), (b"e", b"link")}, True)


def test_the_first_listing_of_a_directory_is_no_change(source: Path) -> None:
    (source / "d/below/file").touch()
    (source / "f").mkdir()
    (source / "f/file").touch()
    assert scanned(b"", b"f")[0] == {(b"", b"f")}  # and the root itself, which is in no directory
    assert scanned() == (set(), True)


def test_a_directory_that_goes_is_more_than_a_name(source: Path) -> None:
    os.rename(source / "d", source / "moved")
    names, is_whole = scanned(b"")
    assert names == {(b"", b"d"), (b"", b"moved")}
    assert not is_whole
    (source / "e/link").unlink()
    (source / "e/empty").mkdir()
    assert scanned(b"e")[1]
    (source / "e/empty").rmdir()
    assert scanned(b"e") == ({(b"", b"e"), (b"e", b"empty")}, True), "nothing was known below it"


def test_more_than_it_holds(source: Path) -> None:
    directory = source / "e/many"
    directory.mkdir()
    _native.scan(_native.find_path(b"e"))
    _native.scan(_native.find_path(b"e/many"))
    for number in range(65_537):
        os.close(os.open(directory / f"{number}", os.O_CREAT | os.O_WRONLY))
    names, is_whole = scanned(b"e/many")
    assert not is_whole
    assert len(names) >= 65_000
    assert scanned() == (set(), True)


def test_it_is_off(source: Path) -> None:
    _native.journal(False)
    (source / "d/new").touch()
    assert scanned(b"d") == (set(), True)
    _native.journal(True)
    assert scanned(b"d") == (set(), True)


def test_find_path(source: Path) -> None:
    del source
    assert _native.find_path(b"") == ROOT
    found = _native.find_path(b"d/below")
    assert _native.path(found) == b"d/below"
    for none in (b"/", b"d/", b"/d", b"d//below", b"x", b"d/file/x", b"n" * 300, b"."):
        assert _native.find_path(none) in (0, _native.find_path(b"d") if none == b"d/" else 0)


def test_is_shared(source: Path) -> None:
    assert _native.is_shared(ROOT)
    assert not _native.is_shared(_native.find_path(b"d/file"))
    assert not _native.is_shared(10**6)
    (source / "f").mkdir()
    _native.scan(ROOT)
    assert not _native.is_shared(_native.find_path(b"f")), "it is not listed"


def test_a_forced_look_takes_the_directory_s_attributes_too(source: Path) -> None:
    (source / "d/new").touch()
    now = (source / "d").stat().st_mtime_ns
    directory = _native.find_path(b"d")
    _native.add(directory, b"new")
    assert _native.version(directory)[2] != now
    _native.add(directory, b"new", is_forced=True)
    assert _native.version(directory)[2] == now
    (source / "d/new").unlink()
    with pytest.raises(FileNotFoundError):
        _native.add(directory, b"new", is_forced=True)
    assert _native.lookup(directory, b"new") == 0

"""A manifest's bytes, and manifests in memory: what is damaged is refused whole."""

from __future__ import annotations

import os
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.base.digest import ALGORITHMS, digest, digest_bytes
from fusecache.base.units import BLOCK_BYTES
from fusecache.manifest import loading
from fusecache.manifest.format import (
    HEADER_BYTES,
    Entry,
    ManifestError,
    Reader,
    Whole,
    block_count,
    entry_bytes,
    header,
)
from fusecache.manifest.listed import Listed

XXH3 = ALGORITHMS["xxh3-128"]


def entry(number: int, algorithm: int = XXH3) -> Entry:
    size = number * (BLOCK_BYTES // 2)
    names = [digest(algorithm, b"%d %d" % (number, block)) for block in range(block_count(size))]
    return Entry(
        b"dir/\xff%d" % number, 70 + number, size, -number, 10**18 + number, b"".join(names)
    )


def manifest(entries: list[Entry], algorithm: int = XXH3) -> bytes:
    whole = Whole(algorithm)
    for one in entries:
        whole.add(one)
    return header(algorithm) + b"".join(map(entry_bytes, entries)) + whole.end()


def read(path: Path, data: bytes, algorithm: int = XXH3) -> Listed:
    path.write_bytes(data)
    return loading.read(os.open(path, os.O_RDONLY), algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS.values())
def test_what_is_written_is_found_by_path_and_version(tmp_path: Path, algorithm: int) -> None:
    entries = [entry(number, algorithm) for number in range(7)]
    listed = read(tmp_path / "m", manifest(entries, algorithm), algorithm)
    assert len(listed) == 7
    for path, ino, size, mtime_ns, ctime_ns, digests in entries:
        assert listed.find(path, ino, size, mtime_ns, ctime_ns) == digests
        assert len(digests) == block_count(size) * digest_bytes(algorithm)
        assert listed.find(path + b"x", ino, size, mtime_ns, ctime_ns) is None
        assert listed.find(path, ino + 1, size, mtime_ns, ctime_ns) is None
        assert listed.find(path, ino, size + 1, mtime_ns, ctime_ns) is None
        assert listed.find(path, ino, size, mtime_ns + 1, ctime_ns) is None
        assert listed.find(path, ino, size, mtime_ns, ctime_ns + 1) is None
        assert listed.find(path, 0, size, mtime_ns, ctime_ns) == digests  # it does not count
    unnumbered = Listed(one._replace(ino=0) for one in entries)
    assert unnumbered.find(*entries[3][:5]) == entries[3].digests
    copies = Listed(entries, of_copies=True)
    path, _, size, mtime_ns, _, digests = entries[3]
    assert copies.find(path, 5, size, mtime_ns, 5) == digests
    assert copies.find(path, 5, size, 1, 5) is None


def test_what_is_alike_in_the_first_half_of_its_hash_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And of equal entries the last one counts."""

    def key(listed: Listed, path: bytes, *version: int) -> bytes:
        return b"the same" + (path + bytes(8))[:8]

    monkeypatch.setattr(Listed, "_key", key)
    listed = Listed(Entry(b"%d" % n, 9, 1, 2, 3, b"%016d" % n) for n in (5, 1, 3))
    assert [listed.find(b"%d" % n, 9, 1, 2, 3) for n in (5, 1, 3)] == [
        b"%016d" % n for n in (5, 1, 3)
    ]
    assert listed.find(b"2", 9, 1, 2, 3) is None
    listed = Listed([Entry(b"a", 9, 1, 2, 3, b"old"), Entry(b"a", 9, 1, 2, 3, b"new")])
    assert listed.find(b"a", 9, 1, 2, 3) == b"new"


def test_the_digest_of_the_whole_knows_content_and_names_and_no_times() -> None:
    def of(*entries: Entry) -> bytes:
        whole = Whole(XXH3)
        for one in entries:
            whole.add(one)
        return whole.digest

    first, second = entry(1), entry(2)
    assert of(first, second) == of(first._replace(mtime_ns=9, ctime_ns=9), second)
    others = [
        of(first),
        of(second, first),
        of(first._replace(path=b"other"), second),
        of(first._replace(digests=bytes(16)), second),
        of(first._replace(size=3), second),
    ]
    assert len({of(first, second), *others}) == 6


def test_another_algorithm_and_format_are_refused(tmp_path: Path) -> None:
    data = manifest([entry(1)])
    with pytest.raises(ManifestError, match="its digests are xxh3-128, and blake3 is wanted"):
        read(tmp_path / "m", data, ALGORITHMS["blake3"])
    with pytest.raises(ManifestError, match="has format 2"):
        read(tmp_path / "m", data[:7] + b"\2" + data[8:])
    for other in (b"", b"a text\n", b"\0" * 100, data[:20]):
        with pytest.raises(ManifestError, match="it is no manifest"):
            read(tmp_path / "m", other)


def test_each_flipped_bit_and_each_cut_is_found(tmp_path: Path) -> None:
    data = manifest([entry(number) for number in range(4)])
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        with pytest.raises(ManifestError):
            read(tmp_path / "m", bytes(changed))
        with pytest.raises(ManifestError):
            read(tmp_path / "m", data[:at])
    with pytest.raises(ManifestError, match="its end is damaged"):
        read(tmp_path / "m", data + b"\0")


def test_whole_entries_that_are_missing_doubled_or_swapped_are_found(tmp_path: Path) -> None:
    """Each of them is sound."""
    entries = [entry(number) for number in range(4)]
    data = manifest(entries)
    body, end = (
        [entry_bytes(one) for one in entries],
        data[len(b"".join(map(entry_bytes, entries))) + HEADER_BYTES :],
    )
    for chosen in ([0, 1, 2], [0, 1, 2, 3, 3], [1, 0, 2, 3]):
        with pytest.raises(ManifestError, match="its end is damaged"):
            read(tmp_path / "m", header(XXH3) + b"".join(body[n] for n in chosen) + end)


def test_mutations_are_refused_and_cost_no_memory(tmp_path: Path) -> None:
    """Sizes and lengths, too, that promise more than there is."""
    draw = random.Random(0)
    data = manifest([entry(number) for number in range(6)])
    tracemalloc.start()
    for _ in range(600):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 8)):
            at, length = draw.randrange(len(changed)), draw.choice([1, 2, 8, 40])
            what = draw.choice([b"\xff" * length, bytes(length), draw.randbytes(length), b""])
            changed[at : at + length] = what
        if bytes(changed) == data:
            continue
        with pytest.raises(ManifestError):
            read(tmp_path / "m", bytes(changed))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


@given(st.binary(max_size=300))
def test_garbage_with_right_checksums_is_refused(garbage: bytes) -> None:
    """What only an attacker can write: an entry's sum is right, and the rest of it is anything."""
    from io import BytesIO

    from fusecache.manifest.format import _summed

    data = header(XXH3) + _summed(garbage)
    with pytest.raises(ManifestError):
        list(Reader(BytesIO(data), len(data)).entries())


def test_of_what_is_being_written_the_whole_entries_count(tmp_path: Path) -> None:
    entries = [entry(number) for number in range(1, 4)]
    data = header(XXH3) + b"".join(map(entry_bytes, entries))
    last = len(entry_bytes(entries[-1]))
    for cut in (0, 1, last - 1, last):
        path = tmp_path / "m"
        path.write_bytes(data[: len(data) - cut])
        with open(path, "rb") as file:
            reader = Reader(file, len(data) - cut)
            assert list(reader.sound_entries()) == (entries if not cut else entries[:2])
            assert reader.sound_bytes == len(data) - (last if cut else 0)

"""Damage of the files of a closed or open cache directory: time may be lost, bytes never wrong."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from fusecache.store.segment import format as fmt
from tests.support.store_support import MIB, Opened, check_invariants, content, opened, version_of

Files = dict[bytes, bytes]


def fill(directory: Path, files: Files) -> None:
    with opened(directory) as store:
        for path, payload in files.items():
            assert store.put(path, payload) is not None
        # A second name for one content: a type-2 record.
        first = next(iter(files.values()))
        assert store.put(b"again", first) is not None


def some_files(count: int = 6) -> Files:
    return {b"d%d/f%d" % (n % 2, n): content(n, 1000 + 20_000 * n) for n in range(count)}


def never_wrong(store: Opened, files: Files) -> int:
    """How many files are still there; all of them with the right bytes."""
    here = 0
    for path, payload in files.items():
        found = store.get(path, version_of(payload))
        assert found in (None, payload)
        here += found is not None
    return here


def still_works(store: Opened, files: Files) -> None:
    """Everything can be stored again and found."""
    store.store.housekeeping()
    store.repair_now()
    store.end_pause()
    for path, payload in files.items():
        if store.get(path, version_of(payload)) is None:
            assert store.put(path, payload) is not None
        assert store.get(path, version_of(payload)) == payload
    records, bad = store.bad_after_verify()
    assert bad == 0
    assert records >= len(files)
    check_invariants(store)


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def segment_of(directory: Path) -> Path:
    (path,) = (directory / "segments").glob("*.seg")
    return path


def index_of(directory: Path) -> Path:
    return max((directory / "index").glob("*.db"))


# ---- flipped bits --------------------------------------------------------------------------------
@pytest.mark.parametrize("with_index", [True, False], ids=["index", "rebuilt"])
def test_a_bit_flipped_in_every_region_of_a_segment(tmp_path: Path, with_index: bool) -> None:
    files = some_files(4)
    fill(tmp_path / "good", files)
    if not with_index:
        shutil.rmtree(tmp_path / "good/index")
    size = segment_of(tmp_path / "good").stat().st_size
    source = random.Random(1)
    # Every field of the first record header, then one bit in each 2048 bytes.
    places = [*range(4096 * 8, (4096 + 160) * 8, 31), *range(0, size * 8, 16384)]
    with_damage = 0
    for number, start in enumerate(places):
        bit = start if number < 42 else min(start + source.randrange(16384), size * 8 - 1)
        directory = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", directory)
        flip(segment_of(directory), bit)
        with opened(directory) as store:
            with_damage += never_wrong(store, files) < len(files)
            assert never_wrong(store, files) >= len(files) - 1
            if number % 20 == 0:
                still_works(store, files)
        shutil.rmtree(directory)
    assert with_damage > len(places) // 2


def test_a_bit_flipped_in_every_region_of_the_index(tmp_path: Path) -> None:
    files = some_files(6)
    fill(tmp_path / "good", files)
    size = index_of(tmp_path / "good").stat().st_size
    source = random.Random(2)
    kinds: set[str] = set()
    places = [*range(0, 112 * 8, 29), *range(112 * 8, size * 8, 2048)]
    for number, start in enumerate(places):
        bit = min(start + source.randrange(29 if start < 896 else 2048), size * 8 - 1)
        directory = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", directory)
        flip(index_of(directory), bit)
        with opened(directory) as store:
            never_wrong(store, files)
            for name, version, at in store.store.lookup_directory(b"0123456789abcdef", b"d0"):
                assert files[b"d0/" + name] == store.read(at)
                assert version == version_of(files[b"d0/" + name])
            if number % 8 == 0:
                still_works(store, files)
            kinds |= store.kinds
        shutil.rmtree(directory)
    assert kinds <= {"index", "missing"}
    assert "index" in kinds


def test_the_index_overwritten_while_open(tmp_path: Path) -> None:
    files = some_files(30)
    with opened(tmp_path / "cache") as store:
        for path, payload in files.items():
            store.put(path, payload)
        store.store.flush()
        index = index_of(store.directory)
        size = index.stat().st_size
        with index.open("r+b") as file:
            for offset in range(0, size, 4096):
                file.seek(offset + 8)
                file.write(random.Random(offset).randbytes(3000))
        wal = Path(f"{index}-wal")
        with wal.open("r+b") as file:
            file.write(random.Random(1).randbytes(wal.stat().st_size))
        never_wrong(store, files)
        store.store.housekeeping()
        still_works(store, files)
        assert "index" in store.kinds
        assert index_of(store.directory) != index


def test_the_index_deleted_while_open(tmp_path: Path) -> None:
    files = some_files(10)
    with opened(tmp_path / "cache") as store:
        for path, payload in files.items():
            store.put(path, payload)
        for name in (store.directory / "index").glob("*.db*"):
            name.unlink()
        store.store.housekeeping()
        assert never_wrong(store, files) == len(files)
        assert store.kinds == {"index"}
        still_works(store, files)
    with opened(tmp_path / "cache") as store:
        assert never_wrong(store, files) == len(files)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"not a database" * 1000),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
    ],
    ids=["missing", "empty", "garbage", "truncated", "longer"],
)
def test_a_broken_index_is_rebuilt(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    files = some_files(20)
    fill(tmp_path / "cache", files)
    damage(index_of(tmp_path / "cache"))
    with opened(tmp_path / "cache") as store:
        assert never_wrong(store, files) == len(files)
        first = next(iter(files.values()))
        assert store.get(b"again", version_of(first)) == first
        assert store.store.usage().blocks == len(files)
        still_works(store, files)
    assert len(list((tmp_path / "cache/index").glob("*.db"))) == 1


# ---- torn, cut, garbage --------------------------------------------------------------------------
def test_a_tail_torn_at_every_512_bytes(tmp_path: Path) -> None:
    """A writer that died in the middle of its last record, with the segment still preallocated."""
    files = {b"a": content(1, 5000), b"b": content(2, 9000)}
    store = Opened(tmp_path / "good")
    for path, payload in files.items():
        store.put(path, payload)
    last = store.find(b"b", version_of(files[b"b"]))
    assert last is not None
    store.kill()  # as kill -9: nothing sealed, nothing flushed
    begin, end = last.offset, fmt.align(last.offset + last.header_len + last.payload_len)
    for cut in range(begin, end, 512):
        directory = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", directory)
        with segment_of(directory).open("r+b") as file:
            file.seek(cut)
            file.write(bytes(end - cut))
        with opened(directory) as store:
            assert store.get(b"a", version_of(files[b"a"])) == files[b"a"]
            is_here = store.get(b"b", version_of(files[b"b"])) is not None
            # The padding behind the payload may be torn without loss.
            assert is_here == (cut - begin >= last.header_len + last.payload_len)
            never_wrong(store, files)
            if not is_here:
                assert segment_of(directory).stat().st_size == fmt.align(begin)
            if cut % 2048 == 0:
                still_works(store, files)
        shutil.rmtree(directory)


def test_a_sealed_segment_cut_at_every_4096_bytes(tmp_path: Path) -> None:
    files = some_files(4)
    fill(tmp_path / "good", files)
    size = segment_of(tmp_path / "good").stat().st_size
    before = 0
    for length in range(0, size, 4096 + 511):
        directory = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", directory)
        with segment_of(directory).open("r+b") as file:
            file.truncate(length)
        with opened(directory) as store:
            here = never_wrong(store, files)
            assert here >= before
            before = here
            assert store.kinds <= {"missing"}
            if length % 3 == 0:
                still_works(store, files)
        shutil.rmtree(directory)


def test_foreign_files_do_no_harm(tmp_path: Path) -> None:
    files = some_files(5)
    directory = tmp_path / "cache"
    fill(directory, files)
    segments = directory / "segments"
    copy = segment_of(directory).read_bytes()
    (segments / "00000900.seg").write_bytes(b"")
    (segments / "00000901.seg").write_bytes(random.Random(1).randbytes(100_000))
    (segments / "00000902.seg").write_bytes(copy)  # right bytes in the wrong place
    (segments / "00000903.seg").mkdir()
    (segments / "00000904.seg").symlink_to("/etc/hostname")
    (segments / "00000905.tmp").write_bytes(b"unborn")
    (segments / "notes.txt").write_text("not ours")
    (directory / "index/00000077.tmp").write_bytes(b"killed builder")
    (directory / "other").mkdir()
    with opened(directory) as store:
        assert never_wrong(store, files) == len(files)
        store.put(b"new", b"new")
        assert store.get(b"new", version_of(b"new")) == b"new"
        assert store.store.usage().blocks == len(files) + 1
    names = {path.name for path in segments.iterdir()}
    assert {"notes.txt", "00000903.seg", "00000904.seg"} <= names
    assert not {"00000900.seg", "00000901.seg", "00000902.seg", "00000905.tmp"} & names
    shutil.rmtree(directory / "index")
    with opened(directory) as store:
        assert never_wrong(store, files) == len(files)


def test_segments_swapped(tmp_path: Path) -> None:
    """Files under each other's number: every location is wrong, none may serve wrong bytes."""
    files = {b"f%d" % n: content(n, MIB) for n in range(12)}
    with opened(tmp_path / "cache") as store:
        for path, payload in files.items():
            store.put(path, payload)
    one, two = sorted((tmp_path / "cache/segments").glob("*.seg"))
    third = one.with_name("x")
    one.rename(third)
    two.rename(one)
    third.rename(two)
    with opened(tmp_path / "cache") as store:
        still_works(store, files)


def test_a_planted_record_is_not_believed(tmp_path: Path) -> None:
    """A file whose content is a record naming another file, uncovered by a damaged header."""
    payload = b"evil"
    header_len = fmt.header_length(len(payload), b"victim")
    record = fmt.Record(
        fmt.TYPE_BLOCK,
        header_len,
        len(payload),
        4096,
        xxhash.xxh3_128_digest(payload),
        1,
        (xxhash.xxh3_64_intdigest(payload),),
        b"0123456789abcdef",
        version_of(b"good"),
        0,
        b"victim",
    )
    evil = b"".join(
        (fmt.pack_record(record, 1, bytes(16), 1, 4096 * n) + payload).ljust(4096, b"\0")
        for n in range(4)
    )
    carrier_header = fmt.header_length(5 * 4096, b"carrier")
    carrier = bytes(4096 - carrier_header) + evil
    carrier = carrier.ljust(5 * 4096, b"\0")
    with opened(tmp_path / "cache") as store:
        store.put(b"carrier", carrier)
        store.put(b"victim", b"good")
    flip(segment_of(tmp_path / "cache"), 4100 * 8)
    shutil.rmtree(tmp_path / "cache/index")
    with opened(tmp_path / "cache") as store:
        assert store.get(b"victim", version_of(b"good")) == b"good"
        assert store.find(b"carrier", version_of(carrier)) is None
        assert store.store.usage().blocks == 1


def test_a_missing_segment_is_forgotten(tmp_path: Path) -> None:
    files = {b"f%d" % n: content(n, MIB) for n in range(20)}
    with opened(tmp_path / "cache") as store:
        for path, payload in files.items():
            store.put(path, payload)
        first = store.segments()[0]
        first.unlink()
        assert 0 < never_wrong(store, files) < len(files)
        store.suspect()
        store.store.housekeeping()
        assert int(first.stem) in store.gone
        assert store.kinds == {"missing"}
        still_works(store, files)


def test_dedupe_does_not_trust_a_damaged_record(tmp_path: Path) -> None:
    payload = content(1, 10_000)
    with opened(tmp_path / "cache") as store:
        location = store.put(b"one", payload)
        assert location is not None
        flip(store.segments()[0], (location.offset + 20) * 8)
        again = store.put(b"two", payload)
        assert again is not None
        assert again.offset != location.offset
        assert store.get(b"two", version_of(payload)) == payload
        assert store.kinds == {"checksum"}


def test_verify_finds_every_flipped_payload(tmp_path: Path) -> None:
    files = some_files(10)
    with opened(tmp_path / "cache") as store:
        for path, payload in files.items():
            store.put(path, payload)
        flipped = set()
        for path in list(files)[::3]:
            at = store.find(path, version_of(files[path]))
            assert at is not None
            flip(store.segments()[0], (at.offset + at.header_len + at.payload_len - 1) * 8)
            flipped.add((at.segno, at.offset))
        bad = [at[:2] for at, fault in store.store.verify(None) if fault]
        assert set(bad) == flipped
        for place in bad:
            store.store.quarantine(*place)
        assert store.bad_after_verify() == (len(files) - len(flipped), 0)

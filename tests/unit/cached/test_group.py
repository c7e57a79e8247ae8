"""A group: blocks of its set and no others, damage found, and nothing left of it at its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.cached.group import Group, NotAGroup, is_set, name_of, set_of
from fusecache.cached.numbers import Numbers
from fusecache.cached.talk import SEGMENTS_FROM
from fusecache.store.types import Location
from tests.unit.cached.support import (
    MIB,
    Block,
    Reported,
    block_of,
    blocks_of,
    held,
    place,
    read_at,
    reported,
    set_with,
)

BLOCKS = blocks_of(1, 6)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Reported]:
    with reported(tmp_path / "cache") as found:
        yield found


@pytest.fixture
def group(made: Reported) -> Group:
    return made.make(1, BLOCKS)


def put(group: Group, block: Block) -> Location:
    (at,) = group.put([block])
    assert at is not None
    return at


def flip(group: Group, at: Location) -> None:
    """A byte of the block, on the disk."""
    fd = os.open(group.folder / "store" / "segments" / f"{at.segno:08d}.seg", os.O_RDWR)
    try:
        place = at.offset + at.header_len + at.payload_len // 2
        os.pwrite(fd, bytes([os.pread(fd, 1, place)[0] ^ 1]), place)
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- its set -------------------------------------------------------------------------------------
def test_a_set_is_sorted_and_has_each_once() -> None:
    one, two = sorted([bytes([1]) * 32, bytes([200]) * 32])
    assert is_set(one)
    assert is_set(one + two)
    assert not is_set(two + one)
    assert not is_set(one + one)
    assert not is_set(b"")
    assert not is_set(one + two[:-1])
    assert set_of(two + one + two) == one + two


@pytest.mark.parametrize("zeros", [1, 5, 31, 32])
def test_a_set_may_have_digests_that_end_with_zeros(made: Reported, zeros: int) -> None:
    ending = [os.urandom(32 - zeros) + bytes(zeros), bytes(31) + b"\1", b"\1" + bytes(31)]
    digests = set_of(b"".join(ending))
    assert is_set(digests)
    assert len(digests) == 32 * 3
    blocks = [Block(name, b"") for name in ending]
    made_group = made.make(1, blocks)
    assert all(name in made_group for name in ending)
    assert bytes(30) + b"\1\0" not in made_group


def test_it_has_blocks_of_its_set_and_no_others(group: Group) -> None:
    assert all(block.name in group for block in BLOCKS)
    ordered = sorted(block.name for block in BLOCKS)
    for near in (ordered[0], ordered[-1]):
        for by in (-1, 1):
            assert (int.from_bytes(near, "big") + by).to_bytes(32, "big") not in group
    assert bytes(32) not in group
    assert b"\xff" * 32 not in group


def test_a_block_that_is_not_of_the_set_is_not_found_whatever_is_stored(group: Group) -> None:
    other = block_of(77)
    put(group, other)  # who serves a put has looked whether it is of the set
    assert place(group, other) is None
    assert group.read(other.name, len(other)) is None


# ---- blocks --------------------------------------------------------------------------------------
def test_what_was_put_is_found_and_read(group: Group) -> None:
    assert place(group, BLOCKS[0]) is None
    at = put(group, BLOCKS[0])
    assert at.segno > SEGMENTS_FROM
    assert place(group, BLOCKS[0]) == at
    assert group.read(BLOCKS[0].name, len(BLOCKS[0])) == BLOCKS[0].data
    assert group.find([(BLOCKS[0].name, len(BLOCKS[0]) + 1)]) == [None], "of another length"
    assert place(group, BLOCKS[1]) is None


def test_of_many_each_is_found_at_its_place(group: Group) -> None:
    first, last = put(group, BLOCKS[0]), put(group, BLOCKS[2])
    other = block_of(77)
    put(group, other)  # not of the set
    asked = [
        (BLOCKS[2].name, len(BLOCKS[2])),
        (other.name, len(other)),
        (BLOCKS[0].name, len(BLOCKS[0])),
        (BLOCKS[0].name, len(BLOCKS[0]) - 1),
        (BLOCKS[1].name, len(BLOCKS[1])),
        (BLOCKS[2].name, len(BLOCKS[2])),
        (BLOCKS[0].name, 1 << 31),
    ]
    assert group.find(asked) == [last, None, first, None, None, last, None]
    assert group.find([]) == []


def test_a_block_that_is_put_twice_is_stored_once(group: Group) -> None:
    assert put(group, BLOCKS[0]) == put(group, BLOCKS[0])


def test_a_mount_reads_it_from_the_segment(group: Group) -> None:
    at = put(group, BLOCKS[0])
    fd = group.open_segment(at.segno)
    assert fd is not None
    assert read_at(fd, at) == BLOCKS[0].data
    assert group.open_segment(at.segno + 1) is None


def test_no_path_of_a_user_is_in_a_record(group: Group) -> None:
    at = put(group, BLOCKS[0])
    group.store.flush()
    found = [
        (path, version.size)
        for path, version, _ in group.store.lookup_directory(group.name[:16], b"")
    ]
    assert found == [(BLOCKS[0].name.hex().encode(), at.payload_len)]


def test_a_doubt_about_a_good_record_changes_nothing(group: Group) -> None:
    at = put(group, BLOCKS[0])
    group.doubt(at.segno, at.offset)
    assert place(group, BLOCKS[0]) == at
    for segno, offset in (
        (at.segno, at.offset + 512),  # no record begins there
        (at.segno, 0),
        (at.segno, (1 << 63) - 1),
        (at.segno + 1, at.offset),
        (1, at.offset),
        ((1 << 32) - 1, at.offset),
    ):
        group.doubt(segno, offset)
    assert place(group, BLOCKS[0]) == at


def test_a_doubt_about_a_bad_record_has_it_forgotten_and_stored_anew(group: Group) -> None:
    at, good = put(group, BLOCKS[0]), put(group, BLOCKS[1])
    flip(group, at)
    assert place(group, BLOCKS[0]) == at, "a header does not show it"
    group.doubt(good.segno, good.offset)
    assert place(group, BLOCKS[0]) == at, "another one was doubted"
    group.doubt(at.segno, at.offset)
    assert place(group, BLOCKS[0]) is None
    assert place(group, BLOCKS[1]) == good
    assert put(group, BLOCKS[0]) != at
    assert group.read(BLOCKS[0].name, len(BLOCKS[0])) == BLOCKS[0].data


def test_a_bad_record_is_not_read_and_forgotten(group: Group) -> None:
    flip(group, put(group, BLOCKS[0]))
    assert group.read(BLOCKS[0].name, len(BLOCKS[0])) is None
    assert place(group, BLOCKS[0]) is None


# ---- its segments --------------------------------------------------------------------------------
def test_its_own_segments_live_until_they_go(made: Reported) -> None:
    blocks = blocks_of(5, 20, MIB)
    group, other = made.make(1, blocks), made.make(2, BLOCKS)
    theirs = put(other, BLOCKS[0]).segno
    segnos = {put(group, block).segno for block in blocks}
    assert len(segnos) > 1
    asked = frozenset(segnos | {theirs, max(segnos) + 1, 1})
    assert group.living(asked) == segnos
    assert other.living(asked) == {theirs}
    assert group.living(frozenset({max(segnos)})) == {max(segnos)}, "those that were asked about"
    assert group.living(frozenset()) == frozenset()
    group.limit_to(group.set_bytes + 16 * MIB)
    living = group.living(asked)
    assert living < segnos
    assert living == {at.segno for block in blocks if (at := place(group, block))}


# ---- its limit -----------------------------------------------------------------------------------
def test_less_room_is_given_back_at_once(made: Reported) -> None:
    blocks = blocks_of(5, 30, MIB)
    group = made.make(1, blocks)
    made.fill(group, blocks)
    before, first = group.held_bytes(), held(group, blocks)
    group.limit_to(group.set_bytes + 16 * MIB)
    assert group.held_bytes() <= group.limit_bytes == group.set_bytes + 16 * MIB
    assert group.held_bytes() < before
    assert 0 < held(group, blocks) < first
    assert held(group, blocks[-4:]) > 0, "what was filled longest ago went first"


# ---- its end -------------------------------------------------------------------------------------
def test_a_removed_group_leaves_nothing_even_to_who_has_a_descriptor(
    made: Reported, group: Group
) -> None:
    at = put(group, BLOCKS[0])
    fd = group.open_segment(at.segno)
    assert fd is not None
    try:
        assert os.fstat(fd).st_size > 0
        group.remove()
        assert os.fstat(fd).st_size == 0
        assert not [path for path in made.root.iterdir() if path.is_dir()]
        assert place(group, BLOCKS[0]) is None
    finally:
        os.close(fd)


def test_a_folder_that_is_no_group_is_refused(tmp_path: Path) -> None:
    digests = set_with(BLOCKS)
    folder = tmp_path / name_of(digests).hex()
    numbers = Numbers(tmp_path)
    folder.mkdir()

    def is_refused() -> bool:
        try:
            Group(folder, 64 * MIB, numbers, lambda *_: None).close()
        except NotAGroup:
            return True
        return False

    assert is_refused()
    (folder / "digests").write_bytes(digests)
    assert is_refused(), "nobody's"
    for owner in ("", "me", "1 2", "é"):
        (folder / "owner").write_text(owner)
        assert is_refused()
    (folder / "owner").write_text("5\n")
    for bad in (b"", digests[:-1], digests[32:], digests + digests[:32], bytes(len(digests))):
        (folder / "digests").write_bytes(bad)
        assert is_refused()
    assert not (folder / "store").exists(), "the set comes first"
    (folder / "digests").write_bytes(digests)
    assert not is_refused()

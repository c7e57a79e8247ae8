"""Numbers of segments: no two segments have one, ever."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from fusecache.cached import group as group_module
from fusecache.cached import numbers as module
from fusecache.cached.group import Group
from fusecache.cached.numbers import AT_ONCE, Numbers
from fusecache.cached.talk import SEGMENTS_FROM
from fusecache.store import capacity
from fusecache.store.segment.files import SegmentWriter
from tests.unit.cached.support import Block, Reported, block_of, blocks_of, large_blocks, reported

FEW = 64
"""A group takes so many here, so that it needs the next soon."""
NOT_DURABLE = OSError(errno.EIO, "the disk has failed")


def test_they_begin_above_those_of_mounts_and_never_come_again(tmp_path: Path) -> None:
    first, taken = Numbers(tmp_path), list[int]()
    for _ in range(5):
        taken += [first.take(), first.take()]
        first = Numbers(tmp_path)
    assert min(taken) > SEGMENTS_FROM
    assert all(later - earlier == AT_ONCE for earlier, later in pairwise(taken))


def test_two_directories_begin_with_different_numbers(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(8)]
    for folder in folders:
        folder.mkdir()
    assert len({Numbers(folder).take() // AT_ONCE for folder in folders}) > 1


def test_a_number_that_could_not_be_noted_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers(tmp_path)
    before = numbers.take()

    def fail(_: int) -> None:
        raise NOT_DURABLE

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="the disk has failed"):
            numbers.take()
    assert Numbers(tmp_path).take() > before


def test_a_number_is_noted_for_good_before_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename that was not synced may be undone by a crash."""
    synced: list[tuple[Path, str]] = []

    def sync(fd: int) -> None:
        noted = tmp_path / "numbers"
        synced.append(
            (Path(f"/proc/self/fd/{fd}").readlink(), noted.read_text() if noted.exists() else "")
        )

    monkeypatch.setattr("os.fsync", sync)
    first = Numbers(tmp_path).take()
    assert synced == [(tmp_path / "numbers.new", ""), (tmp_path, f"{first + AT_ONCE}\n")]


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_text("many\n")
    with pytest.raises(ValueError, match="many"):
        Numbers(tmp_path)


def test_when_all_were_given_none_is(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_text(f"{(1 << 32) - AT_ONCE}\n")
    numbers = Numbers(tmp_path)
    assert numbers.take() + AT_ONCE == 1 << 32
    with pytest.raises(OSError, match="all numbers were given"):
        numbers.take()
    with pytest.raises(OSError, match="all numbers were given"):
        Numbers(tmp_path).take()


# ---- of segments ---------------------------------------------------------------------------------
class Segments:
    """All that were ever written below a directory. INVARIANT: no number twice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_number: dict[int, Path] = {}
        self.full_for = 0
        """So many of the next are not written: there is no room on the disk."""

        def written(path: Path, segno: int, *others: int) -> SegmentWriter:
            if self.full_for > 0:
                self.full_for -= 1
                raise OSError(errno.ENOSPC, "no room")
            assert segno not in self.by_number, f"{path}: that was {self.by_number[segno]}"
            assert segno > SEGMENTS_FROM
            self.by_number[segno] = path
            return SegmentWriter(path, segno, *others)  # type: ignore[arg-type]

        monkeypatch.setattr(capacity, "SegmentWriter", written)
        for user in (module, group_module):
            monkeypatch.setattr(user, "AT_ONCE", FEW)


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> Segments:
    return Segments(monkeypatch)


@pytest.fixture
def made(segments: Segments, tmp_path: Path) -> Iterator[Reported]:
    with reported(tmp_path / "cache") as found:
        yield found


def put_sealed(group: Group, block: Block) -> bool:
    """In a segment of its own."""
    group.store._attachment.faults._paused_until = 0.0
    group.store._segment.note_room()
    is_stored = group.put([block]) != [None]
    group.store.seal()
    return is_stored


def test_groups_have_segments_of_their_own_numbers(made: Reported, segments: Segments) -> None:
    sets = [blocks_of(seed, FEW) for seed in (1, 2)]
    groups = [made.make(owner, blocks) for owner, blocks in enumerate(sets)]
    for number in range(FEW):
        for group, blocks in zip(groups, sets, strict=True):
            assert put_sealed(group, blocks[number])
    assert len(segments.by_number) == 2 * FEW
    assert len({number // FEW for number in segments.by_number}) >= 4, "taken anew"


def test_a_removed_group_and_a_restart_leave_no_number_to_others(
    tmp_path: Path, segments: Segments
) -> None:
    kept, other = blocks_of(1, 3), blocks_of(2, 3)
    count = 0
    for turn in range(6):
        with reported(tmp_path / "cache") as made:
            group = made.find(kept) or made.make(1, kept)
            put_sealed(group, block_of(1000 + turn))
            removed = made.make(2, other)
            assert put_sealed(removed, other[0])
            made.groups._remove(removed)
            again = made.make(2, other)
            assert put_sealed(again, other[0])
            made.groups._remove(again)
            count += 3
    assert len(segments.by_number) == count


def test_puts_that_fail_leave_no_number_to_others(made: Reported, segments: Segments) -> None:
    one, two = (made.make(owner, blocks_of(owner, 3)) for owner in (1, 2))
    for turn in range(2 * FEW):
        segments.full_for = 1
        put_sealed(one, block_of(turn))
        if turn % 10 == 0:
            segments.full_for = 0
            assert put_sealed(one, block_of(5000 + turn))
            assert put_sealed(two, block_of(5000 + turn))


def test_a_put_that_finds_no_room_again_and_again_leaves_no_number_to_others(
    made: Reported, segments: Segments
) -> None:
    """Each time another segment goes for it, and another number is taken."""
    one, two = (made.make(owner, blocks_of(owner, 3)) for owner in (1, 2))
    for turn in range(FEW - 20):
        assert put_sealed(one, block_of(turn))
    for turn in range(30):
        assert put_sealed(two, block_of(turn))
    segments.full_for = 25
    put_sealed(one, block_of(5000))


def test_where_no_numbers_can_be_had_no_segment_is_made(
    made: Reported, segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk with the file of numbers fails, the other groups' have them."""
    one, two = (made.make(owner, blocks_of(owner, 3)) for owner in (1, 2))
    for turn in range(30):
        assert put_sealed(two, block_of(turn))

    def fail() -> int:
        raise NOT_DURABLE

    monkeypatch.setattr(made.groups._numbers, "take", fail)
    stored = 0
    for turn in range(FEW + 10):
        try:
            stored += put_sealed(one, block_of(turn))
        except OSError:
            one.store.seal()
    assert stored <= FEW


def test_a_large_group_that_goes_round_has_new_numbers(made: Reported, segments: Segments) -> None:
    blocks = large_blocks(3, 12)
    group = made.make(1, blocks)
    for block in blocks:
        assert group.put([block]) != [None]
    assert len(segments.by_number) > len(list((group.folder / "store" / "segments").iterdir()))

"""All groups: whose room is whose, what a restart finds, and what damage costs."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusecache.cached import groups as module
from fusecache.cached.group import Group, NotAGroup, name_of
from fusecache.cached.groups import FORGOTTEN_S, NoRoom
from fusecache.store import Store
from fusecache.store.segment import format as fmt
from tests.unit.cached.support import (
    SLACK,
    STEP,
    Block,
    Reported,
    block_of,
    blocks_of,
    figures,
    held,
    large_blocks,
    place,
    reported,
    set_with,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def made(root: Path) -> Iterator[Reported]:
    """Four groups have room, or one that is four times as large; two are within the quota."""
    with reported(root, steps=4, quota_steps=2) as found:
        yield found


def one_block(seed: int) -> list[Block]:
    return blocks_of(seed, 1)


def filled(made: Reported, owner: int, seed: int, steps: int) -> tuple[Group, list[Block]]:
    """A group that was given so many steps, since they were put, and the blocks that it holds."""
    wanted, blocks = large_blocks(seed, 8 * steps), list[Block]()
    group = made.make(owner, wanted)
    while group.limit_bytes < steps * STEP:
        blocks.append(wanted[len(blocks)])
        made.fill(group, blocks[-1:])
    assert group.limit_bytes - group.set_bytes == steps * STEP
    return group, blocks


def grown(made: Reported, owner: int, seed: int, steps: int) -> tuple[Group, list[Block]]:
    """The same, of a group that holds little."""
    blocks = blocks_of(seed, 4)
    group = made.make(owner, blocks)
    made.fill(group, blocks)
    group.limit_to(group.limit_bytes + (steps - 1) * STEP)
    made.check()
    return group, blocks


def used(made: Reported, group: Group) -> None:
    """A mount uses it from now on."""
    assert made.groups.use(group.name) is group


def age(group: Group, seconds: float) -> None:
    group.used_s -= seconds


# ---- quotas --------------------------------------------------------------------------------------
def test_room_that_is_free_goes_to_whoever_puts_something(root: Path) -> None:
    with reported(root, steps=2, quota_steps=1) as made:
        group, blocks = filled(made, 1, 1, 2)
        assert made.granted(1) > made.groups.quota_bytes
        assert held(group, blocks) == len(blocks)


def test_what_is_forgotten_goes_first_whoever_it_belongs_to(made: Reported) -> None:
    forgotten, _ = one_block(1), made.make(1, one_block(1))
    older, _ = one_block(5), made.make(1, one_block(5))
    above, _ = grown(made, 2, 2, 2)
    for blocks, days in ((forgotten, 8), (older, 9)):
        group = made.find(blocks)
        assert group is not None
        age(group, days * 86400)
    made.make(3, one_block(3))
    assert made.find(older) is None, "of two, the one that was used longest ago"
    made.make(3, one_block(4))
    assert made.find(forgotten) is None
    assert above.limit_bytes >= 2 * STEP
    assert made.has(above)


def test_what_was_used_within_a_week_is_not_forgotten(made: Reported) -> None:
    made.groups.quota_bytes = 2 * STEP
    kept = one_block(1)
    age(made.make(1, kept), FORGOTTEN_S - 60)
    grown(made, 2, 2, 3)
    made.make(3, one_block(3))
    assert made.find(kept) is not None
    assert made.granted(2) < 3 * STEP


def test_what_a_mount_uses_is_not_forgotten_however_long(made: Reported) -> None:
    group, _ = grown(made, 1, 1, 2)
    used(made, group)
    age(group, 9 * 86400)
    made.groups.quota_bytes = STEP + SLACK
    used(made, grown(made, 2, 2, 2)[0])
    with pytest.raises(NoRoom):
        made.make(2, one_block(4))
    assert made.granted(1) > 2 * STEP
    made.groups.leave(group)
    with pytest.raises(NoRoom):
        made.make(2, one_block(4))
    assert made.granted(1) > 2 * STEP, "it was used until just now"


def test_who_is_most_above_the_quota_loses_something(root: Path) -> None:
    with reported(root, steps=6, quota_steps=1) as made:
        within, within_blocks = grown(made, 1, 1, 1)
        age(within, 2 * 86400)  # used longest ago; that says nothing here
        above, _ = grown(made, 2, 2, 2)
        age(above, 86400)
        grown(made, 3, 3, 3)
        made.make(4, one_block(4))
        assert made.granted(3) // STEP == 2
        assert made.granted(2) // STEP == 2
        assert held(within, within_blocks) == len(within_blocks)
        assert within.limit_bytes // STEP == 1


def test_of_who_is_above_the_group_goes_that_no_mount_uses_for_longest(root: Path) -> None:
    with reported(root, steps=4, quota_steps=1) as made:
        first, last, between = (made.make(1, one_block(seed)) for seed in (1, 2, 3))
        busy = made.make(1, one_block(4))
        age(first, 50)
        age(last, 10)
        age(between, 20)
        used(made, busy)
        age(busy, 100)
        made.make(2, one_block(5))
        assert [made.has(one) for one in (busy, first, between, last)] == [
            True, False, True, True
        ]  # fmt: skip


def test_a_used_group_gives_room_and_stays(root: Path) -> None:
    with reported(root, steps=3, quota_steps=1) as made:
        made.groups.quota_bytes = STEP + 64  # the sets of those that come have no more
        above, blocks = filled(made, 1, 1, 3)
        used(made, above)
        made.make(2, one_block(2))
        assert made.has(above)
        assert above.limit_bytes - above.set_bytes == 2 * STEP
        made.make(3, one_block(3))
        assert above.limit_bytes - above.set_bytes == STEP
        assert 0 < held(above, blocks) < len(blocks)
        with pytest.raises(NoRoom):
            made.make(4, one_block(4))


def test_who_is_not_below_the_quota_takes_nothing_from_who_is_above(made: Reported) -> None:
    above, blocks = grown(made, 1, 1, 2)
    made.make(1, one_block(9))  # three
    group = made.make(2, one_block(2))
    made.groups.quota_bytes = STEP + SLACK
    used(made, group)
    with pytest.raises(NoRoom):
        made.make(2, one_block(3))
    assert made.granted(1) // STEP == 3
    assert held(above, blocks) == len(blocks)


def test_above_the_quota_the_own_idle_group_goes_that_was_used_longest_ago(root: Path) -> None:
    with reported(root, steps=5, quota_steps=1) as made:
        above, _ = grown(made, 1, 1, 2)
        first, second, busy = (made.make(2, one_block(seed)) for seed in (2, 3, 4))
        age(second, 10)
        used(made, busy)
        age(busy, 20)
        made.make(2, one_block(5))
        assert not made.has(second)
        assert made.has(first)
        assert made.has(busy)
        assert above.limit_bytes - above.set_bytes == 2 * STEP


def test_above_the_quota_the_own_group_stays_as_it_is_while_a_mount_uses_it(root: Path) -> None:
    with reported(root, steps=3, quota_steps=1) as made:
        group, _ = grown(made, 1, 1, 3)
        used(made, group)
        with pytest.raises(NoRoom):
            made.make(1, one_block(2))
        assert group.limit_bytes - group.set_bytes == 3 * STEP


def test_when_nobody_may_lose_anything_the_group_itself_does(root: Path) -> None:
    with reported(root, steps=2, quota_steps=1) as made:
        other, other_blocks = grown(made, 1, 1, 1)
        blocks = large_blocks(2, 16)
        group = made.make(2, blocks)
        used(made, group)
        made.fill(group, blocks)
        assert group.limit_bytes - group.set_bytes == STEP
        assert held(group, blocks[:4]) == 0, "what was filled longest ago goes first"
        assert held(group, blocks[-2:]) == 2
        assert held(other, other_blocks) == len(other_blocks)


def test_who_has_other_idle_groups_loses_them_before_the_group_itself(root: Path) -> None:
    with reported(root, steps=2, quota_steps=1) as made:
        idle = made.make(1, one_block(1))
        blocks = large_blocks(2, 8)
        group = made.make(1, blocks)
        used(made, group)
        made.fill(group, blocks)
        assert not made.has(idle)
        assert held(group, blocks) == len(blocks)


def test_no_group_is_made_where_others_have_all_the_room(root: Path) -> None:
    with reported(root, steps=2, quota_steps=1) as made:
        for owner in (1, 2):
            used(made, made.make(owner, one_block(owner)))
        with pytest.raises(NoRoom, match="others have all of the room"):
            made.make(3, one_block(3))
        assert sorted(figures(made.groups)) == [1, 2]
        assert not [path for path in root.iterdir() if path.name.startswith(".")]


@pytest.mark.claim("D4")
def test_who_is_within_the_quota_loses_nothing_and_no_more_is_granted_than_there_is(
    root: Path,
) -> None:
    """Whatever four users do, of whom the last one wants more than there is."""
    source = random.Random(7)
    sets = {(0, 0): large_blocks(0, 6), (3, 0): large_blocks(3, 6)}
    sets |= {
        (owner, number): blocks_of(10 * owner + number, 4)
        for owner, count in ((1, 2), (2, 1), (3, 5))
        for number in range(1, 1 + count)
    }
    with reported(root, steps=6, quota_steps=2) as made:
        made.groups.quota_bytes = 2 * STEP + 256  # two steps, with the sets
        using: list[Group] = []
        losses = 0
        for _ in range(90):
            (owner, _), blocks = source.choice(list(sets.items()))
            before = figures(made.groups)
            has = {
                other: {
                    key: held(found, sets[key][:2])
                    for key in sets
                    if key[0] == other and (found := made.find(sets[key])) is not None
                }
                for other in (1, 2)
                if other != owner
            }
            group = made.find(blocks)
            try:
                group = group or made.make(owner, blocks)
                block = source.choice(blocks)
                made.groups.put(group, [block])
                if source.random() < 0.2:
                    used(made, group)
                    using.append(group)
            except NoRoom:
                pass
            is_idle = group is not None and not group.connections
            if group is not None and is_idle and owner < 3 and source.random() < 0.2:
                made.groups._remove(group)
            if using and source.random() < 0.3:
                made.groups.leave(using.pop(source.randrange(len(using))))
            made.check()
            after = figures(made.groups)
            for other, (_, _, granted) in before.items():
                if other != owner and granted > made.groups.quota_bytes:
                    losses += after.get(other, (0, 0, 0))[2] < granted
                    assert after[other][2] >= made.groups.quota_bytes
                elif other != owner:
                    assert after[other][::2] == before[other][::2]
            for other, found_before in has.items():
                if before.get(other, (0, 0, 0))[2] <= made.groups.quota_bytes:
                    for key, count in found_before.items():
                        kept = made.find(sets[key])
                        assert kept is not None
                        assert held(kept, sets[key][:2]) == count
        assert losses > 3, "there was something to lose"


def test_room_is_what_may_be_put_without_a_loss_of_others(made: Reported) -> None:
    group = made.make(1, one_block(1))
    others = STEP + group.set_bytes
    made.make(2, one_block(2))
    room = made.groups.room_bytes(group)
    assert 2 * STEP < room <= made.groups.limit_bytes - others - group.held_bytes()
    grown(made, 3, 3, 2)
    assert made.groups.room_bytes(group) < STEP + SLACK


# ---- groups --------------------------------------------------------------------------------------
def test_a_group_that_is_there_is_not_made_again(made: Reported) -> None:
    blocks = blocks_of(1, 3)
    group = made.make(1, blocks)
    made.fill(group, blocks)
    assert made.make(2, blocks) is group
    assert made.granted(2) == 0
    assert held(group, blocks) == 3


def test_a_set_of_another_name_makes_no_group(made: Reported, root: Path) -> None:
    digests = set_with(blocks_of(1, 3))
    for bad in (digests[32:], digests[32:] + digests[:32], digests + digests[-32:], digests[:-1]):
        for name in {name_of(digests), name_of(bad) if len(bad) == len(digests) else b"x" * 32}:
            new = made.groups.begin(name, 1, len(bad))
            new.add(bad)
            with pytest.raises(NotAGroup):
                made.groups.add(new)
            made.groups.end(new)
            assert made.groups.use(name) is None
    assert not [path for path in root.iterdir() if path.is_dir()]


def test_a_user_makes_one_group_at_a_time_and_all_a_few(root: Path) -> None:
    with reported(root, steps=module.NEW_MOST + 2) as made:
        begun = [made.groups.begin(bytes([1]) * 32, 1, 32)]
        with pytest.raises(NoRoom, match="another group is being made"):
            made.groups.begin(bytes([2]) * 32, 1, 32)
        for owner in range(2, 1 + module.NEW_MOST):
            begun.append(made.groups.begin(bytes([owner]) * 32, owner, 32))
        with pytest.raises(NoRoom, match="another group is being made"):
            made.groups.begin(bytes([99]) * 32, 99, 32)
        for new in begun:
            made.groups.end(new)
        made.groups.end(made.groups.begin(bytes([99]) * 32, 99, 32))


def test_a_set_that_is_being_made_counts_as_granted(root: Path) -> None:
    """Or it would come, all of it, and there would be no room."""
    with reported(root, steps=2, quota_steps=1) as made:
        blocks = large_blocks(2, 8)  # more than a step
        group = made.make(2, blocks)
        free = made.groups.room_bytes(group)
        coming = blocks_of(1, 4)
        digests = set_with(coming)
        new = made.groups.begin(name_of(digests), 1, len(digests))
        assert free - made.groups.room_bytes(group) == STEP + len(digests)
        assert made.groups._granted(1) == STEP + len(digests)
        with pytest.raises(NoRoom, match="others have all of the room"):
            made.groups.begin(bytes([3]) * 32, 3, 32)
        used(made, group)
        made.fill(group, blocks)
        assert group.limit_bytes == STEP + group.set_bytes
        new.add(digests)
        made.groups.add(new)
        assert made.groups._granted() == made.granted(1) + made.granted(2), "it counts once"
        made.groups.end(new)
        assert made.groups._granted() == made.granted(1) + made.granted(2)
        assert made.granted(1) == STEP + len(digests)


@pytest.mark.parametrize("why", ["it did not come", "it is none", "it was there"])
def test_what_was_reserved_for_a_group_that_is_not_made_is_free_again(
    made: Reported, why: str
) -> None:
    there = blocks_of(1, 4)
    digests = set_with(there)
    made.make(2, there)
    before = made.groups._granted()
    is_there = why == "it was there"
    new = made.groups.begin(name_of(digests) if is_there else bytes(32), 1, 128)
    assert made.groups._granted() == before + (0 if is_there else STEP + 128)
    new.add(digests)
    if why == "it is none":
        with pytest.raises(NotAGroup):
            made.groups.add(new)
    elif why == "it was there":
        made.groups.add(new)
    made.groups.end(new)
    assert made.groups._granted() == before


def fail_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next store cannot be opened."""
    open_, failed = Store.open, list[object]()

    def open_later(folder: Path, *args: Any, **kwargs: Any) -> Store:
        if not failed:
            failed.append(folder)
            raise OSError(errno.EMFILE, "too many open files")
        return open_(folder, *args, **kwargs)

    monkeypatch.setattr(Store, "open", open_later)


@pytest.mark.parametrize("when", ["made", "restart"])
def test_a_group_that_could_not_be_opened_can_be_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    blocks = blocks_of(1, 3)
    if when == "restart":
        with reported(root) as made:
            made.fill(made.make(1, blocks), blocks)
        fail_once(monkeypatch)
    with reported(root) as made:
        if when == "made":
            fail_once(monkeypatch)
            with pytest.raises(OSError, match="too many open files"):
                made.make(1, blocks)
        assert made.find(blocks) is None
        assert made.groups._granted() == 0
        group = made.make(1, blocks)
        made.fill(group, blocks)
        folders = [path.name for path in root.iterdir() if path.is_dir()]
        assert folders == [group.folder.name]
    with reported(root) as made:
        again = made.find(blocks)
        assert again is not None
        assert held(again, blocks) == 3


def test_a_set_that_is_too_large_is_refused_before_it_is_sent(made: Reported) -> None:
    most = made.groups.limit_bytes // module.SETS_PART
    made.groups.end(made.groups.begin(bytes(32), 1, most))
    with pytest.raises(NoRoom, match="too large"):
        made.groups.begin(bytes(32), 1, most + 1)


def test_one_group_too_many_of_an_owner_removes_the_one_used_longest_ago(
    made: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUPS_MOST", 2)
    first, second = (made.make(1, one_block(seed)) for seed in (1, 2))
    age(made.make(2, one_block(3)), 1000)
    age(second, 10)
    made.make(1, one_block(4))
    assert not made.has(second)
    assert made.has(first)
    assert {owner: count for owner, (count, _, _) in figures(made.groups).items()} == {1: 2, 2: 1}


def test_of_an_owner_s_groups_none_that_a_mount_uses_goes_for_one_too_many(
    made: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUPS_MOST", 2)
    first, second = (made.make(1, one_block(seed)) for seed in (1, 2))
    for group in (first, second):
        used(made, group)
    with pytest.raises(NoRoom, match="too many groups of this user"):
        made.make(1, one_block(3))
    assert made.has(first)
    assert made.has(second)
    made.make(2, one_block(4))
    made.groups.leave(first)
    made.make(1, one_block(3))
    assert [made.has(group) for group in (first, second)] == [False, True]


# ---- blocks of several groups --------------------------------------------------------------------
def test_what_another_group_has_is_copied_when_a_reader_waits_for_it(made: Reported) -> None:
    blocks = blocks_of(1, 4)
    one, two = made.make(1, blocks[:3]), made.make(2, blocks[1:])
    made.fill(one, blocks[:3])
    names, lengths = [b.name for b in blocks], [len(b) for b in blocks]
    assert held(two, blocks) == 0

    ahead = made.groups.find(two, names, lengths, "b", 2, False)
    assert [found.at for found in ahead] == [None] * 4
    assert held(two, blocks) == 0

    waited = made.groups.find(two, names, lengths, "b", 2, True)
    assert [found.at is not None for found in waited] == [False, True, True, False]
    assert held(two, blocks) == 2
    made.groups._remove(one)
    assert held(two, blocks) == 2, "it has them itself"


def test_a_block_is_not_to_be_had_by_a_group_whose_set_it_is_not_of(made: Reported) -> None:
    secret, other = blocks_of(1, 2)
    one, two = made.make(1, [secret]), made.make(2, [other])
    made.fill(one, [secret])
    for holder in ("b", "c"):
        (found,) = made.groups.find(two, [secret.name], [len(secret)], holder, 2, True)
        assert found == (None, False), "and is not promised"


def test_one_request_has_a_few_blocks_copied(made: Reported) -> None:
    blocks = blocks_of(1, module.COPIES_MOST + 3)
    one, two = made.make(1, blocks), made.make(2, [*blocks, block_of(5)])
    made.fill(one, blocks)
    names, lengths = [b.name for b in blocks], [len(b) for b in blocks]
    found = made.groups.find(two, names, lengths, "b", 2, True)
    assert sum(one.at is not None for one in found) == module.COPIES_MOST
    again = made.groups.find(two, names, lengths, "c", 3, True)
    assert sum(one.at is not None for one in again) == len(blocks)


def test_a_damaged_block_is_not_copied(made: Reported) -> None:
    block, other = blocks_of(1, 2)
    one, two = made.make(1, [block]), made.make(2, [block, other])
    (at,) = one.put([block])
    assert at is not None
    path = one.store.segment_path(at.segno)
    with path.open("r+b") as file:
        file.seek(at.offset + at.header_len)
        file.write(bytes([block.data[0] ^ 1]))
    (found,) = made.groups.find(two, [block.name], [len(block)], "b", 2, True)
    assert found.at is None
    assert held(two, [block]) == 0


def test_a_put_ends_the_promise_and_one_that_failed_does_too(
    made: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of(1, 2)
    group = made.make(1, blocks)
    for block in blocks:
        assert not made.groups.promises.ask(block.name, "a", 1)
        assert made.groups.promises.ask(block.name, "b", 2)
    assert made.groups.put(group, blocks[:1]) != [None]
    assert not made.groups.promises.ask(blocks[0].name, "b", 2)
    monkeypatch.setattr(group.store, "put_many", lambda *_, **__: [None])
    assert made.groups.put(group, blocks[1:]) == [None]
    assert not made.groups.promises.ask(blocks[1].name, "b", 2)


# ---- a restart -----------------------------------------------------------------------------------
def places(made: Reported, blocks: list[Block]) -> list[object]:
    group = made.find(blocks)
    assert group is not None
    return [place(group, block) for block in blocks]


def test_a_restart_finds_everything(root: Path) -> None:
    sets = {owner: blocks_of(owner, 5) for owner in (1, 2)}
    with reported(root) as made:
        for owner, blocks in sets.items():
            made.fill(made.make(owner, blocks), blocks[:4])
        large, large_has = filled(made, 3, 3, 2)
        all_large = large_blocks(3, 16)
        before = {owner: places(made, blocks) for owner, blocks in sets.items()}
        names = {group.name for group in (large, made.find(sets[1])) if group}
    with reported(root) as made:
        assert sorted(figures(made.groups)) == [1, 2, 3]
        for owner, blocks in sets.items():
            group = made.find(blocks)
            assert group is not None
            assert group.owner == owner
            assert places(made, blocks) == before[owner]
            assert held(group, blocks) == 4
            made.fill(group, blocks[4:])
        again = made.find(all_large)
        assert again is not None
        assert held(again, large_has) == len(large_has)
        assert again.name in names


def test_a_kill_costs_nothing_that_was_stored(root: Path) -> None:
    blocks = blocks_of(1, 4)
    made = Reported(root, 4, 2)
    made.fill(made.make(1, blocks), blocks)
    group = made.find(blocks)
    assert group is not None
    group.store._attachment.detach()  # nothing sealed, nothing flushed
    with reported(root) as again:
        found = again.find(blocks)
        assert found is not None
        assert held(found, blocks) == 4


def test_with_less_room_at_a_restart_less_is_kept(root: Path) -> None:
    with reported(root, steps=4, quota_steps=2) as made:
        _, blocks = filled(made, 1, 1, 2)
        all_blocks = large_blocks(1, 16)
        small = [one_block(seed) for seed in (2, 3)]
        for owner, each in enumerate(small, 2):
            made.fill(made.make(owner, each), each)
    for steps in (3.0, 2.0, 2.0):
        with reported(root, steps=steps, quota_steps=1) as made:
            made.check()
            assert made.granted(1) + made.granted(2) + made.granted(3) > 0
            group = made.find(all_blocks)
            if group is not None:
                assert group.held_bytes() <= group.limit_bytes
                assert 0 < held(group, blocks) <= len(blocks)
            again = made.find(small[1]) or made.make(3, small[1])
            made.fill(again, small[1])
    bytes_ = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
    assert bytes_ <= 2 * STEP + SLACK


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "digests flipped": lambda folder: flip(folder / "digests"),
    "digests cut": lambda folder: os.truncate(folder / "digests", 64),
    "digests empty": lambda folder: os.truncate(folder / "digests", 0),
    "digests gone": lambda folder: (folder / "digests").unlink(),
    "owner is no number": lambda folder: (folder / "owner").write_text("me\n"),
    "owner is empty": lambda folder: (folder / "owner").write_text(""),
    "owner is no text": lambda folder: (folder / "owner").write_bytes(b"\xff\xfe"),
    "owner gone": lambda folder: (folder / "owner").unlink(),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_group_is_removed_and_no_other_one(root: Path, what: str) -> None:
    bad, good = blocks_of(1, 3), blocks_of(2, 3)
    with reported(root) as made:
        for owner, blocks in ((1, bad), (2, good)):
            made.fill(made.make(owner, blocks), blocks)
    folder = root / name_of(set_with(bad)).hex()
    DAMAGE[what](folder)
    with reported(root) as made:
        assert made.find(bad) is None
        assert not folder.exists()
        kept = made.find(good)
        assert kept is not None
        assert held(kept, good) == 3
        made.fill(made.make(1, bad), bad)


def test_a_store_that_is_gone_or_of_another_format_costs_its_blocks(root: Path) -> None:
    sets = [blocks_of(seed, 3) for seed in (1, 2, 3)]
    with reported(root) as made:
        for blocks in sets:
            made.fill(made.make(1, blocks), blocks)
    gone, strange = (root / name_of(set_with(blocks)).hex() / "store" for blocks in sets[:2])
    shutil.rmtree(gone)
    line = (strange / "format").read_bytes()
    assert b"blake3" in line
    (strange / "format").write_bytes(fmt.pack_format_line(bytes(16), "blake3", 999))
    with reported(root) as made:
        first, third = made.find(sets[0]), made.find(sets[2])
        assert first is not None
        assert third is not None
        assert held(first, sets[0]) == 0
        made.fill(first, sets[0])
        assert made.find(sets[1]) is None
        assert held(third, sets[2]) == 3


def test_what_was_begun_is_removed_at_a_restart(root: Path) -> None:
    blocks = blocks_of(1, 3)
    with reported(root) as made:
        group = made.make(1, blocks)
        made.fill(group, blocks)
    begun = root / f".{'ab' * 32}-17-1234"
    shutil.copytree(group.folder, begun)
    (root / f".{'cd' * 32}-99").mkdir()
    with reported(root) as made:
        assert sorted(path.name for path in root.iterdir() if path.is_dir()) == [group.folder.name]
        kept = made.find(blocks)
        assert kept is not None
        assert held(kept, blocks) == 3


def test_a_folder_that_is_no_group_but_has_the_name_of_one_is_removed(root: Path) -> None:
    root.mkdir()
    (root / ("ab" * 32)).mkdir()
    with reported(root):
        assert not [path for path in root.iterdir() if path.is_dir()]


def test_what_is_not_of_the_service_stays(root: Path) -> None:
    """The root of a disk has a folder of its own, say."""
    for folder in (".ssh", "lost+found", "data"):
        (root / folder).mkdir(parents=True)
        (root / folder / "precious").write_text("x")
    with reported(root):
        pass
    assert sorted(path.parent.name for path in root.glob("*/precious")) == [
        ".ssh", "data", "lost+found"
    ]  # fmt: skip


# ---- by itself -----------------------------------------------------------------------------------
def test_a_disk_that_others_fill_is_given_room(
    made: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, blocks = grown(made, 1, 1, 3)
    kept = made.make(2, one_block(2))
    age(group, 10)
    made.groups.keep_house()
    assert made.granted(1) // STEP == 3, "there is room"
    monkeypatch.setattr(made.groups, "_disk_bytes", lambda: -1)
    made.groups.keep_house()
    assert made.granted(1) // STEP == 2
    assert held(group, blocks) > 0
    assert made.has(kept)


def test_a_short_disk_takes_first_from_who_is_above_the_quota(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reported(root, steps=6, quota_steps=1) as made:
        within, within_blocks = grown(made, 1, 1, 1)
        above, above_blocks = grown(made, 2, 2, 4)
        age(within, 86400)  # used longest ago; that says nothing here
        used(made, above)
        before = within.limit_bytes
        monkeypatch.setattr(made.groups, "_disk_bytes", lambda: -1)
        for left in (3, 2):
            made.groups.keep_house()
            assert made.granted(2) // STEP == left
            assert within.limit_bytes == before
        assert held(within, within_blocks) == len(within_blocks)
        assert held(above, above_blocks) > 0
        made.groups.keep_house()
        assert made.has(above), "nobody would keep the quota: an idle group goes"
        assert not made.has(within)


def test_what_is_to_be_kept_free_is(root: Path) -> None:
    disk = os.statvfs(root.parent)
    with reported(root, keep_free=disk.f_bavail * disk.f_frsize) as made, pytest.raises(NoRoom):
        made.make(1, one_block(1))

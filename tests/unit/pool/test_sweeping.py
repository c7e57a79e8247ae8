"""One host sweeps for all: who does, what it tells, and what the others may leave to it.

Hosts, their tables, what their file systems keep of attributes, the origin, the engine and time are
all made up here; `SharedSweep` is real. Through mounts: mount/test_pool_sweep.py.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from fusecache.pool import board
from fusecache.pool.board import (
    FORMAT,
    NOTE_BYTES,
    PART,
    VALUE_BYTES_MOST,
    Lease,
    hash_of,
    seal,
    unseal,
)
from fusecache.pool.keys import Away
from fusecache.pool.sweeping import (
    NOTES_MOST,
    OWN_PERIODS,
    Alone,
    Following,
    Leading,
    SharedSweep,
)

PERIOD_S = 60.0
KEPT_S = 70.0
"""As long a host's file system believes what it knows of a directory, unless it is forced."""
PREFIX = "fusecache:tree:"
LEASE = f"{PREFIX}{FORMAT}:60000"
Listing = dict[bytes, int]
"""Names, with the version of each; of a directory which one it is."""


class Time:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FakeEngine:
    def __init__(self, time: Time) -> None:
        self.time = time
        self.values: dict[str, tuple[bytes, float]] = {}
        self.is_away = self.is_full = False
        self.commands = 0
        self.before: Callable[[], None] = lambda: None
        """Of each command."""

    def _begin(self) -> None:
        self.before()
        self.commands += 1
        if self.is_away:
            raise Away("it is away")
        self.values = {k: v for k, v in self.values.items() if v[1] > self.time.now_s}

    def get(self, key: str) -> bytes | None:
        self._begin()
        return self.values.get(key, (None, 0.0))[0]

    def put(self, key: str, value: bytes, expires_s: float, is_new: bool = False) -> bool:
        self._begin()
        assert len(value) <= VALUE_BYTES_MOST
        if self.is_full:
            raise Away("OOM")
        if is_new and key in self.values:
            return False
        self.values[key] = value, self.time.now_s + expires_s
        return True

    def remove(self, key: str) -> None:
        self._begin()
        self.values.pop(key, None)


class Origin:
    """A directory, and directories in it."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.versions = 0
        self.directories: dict[bytes, Listing] = {b"": {}}
        self.root_ns = 0

    def new(self) -> int:
        self.versions += 1
        return self.versions

    def make(self, directory: bytes, names: int) -> None:
        """In the place of one that may be there."""
        self.directories[directory] = {b"%d" % name: self.new() for name in range(names)}
        self.directories[b""][directory] = self.new()
        self.root_ns = self.new()

    def change(self, directory: bytes, name: bytes) -> None:
        self.directories[directory][name] = self.new()

    def remove(self, directory: bytes, name: bytes) -> None:
        self.directories[directory].pop(name, None)


class Host:
    """Of each directory in its table: its number, which one it is, and its listing."""

    def __init__(self, name: str, origin: Origin, engine: FakeEngine, time: Time) -> None:
        self.name, self.origin, self.time = name, origin, time
        self.shared = SharedSweep(engine, self, PREFIX, name, PERIOD_S, time)
        self.table: dict[bytes, tuple[int, int, Listing]] = {}
        self.kept: dict[bytes, tuple[float, int, Listing]] = {}
        self.inodes = 0
        self.noted: list[tuple[bytes, bytes]] | None = None
        self.is_whole = True
        self.looks = self.passes = 0
        self.next_tick_s = self.next_pass_s = time.now_s
        self.hangs: set[bytes] = set()

    # ---- as _native has it -----------------------------------------------------------------------

    def journal(self, is_on: bool, /) -> None:
        self.noted, self.is_whole = [] if is_on else None, True

    def journal_take(self) -> tuple[list[tuple[bytes, bytes]], bool]:
        if self.noted is None:
            return [], True
        taken, self.noted = self.noted, []
        is_whole, self.is_whole = self.is_whole, True
        return taken, is_whole

    def note(self, directory: bytes, name: bytes) -> None:
        if self.noted is not None:
            self.noted.append((directory, name))

    # ---- the file system of this host, and the table ---------------------------------------------

    def ask(self, directory: bytes, is_forced: bool) -> tuple[int, Listing]:
        """Which directory it is, and what it holds. LookupError: there is none."""
        kept = self.kept.get(directory)
        if kept is not None and not is_forced and self.time.now_s - kept[0] < KEPT_S:
            return kept[1:]
        if directory not in self.origin.directories or directory in self.hangs:
            raise LookupError
        which = self.origin.directories[b""].get(directory, 0)
        found = which, dict(self.origin.directories[directory])
        self.kept[directory] = self.time.now_s, *found
        return found

    def scan(self, directory: bytes, is_forced: bool = False) -> None:
        which, now = self.ask(directory, is_forced)
        known = self.table[b""][2].get(directory) if directory and b"" in self.table else which
        ino, which_before, before = self.table.get(directory, (0, known, None))
        if which != which_before:
            raise LookupError
        if before is None:
            self.inodes += 1
            self.table[directory] = self.inodes, which, dict(now)
            for name in now if directory == b"" else ():
                self.bury(name, unless=now[name])
            return
        for name in before.keys() | now.keys():
            self.merge(directory, name, now.get(name))
        assert self.table[directory][0] == ino

    def merge(self, directory: bytes, name: bytes, version: int | None) -> None:
        listing = self.table[directory][2]
        if listing.get(name) == version:
            return
        self.note(directory, name)
        if directory == b"":
            self.bury(name, unless=version)
        if version is None:
            listing.pop(name, None)
        else:
            listing[name] = version

    def bury(self, directory: bytes, unless: int | None) -> None:
        """Unless it is this one."""
        if directory in self.table and self.table[directory][1] != unless:
            del self.table[directory]
            self.is_whole = False

    def look(self, directory: bytes, name: bytes, is_forced: bool) -> None:
        if directory in self.table:
            _, now = self.ask(directory, is_forced)
            self.merge(directory, name, now.get(name))

    # ---- as read/directories.py does it ----------------------------------------------------------

    def tick(self) -> None:
        epoch = self.shared.epoch
        root = (self.origin.root_ns, 0) if self.shared.needs_root else None
        found = self.shared.tick(root)
        for directory, names in found.changes.items():
            for name in names:
                try:
                    self.look(directory, name, is_forced=True)
                except LookupError:
                    if directory in self.table:
                        self.shared.epoch.failed(self.table[directory][0])
        for path in found.wanted:
            if path not in self.table:
                self.list(path)
        if self.shared.epoch is not epoch:
            self.next_pass_s = self.time.now_s

    def list(self, directory: bytes) -> None:
        """A reader does."""
        with contextlib.suppress(LookupError):
            if directory not in self.table:
                self.scan(directory)

    def sweep(self) -> None:
        self.shared.begin_pass()
        looks = 0
        for directory in list(self.table):
            if directory not in self.table:
                continue
            ino = self.table[directory][0]
            epoch = self.shared.epoch
            if epoch.leaves(ino):
                continue
            looks += 1
            is_forced = epoch.trusts(directory)
            try:
                self.scan(directory, is_forced)
            except LookupError:
                epoch.failed(ino)
            else:
                epoch.looked(ino, directory, True, is_forced)
        self.looks += looks
        self.passes += bool(looks)

    def is_right(self) -> bool:
        return all(
            listing == self.origin.directories.get(directory)
            for directory, (_, _, listing) in self.table.items()
        )


class World:
    def __init__(self, hosts: int, directories: int = 4, names: int = 3) -> None:
        self.time = Time()
        self.engine = FakeEngine(self.time)
        self.origin = Origin(self.time)
        for number in range(directories):
            self.origin.make(b"d%d" % number, names)
        self.hosts: list[Host] = []
        for _ in range(hosts):
            self.add_host()

    def add_host(self) -> Host:
        name = f"h{self.time.now_s}-{len(self.hosts)}"
        self.hosts.append(Host(name, self.origin, self.engine, self.time))
        return self.hosts[-1]

    def run(self, seconds: float) -> None:
        """Ticks and passes, when they are due."""
        end_s = self.time.now_s + seconds
        while self.time.now_s < end_s:
            for host in self.hosts:
                if self.time.now_s >= host.next_tick_s:
                    host.next_tick_s = self.time.now_s + host.shared.pause_s
                    host.tick()
                if self.time.now_s >= host.next_pass_s:
                    host.next_pass_s = self.time.now_s + PERIOD_S / 2
                    host.sweep()
            self.time.now_s += 1.5

    def list_all(self) -> None:
        for host in self.hosts:
            for directory in self.origin.directories:
                host.list(directory)

    @property
    def leaders(self) -> list[Host]:
        return [host for host in self.hosts if isinstance(host.shared.epoch, Leading)]

    def settle(self) -> tuple[Host, list[Host]]:
        """The leader, and its followers, who leave all to it."""
        self.list_all()
        self.run(4 * PERIOD_S)
        (leader,) = self.leaders
        followers = [host for host in self.hosts if host is not leader]
        for host in followers:
            assert host.shared.status() == {
                "role": "follower", "leader": leader.name, "left": len(self.origin.directories),
                "fault": "",
            }  # fmt: skip
        return leader, followers

    def note_key(self, number: int) -> str:
        (leader,) = self.leaders
        epoch = leader.shared.epoch
        assert isinstance(epoch, Leading)
        return f"{PREFIX}{FORMAT}:{epoch.token}:note:{number}"


def test_one_sweep_a_period() -> None:
    world = World(5)
    leader, followers = world.settle()
    before, passes = [host.looks for host in world.hosts], leader.passes
    world.run(10 * PERIOD_S)
    passes = leader.passes - passes
    assert passes == 20
    after = [host.looks for host in world.hosts]
    looks = [now - then for now, then in zip(after, before, strict=True)]
    assert sum(looks) == passes * len(world.origin.directories)
    assert not any(looks[world.hosts.index(host)] for host in followers)


def test_a_change_is_seen_two_ticks_after_the_leader_has_seen_it() -> None:
    world = World(3)
    leader, followers = world.settle()
    for _ in range(20):
        world.origin.change(b"d1", b"0")
        while not leader.is_right():
            world.run(1.5)
        world.run(2 * leader.shared.tick_s + 1.5)
        assert all(host.is_right() for host in followers)


def test_what_the_leader_s_readers_have_found_is_told() -> None:
    world = World(3)
    leader, followers = world.settle()
    world.origin.change(b"d1", b"0")
    leader.look(b"d1", b"0", is_forced=True)
    assert leader.is_right()
    world.run(PERIOD_S)
    assert all(host.is_right() for host in followers)


def test_the_first_to_come_leads_and_the_next_one_when_it_has_gone() -> None:
    world = World(1)
    first = world.hosts[0]
    world.run(PERIOD_S)
    second = world.add_host()
    world.run(PERIOD_S)
    assert world.leaders == [first]
    world.hosts.remove(first)  # killed: nothing is given up
    world.run(PERIOD_S / 2)
    assert not world.leaders or world.leaders == [second]
    world.run(PERIOD_S / 4)
    assert world.leaders == [second]
    third = world.add_host()
    world.run(PERIOD_S)
    world.hosts.remove(second)
    second.shared.leave()
    third.tick()
    third.tick()  # with the root's time stamps
    assert world.leaders == [third]


def test_a_leader_that_dies_costs_one_sweep_of_each_and_no_change() -> None:
    world = World(4)
    leader, followers = world.settle()
    world.hosts.remove(leader)
    world.origin.change(b"d0", b"0")
    for host in followers:
        host.kept.clear()
    world.run(PERIOD_S * 3 / 4 + 3)
    assert all(host.is_right() for host in followers)
    world.settle()


def test_a_stopped_leader_that_goes_on_follows() -> None:
    world = World(3)
    leader, followers = world.settle()
    world.hosts.remove(leader)
    world.run(PERIOD_S)
    (other,) = world.leaders
    world.origin.change(b"d0", b"0")
    leader.scan(b"d0", is_forced=True)  # as one that still believes to lead
    world.hosts.append(leader)
    assert set(world.leaders) == {leader, other}
    world.run(4 * PERIOD_S)
    assert world.leaders == [other]
    assert all(host.is_right() for host in world.hosts)
    assert leader.noted is None, "its journal would grow"
    assert len(followers) == 2


def test_a_missing_note_is_a_sweep_of_one_s_own() -> None:
    world = World(3)
    leader, followers = world.settle()
    seen = [host.looks for host in followers]
    world.origin.change(b"d0", b"0")
    leader.scan(b"d0", is_forced=True)
    for host in followers:
        host.next_tick_s = world.time.now_s + 20
    leader.tick()
    del world.engine.values[world.note_key(leader.shared.epoch.notes)]  # type: ignore[attr-defined]
    world.run(3 * PERIOD_S)
    assert all(host.is_right() for host in followers)
    assert [host.looks - before for host, before in zip(followers, seen, strict=True)] == [10, 10]


@pytest.mark.parametrize("lost", ["lease", "swept", "all"])
def test_what_is_evicted(lost: str) -> None:
    world = World(3)
    leader, followers = world.settle()
    looks = [host.looks for host in followers]
    for key in list(world.engine.values):
        if lost == "all" or (key == LEASE) == (lost == "lease"):
            del world.engine.values[key]
    leader.tick()
    world.origin.change(b"d0", b"0")
    world.run(3 * PERIOD_S)
    assert world.leaders == [leader]
    assert all(host.is_right() for host in followers)
    assert [host.looks for host in followers] == looks, "the leader came first"
    late = world.add_host()
    for directory in world.origin.directories:
        late.list(directory)
    world.run(4 * PERIOD_S)
    assert late.shared.status()["left"] == len(world.origin.directories), "written anew"


@pytest.mark.parametrize("fault", ["is_away", "is_full"])
def test_no_engine(fault: str) -> None:
    world = World(3)
    world.settle()
    setattr(world.engine, fault, True)
    if fault == "is_full":
        world.run(PERIOD_S)  # until the lease has expired
    world.run(PERIOD_S)
    assert [host.shared.epoch.role for host in world.hosts] == ["alone"] * 3
    before = [host.passes for host in world.hosts]
    world.run(5 * PERIOD_S)
    assert [host.passes - then for host, then in zip(world.hosts, before, strict=True)] == [10] * 3
    setattr(world.engine, fault, False)
    world.settle()


def test_another_directory_under_the_pool_s_name() -> None:
    world = World(2)
    stranger = world.add_host()
    stranger.origin = Origin(world.time)
    for number in range(7):
        stranger.origin.make(b"d%d" % number, 1)
    world.list_all()
    world.run(PERIOD_S)
    passes = stranger.passes
    world.run(10 * PERIOD_S)
    assert stranger not in world.leaders
    assert stranger.shared.status()["left"] == 0
    assert stranger.passes - passes == 20


def test_a_directory_that_only_a_follower_knows() -> None:
    world = World(2)
    leader, follower = world.hosts
    leader.list(b"d0")
    world.run(PERIOD_S)
    assert world.leaders == [leader]
    for directory in world.origin.directories:
        follower.list(directory)
    world.run(3 * PERIOD_S)
    assert set(leader.table) == set(follower.table)
    assert follower.shared.status()["left"] == len(world.origin.directories)


def test_what_the_leader_cannot_look_at_is_looked_at_by_each() -> None:
    world = World(2)
    leader, (follower,) = world.settle()
    leader.hangs.add(b"d1")
    world.run(3 * PERIOD_S)
    assert follower.shared.status()["left"] == len(world.origin.directories) - 1
    world.origin.change(b"d1", b"0")
    world.run(3 * PERIOD_S)
    assert follower.is_right()


def test_a_leader_whose_origin_hangs_gives_the_lease_up() -> None:
    world = World(2)
    leader, (follower,) = world.settle()
    leader.shared.end_pass(is_well=False)
    world.run(PERIOD_S / 2)
    assert world.leaders == [follower]
    assert leader.noted is None
    assert leader.shared.tick(None).changes == {}
    leader.shared.end_pass(is_well=True)
    world.run(PERIOD_S)
    assert world.leaders == [follower]


def test_a_directory_in_the_place_of_another_one() -> None:
    """The leader has not listed the new one, so nobody may leave it to the leader."""
    world = World(2)
    leader, (follower,) = world.settle()
    world.origin.make(b"d1", 5)
    leader.look(b"", b"d1", is_forced=True)
    follower.look(b"", b"d1", is_forced=True)
    follower.scan(b"d1", is_forced=True)
    leader.tick()
    assert b"d1" not in leader.table
    for _ in range(2):
        follower.tick()
        follower.sweep()
    world.origin.change(b"d1", b"0")
    follower.kept.clear()
    follower.sweep()
    assert follower.is_right()


def test_what_could_not_be_written_is_written_later() -> None:
    world = World(2)
    leader, (follower,) = world.settle()
    looks = follower.looks
    world.origin.change(b"d1", b"0")
    leader.scan(b"d1", is_forced=True)
    world.engine.is_full = True
    leader.tick()
    world.engine.is_full = False
    leader.tick()
    follower.tick()
    assert follower.is_right()
    assert follower.looks == looks


def test_a_follower_that_cannot_look_sweeps_that_directory_itself() -> None:
    world = World(2)
    leader, (follower,) = world.settle()
    world.origin.change(b"d1", b"0")
    follower.hangs.add(b"d1")
    leader.kept.clear()
    world.run(PERIOD_S)
    follower.hangs.clear()
    assert not follower.is_right()
    world.run(PERIOD_S)
    assert follower.is_right()
    assert follower.shared.status()["left"] == len(world.origin.directories)


def test_a_leader_that_was_not_noticed_to_be_another_one() -> None:
    """What the new one knew when it began is in none of its notes."""
    world = World(3)
    leader, (heir, follower) = world.settle()
    world.hosts = [heir]
    world.origin.change(b"d1", b"0")
    heir.scan(b"d1", is_forced=True)
    world.run(2 * PERIOD_S)
    assert world.leaders == [heir]
    follower.next_tick_s = follower.next_pass_s = world.time.now_s
    world.hosts.append(follower)
    world.run(3 * PERIOD_S)
    assert follower.is_right()
    assert leader not in world.hosts


def test_only_what_was_looked_at_past_attribute_caches_is_left() -> None:
    epoch = Following(Lease("t", "h", 0, 1, (0, 0)), 1e9)
    epoch.is_joined = True
    epoch.looked(7, b"d", is_shared=True, was_forced=False)
    assert epoch.take_wants() == [b"d"]
    epoch.learn([hash_of(b"d")])
    assert epoch.trusts(b"d")
    epoch.looked(7, b"d", is_shared=True, was_forced=False)
    epoch.looked(7, b"d", is_shared=False, was_forced=True)
    assert not epoch.leaves(7)
    assert not epoch.take_wants()
    epoch.looked(7, b"d", is_shared=True, was_forced=True)
    assert epoch.leaves(7)


def test_more_changes_than_notes_hold() -> None:
    world = World(3)
    leader, followers = world.settle()
    assert isinstance(leader.shared.epoch, Leading)
    token = leader.shared.epoch.token
    for number in range(NOTES_MOST):
        leader.note(b"d0", b"%d" % number * (NOTE_BYTES // 2))
    leader.tick()
    assert leader.shared.epoch.token == token
    for host in followers:
        host.tick()
    for number in range(2 * NOTES_MOST + 2):
        leader.note(b"d0", b"%d" % number * NOTE_BYTES)
    leader.tick()
    assert isinstance(leader.shared.epoch, Leading)
    assert leader.shared.epoch.token != token
    world.run(3 * PERIOD_S)
    assert world.leaders == [leader]
    world.settle()


def test_many_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "PART", 7)
    monkeypatch.setattr(board, "DIRECTORIES_MOST", 20)
    world = World(3, directories=24)
    world.list_all()
    world.run(5 * PERIOD_S)
    assert sorted(host.shared.status()["left"] for host in world.hosts) == [0, 20, 20]
    world.origin.change(b"d23", b"0")
    world.run(2 * PERIOD_S)
    assert all(host.is_right() for host in world.hosts)


def test_a_follower_sweeps_all_at_times() -> None:
    """A leader that lies is found out so."""
    world = World(2)
    leader, (follower,) = world.settle()
    world.origin.change(b"d0", b"0")
    leader.scan(b"d0", is_forced=True)
    leader.journal_take()  # and tells nobody
    world.run(PERIOD_S * (OWN_PERIODS / 2 - 5))
    assert not follower.is_right()
    world.run(PERIOD_S * (OWN_PERIODS + 5))
    assert follower.is_right()


@pytest.mark.parametrize(
    "value",
    [
        b"", b"FCS1", b"FCS1" + bytes(8), b"x" * 100, seal([]), seal(["t", "h", 1, 2]),
        seal(["t", "h", -1, 0, [0, 0]]), seal(["t", "h", 0, 1 << 60, [0, 0]]),
        seal([b"t", "h", 0, 0, [0, 0]]), seal(["t", "h", 0, 0, [0]]),
        seal(["t", "h", 0, 0, [0, 0]])[:-1], b"FCS0" + seal(["t", "h", 0, 0, [0, 0]])[4:],
    ],
)  # fmt: skip
def test_a_lease_that_is_none(value: bytes) -> None:
    world = World(1)
    (host,) = world.hosts
    world.engine.values[LEASE] = value, 1e9
    world.list_all()
    world.run(5 * PERIOD_S)
    assert type(host.shared.epoch) is Alone
    assert host.shared.status()["fault"]
    assert host.passes >= 9
    del world.engine.values[LEASE]
    world.run(PERIOD_S)
    assert world.leaders == [host]


@pytest.mark.parametrize(
    "fields",
    [
        [], [1], ["t", 1, []], ["t", 1, {"d": [b"n"]}], ["t", 1, {b"d": b"n"}],
        ["t", 1, {b"d": ["n"]}], ["t", 2, {}], ["u", 1, {}], ["t", 1, {}, 1],
    ],
)  # fmt: skip
def test_a_note_that_is_none_is_a_gap(fields: list[Any]) -> None:
    world = World(1)
    (host,) = world.hosts
    root = (world.origin.root_ns, 0)

    def lease(notes: int) -> None:
        world.engine.values[LEASE] = seal(["t", "h", notes, 0, list(root)]), 1e9

    lease(0)
    host.tick()
    host.tick()
    epoch = host.shared.epoch
    assert isinstance(epoch, Following)
    assert epoch.is_joined
    world.engine.values[f"{PREFIX}{FORMAT}:t:note:1"] = seal(fields), 1e9
    lease(1)
    assert not host.shared.tick(root).changes
    assert host.shared.epoch is not epoch
    world.engine.values[f"{PREFIX}{FORMAT}:t:note:2"] = seal(["t", 2, {b"d": [b"n"]}]), 1e9
    lease(2)
    assert host.shared.tick(root).changes == {b"d": [b"n"]}


def test_values() -> None:
    for fields in ([], [b"a/b", "text", 1 << 63, {b"d": [b"n"]}]):
        value = seal(fields)
        assert unseal(value) == fields
        for at in range(len(value)):
            assert unseal(value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]) is None
    assert unseal(None) is None
    assert unseal(seal([bytes(VALUE_BYTES_MOST)])) is None
    assert len(seal([f"{'f' * 16}-1", 3, [(1 << 64) - 1] * PART])) < VALUE_BYTES_MOST
    assert hash_of(b"a/b") != hash_of(b"a") != hash_of(b"")


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_all_hosts_are_right_in_the_end(seed: int) -> None:
    draw = random.Random(seed)
    world = World(draw.randint(2, 4), directories=3, names=3)
    directories = [b"d0", b"d1", b"d2", b""]

    def act() -> None:
        match draw.randrange(14):
            case 0 | 1 | 2:
                world.origin.change(draw.choice(directories[:3]), b"%d" % draw.randrange(4))
            case 3:
                world.origin.remove(draw.choice(directories[:3]), b"%d" % draw.randrange(4))
            case 4:
                if draw.random() < 0.5:
                    world.origin.make(draw.choice(directories[:3]), draw.randrange(4))
            case 5 | 6:
                draw.choice(world.hosts).list(draw.choice(directories))
            case 7 | 8:
                host, directory = draw.choice(world.hosts), draw.choice(directories)
                with contextlib.suppress(LookupError):
                    host.look(directory, b"%d" % draw.randrange(4), draw.random() < 0.5)
            case 9:
                if len(world.hosts) > 1:
                    gone = world.hosts.pop(draw.randrange(len(world.hosts)))
                    if draw.random() < 0.5:
                        gone.shared.leave()
            case 10:
                if len(world.hosts) < 5:
                    world.add_host()
            case 11:
                for key in draw.sample(sorted(world.engine.values), len(world.engine.values) // 2):
                    del world.engine.values[key]
            case 12:
                world.engine.is_away = not world.engine.is_away
            case 13:
                world.engine.is_full = not world.engine.is_full

    acts = 0

    def amid_a_tick() -> None:
        nonlocal acts
        if acts and draw.random() < 0.01:
            acts -= 1
            world.origin.change(draw.choice(directories[:3]), b"%d" % draw.randrange(4))

    world.engine.before = amid_a_tick
    for _ in range(60):
        acts = 5
        act()
        world.run(draw.choice([0, 1.5, 6, 20, 45]))
    acts = 0
    world.engine.is_away = world.engine.is_full = False
    world.list_all()
    world.run(KEPT_S + 6 * PERIOD_S)
    for host in world.hosts:
        assert host.is_right(), (host.shared.status(), host.table, world.origin.directories)
    assert len(world.leaders) == 1

"""What goes from a full SSD, and what stays, while a job is hinted. What the origin is asked for is
counted. RAM holds less than is read in between.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hintsd.orders.spec import OrderSpec
from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_hinted import idle, order
from tests.support.directed import Directed, request
from tests.support.mounted import Mount, eventually
from tests.support.plan_client import PlanClient
from tests.support.trees import random_bytes

FILE_BYTES = 500_000
FLAGS = ("--ram", "16M", "--ssd", "64M")  # seven or so segments of 8 MiB
FULL, HALF = 120, 40  # files: more than SSD takes; 20 MB of it
STORED = 2
# That a busy machine reads twice: the kernel let go of half a file, and it is not stored yet.
FEW = 4


def write(root: Path, name: str, count: int) -> list[str]:
    """Of one class; old enough to be kept."""
    names = [f"{name}/class/{number:03}.jpg" for number in range(count)]
    for number in names:
        path = root / number
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random_bytes(number, FILE_BYTES))
        os.utime(path, (1e9, 1e9))
    return names


class Reading:
    """Of files, and what it took from the origin."""

    def __init__(self, mount: Mount, source: Path) -> None:
        self.mount, self.source = mount, source

    @property
    def fetched_files(self) -> float:
        return float(self.mount.value("origin", "bytes")) / FILE_BYTES

    def read(self, names: list[str]) -> float:
        """Files that were fetched; what was read is stored when it returns, if it is to be."""
        before = self.fetched_files
        for name in names:
            assert (self.mount.path / name).read_bytes() == (self.source / name).read_bytes()
        blocks = -1

        def is_still() -> bool:
            nonlocal blocks
            before, blocks = blocks, int(self.mount.value("ssd", "blocks"))
            return before == blocks

        eventually(is_still, every_s=0.5)  # the publisher may wait for a processor
        return self.fetched_files - before


def open_job(directed: Directed, mount: Mount, name: str, files: int, epochs: int = 4) -> OrderSpec:
    spec = OrderSpec("random", files, seed=7, batch_size=4)
    directed.open(name, request(mount.path / name, spec, epochs=epochs))
    return spec


def read_epoch(
    reading: Reading, directed: Directed, job: str, spec: OrderSpec, epoch: int, names: list[str]
) -> None:
    for count, index in enumerate(order(spec, epoch), 1):
        name = names[index]
        assert (reading.mount.path / name).read_bytes() == (reading.source / name).read_bytes()
        if count % 4 == 0:
            directed.step(job, epoch, count // 4)


@in_one_mode
@pytest.mark.parametrize("is_of_another_mount", [False, True])
def test_a_new_job_gets_the_room_of_what_no_job_names(
    place: Place, mounting: Mounting, tmp_path: Path, is_of_another_mount: bool
) -> None:
    """A directory that it never lists, or another dataset in the cache directory."""
    new = write(place.source, "new", HALF)
    if is_of_another_mount:
        other = tmp_path / "other"
        old = write(other, "old", FULL)
        mount = mounting(*FLAGS, source=other)
        Reading(mount, other).read(old)
        mount.umount()
    else:
        old = write(place.source, "old", FULL)
    mount = mounting(*FLAGS)
    reading = Reading(mount, place.source)
    if not is_of_another_mount:
        assert FULL <= reading.read(old) <= FULL + FEW
    before = reading.fetched_files
    with Directed() as directed:
        spec = open_job(directed, mount, "new", HALF)
        eventually(lambda: reading.fetched_files == before + HALF and idle(directed)())
        for epoch in range(2):
            read_epoch(reading, directed, "new", spec, epoch, new)
        assert reading.fetched_files == before + HALF
    assert mount.value("ssd", "reserved_bytes") <= 64 << 20


@in_one_mode
def test_an_idle_job_keeps_its_files_and_no_more(place: Place, mounting: Mounting) -> None:
    mine, old = write(place.source, "mine", HALF), write(place.source, "old", FULL)
    theirs = write(place.source, "theirs", HALF)
    mount = mounting(*FLAGS)
    reading = Reading(mount, place.source)
    with Directed() as directed:
        open_job(directed, mount, "mine", HALF)
        eventually(lambda: reading.fetched_files == HALF and idle(directed)())
        assert FULL <= reading.read(old) <= FULL + FEW
        for _ in range(2):
            reading.read(old)
            again = reading.read(theirs)
            assert HALF <= again <= HALF + FEW, "each time they have gone for the others"
            assert reading.read(theirs) == 0
            assert reading.read(mine) == 0


@in_one_mode
def test_a_job_that_is_done_keeps_nothing(place: Place, mounting: Mounting) -> None:
    mine, theirs = write(place.source, "mine", HALF), write(place.source, "theirs", HALF * 2)
    mount = mounting(*FLAGS, "--policy", "lrf")
    reading = Reading(mount, place.source)
    with Directed() as directed:
        spec = open_job(directed, mount, "mine", HALF, epochs=1)
        eventually(lambda: reading.fetched_files == HALF and idle(directed)())
        read_epoch(reading, directed, "mine", spec, 0, mine)
        eventually(lambda: "mine" in directed.finished)
        eventually(lambda: directed.mount()["connected"])
        assert reading.read(theirs) == HALF * 2
        assert reading.read(theirs) == 0


@in_one_mode
def test_live_jobs_never_take_each_others_files(place: Place, mounting: Mounting) -> None:
    """The second job's dataset does not fit beside the first one's: it has what is left."""
    first, second = write(place.source, "first", HALF), write(place.source, "second", FULL)
    old = write(place.source, "old", FULL)
    mount = mounting(*FLAGS)
    reading = Reading(mount, place.source)
    reading.read(old)
    before = reading.fetched_files
    with Directed() as directed:
        open_job(directed, mount, "first", HALF)
        eventually(lambda: reading.fetched_files == before + HALF and idle(directed)())
        fetched, before = [], reading.fetched_files  # by `second`, from its beginning
        spec = open_job(directed, mount, "second", FULL)
        for epoch in range(3):
            read_epoch(reading, directed, "second", spec, epoch, second)
            eventually(idle(directed))
            fetched.append(reading.fetched_files - before)
            before += fetched[-1]
        assert sum(fetched[1:]) < sum(fetched[:1]) * 2
    assert reading.read(first) == 0


@in_one_mode
def test_pins(place: Place, mounting: Mounting) -> None:
    """A list counts from its last frame on; without `others` nothing goes; the end frees all."""
    mine, theirs = write(place.source, "mine", HALF), write(place.source, "theirs", FULL)
    mount = mounting(*FLAGS, "--policy", "lrf")
    reading = Reading(mount, place.source)
    with PlanClient(mount.path) as client:
        assert client.hello["mount"]["pins"] == 1
        inos = sorted(entry[0] for entry in client.listing(b"mine/class").values())
        assert client.fetch_all(inos) == {STORED: HALF}

        def pin(numbers: list[int], others: bool, last: bool) -> None:
            array = np.array(numbers, np.uint32)
            client.send("pin", inos=array, number=1, others=others, last=last)
            client.settle()

        pin([0, 4_000_000_000, *inos[:10]], False, False)
        pin(inos[10:], False, True)
        reading.read(theirs)
        assert reading.read(theirs) > HALF // 2, "not all of them are stored, and nothing goes"
        client.settle()
        room = client.state["ssd_room_bytes"]
        pin(inos, True, True)
        assert client.state["ssd_room_bytes"] > room + 10 * FILE_BYTES
        assert reading.read(mine) == 0
        pin(inos[:1], True, False)  # no list yet
        assert reading.read(theirs) > 0
        assert reading.read(theirs[-HALF:]) == 0, "the last ones took others' room"
        assert reading.read(mine) == 0
        client.send("clear")
        client.settle()
        for _ in range(2):
            reading.read(theirs)
        assert reading.read(mine) > HALF // 2, "SSD has room for few beside theirs"


@in_one_mode
def test_large_files_are_pinned_over_a_servers_death(place: Place, mounting: Mounting) -> None:
    path = place.write("large", random_bytes("large", 18 << 20))
    os.utime(path, (1e9, 1e9))
    names = write(place.source, "small", FULL)
    mount = mounting(*FLAGS)
    reading = Reading(mount, place.source)
    for killed in (False, True):
        if killed:
            mount.kill_server()
        with PlanClient(mount.path) as client:
            large = client.listing(b"")[b"large"][0]
            if not killed:
                assert client.fetch_all([large]) == {STORED: 1}
            array = np.array([large], np.uint32)
            client.send("pin", inos=array, number=1, others=True, last=True)
            client.settle()
            for _ in range(2):
                reading.read(names)
            before = reading.fetched_files
            assert (mount.path / "large").read_bytes() == path.read_bytes()
            assert reading.fetched_files == before


MALFORMED: list[dict[str, object]] = [
    {},
    {"inos": b"\1\0\0\0", "number": 1, "others": True},
    {"inos": b"\1\0\0", "number": 1, "others": True, "last": True},
    {"inos": b"\1\0\0\0", "number": 1, "others": 1, "last": True},
    {"inos": b"\1\0\0\0", "number": 0, "others": True, "last": True},
    {"inos": 7, "number": 1, "others": True, "last": True},
]


@in_one_mode
def test_a_malformed_list_ends_the_channel(place: Place, mounting: Mounting) -> None:
    names = write(place.source, "d", 1)
    mount = mounting()
    for fields in MALFORMED:
        with PlanClient(mount.path) as client:
            client.send("pin", **fields)
            client.wait_closed()
            assert len(client.errors) == 1, fields
    assert Reading(mount, place.source).read(names) == 1

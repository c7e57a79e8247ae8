"""What a hinted job fetches from the origin where RAM and SSD hold a part of the dataset: each file
once in the first epoch, and in each later one those that neither holds. Bytes are counted.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable

import pytest

from hintsd.orders.spec import OrderSpec
from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_hinted import idle, order, running, shuffled
from tests.support.directed import Directed, request
from tests.support.mounted import Mount, eventually
from tests.support.trees import random_bytes

FILES, FILE_BYTES, PAGES_BYTES = 700, 122_000, 122_880
EPOCHS, BATCH = 3, 4
RAM_BYTES = FILES * PAGES_BYTES // 5  # for plans
SSD_BYTES = FILES * FILE_BYTES * 7 // 20
KEPT_SHARE = 0.1  # of the files: at least half of that RAM

TRAINER = """
import sys, time
from pathlib import Path
from torch.utils.data import DataLoader
from hintsd.orders.drawing import access_sequence
from hintsd.orders.spec import OrderSpec
root, batch_size, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
class Files:
    def __len__(self):
        return len(names)
    def __getitem__(self, index):
        return len((root / names[index]).read_bytes())
spec = OrderSpec("random", len(names), seed=7, batch_size=batch_size)
print("ready", flush=True)
for epoch in range(3):
    assert sys.stdin.readline()
    order = [int(index) for index in access_sequence(spec, epoch)]
    loader = DataLoader(Files(), batch_size, sampler=order, num_workers=4, prefetch_factor=2)
    total = 0
    for sizes in loader:
        total += int(sizes.sum())
        time.sleep(0.002 * len(sizes))  # it trains
    assert total == len(names) * 122_000
    print(epoch, flush=True)
"""


def make_dataset(place: Place) -> list[str]:
    names = [f"class{n * 3 // FILES}/{n:05}.jpg" for n in range(FILES)]
    for name in names:
        path = place.write(name, random_bytes(name, FILE_BYTES))
        os.utime(path, (1e9, 1e9))
    return names


def check_traffic(
    mount: Mount, directed: Directed, read: Callable[[int], None], most: float = 1.05
) -> None:
    """`read` reads an epoch. What is fetched ahead for the next one counts for the one before.
    `most`: so many times what is missing may be fetched.
    """
    fetched = [0]
    for epoch in range(EPOCHS):
        read(epoch)
        eventually(idle(directed))
        fetched.append(int(mount.value("origin", "bytes")))
    shares = [
        (after - before) / (FILES * FILE_BYTES) for before, after in itertools.pairwise(fetched)
    ]
    missing = 1 - mount.value("ssd", "blocks") / FILES - KEPT_SHARE
    lost = directed.job("job")["reclaimed"] / FILES  # the host took it
    told = repr((shares, missing, directed.status(), mount.status()))
    assert 0.3 < missing < 0.62, told
    # exact is unit/plan/test_planner_kept.py; here what hintsd wants crosses what it has not heard
    # of
    assert sum(shares) <= most * (1 + (EPOCHS - 1) * missing) + lost, told
    # all that RAM takes may be of the second epoch: on a busy machine nothing is kept in time
    window_share = RAM_BYTES / (FILES * PAGES_BYTES)
    assert shares[0] <= max(most, 1.05 + window_share) + lost, told


@pytest.mark.claim("P6")
@in_one_mode
def test_one_reader(place: Place, mounting: Mounting) -> None:
    """It computes nothing: most of what it reads is not there in time."""
    names, spec = make_dataset(place), shuffled(FILES)
    mount = mounting("--ram", str(RAM_BYTES * 10 // 9), "--ssd", str(SSD_BYTES))

    def read(epoch: int) -> None:
        for count, index in enumerate(order(spec, epoch), 1):
            assert len((mount.path / names[index]).read_bytes()) == FILE_BYTES
            if count % BATCH == 0:
                directed.step("job", epoch, count // BATCH)

    with Directed() as directed:
        directed.open("job", request(mount.path, spec, epochs=EPOCHS))
        check_traffic(mount, directed, read)


@pytest.mark.claim("P6")
@pytest.mark.parametrize(
    ("zero_open", "batch_size"), [(True, 4), (False, 8)], indirect=["zero_open"]
)
def test_a_dataloader(place: Place, mounting: Mounting, batch_size: int) -> None:
    names = make_dataset(place)
    spec = OrderSpec("random", FILES, seed=7, batch_size=batch_size)
    mount = mounting("--ram", str(RAM_BYTES * 10 // 9), "--ssd", str(SSD_BYTES))
    command = (sys.executable, "-c", TRAINER, str(mount.path), str(batch_size), *names)
    with running(*command) as trainer, Directed() as directed:
        go, answers = trainer.stdin, trainer.stdout
        assert go is not None
        assert answers is not None
        assert answers.readline()

        def read(epoch: int) -> None:
            print("go on", file=go, flush=True)
            assert answers.readline() == f"{epoch}\n"

        directed.open(
            "job",
            request(mount.path, spec, epochs=EPOCHS, workers=4, prefetch_factor=2, pid=trainer.pid),
        )
        # beside four busy loops 1.21 was seen; 1.42 is all files in each epoch
        check_traffic(mount, directed, read, most=1.3)


@pytest.mark.claim("P6", "P13")
@in_one_mode
def test_what_the_kernel_takes_is_fetched_once_more(place: Place, mounting: Mounting) -> None:
    """RAM for three tenths, SSD for next to nothing; all pages go in the midst of an epoch, once.
    What was kept is known to be lost, and comes from the origin when its turn comes.
    """
    names, spec = make_dataset(place), shuffled(FILES)
    ram_bytes = FILES * PAGES_BYTES * 3 // 10
    mount = mounting("--ram", str(ram_bytes * 10 // 9), "--ssd", "16M")

    def read(epoch: int, first: int, last: int) -> None:
        for count, index in enumerate(order(spec, epoch)[first:last], first + 1):
            assert (mount.path / names[index]).read_bytes() == random_bytes(
                names[index], FILE_BYTES
            )
            if count % BATCH == 0:
                directed.step("job", epoch, count // BATCH)

    def fetched() -> float:
        eventually(idle(directed))
        return float(mount.value("origin", "bytes")) / (FILES * FILE_BYTES)

    with Directed() as directed:
        directed.open("job", request(mount.path, spec, epochs=6))
        for epoch in range(2):
            before = fetched()
            read(epoch, 0, FILES)
        usual, at = fetched() - before, fetched()
        read(2, 0, FILES // 2)
        stable = directed.job("job")["reclaimed"]
        mount.drop_kernel_caches()
        least = FILES // 10
        eventually(lambda: directed.job("job")["reclaimed"] - stable >= least)
        read(2, FILES // 2, FILES)
        lost = (directed.job("job")["reclaimed"] - stable) / FILES
        read(3, 0, FILES)
        both, at = fetched() - at, fetched()
        read(4, 0, FILES)
        last, job = fetched() - at, directed.job("job")
        told = repr((usual, both, last, lost, job, mount.status()))
        # what the host took besides, of what RAM held
        earlier, later = stable / FILES, (job["reclaimed"] - stable) / FILES - lost
        taken_bytes = (earlier + later) * FILES * PAGES_BYTES
        assert usual < 0.75 + earlier, told  # 0.8, were nothing kept in RAM
        assert both <= 2 * usual + lost + later + 0.05, told
        assert last <= usual + later + 0.05, told
        assert lost < 0.4, told
        assert job["withheld_bytes"] <= 0.02 * ram_bytes + taken_bytes, told

"""The Director on a real mount: what is hinted is in the page cache before it is read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from hintsd.daemon.messages import JobRefused
from hintsd.follow.progress import SPACING_LEAST as SPACING
from hintsd.orders.drawing import access_sequence
from hintsd.orders.own_drawing import OwnDrawing
from hintsd.orders.spec import OrderSpec
from hintsd.orders.torch_process import TorchProcess
from tests.conftest import Mounting, Place, in_one_mode
from tests.support.commands import WithTorch
from tests.support.directed import Directed, request
from tests.support.mounted import Mount, eventually
from tests.support.trees import random_bytes

FILES = 1000  # many more than there are samples between a few wires
FILE_BYTES = 6000
PAGES_BYTES = 8192
TOTAL_BYTES = FILES * PAGES_BYTES


def make_dataset(place: Place, count: int = FILES) -> list[Path]:
    """Samples in order: (relative) paths of an ImageFolder of three classes; all old enough to be
    kept."""
    names = [Path(f"class{n * 3 // count}/{n:05}.jpg") for n in range(count)]
    for name in names:
        path = place.write(str(name), random_bytes(str(name), FILE_BYTES))
        os.utime(path, (1e9, 1e9))
    return names


def shuffled(count: int = FILES, seed: int = 7) -> OrderSpec:
    return OrderSpec("random", count, seed=seed, batch_size=4)


class Reader:
    """Reads samples as a trainer would, and counts the READs that reach the server."""

    def __init__(self, mount: Mount, names: list[Path]) -> None:
        self.mount, self.names = mount, names

    def read(self, indices: list[int]) -> None:
        for index in indices:
            assert len((self.mount.path / self.names[index]).read_bytes()) == FILE_BYTES

    @contextmanager
    def asks_at_most(self, requests: int, directed: Directed) -> Iterator[None]:
        """READs that reach the server."""
        before = self._requests()
        yield
        asked = self._requests() - before
        assert asked <= requests, repr((asked, directed.status()))

    def _requests(self) -> int:
        return int(self.mount.value("reads", "requests"))


def order(spec: OrderSpec, epoch: int) -> list[int]:
    return [int(index) for index in access_sequence(spec, epoch)]


def idle(directed: Directed) -> Callable[[], bool]:
    """Nothing is queued or under way at the mount."""

    def look() -> bool:
        mount = directed.mount()
        return bool(
            mount["connected"]
            and mount["queued_stage"] + mount["queued_fetch"] + mount["in_flight"] == 0
        )

    return look


def staged(
    directed: Directed, job: str, at_least_bytes: int, place: tuple[int, int] = (0, 0)
) -> None:
    """Wait until the job is seen at `place` at least, with so much staged ahead of it."""

    def look() -> None:
        status = directed.job(job)
        here = status["epoch"] or 0, status["index"] or 0
        there = here >= place and (status["ahead_bytes"] or 0) >= at_least_bytes
        assert there, repr((place, at_least_bytes, directed.status()))

    eventually(look)


@pytest.mark.claim("P6")
def test_everything_is_staged(place: Place, mounting: Mounting) -> None:
    """Without torch's process: a shuffle needs none."""
    names, spec = make_dataset(place), shuffled()
    mount = mounting("--ram", "64M")
    reader = Reader(mount, names)
    with Directed() as directed:
        torch = directed.director.torch = TorchProcess()
        directed.director.drawing = OwnDrawing(torch)
        info = directed.open("job", request(mount.path, spec, epochs=3))
        assert info.mount.mountpoint == str(mount.path)
        assert info.samples_per_epoch == FILES
        staged(directed, "job", TOTAL_BYTES)
        for epoch in range(3):
            with reader.asks_at_most(FILES // 4, directed):
                reader.read(order(spec, epoch))
            directed.step("job", epoch, FILES // 4)
        assert mount.value("prefetch", "files") <= FILES * 1.02
        eventually(lambda: directed.finished == ["job"])
        assert directed.job("job")["not_late"] >= FILES
        assert directed.notices == []
        last = directed.close("job")
        assert (last["state"], last["not_late"] >= FILES) == ("done", True)
        assert directed.status()["jobs"] == []
        assert torch._process is None


@pytest.mark.claim("P6")
def test_window_smaller_than_the_dataset(place: Place, mounting: Mounting) -> None:
    names, spec = make_dataset(place), shuffled()
    budget_bytes = 4 << 20
    mount = mounting("--ram", "16M")
    reader = Reader(mount, names)
    with Directed(ram_bytes=budget_bytes) as directed:
        directed.open("job", request(mount.path, spec, epochs=2))
        staged(directed, "job", 3 << 20)
        # An unhinted reader would ask for nearly every file. The host may take pages, too: one that
        # pages out what looks cold has taken a tenth of them within seconds.
        with reader.asks_at_most(2 * FILES // 4, directed):
            for epoch in range(2):
                sequence = order(spec, epoch)
                for start in range(0, FILES, 200):
                    reader.read(sequence[start : start + 200])
                    # One of the last two wires was seen. The last one itself may be missing: a file
                    # that ends one epoch and is a wire at the next one's beginning fires only once.
                    staged(directed, "job", 0, (epoch, start + 200 - 2 * SPACING))
                    directed.step("job", epoch, (start + 200) // 4)
                    assert mount.value("ram", "bytes") <= budget_bytes
                    if (epoch, start + 200) != (1, FILES):
                        here = divmod(epoch * FILES + start + 200, FILES)
                        staged(directed, "job", 200 * PAGES_BYTES, here)


@pytest.mark.claim("P9")
@in_one_mode
def test_another_seed_is_noticed(place: Place, mounting: Mounting) -> None:
    names = make_dataset(place)
    mount = mounting("--ram", "16M")
    reader = Reader(mount, names)
    with Directed(ram_bytes=4 << 20) as directed:
        directed.open("job", request(mount.path, shuffled(seed=1), epochs=3))
        staged(directed, "job", 3 << 20)
        reader.read(order(shuffled(seed=2), 0))
        eventually(lambda: directed.job("job")["state"] == "wrong")
        assert directed.job("job")["window_bytes"] == 0
        assert [name for name, line in directed.notices if "wrong" in line] == ["job"]
        eventually(idle(directed))


@pytest.mark.claim("P9")
@in_one_mode
def test_a_half_that_is_never_read_is_noticed(place: Place, mounting: Mounting) -> None:
    """The other half is read as is hinted: nothing strays."""
    count, epochs = 12_000, 30
    names = [Path(f"class{n * 3 // count}/{n:05}.jpg") for n in range(count)]
    for name in names:
        place.write(str(name), b"x")
    mount = mounting("--ram", "16M")
    spec = OrderSpec("random", count, seed=7, batch_size=16)

    def reasons(directed: Directed) -> Iterator[str]:
        for epoch in range(epochs):
            half = [index for index in order(spec, epoch) if names[index].stem[-1] in "02468"]
            for start in range(0, len(half), 32):
                for index in half[start : start + 32]:
                    assert (mount.path / names[index]).read_bytes() == b"x"
                time.sleep(0.01)  # as slowly as wires are laid
                yield directed.job("job")["reason"]

    with Directed(ram_bytes=4 << 20) as directed:
        directed.open("job", request(mount.path, spec, epochs=epochs, workers=4))
        staged(directed, "job", 1 << 20)
        assert any("never opened" in reason for reason in reasons(directed))
        assert directed.job("job")["state"] == "wrong"
        eventually(idle(directed))


TRAINER = """
import sys, time
from pathlib import Path
from torch.utils.data import DataLoader
from hintsd.orders.drawing import access_sequence
from hintsd.orders.spec import OrderSpec
root, names = Path(sys.argv[1]), sys.argv[2:]
class Files:
    def __len__(self):
        return len(names)
    def __getitem__(self, index):
        return len((root / names[index]).read_bytes())
spec = OrderSpec("random", len(names), seed=7, batch_size=4)
print(0, 0, flush=True)
assert sys.stdin.readline()
for epoch in range(2):
    order = [int(index) for index in access_sequence(spec, epoch)]
    loader = DataLoader(Files(), batch_size=4, sampler=order, num_workers=2, prefetch_factor=2)
    for batch, _ in enumerate(loader):
        time.sleep(0.01)  # what it computes
        if batch % 10 == 0:
            print(epoch, 4 * batch, flush=True)
            assert sys.stdin.readline()
"""


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process with its children, killed at the end. Python has torch at once."""
    popen = WithTorch if command[0] == sys.executable else subprocess.Popen
    process = popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.claim("P9")
@pytest.mark.parametrize(
    ("zero_open", "ram_bytes"),
    [(True, None), (False, 2 << 20)],
    ids=["wires only", "mostly READs"],
    indirect=["zero_open"],
)
def test_strangers_beside_a_dataloader(
    place: Place, mounting: Mounting, ram_bytes: int | None
) -> None:
    """They read all the time, in processes that end soon, and the trainer's position is known."""
    count = 480
    names = [str(name) for name in make_dataset(place, count)]
    mount = mounting("--ram", "16M")
    strangers = f"cd {mount.path}; while :; do cat */*.jpg; ls -lU *; sleep 0.3; done > /dev/null"
    with (
        running(sys.executable, "-c", TRAINER, str(mount.path), *names) as trainer,
        running("sh", "-c", strangers),
        Directed(ram_bytes=ram_bytes) as directed,
    ):
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        assert trainer.stdout.readline()  # torch is there
        directed.open(
            "job",
            request(
                mount.path, shuffled(count), epochs=2, workers=2, prefetch_factor=2, pid=trainer.pid
            ),
        )
        trainer.stdin.write("go on\n")
        trainer.stdin.flush()

        def position() -> int:
            status = directed.job("job")  # null before it is planned
            return int((status["epoch"] or 0) * count + (status["index"] or 0))

        for line in trainer.stdout:
            epoch, index = map(int, line.split())
            # Strangers fire wires before the trainer comes to them, so it may be seen late.
            assert position() <= epoch * count + index + SPACING
            trainer.stdin.write("go on\n")
            trainer.stdin.flush()
        assert trainer.wait() == 0
        eventually(lambda: position() > count)
        assert directed.job("job")["state"] in ("running", "done")
        assert not [line for _, line in directed.notices if "wrong" in line]


@pytest.mark.claim("P11")
def test_server_killed(place: Place, mounting: Mounting) -> None:
    names, spec = make_dataset(place), shuffled()
    mount = mounting("--ram", "64M", allow_log=[r"(?i)killed|died|signal|next server|resum"])
    reader = Reader(mount, names)
    with Directed() as directed:
        directed.open("job", request(mount.path, spec, epochs=3))
        staged(directed, "job", TOTAL_BYTES)
        reader.read(order(spec, 0))
        directed.step("job", 0, FILES // 4)
        server = int(mount.status()["server_pid"])
        os.kill(server, signal.SIGKILL)
        eventually(lambda: int(mount.status()["server_pid"]) != server)
        eventually(lambda: mount.value("ram", "bytes") >= FILES * FILE_BYTES)
        with reader.asks_at_most(FILES // 4, directed):
            reader.read(order(spec, 1))
        eventually(lambda: directed.job("job")["state"] == "running")


@in_one_mode
def test_unmounted_while_it_is_read(place: Place, mounting: Mounting) -> None:
    names, spec = make_dataset(place), shuffled()
    mount = mounting("--ram", "64M")
    reader = Reader(mount, names)
    with Directed() as directed:
        directed.open("job", request(mount.path, spec, epochs=3))
        staged(directed, "job", TOTAL_BYTES)
        reader.read(order(spec, 0)[: FILES // 2])
        eventually(lambda: directed.job("job")["index"] >= FILES // 2 - 2 * SPACING)
        assert directed.job("job")["state"] == "running"
        mount.umount()
        eventually(lambda: directed.job("job")["state"] == "waiting")
        assert directed.job("job")["window_bytes"] == 0
        assert directed.job("job")["index"] > 0
        assert directed.mount().keys().isdisjoint(("ram_bytes", "ssd_bytes"))
        directed.step("job", 0, FILES // 8)
        mount.start()
        staged(directed, "job", TOTAL_BYTES // 4, (0, FILES // 2 - 2 * SPACING))
        assert directed.mount()["ram_limit_bytes"]
        reader.read(order(spec, 0)[FILES // 2 :])
        eventually(lambda: directed.job("job")["state"] == "running")
        directed.close("job")


@pytest.mark.claim("P8", "P12")
@in_one_mode
def test_two_jobs_share_and_leave_the_pages(place: Place, mounting: Mounting) -> None:
    make_dataset(place)
    mount = mounting("--ram", "64M")
    with Directed() as directed:
        for number in (1, 2):
            directed.open(f"job-{number}", request(mount.path, shuffled(seed=number), epochs=2))
        for number in (1, 2):
            staged(directed, f"job-{number}", TOTAL_BYTES)
        assert mount.value("prefetch", "files") <= FILES
        assert mount.value("ram", "bytes") >= FILES * FILE_BYTES
        directed.close("job-1")
        staged(directed, "job-2", TOTAL_BYTES)
        directed.close("job-2")
        eventually(lambda: directed.status()["mounts"] == [])
        eventually(lambda: not mount.status()["prefetch"]["connected"])
        # for the next job: from now on they are under the mount's own budget
        assert mount.value("ram", "bytes") >= FILES * FILE_BYTES


@in_one_mode
def test_epochs_announced_one_by_one(place: Place, mounting: Mounting) -> None:
    names = make_dataset(place, 60)
    mount = mounting("--ram", "64M")
    reader = Reader(mount, names)
    with Directed() as directed:
        info = directed.open("job", request(mount.path, None))
        assert info.samples_per_epoch == 60
        for epoch in range(3):
            spec = OrderSpec(
                "random", 60, seed=epoch, start_epoch=epoch, epochs_known=1, batch_size=4
            )
            directed.order("job", epoch, spec)
            staged(directed, "job", 60 * PAGES_BYTES)
            with reader.asks_at_most(15, directed):
                reader.read(order(spec, epoch))
            directed.step("job", epoch, 15)
        with pytest.raises(JobRefused, match="61 samples"):
            directed.order("job", 3, OrderSpec("sequential", 61))


@in_one_mode
def test_epochs_of_unequal_lengths_announced_one_ahead(place: Place, mounting: Mounting) -> None:
    """As `connect(…).order(…)` does: what comes next takes nothing away from what is read."""
    names = make_dataset(place, 60)
    mount = mounting("--ram", "64M")
    reader = Reader(mount, names)
    specs = [
        OrderSpec("indices", 60, indices=np.random.default_rng(epoch).permutation(60)[:length],
                  start_epoch=epoch, epochs_known=1, batch_size=4)
        for epoch, length in enumerate([60, 20, 48, 8, 60])
    ]  # fmt: skip
    with Directed() as directed:
        directed.open("job", request(mount.path, None, epochs=len(specs)))
        directed.order("job", 0, specs[0])
        staged(directed, "job", 60 * PAGES_BYTES)
        for epoch, spec in enumerate(specs):
            if epoch + 1 < len(specs):
                directed.order("job", epoch + 1, specs[epoch + 1])
            # the host may take some pages of a short epoch
            with reader.asks_at_most(len(order(spec, epoch)) // 2 + 2, directed):
                reader.read(order(spec, epoch))
            directed.step("job", epoch, len(order(spec, epoch)) // 4)
            begun = min(epoch + 1, len(specs) - 1)
            eventually(lambda: directed.job("job")["epoch"] == begun)  # noqa: B023
        eventually(lambda: directed.job("job")["index"] == 60)
        assert mount.value("origin", "files") == 60


@in_one_mode
def test_refusals(place: Place, mounting: Mounting, tmp_path: Path) -> None:
    make_dataset(place, 60)
    (place.source / "no class").mkdir()
    mount = mounting("--ram", "64M")
    spec = shuffled(60)
    with Directed() as directed:
        for path, line in (
            (tmp_path, "is not in a fusecache mount"),
            (mount.path / "nothing", "No such file"),
            (mount.path / "no class", "no class directory"),
            (mount.path, "valid extension"),
        ):
            with pytest.raises(JobRefused, match=line):
                directed.open("job", request(path, spec, extensions=(".png",)))
        with pytest.raises(JobRefused, match="start_batch 16 lies beyond the epoch's 15 batches"):
            directed.open("job", request(mount.path, spec, start_batch=16, allow_empty=True))
        assert directed.status()["jobs"] == []

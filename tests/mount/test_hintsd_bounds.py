"""What one client asks of hintsd costs the others nothing: a hintsd process on a real mount."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusecache.base import wire
from tests.conftest import Mounting, Place, in_one_mode
from tests.support.hintsd_support import (
    ANSWER_TIMEOUT_S,
    JOB,
    Client,
    DaemonProcess,
    resident_bytes,
)
from tests.support.mounted import Mount

SAMPLES = 20
LARGE_BYTES = 64 << 20
FAR_EPOCH = 6_000_000  # minutes of draws lie before it
TOO_FAR_EPOCH = 10_000_000
WITHOUT_TORCH_BYTES_MOST = 60_000_000  # resident; it takes 47 million


@pytest.fixture
def daemon(place: Place, request: pytest.FixtureRequest) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(place.base, is_forked=getattr(request, "param", True))
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.fixture
def dataset(place: Place, mounting: Mounting) -> Mount:
    for number in range(SAMPLES):
        place.write(f"class/{number:02}.jpg", b"%d" % number)
    return mounting("--ram", "64M")


as_users_have_it = pytest.mark.parametrize("daemon", [False], ids=["own"], indirect=True)
"""For a test of the memory of hintsd, which must not come from what has imported torch."""


@contextlib.contextmanager
def clients(daemon: DaemonProcess, count: int) -> Iterator[list[Client]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Client(daemon.path))) for _ in range(count)]


def a_job(dataset: Mount, **changes: Any) -> dict[str, Any]:
    return {"path": bytes(dataset.path), "epochs": None, **changes}


def is_served(daemon: DaemonProcess, dataset: Mount) -> bool:
    """A job is hinted, and its step is taken, as if nobody else was there."""
    with clients(daemon, 1) as (client,):
        accepted = client.job(**a_job(dataset))
        client.send("step", epoch=1, batch=0)
        return accepted.get("samples_per_epoch") == SAMPLES and client.ask("close") == {}


@in_one_mode
def test_orders_that_take_minutes_hold_nobody_up(dataset: Mount, daemon: DaemonProcess) -> None:
    with clients(daemon, 4) as patient:
        for client in patient:
            client.send("job", **{**JOB, **a_job(dataset, start_epoch=FAR_EPOCH)})
        assert is_served(daemon, dataset)
        patient[0].close()  # and its draws end
        assert is_served(daemon, dataset)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(ANSWER_TIMEOUT_S) == 0


@in_one_mode
def test_an_order_that_is_too_far_is_refused(dataset: Mount, daemon: DaemonProcess) -> None:
    with clients(daemon, 1) as (client,):
        line = client.job(**a_job(dataset, start_epoch=TOO_FAR_EPOCH))["message"]
        assert "the order of epoch 10000000 cannot be computed: 10,000,000 epochs" in line
        assert (
            client.job(**a_job(dataset))["samples_per_epoch"] == SAMPLES
        )  # it can be told another


DEMANDING: list[dict[str, Any]] = [
    {"spec": {"sampler": "sequential"}, "start_epoch": (1 << 32) - 1},
    {"spec": {"sampler": "sequential"}, "epochs": 1 << 32, "start_epoch": 1 << 31},
    {"spec": {"sampler": "random", "seed": 0, "draws_seed": True}, "epochs": 1 << 32},
    {"spec": {"sampler": "random", "seed": 0, "replacement": True}, "epochs": 1 << 32},
    {"spec": {"sampler": "distributed", "seed": 0, "world_size": 65536}, "epochs": 1 << 32},
    {"spec": {"sampler": "sequential", "batch_size": (1 << 32) - 2}},
    {"spec": {"sampler": "random", "seed": 0, "num_samples": 1 << 20}},
    {"workers": 1 << 16, "prefetch_factor": 1 << 16},
]


@in_one_mode
def test_whatever_a_job_is_others_are_served(dataset: Mount, daemon: DaemonProcess) -> None:
    for changes in DEMANDING:
        with clients(daemon, 1) as (client,):
            assert "job" in client.job(**a_job(dataset, **changes)), changes
            for epoch in (1, 1 << 31, (1 << 32) - 1, 0):
                client.send("step", epoch=epoch, batch=(1 << 32) - 2)
                assert is_served(daemon, dataset), changes


@as_users_have_it
def test_what_is_sent_and_not_used_takes_no_memory(daemon: DaemonProcess) -> None:
    """Eight clients, each with a large array but for its last piece, and a part of a frame."""
    data = bytes(1 << 20)
    frame = wire.encode("array", {"name": "b", "total": len(data), "offset": 0, "data": data})
    with clients(daemon, 8) as many:
        before_bytes = resident_bytes(daemon.process.pid)
        for client in many:
            for offset in range(0, LARGE_BYTES - len(data), len(data)):
                client.send("array", name="a", total=LARGE_BYTES, offset=offset, data=data)
            client.ask("status")  # it has taken all in
            client.socket.sendall(frame[:-1])
        grown_bytes = resident_bytes(daemon.process.pid) - before_bytes
        assert grown_bytes < 80 << 20, grown_bytes >> 20


def has_torch(pid: int) -> bool:
    return b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes()


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


@in_one_mode
@as_users_have_it
def test_torch_is_in_a_process_of_its_own_once_a_job_needs_it(
    dataset: Mount, daemon: DaemonProcess
) -> None:
    pid = daemon.process.pid
    order = np.arange(SAMPLES, dtype="<i8")[::-1].tobytes()
    for spec in (
        {"sampler": "sequential"},
        {"sampler": "indices", "length": SAMPLES, "indices": order},
        {"sampler": "distributed", "shuffle": False, "world_size": 2},
        {"sampler": "distributed", "seed": 3, "world_size": 2},
        {"sampler": "random", "seed": 3},
    ):
        with clients(daemon, 1) as (client,):
            assert "job" in client.job(**a_job(dataset, spec=spec))
            assert not children(pid)
            assert not has_torch(pid)
            assert resident_bytes(pid) <= WITHOUT_TORCH_BYTES_MOST
    weights = {"length": SAMPLES, "weights": np.ones(SAMPLES, "<f8").tobytes()}
    weighted = {"sampler": "weighted_random", "seed": 3, "num_samples": 5, **weights}
    with clients(daemon, 1) as (client,):
        assert "job" in client.job(**a_job(dataset, spec=weighted))
    (child,) = children(pid)
    assert has_torch(child)
    assert not has_torch(pid)
    assert resident_bytes(pid) <= WITHOUT_TORCH_BYTES_MOST
    os.kill(child, signal.SIGKILL)
    assert is_served(daemon, dataset)
    with clients(daemon, 1) as (client,):
        assert "job" in client.job(**a_job(dataset, spec=weighted))
    (child,) = children(pid)
    with contextlib.closing(Watched(child)) as watched:
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(ANSWER_TIMEOUT_S) == 0
        assert watched.has_ended()


class Watched:
    """A process that is no child of ours."""

    def __init__(self, pid: int) -> None:
        self._pidfd = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], ANSWER_TIMEOUT_S)[0])

    def close(self) -> None:
        os.close(self._pidfd)


@in_one_mode
def test_a_long_array_is_a_job_once_it_is_complete(dataset: Mount, daemon: DaemonProcess) -> None:
    """As long as the order of eight million samples."""
    name, count = b"class/" + b"x" * 240 + b".jpg", LARGE_BYTES // 256
    (dataset.source / os.fsdecode(name)).write_bytes(b"long")
    paths = b"\0".join([name] * count)
    with clients(daemon, 1) as (client,):
        for offset in range(0, len(paths), 1 << 20):
            piece = paths[offset : offset + (1 << 20)]
            client.send("array", name="p", total=len(paths), offset=offset, data=piece)
        files = {"rule": "paths", "paths": {"array": "p"}}
        told = client.job(**a_job(dataset, files=files))
        assert told.get("samples_per_epoch") == count, told

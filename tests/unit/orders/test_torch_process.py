"""torch's process: what it draws is what torch draws here, whatever becomes of it meanwhile."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from hintsd.daemon.director import Director
from hintsd.daemon.messages import JobRefused, NotHere
from hintsd.orders import torch_process
from hintsd.orders.drawing import NoTorch, Order, OrderLost
from hintsd.orders.spec import OrderSpec
from hintsd.orders.torch_process import TorchProcess
from tests.support import PATIENCE_S
from tests.support.commands import SUBPROCESS_WITH_TORCH

ENDS_WITHIN_S = 60
SMALL = OrderSpec("random", 1000, seed=3)
LARGE = OrderSpec("random", 1_000_000, seed=3)  # more than a socket holds

Wait = Callable[[socket.socket, "subprocess.Popen[bytes]"], None]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_process, "REAP_TIMEOUT_S", PATIENCE_S)


@contextlib.contextmanager
def begun() -> Iterator[TorchProcess]:
    drawing = TorchProcess()
    try:
        yield drawing
    finally:
        drawing.end()


@pytest.fixture(scope="module")
def shared() -> Iterator[TorchProcess]:
    with begun() as drawing:
        yield drawing


@pytest.fixture
def drawing() -> Iterator[TorchProcess]:
    with begun() as drawing:
        yield drawing


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's processes are forks of one that has it: several of them come and go in the test."""
    monkeypatch.setattr(torch_process, "subprocess", SUBPROCESS_WITH_TORCH)


def process_of(drawing: TorchProcess) -> subprocess.Popen[bytes]:
    assert drawing._process is not None
    return drawing._process


def assert_drawn(drawing: TorchProcess, spec: OrderSpec, epoch: int = 0) -> None:
    assert np.array_equal(Order(spec, drawing).sequence(epoch), Order(spec).sequence(epoch))


SPECS = [
    OrderSpec("distributed", 1003, seed=5, world_size=4, rank=3, batch_size=8),
    OrderSpec("distributed", 1003, seed=-5, drop_last=True, batch_drop_last=True, batch_size=8),
    OrderSpec("random", 1000, seed=2**64 - 1, loader_draws="every"),
    OrderSpec("random", 1000, seed=0, draws_seed=True),
    OrderSpec("random", 100, seed=1, num_samples=250, start_epoch=2),
    OrderSpec("random", 100, seed=1, num_samples=250, replacement=True),
    OrderSpec("subset_random", 900, seed=4, indices=np.arange(0, 900, 3, dtype=np.int64)),
    OrderSpec("weighted_random", 300, seed=6, weights=np.linspace(0, 1, 300), replacement=True),
    OrderSpec("weighted_random", 300, seed=6, weights=np.linspace(1, 2, 300), num_samples=200),
    LARGE,
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.sampler)
def test_it_draws_what_torch_draws_here(shared: TorchProcess, spec: OrderSpec) -> None:
    there, here = Order(spec, shared), Order(spec)
    first = spec.start_epoch
    for epoch in (first, first + 1, first + 7, first + 2):
        found = there.sequence(epoch)
        assert found.dtype == np.int64
        assert not found.flags.writeable
        assert np.array_equal(found, here.sequence(epoch))
    there, here = Order(spec, shared), Order(spec)
    there.draw_ahead([first + 3, first + 4, first + 5, first])
    for epoch in (first + 3, first + 4, first + 5, first + 6, first):
        assert np.array_equal(there.copy().sequence(epoch), here.sequence(epoch))
        assert np.array_equal(there.sequence(epoch), here.sequence(epoch))


@pytest.mark.parametrize(
    "spec",
    [
        OrderSpec("distributed", 3, seed=2**64 - 1),  # and no seed for epoch 1
        OrderSpec("weighted_random", 2**24 + 1, seed=0, weights=np.ones(2**24 + 1)),
    ],
    ids=lambda spec: spec.sampler,
)
def test_what_torch_refuses_is_said_as_here(shared: TorchProcess, spec: OrderSpec) -> None:
    said = []
    for drawing in (None, shared):
        with pytest.raises(ValueError, match=r"\w+") as refused:
            Order(spec, drawing).sequence(1)
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert_drawn(shared, SMALL)


def test_several_ask_one_process_at_once(shared: TorchProcess) -> None:
    specs = [OrderSpec("random", 300_000 + number, seed=number) for number in range(6)]
    found: dict[int, Any] = {}

    def draw(number: int) -> None:
        found[number] = Order(specs[number], shared).sequence(1)

    shared.begin()
    process = process_of(shared)
    threads = [threading.Thread(target=draw, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, spec in enumerate(specs):
        assert np.array_equal(found[number], Order(spec).sequence(1))
    assert process_of(shared) is process


class Faults(ABC):
    """Something happens to the process in each of the first `times` waits for an answer."""

    said: str

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        self.wait = torch_process._wait
        monkeypatch.setattr(torch_process, "_wait", self._wait)

    def _wait(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        if not self.left:
            self.wait(connection, process)
            return
        self.left -= 1
        self.happen(connection, process)

    @abstractmethod
    def happen(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """To the process, or to the connection."""


class Killed(Faults):
    """Before the answer."""

    said = "torch's process was killed by SIGKILL"

    def happen(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        self.wait(connection, process)


class KilledInTheAnswer(Faults):
    said = Killed.said

    def happen(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.wait(connection, process)
        process.kill()


class Stopped(Faults):
    said = "torch's process hung"

    def happen(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{process.pid}/stat")
        while state.read_bytes().rpartition(b")")[2].split()[0] != b"T":
            time.sleep(0.01)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_process, "LOOK_MS", 1)
            self.wait(connection, process)


FAULTS = [Killed, KilledInTheAnswer, Stopped]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("fault", FAULTS)
def test_an_order_whose_process_is_lost_is_drawn_by_the_next(
    drawing: TorchProcess, monkeypatch: pytest.MonkeyPatch, fault: type[Faults]
) -> None:
    order, here = Order(LARGE, drawing), Order(LARGE)
    order.sequence(0)
    first = process_of(drawing)
    happening = fault(monkeypatch, 2)
    assert np.array_equal(order.sequence(2), here.sequence(2))
    assert happening.left == 0
    assert first.returncode == -signal.SIGKILL
    assert process_of(drawing) is not first


class Hangs(Faults):
    said = Stopped.said

    def happen(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        raise TimeoutError


class Closes(Faults):
    said = "torch's process gave no answer"

    def happen(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("fault", [Hangs, Closes])
def test_a_lost_process_that_is_long_in_ending_is_not_asked_again(
    drawing: TorchProcess, monkeypatch: pytest.MonkeyPatch, fault: type[Faults]
) -> None:
    drawing.begin()
    first = process_of(drawing)
    monkeypatch.setattr(first, "kill", lambda: None)
    monkeypatch.setattr(torch_process, "REAP_TIMEOUT_S", 0.0)
    fault(monkeypatch, 1)
    assert_drawn(drawing, SMALL)
    assert process_of(drawing) is not first
    assert first.wait(ENDS_WITHIN_S) == 0  # its control has ended


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_process_that_is_lost_each_time_is_one_line(
    monkeypatch: pytest.MonkeyPatch, fault: type[Faults]
) -> None:
    fault(monkeypatch, 1000)
    said = rf"^the order of epoch 4 cannot be computed: {fault.said}, 3 times in a row$"

    async def sequence() -> None:
        owner = Director()
        try:
            order = Order(LARGE, owner.torch)
            await owner.ordering.sequence(np.arange(LARGE.length, dtype=np.uint32), order, 4)
        finally:
            owner.torch.end()

    with pytest.raises(JobRefused, match=said):
        trio.run(sequence)


def test_without_torch_only_given_orders_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fails_late = "import time; time.sleep(0.2); raise OSError('libtorch.so is missing')"
    (tmp_path / "torch.py").write_text(fails_late)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    inos = np.arange(7, 12, dtype=np.uint32)
    why = (
        rf"^torch has to compute this order, and hintsd's Python \({sys.executable}\) has none: "
        "pip install torch there$"
    )

    async def sequences() -> None:
        owner = Director()

        async def sequence(spec: OrderSpec, epoch: int) -> list[int]:
            found = await owner.ordering.sequence(inos, Order(spec, owner.torch), epoch)
            assert found is not None
            return [int(ino) for ino in found]

        given = OrderSpec("indices", 5, indices=np.array([3, 1], np.int64))
        in_turn = OrderSpec("distributed", 5, shuffle=False)
        assert await sequence(given, 0) == [10, 8]
        assert await sequence(in_turn, 1) == [7, 8, 9, 10, 11]
        assert owner.torch._process is None
        try:
            for spec in (
                OrderSpec("random", 5, seed=0),
                OrderSpec("random", 5, seed=0, draws_seed=True),
                OrderSpec("distributed", 5, seed=0),
            ):
                for epoch in (0, 2):
                    with pytest.raises(NotHere, match=why):
                        await sequence(spec, epoch)
        finally:
            owner.torch.end()

    trio.run(sequences)
    assert "torch cannot be imported: libtorch.so is missing" in caplog.text


def test_a_process_that_cannot_begin_is_one_line(
    drawing: TorchProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    drawing.begin()
    with pytest.raises(OrderLost, match=r"^torch's process cannot be started \(No such file"):
        Order(SMALL, drawing).sequence(0)


def test_it_ends_when_nobody_asks() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = (
        "from hintsd.orders import torch_process; torch_process.IDLE_S = 0.01; torch_process.main()"
    )
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=theirs.fileno(), check=False, timeout=ENDS_WITHIN_S
        )
    assert done.returncode == 0


def test_after_one_that_has_ended_another_begins(forked: None, drawing: TorchProcess) -> None:
    assert_drawn(drawing, SMALL)
    first = process_of(drawing)
    drawing._control.close()  # as hintsd's end does
    assert first.wait(ENDS_WITHIN_S) == 0
    assert_drawn(drawing, SMALL, 1)
    assert process_of(drawing) is not first


def test_at_the_end_nothing_is_left_and_nothing_is_drawn() -> None:
    with begun() as drawing:
        drawing.begin()
        process = process_of(drawing)
        process.send_signal(signal.SIGSTOP)  # it hangs, and somebody waits
        lost: list[str] = []

        def wait() -> None:
            try:
                Order(SMALL, drawing).sequence(0)
            except OrderLost as error:
                lost.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
    waiting.join(ENDS_WITHIN_S)
    assert lost == ["hintsd ends"]
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(OrderLost, match="hintsd ends"):
        Order(SMALL, drawing).sequence(1)
    assert drawing._process in (None, process)


DRAWS_FOR_EVER = """
from hintsd.orders.spec import OrderSpec
from hintsd.orders.torch_process import TorchProcess
drawing, spec = TorchProcess(), OrderSpec("random", 1 << 20, seed=0)
drawing.skip(spec, range(1), None)
print(drawing._process.pid, flush=True)
drawing.skip(spec, range(1 << 30), None)
"""


def test_it_ends_with_hintsd_in_the_middle_of_a_draw() -> None:
    with subprocess.Popen([sys.executable, "-c", DRAWS_FOR_EVER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        watched = os.pidfd_open(pid)
        idle = torch_process._processor_ticks(pid)
        while torch_process._processor_ticks(pid) < idle + 5:
            time.sleep(0.01)
        owner.kill()
    ended = select.poll()
    ended.register(watched, select.POLLIN)
    assert ended.poll(ENDS_WITHIN_S * 1000)
    os.close(watched)


def test_here_no_torch_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for spec in SPECS:
        with pytest.raises(NoTorch):
            Order(spec).sequence(spec.start_epoch)

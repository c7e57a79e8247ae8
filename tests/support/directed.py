"""A Director in a thread of the test, for tests that read at the same time."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import trio

from hintsd.daemon.director import Director
from hintsd.daemon.messages import Sampled
from hintsd.daemon.mount import JobInfo, Mount
from hintsd.orders.hint import Files, Hint
from hintsd.orders.own_drawing import OwnDrawing
from hintsd.orders.spec import OrderSpec
from hintsd.orders.torch_process import TorchProcess
from tests.support import PATIENCE_S


def request(path: Path, spec: OrderSpec | None, **changes: Any) -> Hint:
    """`extensions` and `allow_empty` among the changes are those of its files."""
    files: dict[str, Any] = {"extensions": (".jpg",), "allow_empty": False}
    files |= {name: changes.pop(name) for name in list(files) if name in changes}
    told: dict[str, Any] = {"workers": 1, "prefetch_factor": 1, "pid": os.getpid(), **changes}
    return Hint(os.fsencode(path), Files(**files), spec, **told)


class SharedTorch(TorchProcess):
    """torch is imported once for all tests. It ends with the tests' process."""

    def end(self) -> None:
        pass


TORCH = SharedTorch()


class Directed:
    """The Director, and all that it tells. Its status is at most 50 ms old: tests wait for it."""

    def __init__(self, **options: Any) -> None:
        self.notices: list[tuple[str, str]] = []
        self.positions: list[tuple[str, int, int]] = []
        self.finished: list[str] = []
        self._mounts: dict[str, Mount] = {}  # by job
        self.director = Director(
            on_position=lambda *told: self.positions.append(told),
            on_notice=lambda *told: self.notices.append(told),
            on_finished=self.finished.append,
            **options,
        )
        self.director.torch = TORCH
        self.director.drawing = OwnDrawing(TORCH)
        self._running = threading.Event()
        self._often = mock.patch("hintsd.daemon.planning.REPORT_EVERY_S", 0.05)
        self._thread = threading.Thread(target=trio.run, args=(self._run,))
        self._token: trio.lowlevel.TrioToken
        self._scope: trio.CancelScope

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            await nursery.start(self.director.run)
            self._running.set()

    def __enter__(self) -> Directed:
        self._often.start()
        self._thread.start()
        assert self._running.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        trio.from_thread.run_sync(self._scope.cancel, trio_token=self._token)
        self._thread.join(PATIENCE_S)
        self._often.stop()
        assert not self._thread.is_alive()

    def open(self, job: str, hint: Hint, **options: Any) -> JobInfo:
        async def open_job() -> JobInfo:
            return await self.director.open_job(job, hint, **options)

        info = trio.from_thread.run(open_job, trio_token=self._token)
        self._mounts[job] = info.mount
        return info

    def order(self, job: str, epoch: int, spec: OrderSpec) -> None:
        order = self._mounts[job].order
        trio.from_thread.run(order, job, epoch, spec, trio_token=self._token)

    def score(self, job: str, uses: npt.NDArray[np.float32]) -> None:
        trio.from_thread.run(self._mounts[job].score, job, uses, Sampled(), trio_token=self._token)

    def step(self, job: str, epoch: int, batch: int) -> None:
        step = self._mounts[job].step
        trio.from_thread.run_sync(step, job, epoch, batch, trio_token=self._token)

    def close(self, job: str) -> dict[str, Any]:
        return trio.from_thread.run(self._mounts[job].close_job, job, trio_token=self._token)

    def status(self) -> dict[str, Any]:
        return trio.from_thread.run_sync(self.director.status, trio_token=self._token)

    def job(self, name: str) -> dict[str, Any]:
        jobs: dict[str, dict[str, Any]] = {job["name"]: job for job in self.status()["jobs"]}
        return jobs[name]

    def mount(self) -> dict[str, Any]:
        mount: dict[str, Any]
        (mount,) = self.status()["mounts"]
        return mount

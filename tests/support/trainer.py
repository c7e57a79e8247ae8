"""A training in a process of its own, which is told when to go on, and can be killed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any, Self

import hintsd

Begin = Callable[[Any], tuple[Iterator[list[int]], Any, hintsd.Job]]
"""Begins a training from a sampler's state, or from the start (None): its batches, its sampler, and
its job."""


class Trainer:
    """One from `state` on. No job is its parent's."""

    def __init__(self, begin: Begin, state: Any = None) -> None:
        fork = multiprocessing.get_context("fork")
        self._ours, theirs = fork.Pipe()
        self._process = fork.Process(target=_train, args=(theirs, begin, state))
        self._process.start()
        theirs.close()
        self.order: list[int] = []
        self.state, self.job = state, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    def read(self, batches: int) -> None:
        for _ in range(batches):
            self._ours.send("on")
            batch, self.state, self.job = self._ours.recv()
            self.order += batch


def _train(pipe: Any, begin: Begin, state: Any) -> None:
    batches, sampler, job = begin(state)
    while pipe.recv():
        pipe.send((next(batches), sampler.state_dict(), job.name))

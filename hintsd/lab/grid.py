"""Every policy at every capacity over one trace, on as many processes as it pays for."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Final, cast

from fusecache.base import units
from fusecache.base.errors import ConfigError, UserError
from fusecache.traces.traces import Trace
from hintsd.lab.replay import Outcome, Workload
from hintsd.policies.catalogue import CATALOGUE

PROCESSES_WORTH_READS: Final = 5_000_000
"""From so many on, processes win more than their start costs (half a second)."""

Numbered = tuple[int, Outcome]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of a cache: a share of the bytes of all items of the trace, or bytes."""

    share: float | None = None
    size_bytes: int | None = None

    def of(self, total_bytes: int, name: str) -> int:
        """In bytes. ConfigError: everything fits with room to spare."""
        if self.share is not None:
            return round(self.share * total_bytes)
        assert self.size_bytes is not None
        if self.size_bytes > total_bytes:
            raise ConfigError(
                f"--cache {units.format_bytes(self.size_bytes)} is more than all items of "
                f"{name} take: {units.format_bytes(total_bytes)}"
            )
        return self.size_bytes


def parse_capacity(text: str) -> Capacity:
    """ "20%" or "1.5GiB". ConfigError quotes what it is not."""
    text = text.strip()
    if text.isdecimal() and int(text):
        raise ConfigError(f"--cache {text}: of what? write {text}% or {text}B")
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if not 0 < share <= 1:
                raise ConfigError(f"--cache {text}: a share lies above 0% and is at most 100%")
            return Capacity(share=share)
        size_bytes = units.parse_bytes(text)
    except ValueError:
        raise ConfigError(
            f"--cache {text!r} is no capacity; write for example 5%, 20% or 64GiB"
        ) from None
    if size_bytes == 0:
        raise ConfigError(f"--cache {text}: a cache of no bytes holds nothing")
    return Capacity(size_bytes=size_bytes)


def parse_policies(names: Sequence[str]) -> list[str]:
    """The names, each once, as given; all that there are for none. ConfigError: not a policy."""
    for name in names:
        if name not in CATALOGUE:
            raise ConfigError(f"--policy {name} is unknown; there are {', '.join(CATALOGUE)}")
    return list(dict.fromkeys(names)) or list(CATALOGUE)


def replay_all(
    trace: Trace,
    policies: Sequence[str],
    capacities: Sequence[Capacity],
    *,
    name: str,
    warm_up_epochs: int,
    seed: int,
    on_outcome: Callable[[Outcome], object] = lambda _: None,
) -> list[Outcome]:
    """The outcomes by policy, then by capacity, as given. ConfigError as Workload and Capacity."""
    workload = Workload(trace, warm_up_epochs, name)
    sizes_bytes = [capacity.of(workload.total_bytes, name) for capacity in capacities]
    cells = list(itertools.product(policies, sizes_bytes))
    processes = min(len(os.sched_getaffinity(0)), len(cells))
    if processes == 1 or len(cells) * len(trace.items) < PROCESSES_WORTH_READS:
        finished: Iterator[Numbered] = (
            (number, workload.replay(*cell, seed)) for number, cell in enumerate(cells)
        )
    else:
        finished = _in_processes(workload, cells, seed, processes)
    outcomes: dict[int, Outcome] = {}
    for number, outcome in finished:
        outcomes[number] = outcome
        on_outcome(outcome)
    return [outcomes[number] for number in range(len(cells))]


def _in_processes(
    workload: Workload, cells: Sequence[tuple[str, int]], seed: int, processes: int
) -> Iterator[Numbered]:
    """Every n-th cell to each. They end with this process, or after their cell if it is killed.

    UserError: one of them was killed.
    """
    numbered = list(enumerate(cells))
    # Not forked: torch may have threads here by now.
    context = multiprocessing.get_context("spawn")
    workers = []
    answers: list[Connection] = []
    try:
        for number in range(processes):
            answer, end = context.Pipe(duplex=False)
            arguments = (end, workload, numbered[number::processes], seed)
            workers.append(context.Process(target=_replay, args=arguments, daemon=True))
            workers[-1].start()
            end.close()
            answers.append(answer)
        for _ in cells:
            answer = cast(Connection, wait(answers)[0])
            outcome: Numbered | None = answer.recv()
            while outcome is None:  # that one is done
                answers.remove(answer)
                answer = cast(Connection, wait(answers)[0])
                outcome = answer.recv()
            yield outcome
    except EOFError:
        raise UserError("a replaying process was killed; is there memory enough?") from None
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _replay(
    end: Connection, workload: Workload, cells: Sequence[tuple[int, tuple[str, int]]], seed: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever started this ends it
    with contextlib.suppress(BrokenPipeError):  # no reader is left
        for number, cell in cells:
            end.send((number, workload.replay(*cell, seed)))
        end.send(None)

"""The traces of `hintsd lab all`: a few that stand for the ways in which trainings read."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from fusecache.traces import traces
from fusecache.traces.traces import Trace
from hintsd.lab.images import Images, digits, generated
from hintsd.lab.sampler import make
from hintsd.lab.shuffle import of_rank, shuffled, zipf
from hintsd.lab.training import record


def _digits(sampler: str, epochs: int) -> Callable[[int], Trace]:
    return lambda seed: _recorded(digits(), sampler, epochs, seed)


def _generated(items: int, sampler: str, epochs: int) -> Callable[[int], Trace]:
    return lambda seed: _recorded(generated(items, seed), sampler, epochs, seed)


def _recorded(images: Images, sampler: str, epochs: int, seed: int) -> Trace:
    return record(images, make(sampler, images, seed), epochs=epochs, seed=seed).trace


def _shuffled(items: int, epochs: int) -> Callable[[int], Trace]:
    return lambda seed: shuffled(items, epochs, seed)


def _of_rank(items: int, epochs: int, ranks: int) -> Callable[[int], Trace]:
    return lambda seed: of_rank(items, epochs, ranks, seed)


def _zipf(items: int, epochs: int) -> Callable[[int], Trace]:
    return lambda seed: zipf(items, epochs, seed)


FULL: Final[dict[str, Callable[[int], Trace]]] = {
    "shuffle": _shuffled(20_000, 6),
    "rank": _of_rank(20_000, 44, 4),
    "zipf": _zipf(20_000, 11),
    "digits-uniform": _digits("uniform", 30),
    "digits-coarse": _digits("coarse", 30),
    "digits-loss": _digits("loss", 30),
    "digits-shade": _digits("shade", 30),
    "digits-icache": _digits("icache", 30),
    "generated-shade": _generated(20_000, "shade", 8),
    "generated-icache": _generated(20_000, "icache", 8),
}
QUICK: Final[dict[str, Callable[[int], Trace]]] = {
    "shuffle": _shuffled(500, 3),
    "rank": _of_rank(500, 3, 2),
    "zipf": _zipf(500, 3),
    "generated-shade": _generated(500, "shade", 3),
    "generated-icache": _generated(500, "icache", 3),
}


def record_all(
    folder: str, *, quick: bool, seed: int, on_trace: Callable[[], object] = lambda: None
) -> dict[str, Trace]:
    """Writes NAME.trace into the folder for each; the traces by that name."""
    made = {}
    for name, recipe in (QUICK if quick else FULL).items():
        made[f"{name}.trace"] = trace = recipe(seed)
        traces.write(os.path.join(folder, f"{name}.trace"), trace)
        on_trace()
    return made

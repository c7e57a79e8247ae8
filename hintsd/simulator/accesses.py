"""How unequally a worker reads the samples (HDMLP, section 3.2).

Each epoch a sample goes to one of N workers, so a worker reads it Binomial(E, 1/N) times in E
epochs; the estimate stands beside shuffles that are drawn and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hintsd.simulator.orders import Orders
from hintsd.simulator.system import Dataset

Counts = npt.NDArray[np.int64]

# 1.1 * 250 is 275.00000000000006: what differs by less than this is equal.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Accesses:
    """threshold: (1 + δ)·E/N. estimated: how many samples a worker is expected to read more often
    than that; drawn: how many each worker did, shape (N,). histogram: samples that the first worker
    read 0, 1, … E times; expected: the same as the binomial distribution has it; both (E + 1,).
    """

    workers: int
    epochs: int
    samples: int
    delta: float
    threshold: float
    estimated: float
    drawn: list[int]
    histogram: Counts
    expected: npt.NDArray[np.float64]


def analyse(
    workers: int,
    epochs: int,
    samples: int,
    delta: float,
    seed: int,
    progress: Callable[[float], None],
) -> Accesses:
    """The estimate and a Monte Carlo run of E shuffles; progress: called with the share done."""
    threshold = (1 + delta) * epochs / workers
    expected = samples * binomial(epochs, 1 / workers)
    counts = draw(workers, epochs, samples, seed, progress)
    more = np.arange(epochs + 1) > threshold + ROUNDING
    histogram = np.bincount(counts[0], minlength=epochs + 1)
    return Accesses(
        workers,
        epochs,
        samples,
        delta,
        threshold,
        float(expected[more].sum()),
        [int((row > threshold + ROUNDING).sum()) for row in counts],
        histogram,
        expected,
    )


def binomial(trials: int, chance: float) -> npt.NDArray[np.float64]:
    """The probability of 0, 1, … `trials` successes, shape (trials + 1,)."""
    successes = range(trials + 1)
    if chance == 1:
        return np.array([float(number == trials) for number in successes])
    whole = math.lgamma(trials + 1)
    logs = [
        whole
        - math.lgamma(number + 1)
        - math.lgamma(trials - number + 1)
        + number * math.log(chance)
        + (trials - number) * math.log1p(-chance)
        for number in successes
    ]
    chances: npt.NDArray[np.float64] = np.exp(np.array(logs))
    return chances


def draw(
    workers: int, epochs: int, samples: int, seed: int, progress: Callable[[float], None]
) -> npt.NDArray[np.uint16]:
    """How often each worker reads each sample, shape (N, F); each epoch deals all samples out."""
    orders = Orders(Dataset(samples, 1.0, 0.0, samples, epochs), workers, seed)
    counts = np.zeros((workers, samples), np.uint16)
    for number in range(epochs):
        progress(number / epochs)
        order = orders.epoch(number)
        for worker in range(workers):
            counts[
                worker, order.samples[order.bounds[0, worker] : order.bounds[0, worker + 1]]
            ] += 1
    progress(1.0)
    return counts

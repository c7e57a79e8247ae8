"""A real training of a small network, recorded: what it reads, and what it learns of each item.

The network is one hidden layer over the pixels, trained by plain stochastic gradient descent on one
CPU thread: seconds, and the same bits on every run. Importances are those that the sampler makes of
the losses (hintsd/lab/sampler.py); a batch's are told before the next access after it, as a
training without read-ahead would know them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from fusecache.base.errors import UserError
from fusecache.traces.traces import Importance, Trace
from hintsd.lab.images import CLASSES, PIXELS, Images
from hintsd.lab.sampler import Sampler
from hintsd.policies import Hints

if TYPE_CHECKING:
    import torch

HIDDEN: Final = 64
LEARNING_RATE: Final = 0.1
BATCH_SIZE: Final = 32


@dataclass(frozen=True, slots=True)
class Recording:
    trace: Trace
    accuracies: list[float]
    """On the images that are held out, after each epoch."""


class Network:
    """Learns `images`. UserError: torch is missing."""

    def __init__(self, images: Images, seed: int) -> None:
        try:
            import torch
        except ImportError:
            raise UserError("a training needs torch: pip install torch") from None
        self._pixels = torch.from_numpy(images.pixels)
        self._labels = torch.from_numpy(images.labels)
        self._held_out = torch.from_numpy(images.held_out_pixels)
        self._held_out_labels = torch.from_numpy(images.held_out_labels)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(PIXELS, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
            )
        self._optimizer = torch.optim.SGD(self.layers.parameters(), LEARNING_RATE)

    def step(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """One step of descent on the mean loss of these items. Their own losses before it."""
        import torch

        losses: torch.Tensor = torch.nn.functional.cross_entropy(
            self.layers(self._pixels[items]), self._labels[items], reduction="none"
        )
        self._optimizer.zero_grad()
        losses.mean().backward()  # type: ignore[no-untyped-call]  # torch's own
        self._optimizer.step()
        return losses.detach().numpy().astype(np.float64)

    def accuracy(self) -> float:
        """Share of the held-out images that it gets right."""
        import torch

        with torch.no_grad():
            guessed = self.layers(self._held_out).argmax(1)
        return float((guessed == self._held_out_labels).double().mean())


def record(
    images: Images,
    sampler: Sampler,
    *,
    epochs: int,
    seed: int,
    batch_size: int = BATCH_SIZE,
    on_epoch: Callable[[float], object] = lambda _: None,
) -> Recording:
    """Trains for `epochs` with what the sampler chooses.

    on_epoch: called after each with its accuracy.
    """
    network = Network(images, seed)
    cache = sampler.cache
    items: list[npt.NDArray[np.int64]] = []
    epoch_starts: list[int] = []
    importances: list[Importance] = []
    accuracies: list[float] = []
    position = 0
    with _one_thread():
        for _ in range(epochs):
            order = sampler.epoch()
            if len(order):  # of a few items iCACHE's sampler may choose none
                epoch_starts.append(position)
            if cache is not None:
                cache.hint(Hints(epoch=True))
            for begin in range(0, len(order), batch_size):
                batch = order[begin : begin + batch_size]
                if cache is not None:
                    for item in batch.tolist():
                        cache.access(item, int(images.sizes[item]))
                values = sampler.learn(batch, network.step(batch))
                items.append(batch)
                position += len(batch)
                importances.append(Importance(position, batch, values))
                if cache is not None:
                    cache.hint(Hints(items=batch, importance=values))
            accuracies.append(network.accuracy())
            sampler.judge(accuracies[-1])
            on_epoch(accuracies[-1])
    importances.pop()  # of the last batch: nothing is read after it
    return Recording(
        trace=Trace(
            items=np.concatenate(items),
            sizes=images.sizes,
            epoch_starts=np.array(epoch_starts, np.int64),
            times_s=None,
            importances=tuple(importances),
            readers=None,
            seen=None,
            names=None,
            source=f"a training on {len(images):,} {images.name}, {epochs} epochs, "
            f"sampler {sampler.description}, seed {seed}",
        ),
        accuracies=accuracies,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """More threads cost more than they bring for a network of this size, and change the sums."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

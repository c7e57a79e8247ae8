"""A small network trained with stock ImageFolder and DataLoader, by a plain shuffle or by an
ImportanceSampler, and judged on images that it has never seen.

INVARIANT: the same files, seed and arm give the same order: every source of chance is seeded, and
the arithmetic runs in one thread.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import hintsd
from tools.demo_lib import training
from tools.hintsd_command import await_answer
from tools.torchvision_cpu import import_torchvision

import_torchvision()
from torchvision import datasets  # type: ignore[import-untyped]  # noqa: E402  # has no types

BATCH = 64
WORKERS = 2
IMAGES_PER_S = 600  # what the accelerator takes


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    what: str
    settings: dict[str, Any] | None  # of the ImportanceSampler; None: a plain shuffle


ARMS = (
    Arm("uniform", "a plain shuffle", None),
    Arm("shade", "SHADE's sampler", {"scheme": "shade"}),
    Arm("icache", "iCACHE's sampler", {"scheme": "icache", "fraction": 0.7}),
    Arm("ours", "by loss, one epoch drawn ahead", {"scheme": "loss", "draw_ahead": 1}),
)


@dataclass(frozen=True)
class Epoch:
    """What one epoch took and brought."""

    samples: int  # that were read
    seconds: float  # without the judging
    waiting_s: float  # the accelerator had nothing to do: no batch was there
    accuracy: float  # on held-out images, behind it


def _folder(root: Path) -> Any:
    return datasets.ImageFolder(str(root), transform=training.crop, loader=training.image)


def held_out(root: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels below root, ready to be judged by."""
    torch.manual_seed(0)
    folder = _folder(root)
    samples = [folder[index] for index in range(len(folder))]
    return torch.stack([image for image, _ in samples]), torch.tensor([of for _, of in samples])


@contextmanager
def _announced(loader: DataLoader[Any], epochs: int, hints: bool) -> Iterator[None]:
    if not hints:
        yield
        return
    with hintsd.attach(loader, epochs=epochs) as job:
        await_answer(job)
        yield


def train(
    root: Path,
    arm: Arm,
    judged: tuple[torch.Tensor, torch.Tensor],
    *,
    epochs: int,
    seed: int,
    hints: bool,
    before_epoch: Callable[[], None],
    after_epoch: Callable[[Epoch], None],
) -> None:
    """Train `epochs` epochs on the images below root. Callbacks and judging are not timed."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    folder = _folder(root)
    net = training.network(len(folder.classes))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    sampler = None
    if arm.settings is not None:
        sampler = hintsd.ImportanceSampler(folder, seed=seed, **arm.settings)
    loader: DataLoader[Any] = DataLoader(
        folder,
        batch_size=BATCH,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=WORKERS,
        generator=torch.Generator().manual_seed(seed),
        persistent_workers=True,
    )
    with _announced(loader, epochs, hints):
        for _ in range(epochs):
            before_epoch()
            samples, seconds, waiting_s = _epoch(net, optimizer, loader, sampler)
            accuracy = _accuracy(net, judged)
            if sampler is not None:
                sampler.judge(accuracy)
            after_epoch(Epoch(samples, seconds, waiting_s, accuracy))


def _epoch(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    sampler: hintsd.ImportanceSampler | None,
) -> tuple[int, float, float]:
    """As an accelerator would: a step takes its time, the next batch is asked for meanwhile."""
    samples, waiting_s = 0, 0.0
    begin = busy_until = time.perf_counter()
    for images, labels in loader:
        starts = max(time.perf_counter(), busy_until)
        waiting_s += starts - busy_until
        time.sleep(max(0.0, starts - time.perf_counter()))
        losses = nn.functional.cross_entropy(net(images), labels, reduction="none")
        optimizer.zero_grad()
        (losses if sampler is None else sampler.weigh(losses)).mean().backward()
        optimizer.step()
        if sampler is not None:
            sampler.learn(losses)
        samples += len(labels)
        busy_until = max(starts + len(labels) / IMAGES_PER_S, time.perf_counter())
    time.sleep(max(0.0, busy_until - time.perf_counter()))
    return samples, busy_until - begin, waiting_s


def _accuracy(net: nn.Module, judged: tuple[torch.Tensor, torch.Tensor]) -> float:
    images, labels = judged
    net.eval()
    with torch.no_grad():
        right = int((net(images).argmax(1) == labels).sum())
    net.train()
    return right / len(labels)

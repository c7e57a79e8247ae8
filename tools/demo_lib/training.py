"""A small network trained with stock ImageFolder and DataLoader; only the files' place varies, and
whether one line tells hintsd about the loader.

INVARIANT: the same files, seed and count give the same batches, losses and accuracies, to the last
bit: every source of chance is seeded, and the arithmetic runs in one thread.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import hintsd
from tools.torchvision_cpu import import_torchvision

import_torchvision()
from torchvision import (  # type: ignore[import-untyped]  # noqa: E402  # has no types
    datasets,
    transforms,
)

BATCH = 32
WORKERS = 2
_PIXELS = 48


@dataclass(frozen=True)
class Epoch:
    samples: int
    seconds: float
    waiting_s: float  # the trainer had nothing to do: no batch was ready
    losses: tuple[float, ...]  # of each step
    accuracy: float
    batches_digest: str  # of every tensor the loader delivered, in order

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds


@dataclass(frozen=True)
class Files:
    count: int
    size_bytes: int
    digest: str  # of the names and the contents of all files, in the loader's order


def _network(classes: int) -> nn.Module:
    def stage(width_in: int, width_out: int) -> list[nn.Module]:
        convolution = nn.Conv2d(width_in, width_out, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(width_out), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*stage(3, 16), *stage(16, 32), *stage(32, 64), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64 * (_PIXELS // 8) ** 2, classes))


def _dataset(root: Path, most: int) -> tuple[Any, list[int], int]:
    """ImageFolder over root, evenly spread indices of at most `most` samples, number of classes."""
    transform = transforms.Compose(
        [
            transforms.Resize((_PIXELS + 6, _PIXELS + 6)),
            transforms.RandomCrop(_PIXELS),
            transforms.Grayscale(3),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )
    folder = datasets.ImageFolder(str(root), transform=transform)
    count = min(most, len(folder))
    return folder, [i * len(folder) // count for i in range(count)], len(folder.classes)


def train(
    root: Path,
    *,
    most: int,
    epochs: int,
    seed: int,
    hints: bool,
    before_epoch: Callable[[int], None],
    after_epoch: Callable[[int, Epoch], None],
) -> list[Epoch]:
    """Train `epochs` epochs on at most `most` images below root; callbacks are not timed.
    `hints`: the loader's order is announced to the hintsd of the mount that root lies in.

    FileNotFoundError: root has no folders of images.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    folder, indices, classes = _dataset(root, most)
    order = torch.Generator().manual_seed(seed)
    loader: DataLoader[Any] = DataLoader(
        Subset(folder, indices),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        generator=order,
        persistent_workers=True,
    )
    job = hintsd.attach(loader, epochs=epochs) if hints else None
    network = _network(classes)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    results: list[Epoch] = []
    for number in range(epochs):
        before_epoch(number)
        epoch = _epoch(network, optimizer, loader)
        results.append(epoch)
        after_epoch(number, epoch)
    if job is not None:
        job.close()  # the mount can go at once, and not when Python has collected the loader
    return results


def _epoch(network: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> Epoch:
    digest = hashlib.blake2b(digest_size=16)
    losses: list[float] = []
    samples, correct, waiting_s = 0, 0, 0.0
    start = time.perf_counter()
    batches = iter(loader)
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waiting_s += time.perf_counter() - asked
        if batch is None:
            break
        images, labels = batch
        digest.update(images.numpy().tobytes())
        digest.update(labels.numpy().tobytes())
        optimizer.zero_grad()
        scores = network(images)
        loss = nn.functional.cross_entropy(scores, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        correct += int((scores.argmax(1) == labels).sum())
        samples += len(labels)
    seconds = time.perf_counter() - start
    return Epoch(samples, seconds, waiting_s, tuple(losses), correct / samples, digest.hexdigest())


def hash_files(root: Path, most: int) -> Files:
    """Digest of all the files that `train` reads, whole, in ImageFolder's order."""
    folder, indices, _ = _dataset(root, most)
    digest, size_bytes = hashlib.blake2b(digest_size=16), 0
    for index in indices:
        path, label = folder.samples[index]
        data = Path(path).read_bytes()
        size_bytes += len(data)
        head = f"{Path(path).relative_to(root)} {label} {len(data)}\n"
        digest.update(head.encode("utf-8", "surrogateescape"))
        digest.update(data)
    return Files(len(indices), size_bytes, digest.hexdigest())

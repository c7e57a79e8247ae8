"""A small network trained with stock ImageFolder and DataLoader at the rhythm of an accelerator;
only the files' place varies, and whether one line tells hintsd about the loader.

The step of each batch takes as long as an accelerator's would (STEP_S): the network is small
enough to learn within that time on a CPU, and the rest is slept. As with CUDA, the loop asks for
the next batch while the accelerator is at one, and no further ahead.

INVARIANT: the same files, seed and count give the same batches, losses and accuracies, to the last
bit: every source of chance is seeded, and the arithmetic runs in one thread.
"""

import hashlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Subset

import hintsd
from tools.hintsd_command import await_answer
from tools.torchvision_cpu import import_torchvision

import_torchvision()
from torchvision import (  # type: ignore[import-untyped]  # noqa: E402  # has no types
    datasets,
    transforms,
)

BATCH = 8
WORKERS = 2
IMAGES_PER_S = 300  # what the accelerator takes
STEP_S = BATCH / IMAGES_PER_S
_PIXELS = 32


@dataclass(frozen=True)
class Epoch:
    samples: int
    seconds: float
    waiting_s: float  # the accelerator had nothing to do: no batch was there
    losses: tuple[float, ...]  # of each step
    accuracy: float
    delivered: str  # digest of each file's bytes, pixels and label, in the order of the loader

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def busy(self) -> float:
        """Of the time: compute / (compute + waiting), as MLPerf Storage counts it."""
        return 1 - self.waiting_s / self.seconds


def network(classes: int) -> nn.Module:
    def stage(width_in: int, width_out: int) -> list[nn.Module]:
        convolution = nn.Conv2d(width_in, width_out, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(width_out), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*stage(3, 8), *stage(8, 16), *stage(16, 32), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32 * (_PIXELS // 8) ** 2, classes))


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _decode(data: bytes) -> Image.Image:
    """Scaled down while it is decoded."""
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (_PIXELS + 4, _PIXELS + 4))
    return image.convert("RGB")


def image(path: str) -> Image.Image:
    """A loader for ImageFolder."""
    return _decode(_read(path))


crop = transforms.Compose(
    [
        transforms.Resize((_PIXELS + 4, _PIXELS + 4)),
        transforms.RandomCrop(_PIXELS),
        transforms.Grayscale(3),
        transforms.ToTensor(),
        transforms.Normalize([0.5] * 3, [0.25] * 3),
    ]
)


def _prepare(data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return crop(_decode(data)), torch.tensor(list(digest), dtype=torch.uint8)


def _dataset(root: Path, most: int) -> tuple[Any, list[int]]:
    """ImageFolder over root, and evenly spread indices of at most `most` samples."""
    folder = datasets.ImageFolder(str(root), transform=_prepare, loader=_read)
    count = min(most, len(folder))
    return folder, [i * len(folder) // count for i in range(count)]


def files(root: Path, most: int) -> list[Path]:
    """What `train` reads below root. FileNotFoundError: root has no folders of images."""
    folder, indices = _dataset(root, most)
    return [Path(folder.samples[index][0]) for index in indices]


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
    `hints`: the loader's order is announced to the hintsd of the mount that root lies in. Its
    answer (seconds, while it imports torch) comes before the first epoch: a large model is built
    meanwhile, this one is there at once.

    FileNotFoundError: root has no folders of images.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    folder, indices = _dataset(root, most)
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
    net = network(len(folder.classes))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    if job is not None:
        await_answer(job)
    results: list[Epoch] = []
    for number in range(epochs):
        before_epoch(number)
        epoch = _epoch(net, optimizer, loader)
        results.append(epoch)
        after_epoch(number, epoch)
    if job is not None:
        job.close()  # the mount can go at once, and not when Python has collected the loader
    return results


def _epoch(net: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> Epoch:
    delivered = hashlib.blake2b(digest_size=16)
    losses: list[float] = []
    samples, correct, waiting_s = 0, 0, 0.0
    begin = busy_until = time.perf_counter()
    for (images, digests), labels in loader:
        starts = max(time.perf_counter(), busy_until)
        waiting_s += starts - busy_until
        time.sleep(max(0.0, starts - time.perf_counter()))
        for tensor in (digests, images, labels):
            delivered.update(tensor.numpy().tobytes())
        optimizer.zero_grad()
        scores = net(images)
        loss = nn.functional.cross_entropy(scores, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        correct += int((scores.argmax(1) == labels).sum())
        samples += len(labels)
        busy_until = max(starts + len(labels) / IMAGES_PER_S, time.perf_counter())
    time.sleep(max(0.0, busy_until - time.perf_counter()))
    seconds = busy_until - begin
    return Epoch(
        samples, seconds, waiting_s, tuple(losses), correct / samples, delivered.hexdigest()
    )

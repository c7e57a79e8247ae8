"""A network on an accelerator, trained from a stock ImageFolder and DataLoader: how busy is it?

What accelerator utilization (AU) needs, as MLPerf Storage counts it: of the time behind an epoch's
first step, the share in which the device computes (its rules for training, 3.3.2). Compute is from
the moment in which the device begins with a batch (its copy there, decoding there, the step) until
it is done with it; by the device's own clock, if it has one. The loop asks for the next batch while
the device is at the one before, and no further ahead; of an epoch's second one when the first is
done.

Run as a process with a JSON object on standard input: root, images (so many of those below root,
evenly spread), seed, epochs, batch, workers, prefetch_factor, pixels (width and height of what the
network sees), network (resnet50 or tiny), device (cuda or cpu), decode ("workers" or "device"),
hints (true: `hintsd.attach`), limit_s (an epoch that lasts longer is left).
Prints a JSON list, one object an epoch: seconds, compute_s, first_step_s and first_compute_s (of
these, until the device was done with the first batch), samples, bytes, is_whole (false: it was
left), workers_cpu_s (processor time of the loader's workers).

INVARIANT: it ends: an epoch after limit_s and one batch, a batch that does not come after limit_s.
"""

import io
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Subset

import hintsd
from tools.bench.processes import processor_s
from tools.hintsd_command import await_answer
from tools.torchvision_cpu import import_torchvision

import_torchvision()
from torchvision import (  # type: ignore[import-untyped]  # noqa: E402  # has no types
    datasets,
    transforms,
)

WARM_UP_STEPS = 3


class Span(Protocol):
    """Of one batch: what the device does between `begin` and `end`."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def compute_s(self) -> float:
        """Waits until the device is done."""


class _CpuSpan:
    def begin(self) -> None:
        self._begin = time.perf_counter()

    def end(self) -> None:
        self._seconds = time.perf_counter() - self._begin

    def compute_s(self) -> float:
        return self._seconds


class _CudaSpan:
    def __init__(self) -> None:
        self._begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._begin.record()

    def end(self) -> None:
        self._end.record()

    def compute_s(self) -> float:
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000


def _span(device: str) -> Span:
    return _CudaSpan() if device == "cuda" else _CpuSpan()


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


class _InWorkers:
    """Stock transforms of a training; the network's input leaves the worker as bytes."""

    def __init__(self, pixels: int) -> None:
        self._crop = transforms.RandomResizedCrop(pixels)
        self._tensor = transforms.PILToTensor()

    def __call__(self, data: bytes) -> tuple[torch.Tensor, int]:
        return self._tensor(self._crop(_open(data))), len(data)


def _undecoded(data: bytes) -> tuple[torch.Tensor, int]:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), len(data)


def _collate(batch: list[tuple[tuple[torch.Tensor, int], int]]) -> tuple[Any, ...]:
    """(images, a list where they are files of several sizes; bytes; labels)."""
    images = [image for (image, _), _ in batch]
    is_decoded = images[0].dim() == 3
    labels = torch.tensor([label for _, label in batch])
    return torch.stack(images) if is_decoded else images, sum(n for (_, n), _ in batch), labels


def _decoded(files: list[torch.Tensor], pixels: int, device: str) -> torch.Tensor:
    if device == "cuda":
        from torchvision.io import ImageReadMode, decode_jpeg  # type: ignore[import-untyped]

        images = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
    else:
        tensor = transforms.PILToTensor()
        images = [tensor(_open(file.numpy().tobytes())) for file in files]
    size = [pixels, pixels]
    return torch.stack([transforms.functional.resize(image, size) for image in images])


class Trainer:
    """A network on the device, and its steps."""

    def __init__(self, network: str, classes: int, pixels: int, device: str) -> None:
        if network == "resnet50":
            from torchvision import models  # takes as long as torch

            model = models.resnet50(num_classes=classes)
        else:
            layers = [nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
            model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, classes))
        self._model = model.to(device, memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._pixels, self._device = pixels, device

    def warm_up(self, batch: int) -> None:
        images = torch.zeros((batch, 3, self._pixels, self._pixels), dtype=torch.uint8)
        for _ in range(WARM_UP_STEPS):
            self.step(images, torch.zeros(batch, dtype=torch.long)).compute_s()

    def step(self, images: Any, labels: torch.Tensor) -> Span:
        """The device is at it when this returns. `images`: decoded, or a list of files."""
        span = _span(self._device)
        span.begin()
        if isinstance(images, list):
            images = _decoded(images, self._pixels, self._device)
        images = images.to(self._device, non_blocking=True).float() / 255
        labels = labels.to(self._device, non_blocking=True)
        images = images.contiguous(memory_format=torch.channels_last)
        self._optimizer.zero_grad()
        with torch.autocast(self._device, torch.bfloat16, enabled=self._device == "cuda"):
            loss = nn.functional.cross_entropy(self._model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        span.end()
        return span


def _loader(work: dict[str, Any]) -> tuple[DataLoader[Any], int]:
    """The loader, and the number of classes."""
    in_workers = work["decode"] == "workers"
    transform = _InWorkers(work["pixels"]) if in_workers else _undecoded
    folder = datasets.ImageFolder(work["root"], transform=transform, loader=_read)
    count = min(work["images"], len(folder))
    loader: DataLoader[Any] = DataLoader(
        Subset(folder, [i * len(folder) // count for i in range(count)]),
        batch_size=work["batch"],
        shuffle=True,
        num_workers=work["workers"],
        prefetch_factor=work["prefetch_factor"],
        collate_fn=_collate,
        generator=torch.Generator().manual_seed(work["seed"]),
        pin_memory=work["device"] == "cuda",
        persistent_workers=True,
        timeout=work["limit_s"],
    )
    return loader, len(folder.classes)


def _workers_s() -> float:
    return processor_s(child.pid for child in multiprocessing.active_children() if child.pid)


def _batches(loader: DataLoader[Any], limit_s: float) -> Iterator[Any]:
    deadline = time.perf_counter() + limit_s
    for batch in loader:
        yield batch
        if time.perf_counter() > deadline:
            return


def _epoch(loader: DataLoader[Any], trainer: Trainer, limit_s: float) -> dict[str, Any]:
    samples = total = 0
    compute_s = first_step_s = first_compute_s = 0.0
    before = _workers_s()
    span: Span | None = None
    begin = time.perf_counter()
    for images, size_bytes, labels in _batches(loader, limit_s):
        last, span = span, trainer.step(images, labels)
        if last is not None:
            compute_s += last.compute_s()
        else:
            first_compute_s = span.compute_s()
            first_step_s = time.perf_counter() - begin
        samples += len(labels)
        total += size_bytes
    compute_s += span.compute_s() if span is not None else 0.0
    return {
        "seconds": time.perf_counter() - begin,
        "compute_s": compute_s,
        "first_step_s": first_step_s,
        "first_compute_s": first_compute_s,
        "samples": samples,
        "bytes": total,
        "is_whole": samples == len(loader.dataset),  # type: ignore[arg-type]  # it is a Subset
        "workers_cpu_s": _workers_s() - before,
    }


def main() -> None:
    work = json.load(sys.stdin)
    torch.manual_seed(work["seed"])
    torch.backends.cudnn.benchmark = True
    if work["device"] == "cpu":
        torch.set_num_threads(1)
    loader, classes = _loader(work)
    job = hintsd.attach(loader, epochs=work["epochs"]) if work["hints"] else None
    trainer = Trainer(work["network"], classes, work["pixels"], work["device"])
    trainer.warm_up(work["batch"])
    if job is not None:
        await_answer(job)
    json.dump([_epoch(loader, trainer, work["limit_s"]) for _ in range(work["epochs"])], sys.stdout)


if __name__ == "__main__":
    main()

"""A JPEG dataset with the file sizes of ImageNet and something to learn.

Handwritten digits (scikit-learn ships 1,797 of them) are drawn large on noise; the amount of
pixels of each image follows the log-normal size of its file. Ten folders of one class each, as
ImageFolder wants them.

INVARIANT: the same count and seed give the same pixels; files are complete when `make` returns.
"""

import importlib
import io
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

DIGITS = 1_797  # of scikit-learn
MEDIAN_BYTES = 100_000  # with SIGMA the mean is 110 KB, as in ImageNet's training set
SIGMA = 0.45
_LEAST_BYTES, _MOST_BYTES = 15_000, 450_000
_BYTES_PER_PIXEL = 0.44  # what the noise below costs at _QUALITY; photographs are near it
_QUALITY = 90
_NOISE_SIGMA = 13.0
_JOBS = os.cpu_count() or 1


@dataclass(frozen=True)
class Written:
    files: int
    size_bytes: int


def _render(digit: NDArray[np.float64], seed: int) -> bytes:
    random = np.random.default_rng(seed)
    target = float(
        np.clip(random.lognormal(np.log(MEDIAN_BYTES), SIGMA), _LEAST_BYTES, _MOST_BYTES)
    )
    pixels = target / _BYTES_PER_PIXEL
    aspect = float(random.uniform(0.7, 1.4))
    width, height = int((pixels * aspect) ** 0.5), int((pixels / aspect) ** 0.5)
    mask = Image.fromarray((digit * (255 / 16)).astype(np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    ink, paper = random.uniform(0, 255, (2, 3)).astype(np.float32)
    if abs(ink.mean() - paper.mean()) < 60:
        ink = 255 - paper
    share = np.asarray(mask, dtype=np.float32)[..., None] / 255
    # One noise field for all colours: JPEG drops most of what differs between them anyway.
    noise = random.standard_normal((height, width, 1), dtype=np.float32) * _NOISE_SIGMA
    image = paper + (ink - paper) * share + noise
    out = io.BytesIO()
    Image.fromarray(np.clip(image, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=_QUALITY)
    return out.getvalue()


def _handwriting() -> Any:
    """Imported late: it takes a second, and who imports this module may never make a dataset."""
    return importlib.import_module("sklearn.datasets")


def _write(directory: Path, seed: int, numbers: list[int]) -> int:
    """Write the images `numbers`; bytes written."""
    digits = _handwriting().load_digits()
    total = 0
    for number in numbers:
        which = number % len(digits.images)
        folder = directory / f"digit-{digits.target[which]}"
        folder.mkdir(parents=True, exist_ok=True)
        data = _render(digits.images[which], seed * 1_000_003 + number)
        (folder / f"{number:06d}.jpg").write_bytes(data)
        total += len(data)
    return total


def make(directory: Path, count: int, seed: int, first: int = 0) -> Written:
    """Write `count` images below `directory`, number `first` and those behind it: DIGITS in a row
    are of other handwriting each. OSError: no room.
    """
    _handwriting()  # once, and not in each process of the pool
    parts = [list(range(first + part, first + count, _JOBS)) for part in range(_JOBS)]
    with ProcessPoolExecutor(_JOBS) as pool:
        sizes = list(pool.map(partial(_write, directory, seed), parts))
    return Written(count, sum(sizes))

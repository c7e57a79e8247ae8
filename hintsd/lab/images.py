"""What the laboratory's trainings learn: scikit-learn's digits, or images made from a seed.

`digits`: 1,797 handwritten digits of 8×8 pixels; 1,500 are trained on (the items of the trace), 297
are held out to see that the network learns. Item i is always the same image.

`generated`: for more items. Each class has a random pattern of 8×8; an image is its class's pattern
under noise, and how much noise differs from image to image, so that some are much harder to learn
than others. Sizes are log-normal, as those of photographs are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fusecache.base.errors import UserError

CLASSES: Final = 10
PIXELS: Final = 64
DIGITS_TRAINED: Final = 1500
HELD_OUT_SHARE: Final = 0.1
SIZE_MEDIAN_BYTES: Final = 100_000
SIZE_SIGMA: Final = 0.5


@dataclass(frozen=True, slots=True)
class Images:
    """pixels: float32 (items, 64), labels: int64 (items,), sizes: int64 bytes (items,); the same of
    the images that are held out.
    """

    name: str
    pixels: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    held_out_pixels: npt.NDArray[np.float32]
    held_out_labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())


def digits() -> Images:
    """UserError: scikit-learn is missing."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # has no types
    except ImportError:
        raise UserError("the digits need scikit-learn: pip install scikit-learn") from None
    loaded = load_digits()
    shuffled = np.random.default_rng(0).permutation(len(loaded.target))
    pixels = (loaded.data[shuffled] / 16).astype(np.float32)
    labels = loaded.target[shuffled].astype(np.int64)
    trained, held_out = slice(DIGITS_TRAINED), slice(DIGITS_TRAINED, None)
    return Images(
        name="digits",
        pixels=pixels[trained],
        labels=labels[trained],
        sizes=np.full(DIGITS_TRAINED, PIXELS, np.int64),
        held_out_pixels=pixels[held_out],
        held_out_labels=labels[held_out],
    )


def generated(items: int, seed: int) -> Images:
    """260 bytes of memory an item."""
    rng = np.random.default_rng(seed)
    held_out = max(CLASSES, int(items * HELD_OUT_SHARE))
    patterns = rng.standard_normal((CLASSES, PIXELS), np.float32)
    labels = rng.integers(CLASSES, size=items + held_out)
    noise = rng.lognormal(0.5, 0.8, (items + held_out, 1)).astype(np.float32)
    pixels = rng.standard_normal((items + held_out, PIXELS), np.float32)
    pixels *= noise
    pixels += patterns[labels]
    pixels /= 4  # of about the scale of 1, as the network likes it
    sizes = np.rint(SIZE_MEDIAN_BYTES * rng.lognormal(0, SIZE_SIGMA, items)).astype(np.int64)
    return Images(
        name="generated images",
        pixels=pixels[:items],
        labels=labels[:items],
        sizes=sizes,
        held_out_pixels=pixels[items:],
        held_out_labels=labels[items:],
    )

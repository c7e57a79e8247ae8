"""The C part of hintsd (native/mt19937.c): what torch's generator of the CPU draws.

`state`: as torch.Generator.get_state() has it. Each function gives the state behind its draws.
ValueError: it is none; too many numbers, or too large ones, for torch to draw them with 32 bits.
Arrays may be filled without the GIL.
"""

import numpy as np
import numpy.typing as npt

def seeded(seed: int) -> bytes:
    """manual_seed(seed): its low 64 bits."""

def draw_seed(state: bytes) -> tuple[int, bytes]:
    """A number of 63 bits: torch.empty((), dtype=torch.int64).random_()."""

def permute(state: bytes, out: npt.NDArray[np.int64]) -> bytes:
    """torch.randperm(len(out)) into `out`."""

def draw(state: bytes, below: int, out: npt.NDArray[np.int64]) -> bytes:
    """torch.randint(below, (len(out),)) into `out`."""

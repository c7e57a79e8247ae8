"""Losses: what a script hands over, as numbers on this host, without making a GPU wait.

A tensor on a GPU is copied in the background; its numbers are looked at when they are there.

INVARIANT: what is handed over is not changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


class Refused(Exception):
    """What was handed over is no row of losses, or no row of indices: in one line, why."""


class Arriving:
    """Losses of one batch, perhaps still on their way from a device."""

    __slots__ = ("_event", "_values")

    def __init__(self, values: Any, event: Any = None) -> None:
        self._values, self._event = values, event

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_here(self) -> bool:
        return self._event is None or bool(self._event.query())

    def take(self) -> Values:
        """Shape (n,), as precise as f32; waits for what is not here. NaN, too, may be in it."""
        if self._event is not None:
            self._event.synchronize()
        with np.errstate(over="ignore"):
            return np.asarray(self._values, np.float32).astype(np.float64)


def count_of(losses: Any) -> int:
    """How many losses these are, if each has a place of its own in the first dimension, else -1."""
    shape = getattr(losses, "shape", None)
    try:
        shape = tuple(np.shape(losses) if shape is None else shape)
    except ValueError:  # rows of several lengths
        return -1
    return int(shape[0]) if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1) else -1


def arriving(losses: Any) -> Arriving:
    """A loss for each sample: a tensor on any device, an array, a list. Refused."""
    if count_of(losses) < 0:
        shape = tuple(getattr(losses, "shape", ())) or "a single number"
        raise Refused(f"one loss a sample is wanted (reduction='none'), not {shape}")
    if hasattr(losses, "detach"):
        return _tensor(losses.detach().reshape(-1))
    values = np.asarray(losses)
    if values.dtype.kind != "f":
        raise Refused(f"losses are wanted, and these are {_kind(values.dtype)}")
    return Arriving(values.reshape(-1))


def _tensor(values: Any) -> Arriving:
    if not values.is_floating_point():
        raise Refused(f"losses are wanted, and these are {_kind(values.dtype)}")
    if values.device.type == "cpu":
        return Arriving(values.float().numpy())
    if values.device.type != "cuda":
        return Arriving(values.float().cpu().numpy())
    import torch

    here = values.float().to("cpu", non_blocking=True)  # into pinned memory
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
    event.record(torch.cuda.current_stream(values.device))
    return Arriving(here.numpy(), event)


def _kind(dtype: Any) -> str:
    return f"of type {str(dtype).rpartition('.')[2]} (labels?)"


def indices_of(indices: Any, count: int, samples: int) -> npt.NDArray[np.int64]:
    """The indices that a script names, copied, negative ones counted from the end. Refused: not
    `count` whole numbers, or not of this dataset."""
    if hasattr(indices, "detach"):
        indices = indices.detach().cpu().numpy()
    try:
        found = np.asarray(indices)
    except ValueError:
        raise Refused("indices must be a row of whole numbers") from None
    if found.dtype.kind not in "iu":
        raise Refused(f"indices must be whole numbers, not {found.dtype}")
    if found.shape != (count,):
        raise Refused(f"{found.size} indices came with {count} losses")
    found = found.astype(np.int64)
    if len(found) and not (-samples <= found.min() and found.max() < samples):
        raise Refused(f"an index lies outside of the dataset's {samples} samples")
    return np.where(found < 0, found + samples, found)


def weighed(losses: Any, weights: npt.NDArray[np.float32]) -> Any:
    """`losses`, each multiplied by its weight: a tensor stays one, on its device, with its
    graph.
    """
    if hasattr(losses, "detach"):
        import torch

        factors = torch.from_numpy(weights).to(losses.device, losses.dtype)
        return losses * factors.reshape(losses.shape)
    values = np.asarray(losses)
    return values * weights.reshape(values.shape)

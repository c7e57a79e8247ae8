"""What is let in stays until it is released (MinIO: Mohan et al., CoorDL, VLDB '21, section 4.1),
the most used first where uses are known (HDMLP, sections 3.2 and 5.1: a rank of a distributed job
reads some samples more often than others, and those go to the fastest storage).

The planner's SSD, a simulated worker's storage classes and the policies `minio` and `frequency` let
in by this one rule. Here are the bytes; which items they are the caller remembers.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hintsd.policies import Integers, Mask

ROUNDS_MOST: Final = 16


class Residents:
    """The room of a cache that nothing is evicted from, and what its residents take of it.

    INVARIANT: 0 <= held_bytes, and held_bytes <= capacity_bytes but after `resize` to less: then
    nothing with a size is let in until enough is released.
    INVARIANT: free_bytes is capacity_bytes - held_bytes, or 0 where that is less.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Holds nothing. Raises ValueError for a negative capacity."""
        self.held_bytes = 0
        self.capacity_bytes = self.free_bytes = 0
        self.resize(capacity_bytes)

    def resize(self, capacity_bytes: int) -> None:
        """What is held stays. Raises ValueError for a negative capacity."""
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must be 0 or more, not {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self._hold(self.held_bytes)

    def _hold(self, size_bytes: int) -> None:
        self.held_bytes = size_bytes
        self.free_bytes = max(0, self.capacity_bytes - size_bytes)

    def admit(self, sizes: Integers, uses: Integers | None = None) -> Mask:
        """Which of these items are let in, shape (items,): as many as fit, the most used first,
        then in the order given. One that does not fit is passed over (at most ROUNDS_MOST times:
        then the rest is too small to matter).

        sizes: bytes of each, 0 or more, shape (items,); an item that is held already has 0.
        uses: how often each is read over the horizon that is known, whole numbers of 0 or more,
        shape (items,); None: all equally often.

        Raises ValueError, and lets nothing in, where uses and sizes are not of one shape.
        """
        if uses is not None and uses.shape != sizes.shape:
            raise ValueError(
                f"uses and sizes must be of one shape, not {uses.shape}, {sizes.shape}"
            )
        wanted_bytes = int(sizes.sum(dtype=np.int64))
        if wanted_bytes <= self.free_bytes:
            self._hold(self.held_bytes + wanted_bytes)
            return np.ones(len(sizes), np.bool_)
        admitted = np.zeros(len(sizes), np.bool_)
        order = np.arange(len(sizes)) if uses is None else _by_use(uses)
        for _ in range(ROUNDS_MOST):
            order = order[sizes[order] <= self.free_bytes]
            count = fits(sizes[order], self.free_bytes)
            if count == 0:
                break
            chosen, order = order[:count], order[count + 1 :]
            admitted[chosen] = True
            self._hold(self.held_bytes + int(sizes[chosen].sum(dtype=np.int64)))
        return admitted

    def admit_one(self, size_bytes: int) -> bool:
        """Whether this item is let in, as `admit` has it; size_bytes: of it, 0 or more."""
        if size_bytes > self.free_bytes:
            return False
        self._hold(self.held_bytes + size_bytes)
        return True

    def release(self, size_bytes: int) -> None:
        """Residents of so many bytes together are none any more.

        Raises ValueError where that is negative, or more than is held.
        """
        if not 0 <= size_bytes <= self.held_bytes:
            raise ValueError(f"{size_bytes} bytes released, {self.held_bytes} held")
        self._hold(self.held_bytes - size_bytes)

    def check_invariants(self) -> None:
        """Raises AssertionError where an invariant fails."""
        assert self.held_bytes >= 0
        assert self.free_bytes == max(0, self.capacity_bytes - self.held_bytes)


def fits(sizes: npt.NDArray[Any], room_bytes: int) -> int:
    """How many of these, from the first one on, fit together into so many bytes.

    sizes: bytes of each, 0 or more, shape (items,).
    """
    return int(np.searchsorted(np.cumsum(sizes, dtype=np.int64), room_bytes, "right"))


def _by_use(uses: Integers) -> npt.NDArray[np.int64]:
    """Indices of the items, the most used first; equal ones stay in the order given."""
    most = np.iinfo(uses.dtype).max
    return np.argsort(most - uses, kind="stable")

"""Which files a tier keeps: pure classes, one contract.

A policy decides about items (files, blocks) that it is asked about, by size and by what is known
of their use. It holds no content; which items are in is marked by who asks.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Integers = npt.NDArray[Any]


class Admission(Protocol):
    """Admission to a tier of `capacity_bytes`.

    INVARIANT: held_bytes <= capacity_bytes after every `admit`.
    """

    capacity_bytes: int
    held_bytes: int

    def admit(self, sizes: Integers, uses: Integers | None = None) -> Mask:
        """Which of these items are let in; they are held from then on.

        sizes: bytes, shape (items,), in the order of first use; uses: how often each is read
        over the horizon that is known, or None where all are equal.
        """
        ...

    def release(self, size_bytes: int) -> None:
        """An item of this size is held no more."""
        ...

    def check_invariants(self) -> None: ...

"""Which items a cache keeps: pure classes under one contract, `Policy`, for the laboratory; and
those in `hintsd.keeping.NAMES` live (`hintsd serve --keep`).

The planner and the simulator let many items in at once, by the rule of residents.py, which is that
of the policies `minio` and `frequency`.

An item is a small integer (an index into a dataset). A policy holds no content, does no I/O, reads
no clock and draws random numbers only from a generator seeded by its maker, so that the same calls
always give the same answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Integers = npt.NDArray[Any]
Floats = npt.NDArray[Any]

MISS: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What is told about reads to come. A policy takes the parts that it can use.

    sequence: the items in the order they will be read from now on, shape (reads,); clairvoyant
        policies (Belady, HDMLP).
    uses: how often each item is read over the known horizon, shape (items,) (HDMLP 5.1: r_k).
    sizes: bytes of each item, shape (items,) (HDMLP 5.1: s_k).
    items, importance: importance values of these items, both of shape (told,); larger matters
        more; items that are not named keep what they had (SHADE 4, iCACHE III-A).
    epoch: a new epoch begins with the next access.
    """

    sequence: Integers | None = None
    uses: Integers | None = None
    sizes: Integers | None = None
    items: Integers | None = None
    importance: Floats | None = None
    epoch: bool = False


class Policy(ABC):
    """Admission and eviction for a cache of `capacity_bytes`.

    INVARIANT: 0 <= held_bytes <= capacity_bytes, and held_bytes is the sum of the sizes of the
    items for which `item in policy` holds.
    INVARIANT: `access` answers only items that are held when it is called.
    INVARIANT: an item larger than the capacity is never held and evicts nothing.

    on_load: set by a caller that fetches what a policy with a loader of its own asks for (iCACHE's
    packages, Quiver's chunks): called, within `access` or `hint`, with an item of which the policy
    knows the size; it is held from then on. While it is None nothing is held but after a MISS.
    """

    name: ClassVar[str]

    capacity_bytes: int
    held_bytes: int
    on_load: Callable[[int], object] | None

    def __init__(
        self,
        capacity_bytes: int,
        *,
        on_evict: Callable[[int], object] | None = None,
        seed: int = 0,
    ) -> None:
        """on_evict: called with each item that was held and is no more. seed: of the random draws,
        if the policy makes any.

        Raises ValueError for a negative capacity.
        """
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must be 0 or more, not {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self.on_load = None
        self._on_evict = on_evict
        self._prepare(seed)

    def _prepare(self, seed: int) -> None:
        """Makes the state of a policy that holds nothing."""
        del seed

    @abstractmethod
    def access(self, item: int, size_bytes: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        """One read of `item`: what the cache serves, or MISS.

        Answers `item` for a hit; a policy that substitutes (iCACHE, Quiver) may answer another
        item, which is then read in its stead. After MISS the caller fetches `item`, and the policy
        has decided: it holds the item now (`item in policy`) or lets it pass.

        item: 0 or more, and less than 2^31; it is not checked here, once for each read. size_bytes:
        of the item, 0 or more, the same at every access while it is held. cost_s: what a fetch
        of it costs, in seconds. now_s: the caller's clock, never going back.
        """

    @abstractmethod
    def __contains__(self, item: int) -> bool: ...

    @abstractmethod
    def __len__(self) -> int:
        """Items held."""

    def hint(self, hints: Hints) -> None:
        """Takes what is told; a policy that has no use for it does nothing."""
        del hints

    def check_invariants(self) -> None:
        """Raises AssertionError where an invariant of this class or of the subclass fails."""
        assert 0 <= self.held_bytes <= self.capacity_bytes

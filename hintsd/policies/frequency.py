"""Placement by use (HDMLP, sections 3.2 and 5.1): a rank of a distributed job reads some samples
more often than others, and those with the largest access frequency go to the fastest storage.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from hintsd.policies import MISS, Hints, Integers
from hintsd.policies.minio import MinIO
from hintsd.policies.residents import Residents
from hintsd.sampling.formulas import counts


class Frequency(MinIO):
    """MinIO that lets in what is chosen beforehand: the most used items, as many as fit, among
    equal ones those with the smallest number. 2 bytes an item, O(1) an access.

    Chooses when it is told `Hints.uses`: by `Hints.sizes`, or, without those, as if all items were
    as large as the one that is read next. Before that, and again as long as nothing is told, it is
    MinIO.
    """

    name: ClassVar[str] = "frequency"

    def _prepare(self, seed: int) -> None:
        super()._prepare(seed)
        self._chosen: bytes | None = None
        self._uses: Integers | None = None  # told without sizes

    def access(self, item: int, size_bytes: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        if self._uses is not None:
            self._choose(self._uses, np.full(len(self._uses), size_bytes))
        chosen = self._chosen
        if chosen is None or (item < len(chosen) and chosen[item]):
            return super().access(item, size_bytes, cost_s, now_s)
        return item if item in self else MISS

    def hint(self, hints: Hints) -> None:
        """Raises ValueError, and chooses nothing, where uses and sizes are not of one shape, or not
        counts.
        """
        if hints.uses is None:
            return
        uses = counts("uses", hints.uses)
        if hints.sizes is None:
            self._uses = uses
            return
        sizes = counts("sizes", hints.sizes)
        if len(uses) != len(sizes):
            raise ValueError(f"uses and sizes must be of one length, not {len(uses)}, {len(sizes)}")
        self._choose(uses, sizes)

    def _choose(self, uses: Integers, sizes: Integers) -> None:
        """What is held stays, so it takes no more room."""
        self._uses = None
        held = np.zeros(len(uses), np.bool_)
        known = np.frombuffer(self._held, np.bool_)[: len(uses)]
        held[: len(known)] = known
        missing = np.where(held, 0, sizes)
        # Those chosen enter as they are read: until then they take none of the room.
        room = Residents(self._residents.free_bytes)
        self._chosen = room.admit(missing, uses).tobytes()

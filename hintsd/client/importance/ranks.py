"""Ranks: what the processes of a distributed training tell each other about scores.

INVARIANT: torch is used only where the script has it already.
"""

from __future__ import annotations

import sys
from typing import Any


def _distributed() -> Any:
    """torch.distributed, if it is initialised; else None."""
    torch: Any = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def replicas_and_rank() -> tuple[int, int]:
    """How many processes train together, and which of them this is: (1, 0) of one alone."""
    distributed = _distributed()
    if distributed is None:
        return 1, 0
    return int(distributed.get_world_size()), int(distributed.get_rank())


def is_together() -> bool:
    """Whether there are others to exchange anything with."""
    return replicas_and_rank()[0] > 1


def exchange(mine: Any) -> list[Any]:
    """What each rank hands over, in the order of ranks. Every rank has to call it: it waits for
    them. What torch raises."""
    distributed = _distributed()
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return found

"""The DataLoader that draws now: found from within a sampler's `next`, by the frames above it."""

from __future__ import annotations

import sys
from typing import Any


def drawing_iterator() -> Any:
    """torch's iterator of the DataLoader that asks for its next indices; None: none does."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_next_index":
        frame = frame.f_back  # type: ignore[assignment]  # None ends it
    return None if frame is None else frame.f_locals.get("self")

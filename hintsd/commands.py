"""What a planner tells its mount: commands, with the inode numbers that each is about (pure).

The mount carries them out in order (docs/WIRE.md).

INVARIANT: no command has more than COMMAND_INOS_MOST files, but a `stage` of a whole chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hintsd.sequence import NO_INOS, Inos

COMMAND_INOS_MOST = 65_536

STORE_BIT, MOVE_BIT, KEEP_ORDER_BIT, SORT_BIT = 1, 2, 4, 8  # of `store` in a `stage` frame


class Command(NamedTuple):
    kind: str  # "stage" | "fetch" | "cancel" | "drop" | "arm" | "clear" | "pack" | "pin"
    inos: Inos
    store: npt.NDArray[np.uint8] | None = None
    fields: Mapping[str, Any] | None = None  # of a `pack`, a `pin`


def commands_of(
    kind: str, parts: Iterable[Inos], store: npt.NDArray[np.uint8] | None = None
) -> list[Command]:
    inos = np.concatenate([NO_INOS, *parts])
    return [
        Command(
            kind,
            inos[start : start + COMMAND_INOS_MOST],
            None if store is None else store[start : start + COMMAND_INOS_MOST],
        )
        for start in range(0, len(inos), COMMAND_INOS_MOST)
    ]

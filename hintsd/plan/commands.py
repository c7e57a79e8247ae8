"""What a planner tells its mount: commands, with the inode numbers that each is about (pure).

The mount carries them out in order (docs/WIRE.md).

INVARIANT: no command has more than COMMAND_INOS_MOST files, but a `stage` of a whole chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hintsd.follow.sequence import NO_INOS, Inos

COMMAND_INOS_MOST = 65_536


class Command(NamedTuple):
    kind: str  # one of docs/WIRE.md's plan channel
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


class Withdrawn:
    """What was sent, and is taken back by the next commands."""

    def __init__(self) -> None:
        self._cancels: list[Inos] = []
        self._drops: list[Inos] = []

    def cancel(self, inos: Inos) -> None:
        """They are asked for no more."""
        self._cancels.append(inos)

    def drop(self, inos: Inos) -> None:
        """They are to be in RAM no more."""
        self._drops.append(inos)

    def forget_drops(self) -> None:
        """No job needs the room: pages stay, under the mount's own budget."""
        self._drops.clear()

    def void(self) -> None:
        """Nothing is sent any more."""
        self._cancels.clear()
        self._drops.clear()

    def take(self) -> list[Command]:
        """What is to be sent before all else; once."""
        found = [*commands_of("cancel", self._cancels), *commands_of("drop", self._drops)]
        self.void()
        return found

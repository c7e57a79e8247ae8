"""What another user may read: asked of the kernel, by a process that is that user's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import trio

from hintsd.users import looking
from hintsd.users.identity import Identity

TIMEOUT_S: Final = 30.0
_AT_ONCE: Final = 4

LIST: Final = os.R_OK | os.X_OK
"""Names in a directory."""
SEARCH: Final = os.X_OK
"""What has a known name in it."""


class CannotLook(Exception):
    """It could not be found out; one line."""


class Rights:
    """Looks for all other users."""

    def __init__(self) -> None:
        # One of a mount that hangs keeps its place until it ends: others' own jobs have theirs.
        self._limiter = trio.CapacityLimiter(_AT_ONCE)

    async def first_denied(
        self, who: Identity, directories: Sequence[bytes], mode: int
    ) -> bytes | None:
        """The first of these that `who` may not access in this mode, or that is not there.

        Links are followed as `who` could. CannotLook.
        """
        if not directories:
            return None
        with trio.move_on_after(TIMEOUT_S):
            number = await trio.to_thread.run_sync(
                _look, who, directories, mode, limiter=self._limiter, abandon_on_cancel=True
            )
            return directories[number] if number >= 0 else None
        raise CannotLook("it does not answer")


def _look(who: Identity, directories: Sequence[bytes], mode: int) -> int:
    numbers = map(str, (who.uid, who.gid, mode, *who.groups))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", looking.__file__, *numbers],
            input=b"\0".join(directories),
            capture_output=True,
            timeout=TIMEOUT_S,
            env={},
            cwd="/",
        )
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotLook(f"rights cannot be looked at: {error}") from None
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise CannotLook(f"rights cannot be looked at: {last or 'no answer'}") from None

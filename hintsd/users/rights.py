"""What another user may read: asked of the kernel, by a process that is that user's."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import trio

from hintsd.users import looking
from hintsd.users.identity import Identity

TIMEOUT_S: Final = 30.0
_AT_ONCE: Final = 2  # of one user

LIST: Final = os.R_OK | os.X_OK
"""Names in a directory."""
SEARCH: Final = os.X_OK
"""What has a known name in it."""

T = TypeVar("T")


class CannotLook(Exception):
    """It could not be found out; one line."""


class Status(NamedTuple):
    """As os.stat gives it."""

    st_mode: int
    st_dev: int
    st_ino: int
    st_size: int


class Eyes:
    """Those of one user: a process, from the first question on until `close`.

    For a thread; each question raises CannotLook.
    """

    def __init__(self, who: Identity) -> None:
        self._who = who
        self._process: subprocess.Popen[bytes] | None = None

    def first_denied(self, directories: Sequence[bytes], mode: int) -> bytes | None:
        """The first of these that cannot be accessed in this mode, or that is not there.

        Links are followed as the user could.
        """
        if not directories:
            return None
        number = int(self._ask(str(mode), directories))
        return directories[number] if number >= 0 else None

    def real(self, path: bytes) -> bytes | None:
        """Without links; None: it leads nowhere that the user sees."""
        return self._ask("real", [path]) or None

    def stat(self, path: bytes) -> Status:
        """As os.stat; all that the user cannot see is FileNotFoundError."""
        found = self._ask("stat", [path])
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        return Status(*map(int, found.split()))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _ask(self, what: str, paths: Sequence[bytes]) -> bytes:
        try:
            if self._process is None:
                self._process = _begin(self._who)
            return _asked(self._process, what, b"\0".join(paths))
        except OSError as error:
            raise CannotLook(f"rights cannot be looked at: {error}") from None


def _begin(who: Identity) -> subprocess.Popen[bytes]:
    numbers = map(str, (who.uid, who.gid, *who.groups))
    pipe = subprocess.PIPE
    words = [sys.executable, "-I", "-S", looking.__file__, *numbers]
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, env={}, cwd="/")


def _asked(process: subprocess.Popen[bytes], what: str, paths: bytes) -> bytes:
    """OSError; CannotLook: it has ended, or does not answer in time, and has been ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    timer = threading.Timer(TIMEOUT_S, process.kill)
    timer.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"%b %d\n%b" % (what.encode(), len(paths), paths))
            process.stdin.flush()
            if line := process.stdout.readline():
                answer = process.stdout.read(int(line))
                if len(answer) == int(line):
                    return answer
        last = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        raise CannotLook(f"rights cannot be looked at: {last or 'no answer'}")
    finally:
        timer.cancel()


class Rights:
    """Looks for all other users."""

    def __init__(self) -> None:
        self._limiters: dict[int, trio.CapacityLimiter] = {}  # by user

    def limiter(self, who: Identity) -> trio.CapacityLimiter:
        """Threads that look for this user. What hangs, or is long, keeps its place until it ends:
        nobody else waits for it.
        """
        return self._limiters.setdefault(who.uid, trio.CapacityLimiter(_AT_ONCE))

    async def first_denied(
        self, who: Identity, directories: Sequence[bytes], mode: int
    ) -> bytes | None:
        """As `Eyes.first_denied`."""
        if not directories:
            return None
        return await self._look(who, lambda eyes: eyes.first_denied(directories, mode))

    async def real(self, who: Identity, path: bytes, mode: int) -> bytes | None:
        """A directory without links; None: `who` may not access it in this mode."""

        def look(eyes: Eyes) -> bytes | None:
            real = eyes.real(path)
            return None if real is None or eyes.first_denied([real], mode) is not None else real

        return await self._look(who, look)

    async def _look(self, who: Identity, look: Callable[[Eyes], T]) -> T:
        def work() -> T:
            with contextlib.closing(Eyes(who)) as eyes:
                return look(eyes)

        with trio.move_on_after(TIMEOUT_S):
            return await trio.to_thread.run_sync(
                work, limiter=self.limiter(who), abandon_on_cancel=True
            )
        raise CannotLook("it does not answer")

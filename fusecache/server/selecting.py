"""Which files the globs of a request name, or its paths.

The tree is listed at the origin as far as it is not known: files that nobody has looked up count.
INVARIANT: whatever a request names, others get turns meanwhile.
"""

from __future__ import annotations

import os
import stat
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

import trio

from fusecache import _native
from fusecache.base.errors import OriginError, UserError
from fusecache.control.control import PROGRESS_INTERVAL_S, Message, RequestError, Send
from fusecache.read.operations import Operations
from fusecache.server.globs import Globs

ERRORS_SHOWN = 10
LISTING_BATCH = 1024  # names that are asked for at once
SLICE_S = 0.002  # of work, after which readers get as much
ROOT = 1


class Asked(NamedTuple):
    """What a request names: `globs` relative to `prefix`, a directory; no glob: all below it."""

    globs: list[str]
    prefix: bytes

    @classmethod
    def of(cls, request: Message) -> Asked:
        """RequestError."""
        prefix = request.get("prefix") or ""
        if not isinstance(prefix, str):
            raise RequestError("prefix must be a string")
        return cls(strings(request, "globs"), os.fsencode(prefix))

    def none_found(self) -> RequestError:
        below = f" below {os.fsdecode(self.prefix)}" if self.prefix else ""
        return RequestError(f"no file matches {' '.join(self.globs) or '**'}{below}")


def strings(request: Message, name: str) -> list[str]:
    """RequestError: something else."""
    found = request.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise RequestError(f"{name} must be a list of strings")
    return found


class Failures:
    """Files and directories that the origin did not give: how many, and a line of the first."""

    def __init__(self) -> None:
        self.count = 0
        self.lines: list[str] = []

    def add(self, path: bytes, error: OriginError) -> None:
        self.count += 1
        if len(self.lines) < ERRORS_SHOWN:
            self.lines.append(f"{path.decode(errors='backslashreplace') or '.'}: {error}")

    def fields(self) -> Message:
        """Of a result."""
        return {"errors": self.lines, "error_count": self.count}


class Turns:
    """Work in slices: in between others get as much time."""

    def __init__(self) -> None:
        self._until = time.monotonic() + SLICE_S

    async def give_way(self) -> None:
        """To be called between any two short steps."""
        if time.monotonic() >= self._until:
            await trio.sleep(SLICE_S)  # at 0 no other thread gets the interpreter's lock
            self._until = time.monotonic() + SLICE_S


async def select(
    asked: Asked,
    listed: Callable[[int], Awaitable[None]],
    chosen: Callable[[int, bytes], None],
    failures: Failures,
) -> tuple[array[int], list[str]]:
    """The files, and the globs that named none. `listed` has a directory listed; where that raises
    OriginError it is left out. `chosen` is told inode and path of each file.
    """
    unmatched, globs = dict.fromkeys(asked.globs), Globs(asked.globs)
    names_all, below, turns = not asked.globs, asked.prefix, Turns()
    files, directories = array("Q"), [ROOT]
    while directories:
        directory = directories.pop()
        prefix = _native.path(directory)
        try:
            await listed(directory)
        except OriginError as error:
            failures.add(prefix, error)
            continue
        for name, ino in _entries(directory):
            await turns.give_way()
            mode = _native.attributes(ino)[0]
            path = prefix + b"/" + name if prefix else name
            if stat.S_ISDIR(mode):
                if _is_below(path, below) or _is_below(below, path):
                    directories.append(ino)
                continue
            if not stat.S_ISREG(mode) or not _is_below(path, below):
                continue
            naming = globs.naming(path[len(below) :].lstrip(b"/"))
            if naming or names_all:
                for glob in naming:
                    unmatched.pop(glob, None)
                files.append(ino)
                chosen(ino, path)
    return files, list(unmatched)


def _is_below(path: bytes, directory: bytes) -> bool:
    return not directory or path == directory or path.startswith(directory + b"/")


def _entries(directory: int) -> Iterator[tuple[bytes, int]]:
    cookie = 0
    while batch := _native.children(directory, cookie, LISTING_BATCH):
        for name, ino, cookie in batch:  # noqa: B007 (the last cookie is where to go on)
            yield name, ino


class Finding:
    """Files by their paths. Directories are listed, once for all paths."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._known: dict[bytes, int | OriginError] = {}  # 0: there is none

    async def file_at(self, path: bytes) -> int:
        """Its inode; 0: there is no such file. OriginError."""
        above, _, name = path.rpartition(b"/")
        directory = await self._directory_at(above)
        ino = max(0, _native.lookup(directory, name)) if directory and name else 0
        return ino if ino and stat.S_ISREG(_native.attributes(ino)[0]) else 0

    async def _directory_at(self, path: bytes) -> int:
        """Listed."""
        if path in self._known:
            return self._listed(path)
        ino, end = await self._list(b"", ROOT), 0
        while ino and end < len(path):
            begin, end = end, path.find(b"/", end + 1)
            end = len(path) if end < 0 else end
            below = max(0, _native.lookup(ino, path[begin:end].strip(b"/")))
            is_directory = below and stat.S_ISDIR(_native.attributes(below)[0])
            ino = await self._list(path[:end], below if is_directory else 0)
        return ino

    async def _list(self, path: bytes, ino: int) -> int:
        if path not in self._known:
            try:
                if ino:
                    await self._operations.list_checked(ino)
                self._known[path] = ino
            except OriginError as error:
                self._known[path] = error
        return self._listed(path)

    def _listed(self, path: bytes) -> int:
        found = self._known[path]
        if isinstance(found, OriginError):
            raise found
        return found


async def find(
    paths: list[str],
    operations: Operations,
    chosen: Callable[[int, bytes], None],
    failures: Failures,
) -> tuple[array[int], list[str]]:
    """The files at these paths of the mount, in their order, and the paths of no file.
    `chosen` is told inode and path of each file.
    """
    files, missing = array("Q"), list[str]()
    turns, finding = Turns(), Finding(operations)
    for name in paths:
        await turns.give_way()
        path = os.fsencode(name)
        try:
            ino = await finding.file_at(path)
        except OriginError as error:
            failures.add(path, error)
            continue
        if ino:
            files.append(ino)
            chosen(ino, path)
        else:
            missing.append(name)
    return files, missing


async def telling(
    work: Callable[[], Awaitable[Message]], look: Callable[[], Message], send: Send
) -> Message:
    """What `work` returns, or its UserError; meanwhile its progress is told, again and again."""

    async def tell() -> None:
        while True:
            await trio.sleep(PROGRESS_INTERVAL_S)
            await send({"progress": look()})

    result: Message = {}
    failed: UserError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell)
        try:
            result = await work()
        except UserError as error:
            failed = error
        nursery.cancel_scope.cancel()
    if failed is not None:
        raise failed
    return result

"""A reader of a mount, in a process of its own: reads, maps, lists and stats, and compares.

    python reader.py MOUNTPOINT PLAN SEED

PLAN is JSON: path -> [bytes, mtime in ns, SHA-256] of every file at the origin. It says "ready" in
a line, goes on until its standard input ends, and says then what it found, as JSON (`Found`).

INVARIANT: every system call that may wait for the mount is timed, and every answer compared.
Stdlib only, and no other module of ours: it is to start at once.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import select
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

PIECE_BYTES: Final = 128 << 10
WAYS: Final = ("reads", "mapped reads", "listings", "stats")
_SURPRISES_MOST: Final = 20

Plan: TypeAlias = dict[str, tuple[int, int, str]]


@dataclass
class Found:
    tried: Counter[str] = field(default_factory=Counter)
    """Of each of WAYS how many were begun."""
    wrong: int = 0
    """Files, listings and stats that are not the origin's."""
    errors: int = 0
    """That the origin did not give."""
    worst_s: float = 0.0
    """The longest wait of one system call: stat, open, a listing, or a piece read or mapped."""
    surprises: list[str] = field(default_factory=list)
    """The first few."""


class Reader:
    def __init__(self, root: str, plan: Plan, rng: random.Random) -> None:
        self._root, self._plan, self._rng = root, plan, rng
        self._names: dict[str, list[str]] = {}
        for path in sorted(plan):
            self._names.setdefault(os.path.dirname(path), []).append(os.path.basename(path))
        self.found = Found()

    def step(self, way: str, path: str) -> None:
        """One file, or the directory that it is in."""
        self.found.tried[way] += 1
        try:
            wrong = {
                "reads": self._read,
                "mapped reads": self._map,
                "listings": self._list,
                "stats": self._stat,
            }[way](path)
        except OSError as error:
            self.found.errors += 1
            wrong = str(error)
        else:
            self.found.wrong += bool(wrong)
        if wrong and len(self.found.surprises) < _SURPRISES_MOST:
            self.found.surprises.append(f"{way}: {path}: {wrong}")

    def run(self, is_over: Callable[[], bool]) -> None:
        """Each way once, however soon it is over; then at random."""
        paths = sorted(self._plan)
        for way in WAYS:
            self.step(way, self._rng.choice(paths))
        while not is_over():
            way = self._rng.choices(WAYS, weights=(4, 4, 1, 1))[0]
            self.step(way, self._rng.choice(paths))

    # ---- the ways: each says what is wrong, or "" ----------------------------------------------

    def _read(self, path: str) -> str:
        fd = self._open(path)
        try:
            digest = hashlib.sha256()
            while data := self._timed(os.read, fd, PIECE_BYTES):
                digest.update(data)
        finally:
            os.close(fd)
        return "" if digest.hexdigest() == self._plan[path][2] else "other bytes"

    def _map(self, path: str) -> str:
        fd = self._open(path)
        try:
            size = os.fstat(fd).st_size
            if size != self._plan[path][0]:
                return f"{size} bytes"
            digest = hashlib.sha256()
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
                for begin in range(0, size, PIECE_BYTES):
                    piece = slice(begin, begin + PIECE_BYTES)
                    digest.update(self._timed(mapped.__getitem__, piece))
        finally:
            os.close(fd)
        return "" if digest.hexdigest() == self._plan[path][2] else "other bytes, mapped"

    def _list(self, path: str) -> str:
        directory = os.path.dirname(path)
        names = self._timed(os.listdir, os.path.join(self._root, directory))
        return "" if sorted(names) == self._names[directory] else f"{len(names)} names"

    def _stat(self, path: str) -> str:
        status = self._timed(os.stat, os.path.join(self._root, path))
        seen = (status.st_size, status.st_mtime_ns)
        return "" if seen == tuple(self._plan[path][:2]) else f"size and mtime {seen}"

    def _open(self, path: str) -> int:
        fd: int = self._timed(os.open, os.path.join(self._root, path), os.O_RDONLY)
        if self._rng.random() < 0.5:  # what is in the page cache nobody waits for
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return fd

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        begin_s = time.monotonic()
        try:
            return call(*arguments)
        finally:
            self.found.worst_s = max(self.found.worst_s, time.monotonic() - begin_s)


def main(root: str, plan: str, seed: str) -> None:
    with open(plan, encoding="utf-8") as file:
        reader = Reader(root, json.load(file), random.Random(seed))
    print("ready", flush=True)
    reader.run(lambda: bool(select.select([0], [], [], 0)[0]))
    print(json.dumps(vars(reader.found)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Random operations on the origin, the mount and the cache, against a model of what may be seen.

The model keeps, for every path, the files it has led to since the mount was last seen to equal the
source (the *settled* moment), and for every file the contents it has had. Before a change is
visible a read may give any of them, page by page; anything else is a wrong byte. Once settled, a
read gives the one there is. A failure prints its seed and its steps.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Mounting, Place
from tests.support.mounted import Mount, errno_of, eventually
from tests.support.trees import assert_same

STEPS = 220
DIRECTORIES = ("a", "b", "c/d")
NAMES = tuple(f"f{n}" for n in range(7))
PAGE = 4096
GONE = ("ENOENT", "ESTALE", "ENOTDIR")


def _reads(path: Path) -> Iterator[bytes]:
    """What each read of the whole file gives."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while part := os.read(descriptor, 1 << 20):
            yield part
    finally:
        os.close(descriptor)


class File:
    """One file at the origin: the contents it has had since the settled moment."""

    def __init__(self, content: bytes) -> None:
        self.versions = [content]
        self.before: list[bytes] = []  # the settled moment
        self.label = ""
        self.has_moved = False  # its descriptors may be of a name that is gone

    @property
    def content(self) -> bytes:
        return self.versions[-1]


class Machine:
    """One run: origin and model change together, reads are checked at once."""

    def __init__(self, source: Path, mount: Mount, seed: int) -> None:
        self.source, self.mount, self.rng = source, mount, random.Random(seed)
        self.now: dict[str, File] = {}
        self.files: list[File] = []  # all that there ever were
        self.past: dict[str, list[File | None]] = {}  # what a path has led to since settled
        self.held: list[tuple[int, str, list[File]]] = []
        self.steps: list[str] = []
        for directory in DIRECTORIES:
            (source / directory).mkdir(parents=True, exist_ok=True)
        for directory in DIRECTORIES:
            for name in NAMES[:4]:
                self._put(f"{directory}/{name}", self._bytes())

    # ---- the model -----------------------------------------------------------------------------
    def _bytes(self) -> bytes:
        size = self.rng.choice((0, 1, 100, 4096, 5000, 20_000, 140_000, 700_000))
        return self.rng.randbytes(size)

    def _history(self, path: str) -> list[File | None]:
        return self.past.setdefault(path, [self.now.get(path)])

    def _lead(self, path: str, file: File | None) -> None:
        self._history(path).append(file)
        if file is not None and file not in self.files:
            file.label = f"file {len(self.files)}, made at {path} in step {len(self.steps)}"
            self.files.append(file)
        if file is None:
            self.now.pop(path, None)
        else:
            self.now[path] = file

    def _put(self, path: str, content: bytes) -> None:
        (self.source / path).write_bytes(content)
        self._lead(path, File(content))

    def _some(self) -> str:
        return self.rng.choice(sorted(self.now)) if self.now else ""

    def _any_path(self) -> str:
        return f"{self.rng.choice(DIRECTORIES)}/{self.rng.choice(NAMES)}"

    def is_changed(self, path: str) -> bool:
        """Whether anything about the path has changed since the settled moment."""
        files = self._history(path)
        return len(files) > 1 or (files[0] is not None and len(files[0].versions) > 1)

    # ---- the origin changes --------------------------------------------------------------------
    def create(self) -> None:
        path = self._any_path()
        if path not in self.now:
            self._put(path, self._bytes())

    def rewrite(self) -> None:
        path = self._some()
        old = self.now[path].content
        same_size = self.rng.random() < 0.5
        content = self.rng.randbytes(len(old)) if same_size else self._bytes()
        before = (self.source / path).stat()
        self.now[path].versions.append(content)
        with open(self.source / path, "r+b") as file:
            file.truncate(len(content))
            file.write(content)
        if self.rng.random() < 0.5:
            os.utime(self.source / path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def append(self) -> None:
        path = self._some()
        more = self.rng.randbytes(self.rng.choice((1, 5000, 100_000)))
        self.now[path].versions.append(self.now[path].content + more)
        with open(self.source / path, "ab") as file:
            file.write(more)

    def truncate(self) -> None:
        path = self._some()
        size = self.rng.randrange(len(self.now[path].content) + 1)
        self.now[path].versions.append(self.now[path].content[:size])
        os.truncate(self.source / path, size)

    def replace(self) -> None:
        path, content = self._any_path(), self._bytes()
        aside = self.source.parent / "aside"
        aside.write_bytes(content)
        aside.rename(self.source / path)
        self._lead(path, File(content))

    def delete(self) -> None:
        path = self._some()
        (self.source / path).unlink()
        self._lead(path, None)

    def rename(self) -> None:
        old, new = self._some(), self._any_path()
        if old == new:
            return
        file = self.now[old]
        file.has_moved = True
        (self.source / old).rename(self.source / new)
        self._lead(old, None)
        self._lead(new, file)

    def exchange_directories(self) -> None:
        aside = self.source.parent / "directory aside"
        one, two = self.source / "a", self.source / "b"
        one.rename(aside)
        two.rename(one)
        aside.rename(two)
        for name in NAMES:
            first, second = self.now.get(f"a/{name}"), self.now.get(f"b/{name}")
            for file in (first, second):
                if file is not None:
                    file.has_moved = True
            self._lead(f"a/{name}", second)
            self._lead(f"b/{name}", first)

    def touch(self) -> None:
        path = self.source / self._some()
        path.chmod(self.rng.choice((0o600, 0o644, 0o444)))
        if self.rng.random() < 0.5:
            os.utime(path)

    # ---- what readers see ----------------------------------------------------------------------
    def _check(self, path: str, contents: list[bytes], offset: int, seen: bytes) -> None:
        """Every page that one read gave, or the part of it, is of one of these contents."""
        for start in range(offset // PAGE * PAGE, offset + len(seen), PAGE):
            at = max(offset, start)
            page = seen[at - offset : start + PAGE - offset]
            assert any(content[at : at + len(page)] == page for content in contents), (
                f"wrong bytes at {at} of {path}: {self._whose(at, page)}"
            )

    def _whose(self, at: int, page: bytes) -> str:
        """To find out what went wrong: what else at the origin has, or had, this page there."""
        found = [
            f"version {number} of {len(contents)} of {file.label}, has moved: {file.has_moved}"
            for file in self.files
            for contents in [file.before + file.versions]
            for number, content in enumerate(contents)
            if content[at : at + len(page)] == page
        ]
        return "; ".join(found) or "nobody's"

    def read(self) -> None:
        path = self._any_path()
        seen: list[bytes] = []  # by each read(2)
        outcome = errno_of(lambda: seen.extend(_reads(self.mount.path / path)))
        if outcome:
            file = self.now.get(path)
            assert outcome in GONE, (path, outcome)
            assert file is None or self.is_changed(path), f"{outcome} for {path}, which is there"
        elif not self.is_changed(path):
            assert path in self.now, f"{path} is not there, and was read"
            assert b"".join(seen) == self.now[path].content, f"wrong content of {path}"
        else:  # it may change between two reads of one page
            files = [file for file in self._history(path) if file]
            offset = 0
            for part in seen:
                self._check(path, [text for file in files for text in file.versions], offset, part)
                offset += len(part)

    def hold(self) -> None:
        path = self._any_path()
        opened: list[int] = []
        errno_of(lambda: opened.append(os.open(self.mount.path / path, os.O_RDONLY)))
        if opened:
            self.held.append((opened[0], path, [file for file in self._history(path) if file]))
        if len(self.held) > 10:
            os.close(self.held.pop(0)[0])

    def read_held(self) -> None:
        if not self.held:
            return
        descriptor, path, files = self.rng.choice(self.held)
        offset = self.rng.randrange(0, 200_000, PAGE)
        seen: list[bytes] = []
        if self.rng.random() < 0.3:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        outcome = errno_of(lambda: seen.append(os.pread(descriptor, 150_000, offset)))
        if outcome:
            assert outcome in GONE, (path, outcome)
            file = self.now.get(path)
            assert files != [file] or self.is_changed(path) or (file and file.has_moved), (
                f"{outcome} for {path}, held open"
            )
        else:
            # Of a file that has moved it shows what the cache holds of the name that is gone (H3).
            contents = [
                content
                for file in files
                for content in (file.before if file.has_moved else []) + file.versions
            ]
            self._check(path, contents, offset, seen[0])

    def list(self) -> None:
        directory = self.rng.choice(DIRECTORIES)
        names: list[str] = []
        outcome = errno_of(lambda: names.extend(os.listdir(self.mount.path / directory)))
        if outcome:  # it has been exchanged since the kernel looked its name up
            assert outcome in ("ESTALE", "ENOENT"), outcome  # or seen between two renames
            assert any(self.is_changed(f"{directory}/{name}") for name in NAMES), outcome
            return
        for name in NAMES:
            path = f"{directory}/{name}"
            if not self.is_changed(path):
                assert names.count(name) == (path in self.now), f"listing of {directory}: {name}"

    def settle(self) -> None:
        """Wait until the mount equals the source; from now on nothing older may be seen."""
        eventually(lambda: assert_same(self.source, self.mount.path), every_s=0.02)
        self.past.clear()
        for file in {*self.now.values()}:
            file.before += file.versions[:-1]
            del file.versions[:-1]
        for descriptor, path, files in self.held:
            if files == [self.now.get(path)] and not files[0].has_moved:
                found = os.pread(descriptor, 1 << 20, 0)
                assert found == files[0].content, f"{path}, held open, is not the new content"

    # ---- faults --------------------------------------------------------------------------------
    def kill(self) -> None:
        self.mount.kill_servers_now()

    def restart(self) -> None:
        eventually(lambda: self.mount.run("restart", self.mount.path).returncode == 0)

    def drop(self) -> None:
        self.mount.drop_kernel_caches()

    def drop_pages(self) -> None:
        errno_of(self.mount.drop_pages)

    def flip_bits(self) -> None:
        paths = [path for path in sorted(self.mount.cache_dir.rglob("*")) if path.is_file()]
        for path in self.rng.sample(paths, min(3, len(paths))):
            if path.name.endswith("-shm") or errno_of(os.stat, path) != "":
                continue
            with contextlib.suppress(FileNotFoundError):  # it was evicted
                self._flip(path)

    def _flip(self, path: Path) -> None:
        with open(path, "r+b") as file:
            for _ in range(5):
                offset = self.rng.randrange(max(1, os.fstat(file.fileno()).st_size))
                byte = os.pread(file.fileno(), 1, offset) or b"\0"
                flipped = byte[0] ^ 1 << self.rng.randrange(8)
                os.pwrite(file.fileno(), bytes([flipped]), offset)

    def lose_cache(self) -> None:
        shutil.rmtree(self.mount.cache_dir, ignore_errors=True)

    def remount(self) -> None:
        for descriptor, _, _ in self.held:
            os.close(descriptor)
        self.held.clear()
        eventually(lambda: self.mount.run("umount", self.mount.path).returncode == 0)
        self.mount.wait_gone()
        self.mount.start()

    def run(self, steps: int) -> None:
        weights: dict[Callable[[], None], int] = {
            **dict.fromkeys((self.create, self.rewrite, self.append, self.truncate), 5),
            **dict.fromkeys((self.replace, self.delete, self.rename, self.touch), 4),
            **dict.fromkeys((self.read, self.read_held), 30),
            **dict.fromkeys((self.hold, self.list), 10),
            self.settle: 8,
            **dict.fromkeys((self.drop, self.drop_pages, self.exchange_directories), 2),
            **dict.fromkeys((self.kill, self.flip_bits), 2),
            **dict.fromkeys((self.restart, self.remount, self.lose_cache), 1),
        }
        try:
            for step in self.rng.choices([*weights], [*weights.values()], k=steps):
                if self.now or step not in (self.rewrite, self.append, self.truncate, self.delete):
                    self.steps.append(step.__name__)
                    step()
            self.settle()
        finally:
            for descriptor, _, _ in self.held:
                os.close(descriptor)


@pytest.mark.claim("C1", "C2", "C3", "C4", "C9", "C10", "H1", "H2", "H3", "K1", "F1")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_operations(place: Place, mounting: Mounting, seed: int) -> None:
    allowed = ["(?i)fault|segment|index|cache directory|rebuil|format|corrupt|disk"]
    source = place.source
    for directory in DIRECTORIES:
        (source / directory).mkdir(parents=True)
    mount = mounting("--ssd", "32M", "--ram", "16M", "--revalidate", "0.4", allow_log=allowed)
    machine = Machine(source, mount, seed)
    machine.settle()
    try:
        machine.run(STEPS)
    except BaseException as error:
        error.add_note(f"seed {seed}, after: {' '.join(machine.steps)}")
        raise

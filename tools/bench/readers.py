"""Runs the compiled reader; one timed pass is one `Pass`.

INVARIANT: the readers are the same program with the same order of files for every peer.
"""

import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("reader.c")
_IN_PYTHON = Path(__file__).with_name("python_reader.py")
_PASS_TIMEOUT_S = 900.0
PREFETCH_FACTOR = 2  # torch's own default


@dataclass(frozen=True)
class Pass:
    seconds: float
    items: int
    size_bytes: int

    @property
    def items_per_s(self) -> float:
        return self.items / self.seconds

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / self.seconds


class Readers:
    """The reader program, compiled into `work`."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._program = work / "reader"
        subprocess.run(
            ["gcc", "-O2", "-o", str(self._program), str(_SOURCE)], check=True, timeout=60
        )

    def _pass(self, *arguments: str) -> Pass:
        return self._run([str(self._program), *arguments])

    def _run(self, command: list[str]) -> Pass:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PASS_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        seconds, items, size_bytes = done.stdout.split()
        return Pass(float(seconds), int(items), int(size_bytes))

    def read_files(
        self, root: Path, names: list[str], readers: int, seed: int, in_python: bool = False
    ) -> Pass:
        """open+fstat+read+close of root/name for all names, in an order made from the seed."""
        order = list(names)
        random.Random(seed).shuffle(order)
        listed = self._work / "order.txt"
        listed.write_text("".join(f"{root}/{name}\n" for name in order))
        if in_python:
            return self._run([sys.executable, str(_IN_PYTHON), str(listed), str(readers)])
        return self._pass("files", str(listed), str(readers))

    def read_batches(self, paths: Iterable[str], readers: int, batch: int) -> Pass:
        """The same in the given order, dealt out in batches as a data loader's workers get them: no
        reader is further ahead of the others than PREFETCH_FACTOR allows.
        """
        ahead = str(readers * PREFETCH_FACTOR)
        listed = self._work / "order.txt"
        listed.write_text("".join(f"{path}\n" for path in paths))
        return self._pass("files", str(listed), str(readers), str(batch), ahead)

    def await_files(self, paths: Iterable[str]) -> Pass:
        """Open each in the given order and wait until all its pages are there; read none of them.

        A file whose pages do not come within 5 ms is read: they may have come and gone.
        """
        listed = self._work / "order.txt"
        listed.write_text("".join(f"{path}\n" for path in paths))
        return self._pass("await", str(listed))

    def read_direct(self, file: Path) -> Pass:
        """The device's sequential bandwidth: one reader, 4 MiB each, past the page cache."""
        return self._pass("direct", str(file))

    def list_entries(self, directory: Path) -> Pass:
        return self._pass("list", str(directory))

    def stat_entries(self, directory: Path) -> Pass:
        return self._pass("stat", str(directory))

    def list_tree(self, directory: Path) -> Pass:
        return self._pass("tree", str(directory))

    def read_stream(self, file: Path) -> Pass:
        return self._pass("stream", str(file))

    def make_tree(self, directory: Path, folders: int, files: int) -> None:
        """`files` empty files in each of `folders` folders."""
        self._pass("make", str(directory), str(folders), str(files))

    def fill_files(self, directory: Path, count: int, size_bytes: int, seed: int) -> list[str]:
        """Files of random bytes in folders of 500; their names relative to the directory."""
        self._pass("fill", str(directory), str(count), str(size_bytes), str(seed))
        return sorted(str(p.relative_to(directory)) for p in directory.rglob("*.bin"))

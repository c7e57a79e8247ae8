"""What all attacks stand on: a dataset whose bytes are known, a mount of it, and the count.

INVARIANT: an attack never repairs what it counts. A wrong read or an error that the origin did not
give is noted once, with what was being done, and stays noted.
"""

import contextlib
import ctypes
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.fusecache_command import FusecacheMount

OTHER_UID = 65534  # a user without rights
_MS_REMOUNT = 32
_MOUNT_FLAGS = os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Count:
    """What was tried (name -> number), and what should not have happened."""

    tried: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    """Reads that gave other bytes than the origin's; listings and stats likewise."""
    errors: int = 0
    """Reads and commands that failed although the origin works."""
    notes: list[str] = field(default_factory=list)
    surprises: dict[str, tuple[str, int]] = field(default_factory=dict)
    """What was being done -> the first line about it, and how many there were."""

    def add(self, other: "Count") -> None:
        self.tried += other.tried
        self.wrong += other.wrong
        self.errors += other.errors

    def wrong_read(self, doing: str, what: str) -> None:
        self.wrong += 1
        self.surprise(doing, f"{what}: wrong bytes")

    def failed(self, doing: str, what: object = "") -> None:
        self.errors += 1
        self.surprise(doing, str(what))

    def surprise(self, doing: str, what: str) -> None:
        line, times = self.surprises.get(doing, (f"{doing}: {what}" if what else doing, 0))
        self.surprises[doing] = (line, times + 1)


class Ground:
    """One attack's directories, and a dataset of `files` files of `bytes_mean` bytes on average
    (log-normal, as photographs are).
    """

    def __init__(self, work: Path, rng: random.Random, files: int, bytes_mean: int) -> None:
        self.rng = rng
        self.work = work
        self.source, self.mountpoint = work / "source", work / "mnt"
        self.cache_dir = work / "cache"
        self.content: dict[str, bytes] = {}
        for number in range(files):
            name = f"class{number % 8}/{number:05d}.jpg"
            size = min(int(rng.lognormvariate(0, 0.6) * bytes_mean), 16 * bytes_mean)
            self.add(name, rng.randbytes(size))

    def add(self, name: str, content: bytes) -> None:
        """One more file, before the dataset is mounted."""
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.content[name] = content

    @contextlib.contextmanager
    def mounted(self, *options: str) -> Iterator[FusecacheMount]:
        with FusecacheMount(self.source, self.mountpoint, self.cache_dir, options) as mount:
            yield mount

    def forget(self) -> None:
        """The kernel forgets the mount's names, inodes and pages, and nobody else's."""
        flags = _MS_REMOUNT | _MOUNT_FLAGS
        if _libc.mount(None, os.fsencode(self.mountpoint), None, flags, None):
            raise OSError(ctypes.get_errno(), "remount", str(self.mountpoint))

    def check(self, name: str, count: Count, doing: str) -> None:
        """Read one file through the mount and compare."""
        count.tried["reads"] += 1
        try:
            found = (self.mountpoint / name).read_bytes()
        except OSError as error:
            count.failed(doing, f"{name}: {error}")
            return
        if found != self.content[name]:
            count.wrong_read(doing, name)

    def check_all(self, count: Count, doing: str) -> None:
        for name in self.rng.sample(sorted(self.content), len(self.content)):
            self.check(name, count, doing)

    def fill(self, mount: FusecacheMount, timeout_s: float = 60.0) -> None:
        """Read until all of it is on SSD: what has just been written is too young to be kept."""
        deadline = time.monotonic() + timeout_s
        count = Count()
        while time.monotonic() < deadline:
            self.forget()
            before = mount.status()["reads"]["from_origin"]
            self.check_all(count, "filling the cache")
            mount.settle()
            if mount.status()["reads"]["from_origin"] == before:
                break
        if count.wrong or count.errors:
            raise RuntimeError(f"before the attack: {count.surprises}")

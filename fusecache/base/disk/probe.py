"""What the device of a cache directory can do: measured once, and kept in the directory (`probe`).

Which layout pays depends on it (docs/LOG.md): `--layout auto` compares random reads at the size of
the samples with large reads beside as many writes. Each figure is the median of several short
passes past the page cache, which are taken in turn with those of the others, so that what disturbs
for a moment spoils few of each; a virtual disk may be cached by its host, and a disk that is used
all the while looks slower than it is.

INVARIANT: the file that is measured has no name, so nothing is left of it, whatever ends us.
INVARIANT: `load` returns nothing that was measured on another device, is damaged, or too old.
It decides nothing: that is hintsd's (hintsd/reorder/worth.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from fusecache.base.disk import cache_names
from fusecache.base.errors import UserError
from fusecache.base.units import format_bytes

log = logging.getLogger(__name__)

FILE_NAME: Final = "probe"
VERSION: Final = 2
FILE_BYTES: Final = 256 << 20
FILE_SHARE: Final = 8  # a file is an eighth of what is free at most, but SMALL_FILE_BYTES at least
SMALL_FILE_BYTES: Final = 32 << 20
FILE_BYTES_LEAST: Final = 4 << 20
PASS_S: Final = 0.08
PASSES: Final = 5  # of each figure
PASSES_S_MOST: Final = 4.0  # of all, where a pass waits long for its last reads; one is made
WRITE_S_MOST: Final = 2.0  # a slow disk is measured on what it has written by then
DEPTH: Final = 64
RANDOM_BYTES: Final = (4 << 10, 16 << 10, 64 << 10, 128 << 10)
LARGE_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 256 << 10  # of what is written
AT_ONCE: Final = 4  # large reads, and pieces
AGE_S_MOST: Final = 30 * 24 * 3600.0

_ALIGNMENT: Final = 4096  # of records, and of their headers together with the payload
_HEADER_BYTES: Final = 192  # of a record of one chunk sum and a path of some 30 bytes
_RESULT_BYTES_MOST: Final = 65536
_NICE: Final = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Bandwidths in bytes/s, each a finite number above 0."""

    device: int  # st_dev of the directory
    device_bytes: int  # size of its file system
    taken_at: float  # seconds since 1970
    sequential_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    """Of large reads, while as much is written."""
    random: tuple[tuple[int, float], ...]
    """(bytes of a read, bandwidth), ascending: random reads, 64 in flight."""
    spread: float = 0.0
    """(Fastest - slowest pass) / median, of the figure whose passes differ most; writes are one."""

    def random_bytes_per_s(self, size_bytes: int) -> float:
        """Payload of random reads of samples of that size: what lies on disk of each is larger.

        Between the sizes that were measured, on straight lines between logarithms (so a limit of
        requests and one of bandwidth are both met exactly); beyond them towards sequential reads
        of 1 MiB.
        """
        on_disk = -(-(max(1, size_bytes) + _HEADER_BYTES) // _ALIGNMENT) * _ALIGNMENT
        points = [*self.random, (LARGE_BYTES, max(self.sequential_bytes_per_s, self.random[-1][1]))]
        return _between(points, on_disk) * size_bytes / on_disk

    def as_map(self) -> dict[str, Any]:
        """For JSON and msgpack."""
        return {**asdict(self), "random": [list(point) for point in self.random]}

    @classmethod
    def from_map(cls, values: Mapping[str, Any]) -> Probe:
        """ValueError: it is none."""
        try:
            random = tuple((int(size), _rate(rate)) for size, rate in values["random"])
            sizes = [size for size, _ in random]
            if not random or sizes[0] < 1 or sorted(set(sizes)) != sizes or sizes[-1] > LARGE_BYTES:
                raise ValueError("sizes that do not ascend")
            return cls(
                device=int(values["device"]),
                device_bytes=int(values["device_bytes"]),
                taken_at=float(values["taken_at"]),
                sequential_bytes_per_s=_rate(values["sequential_bytes_per_s"]),
                write_bytes_per_s=_rate(values["write_bytes_per_s"]),
                mixed_bytes_per_s=_rate(values["mixed_bytes_per_s"]),
                random=random,
                spread=_share(values.get("spread", 0.0)),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"no result of a probe: {error!r}") from None


def _rate(value: Any) -> float:
    rate = float(value)
    if not 0 < rate < math.inf:
        raise ValueError(f"{value!r} is no bandwidth")
    return rate


def _share(value: Any) -> float:
    share = float(value)
    if not 0 <= share < math.inf:
        raise ValueError(f"{value!r} is no share")
    return share


def _between(points: list[tuple[int, float]], size: int) -> float:
    """At `size`, on lines between the logarithms of sizes and rates; the ends go on as they are."""
    before_size, before = points[0]
    for next_size, following in points:
        if size <= next_size:
            if size <= before_size:
                return before
            share = math.log(size / before_size) / math.log(next_size / before_size)
            return float(before * (following / before) ** share)
        before_size, before = next_size, following
    return before


def load(directory: Path) -> Probe | None:
    """What was measured of this directory's device in the last 30 days, if it is kept there."""
    try:
        with open(directory / FILE_NAME, "rb", opener=_open_plain) as file:
            kept = json.loads(file.read(_RESULT_BYTES_MOST))
        found = Probe.from_map(kept["probe"])
        if kept["version"] != VERSION or kept["checksum"] != _checksum(found):
            return None
        age_s = time.time() - found.taken_at
        if _device_of(directory) != (found.device, found.device_bytes):
            return None
        return found if 0 <= age_s <= AGE_S_MOST else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def measure(directory: Path, file_bytes: int | None = None, pass_s: float = PASS_S) -> Probe:
    """Measure, and keep the result there. Takes about 3 s, and room for `file_bytes`; None: for
    FILE_BYTES, or less where less is free.

    UserError: the directory is not there or not writable, holds others' files, has no room, or its
    file system takes no direct I/O.
    """
    from fusecache import _native  # hintsd reads results, and needs no more

    try:
        # Nothing is written among other people's files, which may lie on quite another disk.
        cache_names.check(str(directory.absolute()))
        file_bytes = file_bytes or _file_bytes(directory)
        # Without a name where the file system has that (O_TMPFILE), else unlinked at once.
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            fd = file.fileno()
            os.posix_fallocate(fd, 0, file_bytes)
            _leave_page_cache(fd, directory)

            def run(
                size: int, reads: int = 0, writes: int = 0, read_bytes: int = LARGE_BYTES,
                is_random: bool = False, seconds: float = pass_s,
            ) -> tuple[int, int, float]:  # fmt: skip
                return _native.probe_io(
                    fd, size, read_bytes, reads, PIECE_BYTES, writes, is_random, seconds
                )

            _, written, write_s = run(file_bytes, writes=AT_ONCE, seconds=WRITE_S_MOST)
            if written < min(file_bytes, FILE_BYTES_LEAST):
                raise UserError(
                    f"{directory}: only {format_bytes(written)} could be written in "
                    f"{WRITE_S_MOST:g} s: too slow to be measured"
                )
            # What was never written is not read from the device.
            size = written // LARGE_BYTES * LARGE_BYTES
            os.fdatasync(fd)

            def reads(read_bytes: int) -> float:
                read, _, seconds = run(size, reads=DEPTH, read_bytes=read_bytes, is_random=True)
                return read / seconds

            def large_reads(writes: int = 0) -> float:
                read, _, seconds = run(size, reads=AT_ONCE, writes=writes)
                return read / seconds

            rates, spread = _medians(
                [
                    large_reads,
                    *(partial(reads, read_bytes) for read_bytes in RANDOM_BYTES),
                    partial(large_reads, AT_ONCE),
                ]
            )
        device, device_bytes = _device_of(directory)
        found = Probe.from_map(
            {
                "device": device,
                "device_bytes": device_bytes,
                "taken_at": time.time(),
                "sequential_bytes_per_s": rates[0],
                "write_bytes_per_s": written / write_s,
                "mixed_bytes_per_s": rates[-1],
                "random": list(zip(RANDOM_BYTES, rates[1:-1], strict=True)),
                "spread": spread,
            }
        )
        _keep(directory, found)
    except OSError as error:
        room = ""
        if error.errno == errno.ENOSPC and file_bytes:
            room = f" (it takes {format_bytes(file_bytes)})"
        raise UserError(f"{directory} cannot be measured: {error.strerror}{room}") from None
    return found


def _file_bytes(directory: Path) -> int:
    """Of a file that leaves room for others. UserError: there is too little room."""
    disk = os.statvfs(directory)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < SMALL_FILE_BYTES:
        raise UserError(
            f"{directory} cannot be measured: that takes {format_bytes(SMALL_FILE_BYTES)}, and "
            f"{format_bytes(free_bytes)} are free on its disk"
        )
    share = free_bytes // FILE_SHARE // LARGE_BYTES * LARGE_BYTES
    return min(FILE_BYTES, max(SMALL_FILE_BYTES, share))


def together(parts: Sequence[Probe]) -> Probe:
    """Of a cache that is striped over these: segments alternate between the directories, so all
    wait for the slowest. Directories on one device are no more than one. The same device as the
    first one's, as old as the oldest.
    """
    by_device = {part.device: part for part in parts}
    slowest = [
        min(by_device.values(), key=lambda part: dict(part.random).get(size, math.inf))
        for size, _ in parts[0].random
    ]
    count = len(by_device)
    return replace(
        parts[0],
        device_bytes=sum(part.device_bytes for part in by_device.values()),
        taken_at=min(part.taken_at for part in parts),
        sequential_bytes_per_s=count * min(part.sequential_bytes_per_s for part in parts),
        write_bytes_per_s=count * min(part.write_bytes_per_s for part in parts),
        mixed_bytes_per_s=count * min(part.mixed_bytes_per_s for part in parts),
        random=tuple(
            (size, count * dict(part.random)[size])
            for (size, _), part in zip(parts[0].random, slowest, strict=True)
        ),
    )


def _medians(figures: list[Callable[[], float]]) -> tuple[list[float], float]:
    """Of passes of each in turn; and how far those of one figure lie apart at most, as a share."""
    begin = time.monotonic()
    rounds = [[one() for one in figures]]
    while len(rounds) < PASSES and time.monotonic() - begin < PASSES_S_MOST:
        rounds.append([one() for one in figures])
    passes = list(zip(*rounds, strict=True))
    medians = [statistics.median(some) for some in passes]
    if not all(medians):
        raise OSError(errno.EIO, "a pass read nothing")
    return medians, max(
        (max(some) - min(some)) / median for some, median in zip(passes, medians, strict=True)
    )


class Device:
    """What is known of the directories' devices while a server lives: as it was kept, or measured.
    Of several: as one (`together`), once all are known; one that cannot be measured counts nothing.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._parts = {directory: load(directory) for directory in directories}
        self.fault = ""
        """Why it could not be measured."""
        self._thread: threading.Thread | None = None

    @property
    def found(self) -> Probe | None:
        parts = list(self._parts.values())
        known = [part for part in parts if part is not None]
        return together(known) if known and len(known) == len(parts) else None

    def measure_once(self) -> None:
        """In a thread of low priority, unless it is known; `found` is there when it is done. What
        fails is logged, and not tried again.
        """
        if self.found is None and self._thread is None:
            self._thread = threading.Thread(target=self._measure, daemon=True)
            self._thread.start()

    def _measure(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread
        for directory in [path for path, part in self._parts.items() if part is None]:
            try:
                self._parts[directory] = measure(directory)
            except UserError as error:
                log.warning("--layout auto stays static: %s", error)
                if len(self._parts) > 1:
                    del self._parts[directory]
                else:
                    self.fault = str(error)


def _leave_page_cache(fd: int, directory: Path) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        raise UserError(
            f"{directory} cannot be measured: its file system takes no direct I/O"
        ) from None


def _device_of(directory: Path) -> tuple[int, int]:
    disk = os.statvfs(directory)
    return os.stat(directory).st_dev, disk.f_blocks * disk.f_frsize


def _checksum(probe: Probe) -> int:
    return zlib.crc32(json.dumps(probe.as_map(), sort_keys=True).encode())


def _keep(directory: Path, probe: Probe) -> None:
    """One line, whole or not at all."""
    kept = {"version": VERSION, "probe": probe.as_map(), "checksum": _checksum(probe)}
    fd, temporary = tempfile.mkstemp(prefix=f"{FILE_NAME}.", suffix=".tmp", dir=directory)
    try:
        with open(fd, "w", encoding="ascii") as file:
            file.write(json.dumps(kept) + "\n")
        os.replace(temporary, directory / FILE_NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

"""The journal: what a hintsd that starts has to know of the jobs of the one before.

One directory, `jobs/` beside hintsd's socket (docs/WIRE.md, "Journal"):

    lock             held by the hintsd that lives
    number           of the job that began last
    <job>.job        the job: its message, its process
    <job>.position   [epoch, position], rewritten as the reader goes on
    <job>.scores     expected uses of each sample, if they were told

These are files of their own because a job's message can be hundreds of megabytes of paths.
Nothing is synced: after a crash of the machine no job's process lives, and nothing is wanted.

INVARIANT: no number is given twice, as long as the directory lives.
INVARIANT: each file appears under its name complete, or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
from dataclasses import dataclass
from typing import Any, Final, get_origin, get_type_hints

import msgpack  # type: ignore[import-untyped]

from fusecache.base import processes

log = logging.getLogger(__name__)

VERSION: Final = 1
LOCK_FILE: Final = "lock"
NUMBER_FILE: Final = "number"
JOB_SUFFIX: Final = ".job"
POSITION_SUFFIX: Final = ".position"
SCORES_SUFFIX: Final = ".scores"
TEMPORARY_SUFFIX: Final = ".new"
NUMBER_MOST: Final = 1 << 60  # msgpack must be able to hold the next one


class JournalBusy(Exception):
    """Another hintsd holds this journal; one line."""


@dataclass
class Entry:
    """One job."""

    job: str
    uid: int
    pid: int
    """Of the process whose end ends the job; 0: none does."""
    pid_start: int
    """When that process began: `process_start`."""
    message: dict[str, Any]
    """Of its hint: `Hint.to_message`."""
    epoch: int
    position: int
    """Index of the sample within the epoch."""


_KINDS: Final = {name: get_origin(kind) or kind for name, kind in get_type_hints(Entry).items()}


def _number_in(name: str) -> int:
    match = re.search(r"-(\d{1,15})$", name)
    return int(match[1]) if match is not None else 0


def process_start(pid: int) -> int | None:
    """When process `pid` began, in clock ticks since boot (field 22 of /proc/pid/stat).

    None: it is gone, or only its exit status is left. Together with the pid it names a process.
    """
    fields = processes.stat(pid)
    return int(fields[19]) if fields and fields[0] not in b"ZX" else None


class Journal:
    """See the module. Methods raise OSError when the directory cannot be written."""

    def __init__(self, directory: str) -> None:
        """Take the journal over. JournalBusy; OSError: the directory is not ours alone."""
        self._directory = directory
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        status = os.lstat(directory)
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not is_ours or status.st_mode & 0o077:
            raise PermissionError(1, "is not a directory of yours with mode 0700", directory)
        self._lock_fd = os.open(
            os.path.join(directory, LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace")
            os.close(self._lock_fd)
            raise JournalBusy(f"a hintsd runs here already (process {holder})") from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, b"%d" % os.getpid(), 0)

        self._number = self._last_number()

    def number(self, before: str) -> int:
        """For the name of a new job: larger than those of all jobs before. `before`: the name that
        it had, perhaps from a hintsd whose journal is lost; or "".
        """
        self._number = max(self._number, _number_in(before)) + 1
        try:
            self._write(NUMBER_FILE, self._number)
        except OSError as error:
            log.warning("journal: the next hintsd may give names again: %s", error)
        return self._number

    def _last_number(self) -> int:
        """Of what cannot be read, the jobs that are here tell the least it can be."""
        numbers = [
            _number_in(name.removesuffix(JOB_SUFFIX)) for name in os.listdir(self._directory)
        ]
        with contextlib.suppress(OSError, ValueError):
            number = self._unpack(NUMBER_FILE)
            if type(number) is int and number < NUMBER_MOST:
                numbers.append(number)
        return max(numbers)

    def close(self) -> None:
        """Let another hintsd have it. The files stay."""
        os.close(self._lock_fd)

    def write(self, entry: Entry) -> None:
        """Add a job, or replace it."""
        self._write(entry.job + JOB_SUFFIX, {"version": VERSION, **vars(entry)})
        self._remove(entry.job + POSITION_SUFFIX)
        self._remove(entry.job + SCORES_SUFFIX)

    def move(self, job: str, epoch: int, position: int) -> None:
        """Note where the job is now."""
        self._write(job + POSITION_SUFFIX, [epoch, position])

    def score(self, job: str, uses: bytes) -> None:
        """Note what was told of the uses of its samples (docs/WIRE.md, `scores`)."""
        self._write(job + SCORES_SUFFIX, uses)

    def scores(self, job: str) -> bytes | None:
        """What was noted; None: nothing. ValueError, OSError: it cannot be read."""
        try:
            uses = self._unpack(job + SCORES_SUFFIX)
        except FileNotFoundError:
            return None
        if type(uses) is not bytes:
            raise ValueError("not msgpack of bytes")
        return uses

    def forget_scores(self, job: str) -> None:
        self._remove(job + SCORES_SUFFIX)

    def remove(self, job: str) -> None:
        for suffix in (JOB_SUFFIX, POSITION_SUFFIX, SCORES_SUFFIX):
            self._remove(job + suffix)

    def load(self) -> list[Entry]:
        """The jobs whose process lives. All else in the directory is removed, what cannot be read
        with a warning.
        """
        entries, kept = [], {LOCK_FILE, NUMBER_FILE}
        for name in sorted(os.listdir(self._directory)):
            if not name.endswith(JOB_SUFFIX):
                continue
            job = name.removesuffix(JOB_SUFFIX)
            try:
                entry = self._read(job)
            except (OSError, ValueError) as error:
                log.warning("journal: %s cannot be read and is removed: %s", name, error)
                continue
            if entry.pid and process_start(entry.pid) != entry.pid_start:
                log.info("job %s: process %d has ended meanwhile", job, entry.pid)
                continue
            kept |= {name, job + POSITION_SUFFIX, job + SCORES_SUFFIX}
            entries.append(entry)
        for name in set(os.listdir(self._directory)) - kept:
            self._remove(name)
        return entries

    def _read(self, job: str) -> Entry:
        values = self._unpack(job + JOB_SUFFIX)
        if type(values) is not dict or values.get("version") != VERSION:
            raise ValueError("not a journal of version 1")
        for name, kind in _KINDS.items():
            if type(values.get(name)) is not kind:
                raise ValueError(f"field {name} is missing or of the wrong type")
        if values["job"] != job:
            raise ValueError("field job is another name than the file's")
        place = [values["epoch"], values["position"]]
        with contextlib.suppress(FileNotFoundError):
            place = self._unpack(job + POSITION_SUFFIX)
        if type(place) is not list or [type(value) for value in place] != [int, int]:
            raise ValueError("the position is not [epoch, index]")
        epoch, position = place
        if min(epoch, position, values["pid"]) < 0:
            raise ValueError("a number is negative")
        values |= {"epoch": epoch, "position": position}
        return Entry(**{name: values[name] for name in _KINDS})

    def _unpack(self, name: str) -> Any:
        with open(os.path.join(self._directory, name), "rb") as file:
            data = file.read()
        try:
            return msgpack.unpackb(data)
        except Exception as error:  # msgpack raises many kinds, of no common base
            raise ValueError(f"not msgpack: {error or type(error).__name__}") from None

    def _write(self, name: str, value: object) -> None:
        path = os.path.join(self._directory, name)
        with open(path + TEMPORARY_SUFFIX, "wb") as file:
            msgpack.pack(value, file)
        os.rename(path + TEMPORARY_SUFFIX, path)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._directory, name))

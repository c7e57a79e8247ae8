"""The log of a mount: the keeper's lines, and what its servers write."""

from __future__ import annotations

import contextlib
import json
import logging
import os

from fusecache.base import logs, mounts, trust
from fusecache.keeper.mounting import Json, KeeperError

NAME = "fusecache.keeper"


class LogFile:
    """Our stdout and stderr, so the servers' too. In the foreground it is a file only where one was
    chosen.
    """

    def __init__(self, foreground: bool, config: Json) -> None:
        self._foreground = foreground
        self._directory = ""
        self._begin = 0  # of the present server's part
        self.use(config)

    @property
    def is_file(self) -> bool:
        return self._chosen is not None or not self._foreground

    @property
    def path(self) -> str:
        return str(self._chosen or os.path.join(self._directory, mounts.LOG_FILE))

    def use(self, config: Json) -> None:
        """Of the mount. Its `log_file` (None: in the runtime directory) from the next `open` on."""
        self._chosen: str | None = config.get("log_file")
        self._least = logging.getLevelNamesMapping()[config.get("log_level", "info").upper()]
        form = config.get("log_format", "text")
        self._formatter = logs.Formatter(form, config["mountpoint"])

    def write(self, level: str, line: str) -> None:
        number = logging.getLevelNamesMapping()[level]
        if number < self._least:
            return
        record = logging.LogRecord(NAME, number, "", 0, line, None, None)
        with contextlib.suppress(OSError):
            os.write(2, os.fsencode(self._formatter.format(record) + "\n"))

    def open_in(self, directory: str) -> None:
        """With this runtime directory. KeeperError."""
        self._directory = directory
        self._open(must=True)

    def begin_part(self, must: bool) -> None:
        """Of the next server. Rotates a large one. KeeperError, if it `must` be opened."""
        self._open(must)
        self._begin = os.fstat(2).st_size

    def _open(self, must: bool) -> None:
        if not self.is_file:
            return
        try:
            fd = trust.open_log(self.path)
        except OSError as error:
            if must:
                raise KeeperError(f"cannot write the log {self.path}: {error.strerror}") from None
            return
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)

    def last_words(self) -> str:
        """What the present server wrote last: mostly the exception that ended it. May be empty."""
        if not self.is_file:
            return ""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                begin = max(self._begin, os.fstat(file.fileno()).st_size - 8192)
                file.seek(begin)
                lines = os.fsdecode(file.read()).splitlines()
        except OSError:
            return ""
        for line in reversed(lines):
            if words := _words(line):
                return f"; its last words: {words}"
        return ""

    def keep_after_failure(self) -> str:
        """Where the log of a start that failed can be read, for the end of a line: the runtime
        directory goes away.
        """
        kept = self.path
        if self._chosen is None:
            if self._foreground:
                return ""
            kept = os.path.join(os.path.dirname(self._directory), "last-failure.log")
            try:
                os.replace(self.path, kept)
            except OSError:
                return ""
        return f" (log: {kept})"


def _words(line: str) -> str:
    """Of a server, in a line of the log; "": there are none, or they are the keeper's."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            fields = json.loads(line)
            if fields.get("logger") == NAME:
                return ""
            line = str(fields.get("exception") or fields.get("message")).splitlines()[-1]
    words = line.strip(" |+-")  # the frame that trio draws around nested exceptions
    return "" if f" {NAME}: " in words else words

"""How log lines look: of keeper, server and hintsd alike (docs/OPERATING.md, "Log files").

* text: `2026-11-25 20:21:06,123 INFO fusecache.read.origin: what happened`
* json: an object a line, with ts (RFC 3339), level, logger, message; where they are known mount,
  and exception (a traceback).
* Where the lines go to systemd's journal, each begins with its priority, `<N>` (sd-daemon(3)), and
  text has no time: the journal has both.

Standard library only: the keeper logs by it, too.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Final, TextIO

FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")

_PRIORITIES: Final = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


def priority(level: str, fd: int = 2) -> str:
    """`<N>` where `fd` is the journal, else "". `level`: as logging names it."""
    try:
        place = os.fstat(fd)
    except OSError:
        return ""
    is_journal = os.environ.get("JOURNAL_STREAM") == f"{place.st_dev}:{place.st_ino}"
    return f"<{_PRIORITIES.get(level, 6)}>" if is_journal else ""


class Formatter(logging.Formatter):
    """One record to one line, or with a traceback in text to several.

    What a client sends or a file is named makes no line of its own. A record's attribute `mount`
    wins over the one given here.
    """

    def __init__(self, form: str, mount: str = "", fd: int = 2) -> None:
        super().__init__()
        self._is_json = form == "json"
        self._mount = mount
        self._fd = fd

    def format(self, record: logging.LogRecord) -> str:
        mark = priority(record.levelname, self._fd)
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._is_json:
            return mark + self._object(record, trace)
        line = f"{record.name}: {_on_one_line(record.getMessage())}"
        if not mark:
            line = f"{self.formatTime(record)} {record.levelname} {line}"
        return "\n".join(mark + part for part in [line, *trace.splitlines()])

    def _object(self, record: logging.LogRecord, trace: str) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        mount = getattr(record, "mount", self._mount)
        fields = {
            "ts": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **({"mount": mount} if mount else {}),
            **({"exception": trace} if trace else {}),
        }
        return json.dumps({name: _as_unicode(value) for name, value in fields.items()})


def begin(level: str, form: str, *, mount: str = "", stream: TextIO | None = None) -> None:
    """Log to `stream`, or stderr, from now on, warnings of Python's too."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Formatter(form, mount, 2 if stream is None else stream.fileno()))
    logging.basicConfig(handlers=[handler], level=level.upper())
    logging.captureWarnings(True)


def _on_one_line(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _as_unicode(text: str) -> str:
    """A lone surrogate, of a file name that is no UTF-8, as \\udcff: many take no JSON with one."""
    return text.encode("utf-8", "backslashreplace").decode()

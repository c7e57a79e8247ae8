"""How log lines look, to people, to the journal and to machines."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from fusecache.base import command, logs
from fusecache.keeper.log_file import LogFile

STRANGE = "a\nINFO b\x1b[0m\udcff é"


def record(level: int = logging.INFO, *, fails: bool = False) -> logging.LogRecord:
    try:
        raise OSError("no space")
    except OSError:
        told = sys.exc_info() if fails else None
    return logging.LogRecord("x.y", level, "", 0, "refused: %s", (STRANGE,), told)


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A descriptor that is the journal, as systemd tells a service."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        place = os.fstat(theirs.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{place.st_dev}:{place.st_ino}")
        yield theirs.fileno()


def test_text_has_time_and_level_and_a_name_makes_no_line_of_its_own() -> None:
    line = logs.Formatter("text", "/data/a").format(record())
    stamp, _, rest = line.partition(" INFO ")
    assert datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f")
    assert rest == r"x.y: refused: a\nINFO b\x1b[0m\udcff é"
    lines = logs.Formatter("text").format(record(fails=True)).splitlines()
    assert lines[-1] == "OSError: no space"


def test_json_is_one_object_a_line() -> None:
    line = logs.Formatter("json", "/data/\udcff").format(record(logging.WARNING, fails=True))
    assert "\n" not in line
    assert line.isascii()
    told = json.loads(line)
    assert datetime.fromisoformat(told.pop("ts")).utcoffset() is not None
    assert told.pop("exception").endswith("OSError: no space")
    assert told == {
        "level": "warning",
        "logger": "x.y",
        "message": "refused: a\nINFO b\x1b[0m\\udcff é",
        "mount": "/data/\\udcff",
    }
    named = record()
    named.mount = "/data/b"
    assert json.loads(logs.Formatter("json").format(named))["mount"] == "/data/b"
    assert {"mount", "exception"}.isdisjoint(json.loads(logs.Formatter("json").format(record())))


def test_the_journal_is_told_the_priority_of_every_line_and_has_the_time(journal: int) -> None:
    lines = logs.Formatter("text", fd=journal).format(record(logging.ERROR, fails=True))
    assert all(line.startswith("<3>") for line in lines.split("\n"))
    assert lines.startswith("<3>x.y: refused: ")
    assert lines.endswith("\n<3>OSError: no space")
    assert logs.Formatter("json", fd=journal).format(record()).startswith('<6>{"ts": ')


def test_what_is_not_the_journal_gets_no_priority(journal: int, tmp_path: Path) -> None:
    """JOURNAL_STREAM is inherited by those whose stderr leads elsewhere."""
    with open(tmp_path / "log", "w") as file:
        assert logs.priority("ERROR", file.fileno()) == ""
    assert logs.priority("ERROR", journal) == "<3>"


def test_keeper_and_commands_log_by_the_same_rules(
    journal: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = {"mountpoint": "/data/a", "log_format": "json", "log_level": "warning"}
    kept = LogFile(foreground=True, config=config)
    kept.write("INFO", "mounted")
    kept.write("WARNING", "server 7 hangs")
    told = json.loads(capfd.readouterr().err)
    assert (told["level"], told["logger"]) == ("warning", "fusecache.keeper")
    assert (told["mount"], told["message"]) == ("/data/a", "server 7 hangs")
    kept.use({"mountpoint": "/data/a"})
    saved = os.dup(2)
    with open(tmp_path / "log", "w+") as file:
        os.dup2(file.fileno(), 2)
        place = os.fstat(2)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("JOURNAL_STREAM", f"{place.st_dev}:{place.st_ino}")
                kept.write("INFO", "mounted")
                patch.setattr(sys, "stderr", file)
                command.complain("fusecache", "warning: slow")
                command.complain("fusecache", "no such mount")
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        file.seek(0)
        assert file.read().splitlines() == [
            "<6>fusecache.keeper: mounted",
            "<4>fusecache: warning: slow",
            "<3>fusecache: no such mount",
        ]

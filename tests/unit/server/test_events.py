"""What the front says of records: which are forgotten, and which are quarantined."""

from __future__ import annotations

import logging

import pytest

from fusecache import _native
from fusecache.server.serving import note_record

UNKNOWN = 99


def noted(kind: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What was done about record 3 of segment 2, which inode 5 has led to."""
    monkeypatch.setattr(_native, "path", lambda ino: b"dir/\xff")
    done: list[tuple[object, ...]] = []
    note_record(
        (kind, 2, 3, 5),
        lambda *told: done.append(("forget", *told)),
        lambda *told: done.append(("quarantine", *told)),
    )
    return done


def test_a_bad_record_is_quarantined_and_one_that_was_evicted_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    when = "read for dir/\\xff"
    assert noted(_native.EVENT_FAULT, monkeypatch) == [("quarantine", "checksum", 2, 3, when)]
    assert noted(_native.EVENT_UNREAD, monkeypatch) == [("quarantine", "read", 2, 3, when)]
    assert noted(_native.EVENT_PUNCHED, monkeypatch) == [("forget", 2, 3)]


def test_an_event_of_an_unknown_kind_quarantines_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert noted(UNKNOWN, monkeypatch) == []
    assert [record.message for record in caplog.records] == [
        f"the front told of an event of kind {UNKNOWN}, which is not known here"
    ]

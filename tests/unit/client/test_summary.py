"""The last line of `hintsd run`: what it makes of what processes have noted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hintsd.client import summary


def said(*notes: tuple[int, int, str, str]) -> summary.Summary:
    return summary.Summary([json.dumps(note).encode() + b"\n" for note in notes])


def test_what_became_of_each_loader() -> None:
    nothing = said()
    assert str(nothing) == "no DataLoader was read"
    assert not nothing.is_whole
    one = said((7, 0, "waiting", ""), (7, 0, "hinted", ""), (7, 0, "over", "closed"))
    assert (str(one), one.is_whole) == ("1 loader hinted", True)
    several = said(
        (7, 0, "hinted", ""),
        (8, 0, "hinted", ""),
        (8, 0, "waiting", "hintsd went away"),
        (7, 1, "over", "no paths"),
        (8, 1, "over", "no paths"),
        (8, 2, "waiting", ""),
    )
    assert not several.is_whole
    assert str(several) == (
        "2 loaders hinted, 3 not: no paths (2 loaders); hintsd has not answered"
    )


def test_a_hint_that_was_wrong_or_was_given_up_is_none() -> None:
    wrong = said((7, 0, "hinted", ""), (7, 0, "wrong", "another seed"))
    assert str(wrong) == "0 loaders hinted, 1 not: another seed"
    found = said((7, 0, "hinted", ""), (7, 0, "wrong", "another seed"), (7, 0, "hinted", ""))
    assert found.is_whole
    given_up = said((7, 0, "hinted", ""), (7, 0, summary.FAILED, "not read"), (7, 0, "over", "x"))
    assert given_up.reasons.total() == 1


def test_notes_go_where_hintsd_run_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv(summary.NOTES, str(notes))
    summary.note(0, "hinted", "")
    assert not notes.exists()  # nobody waits for them any more
    notes.touch()
    summary.note(0, "waiting", "no hintsd\nanswers; going on without hints")
    assert (
        str(summary.Summary(notes.read_bytes().splitlines()))
        == "0 loaders hinted, 1 not: no hintsd answers"
    )
    monkeypatch.delenv(summary.NOTES)
    summary.note(1, "hinted", "")
    assert len(notes.read_text().splitlines()) == 1


def test_what_is_no_note_is_left_out_and_what_is_no_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = [b"x\n", b'[1, 2, "hin', b"\xff\n", b"[1, 2, 3]\n", b"7\n", b'[[], 1, "a", "b"]\n', b"\n"]
    assert str(summary.Summary([*odd, b'[7, 0, "hinted", ""]\n'])) == "1 loader hinted"
    fifo = tmp_path / "fifo"  # another user's, where ours was
    os.mkfifo(fifo)
    monkeypatch.setenv(summary.NOTES, str(fifo))
    summary.note(0, "hinted", "")
    assert fifo.is_fifo()


def test_what_would_become_of_each_loader() -> None:
    def explained(*notes: tuple[int, int, str, str]) -> summary.Explained:
        return summary.Explained([json.dumps(note).encode() for note in notes] + [b"{"])

    nothing = explained((7, 0, summary.NEEDLESS, "in memory"))
    assert (nothing.lines, nothing.is_whole) == (["in memory"], False)
    whole = explained(
        (7, 0, summary.WOULD_BE, "this"), (7, 1, summary.WOULD_BE, "this"),
        (8, 0, summary.WOULD_BE, "this"), (8, 2, summary.NEEDLESS, "in memory"),
    )  # fmt: skip
    assert (whole.lines, whole.is_whole) == (["this (in 2 processes)", "this", "in memory"], True)
    partly = explained((7, 0, summary.WOULD_BE, "this"), (7, 1, summary.WOULD_NOT_BE, "that"))
    assert (partly.lines, partly.is_whole) == (["this", "that"], False)

"""What tools/loaders makes of a stack's run: the verdict, and which files the kernel saw opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.loaders_lib.__main__ import row
from tools.loaders_lib.judging import Announced, Explained, Judged, differs, judge
from tools.loaders_lib.stacks import STACKS, _Opens

ORDER = ["a", "b", "c", "d"]
EXACT = Judged("exact", "", False)
NO = Judged("no", "why", False)


@pytest.mark.parametrize(
    ("read", "early", "verdict"),
    [
        ("abcd", 0, "exact"),
        ("cd", 0, "exact"),  # resumed
        ("abdc", 0, "wrong"),
        ("abdc", 1, "exact"),
        ("bcda", 1, "exact"),  # `a` is late, the others are early
        ("dabc", 2, "wrong"),
        ("dc", 1, "exact"),
        ("abcc", 3, "wrong"),
        ("abc", 3, "wrong"),
    ],
)
def test_the_verdict_on_an_epoch(read: str, early: int, verdict: str) -> None:
    announced = {7: [Announced({0: ORDER}, False)]}
    assert judge({7: [list(read)]}, announced, "", early).verdict == verdict


def test_a_row_says_how_exact_an_order_is() -> None:
    assert row(STACKS["tf_data"], EXACT, "2").endswith("| exact, as each epoch begins |")
    assert row(STACKS["tf_data_parallel"], EXACT, "2").endswith(
        "| exact, as each epoch begins; opened up to 3 files early |"
    )


@pytest.mark.parametrize(
    ("code", "line", "judged", "otherwise"),
    [
        (0, "would be hinted: as each epoch begins", EXACT, ""),
        (0, "would be hinted: all epochs ahead", EXACT, "it does not say: as each epoch begins"),
        (1, "would not be hinted: why; do", NO, ""),
        (1, "would not be hinted: x; do", NO, "it does not say: why"),
        (0, "would be hinted", NO, "it exits with 0"),
        (1, "would not be hinted: why", EXACT, "it exits with 1"),
        (1, "no DataLoader was read", NO, "it exits with 1"),
    ],
)
def test_what_explain_says_otherwise(code: int, line: str, judged: Judged, otherwise: str) -> None:
    assert differs(Explained(code, [line]), judged) == otherwise


def test_the_kernel_tells_what_was_opened(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("y/2.png", "x/1.png", "y/3.png")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    opens = _Opens(str(tmp_path))
    assert opens.told() == []
    for file in [*files, files[0]]:
        file.read_bytes()
        list(file.parent.iterdir())
    assert opens.told() == ["y/2.png", "x/1.png", "y/3.png", "y/2.png"]
    assert opens.told() == []

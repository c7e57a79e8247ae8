"""What the documentation claims is tested: every claim of SEMANTICS.md is quoted by a test."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLAIM = re.compile(r"^\* \*\*([A-Z][0-9]+)\*\* ", re.MULTILINE)


def claims() -> list[str]:
    return CLAIM.findall((ROOT / "docs/SEMANTICS.md").read_text())


def quoted() -> Iterator[tuple[str, str]]:
    """(claim number, test that quotes it) for every `pytest.mark.claim` on a test function."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == (
                    "pytest.mark.claim"
                ):
                    assert node.name.startswith("test_"), f"{node.name} is not a test"
                    for argument in decorator.args:
                        yield ast.literal_eval(argument), f"{path.name}::{node.name}"


def test_every_claim_is_numbered_once() -> None:
    twice = [number for number, count in Counter(claims()).items() if count > 1]
    assert not twice
    text = (ROOT / "docs/SEMANTICS.md").read_text()
    bullets = [line for line in text.splitlines() if line.startswith("* ")]
    assert len(bullets) == len(claims()) > 40


def test_every_claim_has_a_test() -> None:
    assert set(claims()) - {number for number, _ in quoted()} == set()


def test_no_test_quotes_a_claim_that_is_not_there() -> None:
    known = set(claims())
    assert [(number, test) for number, test in quoted() if number not in known] == []


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    missing = []
    for document in documents:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            if "://" not in target and not (document.parent / target).exists():
                missing.append((document.name, target))
    assert missing == []

"""Each object of the store alone writes its fields (docs/ARCHITECTURE.md, "Layout: rooms")."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

STORE = Path(__file__).resolve().parents[3] / "fusecache/store"


@pytest.mark.parametrize("path", sorted(STORE.rglob("*.py")), ids=lambda path: path.stem)
def test_nobody_writes_fields_of_another_object(path: Path) -> None:
    written = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and ast.unparse(node.value) != "self"
    ]
    assert written == []

"""What is stored of one dataset's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusecache.store.index import index
from tests.support.store_support import DATASET, MIB, content, opened

OTHER = b"another dataset!"


@pytest.mark.parametrize("page_rows", [1, 3, 12, 13, 50_000])
def test_each_file_counts_once_for_each_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_rows: int
) -> None:
    monkeypatch.setattr(index, "_SUM_ROWS", page_rows)
    with opened(tmp_path / "cache", limit_bytes=64 * MIB) as store:
        assert store.store.dataset_bytes(DATASET) == 0
        for number in range(10):
            store.put(b"%d/%d" % (number % 3, number), content(number, 10_000 + number))
        for name in (b"a", b"a/copy"):
            store.put(name, content(99, 500))
        store.store.flush()
        assert store.store.dataset_bytes(DATASET) == sum(range(10_000, 10_010)) + 2 * 500
        assert store.store.dataset_bytes(OTHER) == 0

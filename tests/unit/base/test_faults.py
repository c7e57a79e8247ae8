"""The log of faults: counted always, written once."""

from __future__ import annotations

import logging

import pytest

from fusecache.base.errors import FaultLog


def test_a_kind_of_fault_is_logged_once_and_counted_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = FaultLog()
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            faults.report("checksum", f"record {number}")
        faults.report("io", "disk")
    assert faults.counts() == {"checksum": 5, "io": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "checksum fault (number 1): record 0",
        "io fault (number 1): disk",
    ]

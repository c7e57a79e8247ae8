"""Warnings, as they are heard."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from hintsd.client import warning


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[warnings.WarningMessage]]:
    """What this process warned of in the test; each reason once."""
    monkeypatch.setattr(warning, "_warned", set())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        # of Python 3.12 and later, whenever a DataLoader with workers begins
        warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
        yield found

"""Predicted stalls against the recurrence of HDMLP, section 4, computed step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.plan.status import stall_seconds

_SOURCES = {"ram": np.inf, "ssd": 500.0, "origin": 90.0}


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.sampled_from(sorted(_SOURCES))), max_size=60),
    st.floats(1, 5000),
)
def test_closed_form_is_the_recurrence(samples: list[tuple[int, str]], consumer: float) -> None:
    sizes = np.array([size for size, _ in samples], float)
    rates = np.array([_SOURCES[source] for _, source in samples])
    delivered = dict.fromkeys(_SOURCES, 0.0)
    taken_at = stalled = 0.0
    for index, (size, source) in enumerate(samples):
        delivered[source] += size
        available = 0.0 if source == "ram" else delivered[source] / _SOURCES[source]
        ready = taken_at + (samples[index - 1][0] / consumer if index else 0.0)
        taken_at = max(available, ready)
        stalled += taken_at - ready
    assert stall_seconds(sizes, rates, consumer) == pytest.approx(stalled, abs=1e-6)


def test_a_fast_source_stalls_nobody_after_the_first_sample() -> None:
    sizes = np.full(1000, 100.0)
    assert stall_seconds(sizes, np.full(1000, 1000.0), 700.0) == pytest.approx(0.1)
    assert stall_seconds(sizes, np.full(1000, 350.0), 700.0) == pytest.approx(
        1e5 / 350 - 99900 / 700
    )


def test_unknown_rates_and_idle_consumers_predict_nothing() -> None:
    assert stall_seconds(np.ones(3), np.zeros(3), 1.0) == 0
    assert stall_seconds(np.ones(3), np.ones(3), 0.0) == 0

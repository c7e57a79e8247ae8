"""What hintsd makes of the rates that a mount's server tells."""

from __future__ import annotations

import pytest

from hintsd.daemon.mount import RATE_SMOOTHING, ServerState
from hintsd.daemon.mount_link import State


def told(state: ServerState, **values: int) -> tuple[float, float]:
    zero = ("queued_stage", "queued_fetch", "in_flight", "changes_seen")
    rates = ("origin_bytes_per_s", "ssd_bytes_per_s")
    state.take(State(dict.fromkeys((*zero, *rates), 0) | values))
    return state.origin_bytes_per_s, state.ssd_bytes_per_s


def test_a_rate_is_that_of_a_source_that_was_busy() -> None:
    """SSD from one state to the next: else it may have had nothing to do for most of the time."""
    state = ServerState()
    assert told(state, origin_bytes_per_s=7, ssd_bytes_per_s=7) == (0, 0)
    assert told(state, queued_stage=1, origin_bytes_per_s=100, ssd_bytes_per_s=7) == (100, 0)
    assert told(state, queued_stage=1, ssd_bytes_per_s=1000) == (100, 1000)
    smoothed = 1000 - 500 * RATE_SMOOTHING
    assert told(state, queued_stage=1, ssd_bytes_per_s=500) == pytest.approx((100, smoothed))
    assert told(state, ssd_bytes_per_s=1) == pytest.approx((100, smoothed))
    assert told(state, queued_stage=1, ssd_bytes_per_s=1) == pytest.approx((100, smoothed))
    assert told(state, in_flight=1, origin_bytes_per_s=200)[0] == 100 + 100 * RATE_SMOOTHING

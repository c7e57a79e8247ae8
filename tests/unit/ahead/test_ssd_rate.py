"""What a mount tells hintsd of its SSD."""

from __future__ import annotations

import pytest

from fusecache.ahead.plan import MEASURED_BYTES_LEAST, MEASURED_WEIGHT, _SsdRate


def test_it_is_measured_while_the_ssd_has_enough_to_give() -> None:
    some = MEASURED_BYTES_LEAST
    rate = _SsdRate(5 * some, 7.0)
    assert rate.at(5 * some, 7.5) == 0
    assert rate.at(6 * some - 1, 8.0) == 0, "most of the time went elsewhere"
    assert rate.at(7 * some - 1, 8.5) == 2 * some
    assert rate.at(7 * some - 1, 9.0) == rate.at(7 * some, 9.5) == 2 * some
    assert rate.at(9 * some, 10.0) == pytest.approx((2 + 2 * MEASURED_WEIGHT) * some, abs=1)

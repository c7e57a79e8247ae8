"""Settings of an importance sampler: what its maker says, checked.

INVARIANT: `Settings` that exist are valid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final

from hintsd.sampling.schemes import NAMES, Scheme, scheme_of

SUBSTITUTES: Final = ("none", "low")
DRAW_AHEAD_MOST: Final = 1


@dataclass(frozen=True)
class Settings:
    """The arguments of `hintsd.ImportanceSampler` (client/importance/sampler.py explains them).
    ValueError: one line that begins with the field's name."""

    scheme: str = "shade"
    seed: int = 0
    fraction: float = 0.7
    h_share: float = 0.7
    replacement: bool = True
    repeat: float = 1.0
    substitute: str = "none"
    coverage: int | None = None
    compute_only: bool = False
    unbiased: bool = False
    draw_ahead: int = 0
    warm_up: int = 1
    batch_size: int | None = None
    num_replicas: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        _require(self.scheme in NAMES, "scheme", f"must be one of {', '.join(NAMES)}", self.scheme)
        whole("seed", self.seed, None)
        _number("fraction", self.fraction, "above 0 and at most 1")
        _require(0 < self.fraction <= 1, "fraction", "must be above 0 and at most 1", self.fraction)
        _number("h_share", self.h_share, "0 to 1")
        _require(0 <= self.h_share <= 1, "h_share", "must be 0 to 1", self.h_share)
        _number("repeat", self.repeat, "1 or more")
        _require(self.repeat >= 1, "repeat", "must be 1 or more", self.repeat)
        for name in ("replacement", "compute_only", "unbiased"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, "must be True or False", value)
        known = ", ".join(SUBSTITUTES)
        _require(
            self.substitute in SUBSTITUTES, "substitute", f"must be one of {known}", self.substitute
        )
        whole("draw_ahead", self.draw_ahead, 0, DRAW_AHEAD_MOST)
        whole("warm_up", self.warm_up, 0)
        if self.batch_size is not None:
            whole("batch_size", self.batch_size, 1)
        whole("num_replicas", self.num_replicas, 1)
        whole("rank", self.rank, 0, self.num_replicas - 1)
        self._check_together()

    def _check_together(self) -> None:
        is_icache = self.scheme == "icache"
        _require(self.replacement or not is_icache, "replacement", "is not for icache", False)
        _require(is_icache or not self.compute_only, "compute_only", "is for icache", True)
        _require(
            is_icache or self.substitute == "none", "substitute", "is for icache", self.substitute
        )
        if self.repeat > 1:
            _require(self.may_repeat, "repeat", "needs a draw with replacement", self.repeat)
            _require(not self.unbiased, "repeat", "above 1 cannot be unbiased", self.repeat)
        if self.substitute != "none":
            _require(not self.unbiased, "substitute", "cannot be unbiased", self.substitute)
            _require(not self.compute_only, "substitute", "reads all with compute_only", "low")
        if self.coverage is not None:
            _require(not self.may_repeat, "coverage", "needs samples once an epoch", self.coverage)
            _require(not self.unbiased, "coverage", "cannot be unbiased", self.coverage)
            _require(self.draw_ahead == 0, "coverage", "is not for draw_ahead=1", self.coverage)
            whole("coverage", self.coverage, math.ceil(1 / self.fraction))

    @property
    def may_repeat(self) -> bool:
        """Whether a sample may come more than once an epoch."""
        return self.scheme != "icache" and self.replacement

    @property
    def needs_cached(self) -> bool:
        """Whether a draw depends on what is cached."""
        return self.repeat > 1 or self.substitute != "none"

    def make_scheme(self) -> Scheme:
        return scheme_of(self.scheme, self.fraction)


def _require(holds: bool, name: str, rule: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{name} {rule}, not {value!r}")


def _number(name: str, value: Any, bounds: str) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    _require(is_number and math.isfinite(value), name, f"must be {bounds}", value)


def whole(name: str, value: Any, least: int | None, most: int | None = None) -> None:
    """ValueError: the value of that name is no integer within these bounds."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    _require(is_whole, name, "must be an integer", value)
    if least is not None:
        _require(value >= least, name, f"must be at least {least}", value)
    if most is not None:
        _require(value <= most, name, f"must be at most {most}", value)

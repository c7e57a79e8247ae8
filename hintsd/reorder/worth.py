"""When a log pays, and for how many epochs (docs/LOG.md, "When a dataset is packed"; pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from fusecache.base.units import format_bytes
from hintsd.follow.sequence import EpochOrder
from hintsd.reorder.packing import Contents

MARGIN = 1.25
SHARED_LEAST = 0.5  # of the next epoch's samples with the present one's
COMPARED_SAMPLES = 1 << 16
WHOLE_SHARE = 0.99  # of a log's samples were moved: it can serve more epochs than one
FIRST_SHARE = 0.1  # of the bytes lie on SSD at most when an epoch counts as the first one
WAITED_SHARE = 0.01  # of an epoch's samples that its reader found missing: it has waited
# ... though it got less than this part of what the device gives at random: it was not the device.
DEVICE_SHARE = 0.5
CHEAP_BYTES = 5000  # larger samples cost no less of a processor when they lie in order

STATIC, REORDER, AUTO = "static", "reorder", "auto"


class Probe(Protocol):
    """What was measured of the cache directory's device, in bytes/s."""

    @property
    def sequential_bytes_per_s(self) -> float:
        """Of large reads."""

    @property
    def mixed_bytes_per_s(self) -> float:
        """Of large reads, while as much is written."""

    def random_bytes_per_s(self, size_bytes: int) -> float:
        """Payload of random reads of samples of this size."""


class Verdict(NamedTuple):
    is_packed: bool
    why: str


class Wanted(NamedTuple):
    """What a job's reader takes from SSD."""

    bytes_per_s: float
    late_share: float = 0.0  # of its samples that it has waited for
    others_bytes_per_s: float = 0.0  # what other jobs' readers took meanwhile

    @property
    def has_waited(self) -> bool:
        """It may want more than it got."""
        return self.late_share > WAITED_SHARE


def following(present: EpochOrder, coming: Sequence[EpochOrder]) -> int:
    """For how many of these epochs one log can be written from what the present one reads."""
    for count, order in enumerate(coming):
        if shared(present, order) < WHOLE_SHARE:
            return count
    return len(coming)


def shared(present: EpochOrder, coming: EpochOrder) -> float:
    """Which part of the samples that come are read in the present epoch: a log gets these."""
    sample = coming.inos[:: max(1, len(coming.inos) // COMPARED_SAMPLES)]
    return float(present.contains(sample).mean())


def refusal(present: EpochOrder, coming: EpochOrder) -> str:
    """Why a log for the order that comes is not worth it; "": it may be."""
    if np.array_equal(present.inos, coming.inos):
        return "each epoch has the same order"
    if shared(present, coming) < SHARED_LEAST:
        return "the next epoch reads other samples"
    return ""


def decide(
    layout: str,
    probe: Probe | None,
    contents: Contents,
    wanted: Wanted | None,
    epochs: int = 1,
    in_order: float = 1.0,
) -> Verdict:
    """Whether the samples are written anew in the order of the next epoch, or of so many.

    wanted: None: unknown. in_order: the part of what they read that the log gets.
    """
    if layout == STATIC:
        return Verdict(False, "--layout static")
    if contents.size_bytes == 0:
        return Verdict(False, "nothing of it is to be on SSD")
    if contents.stored_bytes <= FIRST_SHARE * contents.size_bytes:
        return Verdict(True, "first epoch: written once in either layout")
    if layout == REORDER:
        return Verdict(True, "--layout reorder")
    if probe is None:
        return Verdict(False, "the device is not measured yet")
    if wanted is None:
        return Verdict(False, "how fast it reads is not known yet")
    mean_bytes = contents.size_bytes // contents.samples
    most = math.inf if wanted.has_waited else wanted.bytes_per_s
    random = min(probe.random_bytes_per_s(mean_bytes), most)
    mixed = probe.mixed_bytes_per_s
    taken = wanted.bytes_per_s + wanted.others_bytes_per_s
    is_device_idle = wanted.has_waited and taken < DEVICE_SHARE * random
    if is_device_idle and mean_bytes > CHEAP_BYTES:
        said = f"readers waited ({wanted.late_share:.1%} late), but not for the device: "
        said += f"{format_bytes(taken)}/s of {format_bytes(random)}/s at random"
        return Verdict(False, f"{said}, samples of {format_bytes(mean_bytes)}")
    # one of the epochs is read while it is written, and the others are only read
    costs_s = [in_order / min(mixed, most) + (1 - in_order) / random]
    costs_s += [1 / min(probe.sequential_bytes_per_s, most)] * (epochs - 1)
    is_packed = epochs / sum(costs_s) > MARGIN * random
    said = f"{format_bytes(mixed)}/s in order and rewritten"
    if epochs > 1:
        said += f", {format_bytes(probe.sequential_bytes_per_s)}/s only in order"
    said += f", {format_bytes(probe.random_bytes_per_s(mean_bytes))}/s at random"
    if in_order < WHOLE_SHARE:
        said += f" (where {1 - in_order:.0%} of it stays)"
    if most < math.inf:
        said += f", {format_bytes(most)}/s wanted"
    else:
        said += f", readers waited: {wanted.late_share:.1%} late"
    return Verdict(is_packed, f"{said}, samples of {format_bytes(mean_bytes)}")

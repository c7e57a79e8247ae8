"""Predicted stalls: HDMLP's performance model (section 4) on one node.

A consumer that could take `consumer_bytes_per_s` stands still whenever the next sample is not
available: t_f = max(avail(f), t_{f-1} + s_{f-1} / c). Sources work side by side (the page cache,
SSD, the origin), each delivering its own samples in order of need.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def available_s(sizes: Floats, rates: Floats) -> Floats:
    """When each sample is there, from now (HDMLP: avail).

    sizes: bytes; rates: bytes/s of the source each sample comes from, inf: it is there already,
    0 or less: unknown, counted as there. Shape (samples,), in order of need.
    """
    at = np.zeros(len(sizes))
    for rate in np.unique(rates[np.isfinite(rates) & (rates > 0)]):
        here = rates == rate
        at[here] = np.cumsum(sizes[here]) / rate
    return at


def stall_seconds(sizes: Floats, rates: Floats, consumer_bytes_per_s: float) -> float:
    """Seconds that the consumer stands still until it has taken all samples.

    The recurrence has a closed form: with C_f = Σ_{k<f} s_k / c,
    t_f = C_f + max_{g<=f}(avail(g) - C_g), so the stall is that last maximum.
    """
    if len(sizes) == 0 or consumer_bytes_per_s <= 0:
        return 0.0
    computed = np.concatenate([[0.0], np.cumsum(sizes[:-1])]) / consumer_bytes_per_s
    return max(0.0, float((available_s(sizes, rates) - computed).max()))

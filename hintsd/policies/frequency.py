"""Order by use: a rank of a distributed job reads some samples more often than others (HDMLP,
sections 3.2 and 5.1: samples with the largest access frequency go to the fastest storage).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hintsd.policies import Integers


def by_use(uses: Integers) -> npt.NDArray[np.int64]:
    """Indices of the items, the most used first; equal ones stay in the order given (first use)."""
    most = np.iinfo(uses.dtype).max
    return np.argsort(most - uses, kind="stable")

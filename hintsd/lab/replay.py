"""One trace through one policy at one capacity: hits, bytes, evictions.

A policy that answers another item (iCACHE, Quiver) saves a fetch but does not serve what was asked
for: such reads are counted apart and never as hits.

Everything that the trace knows is told: each epoch's begin, importances at the position where they
were learned, and, once, the whole sequence with its use counts, which only the clairvoyant policies
(Belady MIN, frequency placement) take. For traces of a sampler that decides as it learns that is
more than anybody can know in time; they are bounds there.

INVARIANT: the same trace, policy, capacity and seed give the same outcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fusecache.base.errors import ConfigError
from fusecache.traces.traces import Trace
from hintsd.policies import MISS, Hints, Policy
from hintsd.policies.catalogue import CATALOGUE

ORIGIN_LATENCY_S: Final = 1e-3
ORIGIN_BYTES_PER_S: Final = 1e8
"""What a fetch costs, as policies are told: a file server on the local network."""
READ_INTERVAL_S: Final = 1e-3
"""Between two reads of a trace that has no times."""
BYTES_MOST: Final = 2.0**62
"""Sums of int64 hold, with as much again for what a policy loads."""
SEGMENT_READS: Final = 1 << 16
"""At a time as Python's numbers, which take ten times the memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts over the epochs after the warm-up."""

    policy: str
    capacity_bytes: int
    capacity_share: float
    """Of the bytes of all items."""
    accesses: int
    hits: int
    substituted: int
    """Another item was served."""
    read_bytes: int
    """Of all accesses, in sizes of the items that were asked for."""
    hit_bytes: int
    substituted_bytes: int
    """Of the items that were asked for and not served."""
    loaded: int
    """Items that the policy had fetched on its own (iCACHE's packages, Quiver's chunks)."""
    loaded_bytes: int
    origin_bytes: int
    """Of what was missed and of what was loaded."""
    evictions: int

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.accesses

    @property
    def byte_hit_ratio(self) -> float:
        return self.hit_bytes / self.read_bytes if self.read_bytes else 0.0

    @property
    def substituted_ratio(self) -> float:
        return self.substituted / self.accesses

    @property
    def substituted_byte_ratio(self) -> float:
        return self.substituted_bytes / self.read_bytes if self.read_bytes else 0.0


class Workload:
    """A trace made ready to be replayed, many times. ConfigError: it cannot be."""

    def __init__(self, trace: Trace, warm_up_epochs: int, name: str) -> None:
        """name: what messages call it, the file's."""
        _check(trace, name)
        epochs = len(trace.epoch_starts)
        if warm_up_epochs >= epochs or trace.epoch_starts[warm_up_epochs] == len(trace.items):
            raise ConfigError(
                f"{name}: --warm-up {warm_up_epochs} leaves nothing to count of {epochs} epochs"
            )
        self.trace = trace
        self.sizes = trace.sizes[trace.items]
        self.total_bytes = int(trace.sizes.sum(dtype=np.int64))
        self.counted_from = int(trace.epoch_starts[warm_up_epochs])
        self._times_s: npt.NDArray[np.float64] | None = None
        if trace.times_s is not None:
            # Several readers' may be out of order by a little.
            self._times_s = np.maximum.accumulate(trace.times_s)
        self._uses = np.bincount(trace.items, minlength=len(trace.sizes))

    def replay(self, policy_name: str, capacity_bytes: int, seed: int) -> Outcome:
        """One pass. KeyError: no such policy."""
        evicted: list[int] = []
        loaded: list[int] = []
        policy = CATALOGUE[policy_name](capacity_bytes, on_evict=evicted.append, seed=seed)
        policy.on_load = loaded.append
        trace = self.trace
        policy.hint(Hints(sequence=trace.items, uses=self._uses, sizes=trace.sizes))
        served = np.empty(len(trace.items), np.int64)
        for begin, end, hints in self._segments():
            if begin == self.counted_from:
                evicted.clear()
                loaded.clear()
            for told in hints:
                policy.hint(told)
            served[begin:end] = self._read(policy, begin, end)
        return self._outcome(policy_name, capacity_bytes, served, loaded, len(evicted))

    def _read(self, policy: Policy, begin: int, end: int) -> npt.NDArray[np.int64]:
        part = slice(begin, end)
        sizes = self.sizes[part]
        if self._times_s is None:
            times_s = np.arange(begin, end) * READ_INTERVAL_S
        else:
            times_s = self._times_s[part]
        answers = map(
            policy.access,
            self.trace.items[part].tolist(),
            sizes.tolist(),
            (ORIGIN_LATENCY_S + sizes / ORIGIN_BYTES_PER_S).tolist(),
            times_s.tolist(),
        )
        return np.fromiter(answers, np.int64, end - begin)

    def _segments(self) -> Iterator[tuple[int, int, list[Hints]]]:
        """(begin, end, what is told before `begin`). Importances come before an epoch's begin:
        they were learned in the epoch before.
        """
        told: dict[int, list[Hints]] = {}
        for importance in self.trace.importances:
            hints = Hints(items=importance.items, importance=importance.values)
            told.setdefault(importance.position, []).append(hints)
        for start in self.trace.epoch_starts.tolist():
            told.setdefault(start, []).append(Hints(epoch=True))
        reads = len(self.trace.items)
        begins = sorted({*told, *range(0, reads, SEGMENT_READS)})
        for begin, end in zip(begins, [*begins[1:], reads], strict=True):
            yield begin, end, told.get(begin, [])

    def _outcome(
        self,
        policy_name: str,
        capacity_bytes: int,
        served: npt.NDArray[np.int64],
        loaded: list[int],
        evictions: int,
    ) -> Outcome:
        counted = slice(self.counted_from, None)
        sizes = self.sizes[counted]
        served = served[counted]
        hit = served == self.trace.items[counted]
        missed = served == MISS
        substituted = ~(hit | missed)
        loaded_bytes = int(self.trace.sizes[loaded].sum())
        return Outcome(
            policy=policy_name,
            capacity_bytes=capacity_bytes,
            capacity_share=capacity_bytes / self.total_bytes,
            accesses=len(served),
            hits=int(hit.sum()),
            substituted=int(substituted.sum()),
            read_bytes=int(sizes.sum()),
            hit_bytes=int(sizes[hit].sum()),
            substituted_bytes=int(sizes[substituted].sum()),
            loaded=len(loaded),
            loaded_bytes=loaded_bytes,
            origin_bytes=int(sizes[missed].sum()) + loaded_bytes,
            evictions=evictions,
        )


def _check(trace: Trace, name: str) -> None:
    """ConfigError naming what a replay cannot use."""
    if not len(trace.items):
        raise ConfigError(f"{name} is an empty trace: it holds no access")
    if not trace.sizes.any():
        raise ConfigError(f"{name}: all its items are empty files; there is nothing to cache")
    for sizes in (trace.sizes, trace.sizes[trace.items]):
        if sizes.sum(dtype=np.float64) >= BYTES_MOST:
            raise ConfigError(f"{name}: the sizes of its items add up to more than can be counted")
    for importance in trace.importances:
        unusable = np.flatnonzero(~np.isfinite(importance.values))
        if len(unusable):
            raise ConfigError(
                f"{name}: the importance of item {importance.items[unusable[0]]}, told before "
                f"access {importance.position}, is {importance.values[unusable[0]]}"
            )

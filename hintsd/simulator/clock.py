"""When each batch is done: volumes in, seconds out.

Batches are bulk-synchronous: one starts when the slowest worker has finished the one before. Inside
a batch data flows evenly (a fluid), which is what makes whole epochs a few array operations; the
paper's t_{i,f} = max(avail_i(f), t_{i,f-1} + s/c) holds for the last sample of each batch.

Contention: γ, of which t(γ)/γ is a worker's share of the shared file system, is 1 + the number of
other workers that are still reading there; one that fetches from elsewhere, too, counts as the
share of its fetching that is from there. Workers take their turn one after the other, each as far
as its staging buffer has room, and see the readers of before (docs/SIMULATOR.md says why: it is
the reading that gives the published times).

Servers that workers share (a pool's networks and storage) each do one batch after the other: a
batch is there when the most loaded of them has given its part. As far as the staging buffers have
room they work ahead, which evens out what they have to do for single batches.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hintsd.simulator.orders import Seconds
from hintsd.simulator.system import System


class Clock:
    """Time of a run.

    now_s: when the batch before was done. INVARIANT: it never goes back.
    """

    def __init__(self, system: System, depth: int) -> None:
        """depth: batches that fit into the staging buffer, K."""
        self.system = system
        self.depth = depth
        self.now_s = 0.0
        # When the staging buffers have what was asked for until now; when the last of it came
        # from the shared file system, and which share of the fetching was from there.
        self.ready_s = np.zeros(system.workers)
        self._read_until_s = np.zeros(system.workers)
        self._reading = np.zeros(system.workers)
        self._pfs_s_per_mb = [system.pfs_s_per_mb(n) for n in range(1, system.workers + 1)]
        # When the last K batches were done: their room is free then.
        self._done_s = np.zeros(depth)
        # When the servers have given what was asked for until now; one number stands for all.
        self._served_s = np.zeros(1)

    def wait(self, seconds: float) -> None:
        """No worker computes or prefetches."""
        self.now_s += seconds
        self.ready_s[:] = self.now_s
        self._done_s[:] = self.now_s

    def prefetched(
        self,
        compute_s: Seconds,
        last_s: Seconds,
        fetch_s: Seconds,
        write_s: Seconds,
        pfs_mb: Seconds,
        readers: int | None = None,
        served_s: Seconds | None = None,
    ) -> Seconds:
        """Batches that pass through the staging buffer; at most K of them at once.

        compute_s: of each batch and worker; last_s: of its last sample. fetch_s: for what is not
        on the shared file system, write_s: for all, pfs_mb: what is there; these three divided by
        p_0. All of shape (batches, N). readers: γ where it is known, None for the rule of this
        module. served_s: for how long each server works for each batch, shape (batches, servers).
        Answers the seconds spent at the shared file system, shape (batches, N).
        """
        pfs_s = np.empty_like(pfs_mb)
        if served_s is None:
            served_s = np.empty((len(compute_s), 0))
        for first in range(0, len(compute_s), self.depth):
            some = slice(first, first + self.depth)
            pfs_s[some] = self._filled(
                compute_s[some],
                last_s[some],
                fetch_s[some],
                write_s[some],
                pfs_mb[some],
                readers,
                served_s[some],
            )
        return pfs_s

    def _filled(
        self,
        compute_s: Seconds,
        last_s: Seconds,
        fetch_s: Seconds,
        write_s: Seconds,
        pfs_mb: Seconds,
        readers: int | None,
        served_s: Seconds,
    ) -> Seconds:
        """At most K batches: each worker fills its staging buffer, then they are consumed."""
        batches = len(compute_s)
        ready_s = np.empty_like(compute_s)
        pfs_s = np.empty_like(compute_s)
        freed_s = self._done_s[:batches]
        for worker in range(self.system.workers):
            start_s = max(float(self.ready_s[worker]), float(freed_s[0]))
            volume = pfs_mb[:, worker]
            local = fetch_s[:, worker] + write_s[:, worker]
            if not volume.any():
                pfs_s[:, worker] = 0.0
            elif readers is not None:
                pfs_s[:, worker] = volume * self._pfs_s_per_mb[readers - 1]
            else:
                pfs_s[:, worker] = self._contended(worker, start_s, local, volume) - local
            durations = local + pfs_s[:, worker]
            done = np.cumsum(durations)
            waits = np.maximum.accumulate(np.maximum(freed_s, start_s) - (done - durations))
            ready_s[:, worker] = done + waits
            self.ready_s[worker] = ready_s[-1, worker]
            if volume.any():
                latest = int(np.flatnonzero(volume)[-1])
                self._read_until_s[worker] = ready_s[latest, worker]
                there_s = float(pfs_s[:, worker].sum())
                self._reading[worker] = there_s / (there_s + float(fetch_s[:, worker].sum()))
        ready_s = np.maximum(ready_s, self._serve(served_s, freed_s))
        slowest = np.cumsum(compute_s.max(axis=1))
        available = (ready_s + last_s).max(axis=1)
        stalled = np.maximum.accumulate(np.maximum(available - slowest, self.now_s))
        done_s = slowest + stalled
        self._done_s = np.concatenate([self._done_s[batches:], done_s])
        self.now_s = float(done_s[-1])
        return pfs_s

    def _serve(self, served_s: Seconds, freed_s: npt.NDArray[np.float64]) -> Seconds:
        """When the last server has given each batch, shape (batches, 1). Each gives batch after
        batch, none before the staging buffers have room for it.
        """
        if served_s.shape[1] == 0:
            return np.zeros((len(served_s), 1))
        done_s = np.cumsum(served_s, axis=0)
        free_s = np.maximum(freed_s[:, np.newaxis], self._served_s)
        done_s += np.maximum.accumulate(free_s - (done_s - served_s), axis=0)
        self._served_s = done_s[-1]
        last_s: Seconds = done_s.max(axis=1, keepdims=True)
        return last_s

    def _contended(
        self,
        worker: int,
        start_s: float,
        local_s: npt.NDArray[np.float64],
        pfs_mb: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """How long each batch takes a worker; γ falls whenever another has read all it will."""
        ends_s = np.where(self._read_until_s > start_s, self._read_until_s, 0.0)
        ends_s[worker] = 0.0
        others = np.argsort(ends_s)
        others = others[ends_s[others] > 0]
        edges = np.arange(len(local_s) + 1, dtype=np.float64)
        arrivals = np.empty(len(local_s))
        place, time_s = 0.0, start_s
        for gone in range(len(others) + 1):
            readers = 1 + float(self._reading[others[gone:]].sum())
            cost = np.zeros(len(edges))
            np.cumsum(local_s + pfs_mb * self.system.pfs_s_per_mb(readers), out=cost[1:])
            spent = float(np.interp(place, edges, cost))
            arrivals[int(place) :] = time_s + cost[int(place) + 1 :] - spent
            if gone == len(others) or arrivals[-1] <= ends_s[others[gone]]:
                break
            end_s = float(ends_s[others[gone]])
            place = float(np.interp(spent + end_s - time_s, cost, edges))
            time_s = end_s
        return np.diff(arrivals, prepend=start_s)

    def on_demand(self, serial_s: Seconds, pfs_mb: Seconds, tail_s: Seconds) -> Seconds:
        """Batches whose samples are read when they are needed, by one thread, while nothing is
        computed.

        serial_s: computing, and all else that is not the shared file system; tail_s: what follows
        the last read. Answers the seconds spent at the shared file system. All (batches, N).
        """
        took_s = np.empty_like(serial_s)
        ends_s = np.empty_like(serial_s)
        for worker in range(self.system.workers):
            left = np.ones(len(serial_s))
            time_s = np.zeros(len(serial_s))
            before = np.sort(ends_s[:, :worker], axis=1)
            for readers in range(worker + 1, 0, -1):
                whole_s = serial_s[:, worker] + pfs_mb[:, worker] * self._pfs_s_per_mb[readers - 1]
                if readers == 1:
                    span_s = left * whole_s
                else:
                    end_s = before[:, worker + 1 - readers]
                    span_s = np.clip(end_s - time_s, 0, left * whole_s)
                left = left - np.divide(span_s, whole_s, out=np.ones_like(left), where=whole_s > 0)
                time_s = time_s + span_s
            took_s[:, worker] = time_s
            ends_s[:, worker] = np.where(pfs_mb[:, worker] > 0, time_s - tail_s[:, worker], 0.0)
        self.now_s += float(took_s.max(axis=1).sum())
        self.ready_s[:] = self.now_s
        self._done_s[:] = self.now_s
        return took_s - serial_s

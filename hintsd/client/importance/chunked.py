"""ChunkedSampler: trainings that share a mount read the same part of the dataset at a time.

    sampler = hintsd.ChunkedSampler(dataset, batch_size=256, seed=0)
    loader = DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=4)
    job = hintsd.attach(loader)

Quiver's co-operative misses (FAST '20, 5.1): all jobs have the same chunks, and walk the ring of
them together, each in an order of its own within a chunk. docs/SHARING.md says when that is worth
it.

INVARIANT: those of `once`; what decides is where the other trainings are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Optional

import numpy.typing as npt

from hintsd.client.importance.once import Epoch, OnceSampler
from hintsd.sampling.chunks import CHUNKS_MOST, Ring, Walk
from hintsd.sampling.settings import whole

BATCHES_AHEAD: Final = 4
"""Reads that are decided are at least so many, where a chunk is short."""

Choose = Callable[[list[int], int], Optional[int]]


class ChunkedSampler(OnceSampler):
    """Gives out the indices of an epoch: chunk by chunk, shuffled within each."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int = 0,
        chunks: int = 10,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """`dataset`: what the loader reads, or its length. `batch_size`: the loader's, in samples.

        `chunks`: parts that the dataset is cut into, up to 100, the same for all jobs that are to
        read it together. `num_replicas`, `rank`: of a distributed training; None:
        torch.distributed's, if it is initialised by now. A rank has its share of each chunk, as a
        DistributedSampler deals it (where the samples cannot be dealt evenly, a few come to two
        ranks).

        4 bytes a sample, and 8 for each that the rank reads of an epoch.
        ValueError: an argument, which the line begins with.
        """
        super().__init__(dataset, batch_size, seed, num_replicas, rank)
        whole("chunks", chunks, 1, CHUNKS_MOST)
        self._chunks = chunks
        self._ring: Ring | None = None
        self._choose: Choose | None = None
        self._is_offer = False  # it is not the user's

    def set_next_chunk(self, choose: Choose, *, is_offer: bool = False) -> None:
        """`choose(unread, chunks)` says which chunk is read next, one of `unread`, or None: the
        first of these. They are the numbers of those that the epoch has not read yet, in the order
        of the ring. `is_offer`: attach's, which is asked where no other was set."""
        if not is_offer or self._choose is None or self._is_offer:
            self._choose, self._is_offer = choose, is_offer

    def order_of_epoch_behind(self) -> npt.NDArray[Any]:
        """The indices that this rank reads in the epoch behind the one that is read, as far as it
        is known now; before the first one: in that. Shape (reads,)."""
        reads: npt.NDArray[Any] = self._behind().order.reads()
        return reads

    # ---- what OnceSampler asks -------------------------------------------------------------------

    def _order(self, number: int) -> Walk:
        return Walk(self._whole_ring(), number, self._last())

    def _ahead(self) -> int:
        share = -(-self._samples // (self._chunks * self._replicas))
        return max(-(-share // 2), BATCHES_AHEAD * self._batch_size)

    def _decide(self, order: Walk, reads: int) -> bool:
        """By where the other jobs are."""
        is_other = False
        while order.arranged < reads:
            is_other = order.take(self._chosen(order.unread)) or is_other
        return is_other

    def _chosen(self, unread: list[int]) -> int:
        """The chunk that is read next."""
        try:
            found = None if self._choose is None else self._choose([*unread], self._chunks)
            if found is None:
                return unread[0]
            if found not in unread:
                raise ValueError(f"{found!r} is none of these")
        except Exception as error:
            self._say(f"which chunk is next cannot be told ({error!r})")
            return unread[0]
        return int(found)

    def _settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            {
                "samples": self._samples,
                "chunks": self._chunks,
                "seed": self._seed,
                "replicas": self._replicas,
            },
            {"rank": self._rank},
        )

    def _place(self, order: Walk | None, read: int) -> dict[str, Any]:
        if order is None:
            return {"last": self._last(), "begun": [], "read": 0}
        begun, of_last = order.state(read)
        return {"last": order.before, "begun": begun, "read": of_last}

    def _resumed(self, number: int, told: Mapping[str, Any]) -> tuple[Walk, int]:
        last = int(told["last"])
        if not -1 <= last < self._chunks:
            raise ValueError(f"its last chunk is {last}")
        order = Walk(self._whole_ring(), number, last)
        return order, order.resume([int(chunk) for chunk in told["begun"]], int(told["read"]))

    # ---- within ----------------------------------------------------------------------------------

    def _advance(self, epoch: Epoch, start: int) -> None:
        super()._advance(epoch, start)
        if epoch is not self._now:
            return
        behind, left = self._behind(), len(epoch.order) - start
        is_other = behind.order.follow(epoch.order.last)
        if left < self._ahead() and self._keep_ahead(behind, behind.begin - left):
            is_other = True
        if is_other:
            self._tell(behind)

    def _last(self) -> int:
        """The chunk that the epoch begun last reads last; -1: there is none."""
        return -1 if self._now is None else int(self._now.order.last)

    def _whole_ring(self) -> Ring:
        if self._ring is None or self._ring.samples != self._samples:
            self._ring = Ring(self._samples, self._chunks, self._seed, self._replicas, self._rank)
        return self._ring

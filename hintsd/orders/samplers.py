"""Samplers of torchdata and accelerate whose order we compute ahead, known by their classes' names:
neither is imported for it. Those whose own `__iter__` may be run, as each epoch begins:
hintsd/client/known/libraries.py.

torchdata's StatefulDataLoader has a BatchSampler and a RandomSampler of its own, whose iterators
tell their state. accelerate wraps the batches of a DataLoader: each process gets its share of them.

INVARIANT: nothing here draws, imports torchdata or accelerate, or changes what it looks at.
"""

from __future__ import annotations

import copy
from typing import Any, Final

_STATEFUL: Final = "torchdata.stateful_dataloader.sampler"
_ACCELERATE: Final = "accelerate.data_loader"

RESUMING: Final = "resuming"
SEEDING: Final = "seeding"
_KINDS: Final = {
    (_STATEFUL, "RandomSampler"): RESUMING,
    (_ACCELERATE, "SeedableRandomSampler"): SEEDING,
}


def _name(value: object) -> tuple[str, str]:
    kind = type(value)
    return kind.__module__, kind.__qualname__


def random_kind(sampler: object) -> str | None:
    """Of what works as torch's RandomSampler with a generator of its own, one epoch at a time.

    RESUMING: draws when `iter` is called, and its iterator tells and takes a state, a map of
    `generator` (before that draw) and `yielded`. SEEDING: seeds its generator with `initial_seed` +
    `epoch` at the first `next`.
    """
    return _KINDS.get(_name(sampler))


def is_distributed(sampler: object) -> bool:
    """Whether it is torch's DistributedSampler, or torchdata's, which begins at `next_yielded`."""
    from torch.utils.data import DistributedSampler

    return type(sampler) is DistributedSampler or (
        _name(sampler) == (_STATEFUL, "StatefulDistributedSampler")
    )


def skipped(sampler: object) -> int:
    """How many indices of its next epoch a sampler that took a state leaves out."""
    return int(getattr(sampler, "next_yielded", None) or 0) if is_distributed(sampler) else 0


def is_plain_batching(outer: object) -> bool:
    """Whether it puts the indices of its `sampler` into batches, in turn, and does nothing else."""
    from torch.utils.data import BatchSampler

    return type(outer) is BatchSampler or _name(outer) == (_STATEFUL, "BatchSampler")


def is_skipping(outer: object) -> bool:
    """Whether it leaves out the first batches of its `batch_sampler`, and does nothing else."""
    return _name(outer) == (_ACCELERATE, "SkipBatchSampler")


def is_rebatching(outer: object) -> bool:
    """Whether its batches follow from those of its `batch_sampler`, without any draw."""
    return is_skipping(outer) or _name(outer) == (_ACCELERATE, "BatchSamplerShard")


def batching_within(outer: Any) -> Any:
    """What the batches of a rebatching `outer` come from in the end."""
    while is_rebatching(outer):
        outer = outer.batch_sampler
    return outer


def rebatched(outer: Any, batches: Any) -> Any:
    """As `outer`, of these batches."""
    if not is_rebatching(outer):
        return batches
    twin = copy.copy(outer)
    twin.batch_sampler = rebatched(outer.batch_sampler, batches)
    return twin


def iterated_loader(loader: Any) -> Any:
    """The DataLoader that is iterated for this one: its inner one, if accelerate prepared it."""
    kinds = [(kind.__module__, kind.__qualname__) for kind in type(loader).__mro__]
    return loader.base_dataloader if (_ACCELERATE, "DataLoaderAdapter") in kinds else loader

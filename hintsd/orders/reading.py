"""Live samplers: the `OrderSpec` of one, without drawing from anything.

What becomes of a generator that others draw from, too (torch's default generator), cannot be told:
`epochs_known` is 1 then.

INVARIANT: a sampler that is read is left as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hintsd.orders import samplers
from hintsd.orders.spec import GENERATED, LoaderDraws, OrderSpec

if TYPE_CHECKING:
    import torch


def spec_of(
    sampler: object,
    batch_sampler: object | None = None,
    loader_generator: torch.Generator | None = None,
    *,
    start_epoch: int = 0,
    length: int | None = None,
    base_seed_drawn: bool = True,
    persistent_workers: bool = False,
) -> OrderSpec | None:
    """Read a live sampler, of which epoch `start_epoch` comes next, without drawing from anything.

    `sampler`, `batch_sampler` and `loader_generator` are a DataLoader's `sampler`, `batch_sampler`
    and `generator`. To be called right before the epoch's first draw: of the sampler, or with
    `base_seed_drawn=False` of the loader (before `iter(loader)`; a loader whose persistent workers
    run already draws none). `length`: of the dataset, bounds SubsetRandomSampler's indices.

    A DistributedSampler is taken to have `set_epoch` called with numbers that rise by one, and
    accelerate's SeedableRandomSampler to be read to the end. Of torchdata's random sampler
    (samplers.py) one epoch is known.
    None: none of these samplers (its exact type; a subclass may do anything), or one whose order
    torch does not tell in advance.
    """
    from torch.utils.data import BatchSampler

    batching: dict[str, Any] = {}
    if batch_sampler is not None:
        if type(batch_sampler) is not BatchSampler:
            return None
        sampler = batch_sampler.sampler
        batching["batch_size"] = batch_sampler.batch_size
        batching["batch_drop_last"] = batch_sampler.drop_last
    try:
        read = _read_sampler(sampler, start_epoch, length)
        if read is None:
            return None
        if read["sampler"] in GENERATED:
            drawing = _read_generator(
                sampler, loader_generator, base_seed_drawn, persistent_workers
            )
            if drawing is None:
                return None
            read |= drawing
        return OrderSpec(**read, **batching, start_epoch=start_epoch)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None  # a data source without a length, negative indices, weights on another device


def _read_sampler(sampler: object, start_epoch: int, length: int | None) -> dict[str, Any] | None:
    from torch.utils.data import (
        RandomSampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )

    if type(sampler) is SequentialSampler:
        return {"sampler": "sequential", "length": len(sampler.data_source)}
    kind: Any = sampler
    if _reads_each_once_by_seed(kind):
        return {  # one generator, seeded anew each epoch: as a DistributedSampler of one rank
            "sampler": "distributed",
            "length": len(kind.data_source),
            "seed": kind.initial_seed + kind.epoch - start_epoch,
        }
    if type(sampler) is RandomSampler or samplers.random_kind(sampler):
        return {
            "sampler": "random",
            "length": len(kind.data_source),
            "replacement": kind.replacement,
            "num_samples": kind.num_samples,
            "draws_seed": type(sampler) is RandomSampler and sampler.generator is None,
        }
    if type(sampler) is SubsetRandomSampler:
        indices = np.array(sampler.indices)
        if indices.ndim != 1 or indices.dtype.kind not in "iu" or not len(indices):
            return None
        return {
            "sampler": "subset_random",
            "length": int(indices.max()) + 1 if length is None else length,
            "indices": indices.astype(np.int64),
        }
    if type(sampler) is WeightedRandomSampler:
        weights = sampler.weights.numpy().copy()  # a TypeError when they are not on the CPU
        return {
            "sampler": "weighted_random",
            "length": len(weights),
            "weights": weights,
            "num_samples": sampler.num_samples,
            "replacement": sampler.replacement,
        }
    if samplers.is_distributed(sampler):
        return {
            "sampler": "distributed",
            "length": len(kind.dataset),
            "seed": kind.seed + kind.epoch - start_epoch,
            "world_size": kind.num_replicas,
            "rank": kind.rank,
            "shuffle": kind.shuffle,
            "drop_last": kind.drop_last,
        }
    return None


def _reads_each_once_by_seed(sampler: Any) -> bool:
    return (
        samplers.random_kind(sampler) == samplers.SEEDING
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
        and (sampler.generator is None or sampler.generator.device.type == "cpu")
    )


def _read_generator(
    sampler: Any,
    loader_generator: torch.Generator | None,
    base_seed_drawn: bool,
    persistent_workers: bool,
) -> dict[str, Any] | None:
    import torch
    from torch.utils.data import RandomSampler

    default = torch.default_generator
    resuming = samplers.random_kind(sampler) == samplers.RESUMING
    generator = default if sampler.generator is None else sampler.generator
    if generator.device.type != "cpu":
        return None
    if samplers.random_kind(sampler) == samplers.SEEDING:
        return {"seed": sampler.initial_seed + sampler.epoch, "epochs_known": 1}
    if (
        (sampler.generator is default or (resuming and sampler.generator is loader_generator))
        and (type(sampler) is RandomSampler or resuming)
        and (sampler.replacement or sampler.num_samples > len(sampler.data_source))
    ):
        return None  # it draws all through the epoch, in turn with everybody else
    loader_draws: LoaderDraws = "never"
    if (default if loader_generator is None else loader_generator) is generator:
        if persistent_workers:
            loader_draws = "never" if base_seed_drawn else "first"
        else:
            loader_draws = "later" if base_seed_drawn else "every"
    return {
        "generator_state": generator.get_state().numpy().tobytes(),
        "loader_draws": loader_draws,
        "epochs_known": 1 if generator is default or resuming else None,
    }

"""How a dataset class says which files it reads, and a sampler class in which order.

    @hintsd.paths_of.register
    def _(dataset: MyDataset):                  # one path for each index, or hintsd.Ranges
        return dataset.files

    hintsd.order_of.register(MySampler, list)   # the indices of the epoch that begins now

A dataset may also have an attribute or a method `__hintsd_paths__`. A package does the same without
importing us, by entry points of the groups `hintsd.datasets` and `hintsd.samplers`: the name is the
class with its module, the value the function.

INVARIANT: importing it costs nothing; a package's function is imported when an object of its class
is met.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hintsd.client.ranges.rows import Told

DATASETS: Final = "hintsd.datasets"
SAMPLERS: Final = "hintsd.samplers"

NO_INDICES: Final = "an IterableDataset has no indices that could be announced"

Function = Callable[[Any], Any]


class Unreadable(Exception):
    """This loader cannot be hinted; one line that says why."""

    advice = "see docs/LOADERS.md"


class Needless(Unreadable):
    """This loader needs no hints."""

    advice = "nothing is to be done"


@functools.singledispatch
def paths_of(dataset: Any) -> Told:
    """The file that each index of a dataset reads, or Ranges. `register` a function for a class of
    your own; it holds for subclasses, too. TypeError: nothing is registered."""
    raise TypeError(f"no paths are registered for a {type(dataset).__name__}")


@functools.singledispatch
def order_of(sampler: Any) -> Iterable[Any]:
    """The indices, or batches of indices, of the epoch that a sampler begins now. `register` a
    function for a class of your own. It must leave the sampler as it was: `list` does, of one that
    seeds a generator by its epoch. Subclasses may draw otherwise, and are not taken for it.
    TypeError: nothing is registered."""
    raise TypeError(f"no order is registered for a {type(sampler).__name__}")


def class_name(kind: type) -> str:
    """With its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def told_paths(dataset: Any) -> Told | None:
    """As the dataset itself says, or who registered its class; None: nobody does."""
    own = getattr(dataset, "__hintsd_paths__", None)
    if own is not None:
        return own() if callable(own) else own  # type: ignore[no-any-return]  # checked by who asks
    if paths_of.dispatch(type(dataset)) is not paths_of.dispatch(object):
        return paths_of(dataset)
    for kind in type(dataset).__mro__:
        function = _entry(DATASETS, class_name(kind))
        if function is not None:
            return function(dataset)  # type: ignore[no-any-return]  # as above
    return None


def order_function(sampler: Any) -> Function | None:
    """What is registered for exactly this class; None: nothing."""
    return order_of.registry.get(type(sampler)) or _entry(SAMPLERS, class_name(type(sampler)))


def _entry(group: str, name: str) -> Function | None:
    """Unreadable: it is there, and cannot be imported."""
    point = _entries(group).get(name)
    if point is None:
        return None
    try:
        return point.load()  # type: ignore[no-any-return]  # whatever the package says
    except Exception as error:
        raise Unreadable(f"the entry point {name} of {group} does not load ({error!r})") from None


@functools.cache
def _entries(group: str) -> Mapping[str, Any]:
    """By name. Looked for once a process: it reads the metadata of all installed packages."""
    if sys.version_info >= (3, 10):
        found: Iterable[Any] = metadata.entry_points(group=group)
    else:
        found = metadata.entry_points().get(group, ())
    return {point.name: point for point in found}

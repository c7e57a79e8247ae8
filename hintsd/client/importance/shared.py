"""What both samplers do: lengths of datasets, numbers of epochs, what is cached, states as
tensors.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from hintsd.sampling.formulas import Mask

LENGTH_MOST: Final = 2**32 - 2  # as an order's (orders/spec.py)

Say = Callable[[str], None]


def length_of(dataset: Any) -> int:
    """Of a dataset, or the length itself. ValueError: it has none."""
    try:
        length = int(dataset) if _is_whole(dataset) else len(dataset)
    except TypeError:
        raise ValueError(
            f"dataset must be one with a length, or its length, not {type(dataset).__name__}"
        ) from None
    if not 0 < length <= LENGTH_MOST:
        raise ValueError(f"dataset must have 1 to {LENGTH_MOST} samples, not {length}")
    return length


def length_now(dataset: Any, before: int, say: Say) -> int:
    """As `length_of`; a line where it has changed. `before`: where it has no length that is one."""
    try:
        length = before if _is_whole(dataset) else len(dataset)
    except Exception as error:
        say(f"the dataset has no length any more ({error!r})")
        return before
    if length == before or not 0 < length <= LENGTH_MOST:
        return before
    say(f"the dataset has {length} samples now, and had {before}")
    return length


def number_of_epoch(epoch: Any, say: Say) -> int | None:
    """What `set_epoch` was given; None: no number of an epoch, and there is a line."""
    try:
        number = operator.index(epoch)
    except TypeError:
        number = -1
    if number < 0:
        say(f"set_epoch was given no number of an epoch ({epoch!r})")
        return None
    return number


def mask_of(cached: Callable[[], Any], samples: int, say: Say) -> Mask | None:
    """Which samples `cached()` names, by a mask or by indices: shape (samples,). None: it does not
    know, or there is a line."""
    try:
        told = cached()
        if told is None:
            return None
        told = np.asarray(told)
        if told.dtype == np.bool_ and told.shape == (samples,):
            return np.array(told)
        if len(told) and (told.dtype.kind not in "iu" or told.ndim != 1):
            raise ValueError("it is neither a mask of the samples nor a row of indices")
        mask = np.zeros(samples, np.bool_)
        mask[told.astype(np.int64)] = True
        return mask
    except Exception as error:
        say(f"what is cached cannot be told ({error!r})")
        return None


def added(hooks: list[Any], hook: Any) -> Callable[[], None]:
    """Add the hook; what is returned takes it away."""
    hooks.append(hook)

    def remove() -> None:
        if hook in hooks:
            hooks.remove(hook)

    return remove


def call(hooks: list[Any], say: Say, *told: Any) -> None:
    """Tell all hooks; of one that fails there is a line."""
    for hook in tuple(hooks):
        try:
            hook(*told)
        except Exception as error:
            say(f"a hook failed ({error!r})")


def as_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Its arrays as tensors, where the script has torch."""
    found: dict[str, Any] = _tree(state, _as_tensor) if "torch" in sys.modules else state
    return found


def as_arrays(state: Mapping[str, Any]) -> Any:
    """Its tensors as arrays."""
    return _tree(state, _as_array)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _tree(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with each leaf changed."""
    if isinstance(value, Mapping):
        return {key: _tree(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tree(each, change) for each in value]
    return change(value)


def _as_tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    import torch

    return torch.from_numpy(value)


def _as_array(value: Any) -> Any:
    return value.cpu().numpy() if hasattr(value, "cpu") else value

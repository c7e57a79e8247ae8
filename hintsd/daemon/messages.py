"""Messages of the hints channel, checked: from the fields of a frame to what it says.

A field that is missing, of the wrong type or out of bounds is a WireError: such a client does not
speak our language, its connection ends. What is well-formed and cannot be used is a ValueError,
which is told to the client. Both are one line that names the field.
"""

from __future__ import annotations

from typing import Any

from fusecache.base.wire import Fields
from hintsd.daemon.arrays import Arrays
from hintsd.orders.hint import BATCH_MOST, NAME_LENGTH_MOST, Hint, read_hint, read_spec
from hintsd.orders.spec import EPOCH_MOST, OrderSpec


class JobRefused(Exception):
    """One line for the user."""


class NotHere(JobRefused):
    """This hintsd cannot compute the order; one with torch could."""


def _with_arrays(fields: Fields, arrays: Arrays, where: str) -> dict[str, Any]:
    """The map with its {"array": name} values replaced by the arrays."""
    found = dict(fields.raw())
    for name, value in found.items():
        if type(value) is dict:
            found[name] = arrays.take(f"{where}: field {name}", fields.map(name))
    return found


def hint(fields: Fields, arrays: Arrays) -> Hint:
    """Of a `job` message, its arrays in their places. As `read_hint` raises."""
    message = dict(fields.raw())
    for name in ("files", "spec"):
        if name in fields:
            message[name] = _with_arrays(fields.map(name), arrays, f"job: {name}")
    return read_hint(message)


def is_of_others(fields: Fields) -> bool:
    """Field `of_others` of a `job` message. WireError."""
    return fields.raw().get("of_others") is not None and fields.bool("of_others")


def resumed_job(fields: Fields) -> str | None:
    """Field `resume` of a `job` message. WireError."""
    return fields.optional_str("resume", NAME_LENGTH_MOST)


def wants_state(fields: Fields) -> bool:
    """Field `tell_state` of a `job` message. WireError."""
    return "tell_state" in fields and fields.bool("tell_state")


def order_spec(fields: Fields, arrays: Arrays) -> tuple[int, OrderSpec]:
    """The epoch and the spec of an `order` message. WireError, ValueError: see the module."""
    epoch = fields.int("epoch", 0, EPOCH_MOST)
    return epoch, read_spec(_with_arrays(fields.map("spec"), arrays, "order: spec"))


def step(fields: Fields) -> tuple[int, int]:
    """The epoch and the batch of a `step` message. WireError."""
    return fields.int("epoch", 0, EPOCH_MOST), fields.int("batch", 0, BATCH_MOST)

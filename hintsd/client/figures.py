"""A job's figures, asked of hintsd on a connection of their own: for a training's log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Union

from fusecache.base import wire
from hintsd.client.connection import Connection
from hintsd.client.finding import Unhinted, find_socket

Number = Union[int, float]

_PLAIN: Final = ("epoch", "index", "not_late", "window_bytes", "samples_per_s", "predicted_stall_s")
_SUMS: Final = ("late", "unplanned")


def ask_figures(path: str, name: str, timeout_s: float) -> dict[str, Number]:
    """Of the job of that name, whose dataset is `path`; {}: hintsd did not say so in time, or does
    not know the job."""
    connection = Connection(lambda line: None)
    try:
        connection.prepare()
        connection.connect(find_socket(path)[0], timeout_s)
        connection.send(wire.encode("status", {}))
        answer = connection.expect("status", timeout_s).fields.raw()
    except (OSError, Unhinted, wire.WireError):
        return {}
    finally:
        connection.disconnect()
    return next((flat(job) for job in answer["jobs"] if job["name"] == name), {})


def flat(job: Mapping[str, Any]) -> dict[str, Number]:
    """Those of a job in hintsd's `status` that are numbers (docs/WIRE.md); `late` and `unplanned`
    are summed up. What is not known is left out."""
    found = {name: job[name] for name in _PLAIN if job.get(name) is not None}
    found.update({name: sum(job[name].values()) for name in _SUMS if job.get(name) is not None})
    return found

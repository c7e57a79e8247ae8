"""The command line's end of a short conversation with hintsd (docs/WIRE.md, hints channel).

Who reads a mount without a descriptor that the kernel would count (zero-open mode) is known to
hintsd alone, when there is a hint.
INVARIANT: nothing here waits longer than TIMEOUT_S, or fails: a hintsd that is dead, stuck or
somebody else's has no jobs.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any, Final, NamedTuple

from fusecache.base import mounts, wire
from fusecache.control.control_client import Target

TIMEOUT_S: Final = 5.0
RECEIVE_BYTES: Final = 1 << 18


class Told(NamedTuple):
    """What `fusecache status` adds to what the mount says of itself."""

    layout: dict[str, Any]
    """How the samples of the mount's jobs lie on SSD: "chosen", "why" and "job", of the job that
    the log follows, else of one that has epochs to come; "last", a map of the same three, while no
    job is read: of the one that has ended last. {}: nothing is said of it.
    """
    absent: str = ""
    """The socket on which no process listens, although the mount's hints are to come from there."""
    is_unhinted: bool = False
    """Whether it is to have no hints (--hintsd none)."""


def readers(target: Target) -> tuple[list[str], str]:
    """The hinted jobs that read from a mount, one line each: those of a process that lives, and
    those that somebody was seen to read for of late. A hint without a reader is none. And the
    socket on which no process listens (`Told.absent`), or "".
    """
    path = socket_of(target)
    if path is None:
        return [], ""
    try:
        jobs = status(path)["jobs"]
        return [_line(job) for job in jobs if _reads(job, target.mountpoint)], ""
    except (FileNotFoundError, ConnectionRefusedError):
        return [], path
    except (OSError, wire.WireError, KeyError, TypeError, AttributeError):
        return [], ""


def told(target: Target) -> Told:
    """Of a mount's jobs."""
    if setting(target) == "none":
        return Told({}, is_unhinted=True)
    path = socket_of(target)
    if path is None:
        return Told({})
    try:
        return Told(_layout(status(path), target.mountpoint))
    except (FileNotFoundError, ConnectionRefusedError):
        return Told({}, path)
    except (OSError, wire.WireError, KeyError, TypeError, AttributeError):
        return Told({})


def setting(target: Target) -> str | None:
    """The mount's --hintsd; None: we may not see it."""
    record = mounts.keeper_record(target.directory) if target.directory else {}
    config = record.get("config")
    chosen = config.get("hintsd") if isinstance(config, dict) else None
    return chosen if isinstance(chosen, str) else None


def _layout(status: dict[str, Any], mountpoint: str) -> dict[str, Any]:
    jobs = [job for job in status["jobs"] if job["mountpoint"] == mountpoint]
    said = [job for job in jobs if job.get("layout")]
    found: dict[str, Any] = {}
    if said:
        found = _verdict(min(said, key=lambda job: (job["layout"] == "static", _is_in_last(job))))
    if any(job.get("state") != "waiting" for job in jobs):
        return found
    before = [job for job in status.get("ended") or [] if job.get("mountpoint") == mountpoint]
    last = min(before, key=lambda job: float(job["ended_ago_s"]), default=None)
    return found | {"last": _verdict(last)} if last and last.get("layout") else found


def _verdict(job: dict[str, Any]) -> dict[str, Any]:
    named = {"chosen": "layout", "why": "layout_why", "job": "name"}
    return {name: str(job[key]) for name, key in named.items()}


def _is_in_last(job: dict[str, Any]) -> bool:
    """Whether no epoch follows the one that it is in: nothing is written for it."""
    epochs = job.get("epochs")
    return epochs is not None and (job.get("epoch") or 0) + 1 >= epochs


def _reads(job: dict[str, Any], mountpoint: str) -> bool:
    is_live = job.get("pid") is not None or job.get("state") == "running"
    return is_live and job["mountpoint"] == mountpoint and job.get("state") != "done"


def _line(job: dict[str, Any]) -> str:
    name, pid = job["name"], job.get("pid")
    return f"{name} (process {pid})" if pid is not None else f"{name} (hintsd end {name})"


def socket_of(target: Target) -> str | None:
    """Where the mount's hintsd listens; None: it is to have none, or we may not see it."""
    chosen = setting(target)
    if chosen is None or chosen == "none":
        return None
    if chosen == "auto":
        return mounts.hintsd_socket(target.mount.uid)
    return chosen if target.mount.uid == os.getuid() else None  # not where others send us


def status(path: str) -> dict[str, Any]:
    """What the hintsd that listens there says (docs/WIRE.md, Status). OSError, WireError."""
    end_s = time.monotonic() + TIMEOUT_S
    directory, name = os.path.split(path)
    with mounts.connect(directory, name, TIMEOUT_S) as connection:
        for kind, fields in (("hello", {"version": wire.VERSION}), ("status", {})):
            connection.sendall(wire.encode(kind, fields))
        decoder = wire.Decoder()
        while True:
            for frame in _receive(connection, decoder, end_s):
                if frame.type == "status":
                    return frame.fields.raw()


def _receive(connection: socket.socket, decoder: wire.Decoder, end_s: float) -> list[wire.Frame]:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(left_s)
    data = connection.recv(RECEIVE_BYTES)
    if not data:
        raise ConnectionResetError
    return decoder.feed(data)

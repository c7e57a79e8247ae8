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
from typing import Any, Final

from fusecache import mounts, wire
from fusecache.control_client import Target

TIMEOUT_S: Final = 1.0
RECEIVE_BYTES: Final = 1 << 18


def readers(target: Target) -> list[str]:
    """The hinted jobs that read from a mount, one line each: those of a process that lives, and
    those that somebody was seen to read for of late. A hint without a reader is none.
    """
    try:
        jobs = _asked(target)["jobs"]
        return [_line(job) for job in jobs if _reads(job, target.mountpoint)]
    except (OSError, wire.WireError, KeyError, TypeError, AttributeError):
        return []


def layout(target: Target) -> dict[str, str]:
    """How the samples of a mount's jobs lie on SSD: "chosen", "why" and "job", of the job that the
    log follows if there is one. {}: no job, or nothing is said of it.
    """
    try:
        jobs = [job for job in _asked(target)["jobs"] if job["mountpoint"] == target.mountpoint]
        said = [
            (str(job["layout"]), str(job["layout_why"]), job) for job in jobs if "layout" in job
        ]
        for chosen, why, job in sorted(said, key=lambda row: row[0] == "static"):
            return {"chosen": chosen, "why": why, "job": str(job["name"])}
    except (OSError, wire.WireError, KeyError, TypeError, AttributeError):
        pass
    return {}


def _reads(job: dict[str, Any], mountpoint: str) -> bool:
    is_live = job.get("pid") is not None or job.get("state") == "running"
    return is_live and job["mountpoint"] == mountpoint and job.get("state") != "done"


def _line(job: dict[str, Any]) -> str:
    process = f" (process {job['pid']})" if job.get("pid") is not None else ""
    return f"{job['name']}{process}"


def _asked(target: Target) -> dict[str, Any]:
    """The status of the mount's hintsd. OSError, WireError: there is none."""
    record = mounts.keeper_record(target.directory) if target.directory else {}
    config = record.get("config")
    chosen = config.get("hintsd") if isinstance(config, dict) else None
    if not isinstance(chosen, str) or chosen == "none":
        raise FileNotFoundError
    return _status(mounts.hintsd_socket(target.mount.uid) if chosen == "auto" else chosen)


def _status(path: str) -> dict[str, Any]:
    """OSError, WireError: there is none."""
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

"""Asks all fusecache mounts of this host, and their hintsds, at once.

INVARIANT: what hangs holds up nobody: each is asked in a thread of its own, and what has not
answered by the deadline counts as silent.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeVar

from fusecache.base import mounts, wire
from fusecache.base.errors import UserError
from fusecache.control import control_client, hintsd_client
from fusecache.control.control_client import Target
from fusecache.observe.shapes import check_hintsd, check_mount

DEADLINE_S: Final = 3.0

Status = dict[str, Any]
State = Literal["up", "dead", "silent", "private"]
"""dead: no process of it lives; silent: one does, and does not answer; private: another user's."""

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """What a mount said of itself."""

    target: Target
    state: State
    status: Status
    """As `fusecache status --json`; {}: it did not answer."""
    fault: str = ""
    """A line for the user: why there is no status."""
    heal: str = ""
    """The command that helps."""

    @property
    def mountpoint(self) -> str:
        return self.target.mountpoint


@dataclass(frozen=True)
class Host:
    """All that answered, or should have."""

    mounts: list[Answer]
    hintsds: dict[str, Status | None]
    """By the path of its socket; None: none answers there, though a mount is to have one."""

    def jobs(self, mountpoint: str) -> list[Status]:
        """The live ones of a mount."""
        return [
            job
            for status in self.hintsds.values()
            for job in maps((status or {}).get("jobs"))
            if job.get("mountpoint") == mountpoint
        ]


def look(deadline_s: float = DEADLINE_S) -> Host:
    """Takes `deadline_s` at most, and a moment."""
    targets = seen(control_client.find_all())
    sockets = _sockets(targets)
    asked: dict[Any, Callable[[], Any]] = {
        target.mountpoint: partial(_ask, target, deadline_s) for target in targets
    }
    asked |= {("hintsd", path): partial(_ask_hintsd, path) for path in sockets}
    found = _all(asked, deadline_s)
    late = f"no answer within {deadline_s:g} s"
    return Host(
        [found.get(one.mountpoint) or _silent(one, late) for one in targets],
        {path: found.get(("hintsd", path)) for path in sockets},
    )


def seen(targets: Iterable[Target]) -> list[Target]:
    """Each mount once: of several places the first, of several mounts on one place the topmost."""
    topmost = {target.mountpoint: target for target in targets}
    devices: dict[str, Target] = {}
    for target in topmost.values():
        devices.setdefault(target.mount.device, target)
    return list(devices.values())


def log_of(target: Target) -> str:
    """The path of its log file; "": not known, or it has none."""
    record = mounts.keeper_record(target.directory) if target.directory else {}
    log = record.get("log")
    return log if isinstance(log, str) else ""


def _all(calls: Mapping[Any, Callable[[], T]], deadline_s: float) -> dict[Any, T]:
    """What those returned that did in time."""
    done: dict[Any, T] = {}

    def run(key: Any, call: Callable[[], T]) -> None:
        done[key] = call()

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in calls.items()]
    end_s = time.monotonic() + deadline_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    return dict(done)


def _ask(target: Target, timeout_s: float) -> Answer:
    if is_private(target):
        return Answer(target, "private", {}, "it is another user's")
    is_seen = target.mount.uid == os.getuid() or os.getuid() == 0  # else its sockets are not
    if is_seen and not control_client.is_kept(target):
        fault = "its keeper and its server are gone"
        return Answer(target, "dead", {}, fault, f"fusecache mount {places(target)}")
    try:
        status = control_client.status(target, timeout_s)
        check_mount(status)
        return Answer(target, "up", status)
    except (UserError, OSError, KeyError, TypeError, ValueError) as error:
        return _silent(target, str(error))


def _silent(target: Target, fault: str) -> Answer:
    pids = control_client.stopped(target, "keeper_pid", "server_pid")
    if pids:
        return Answer(target, "silent", {}, "stopped", f"kill -CONT {' '.join(map(str, pids))}")
    heal = f"fusecache restart {shlex.quote(target.mountpoint)}"
    return Answer(target, "silent", {}, fault, heal)


def is_private(target: Target) -> bool:
    """Whether another user's mount says nothing to us."""
    uid = target.mount.uid
    if uid == os.getuid() or os.getuid() == 0:
        return False
    return uid != 0 or not os.path.exists(mounts.status_socket(target.mount.device))


def places(target: Target) -> str:
    """What `fusecache mount` is to be told, in words of a shell."""
    source, mountpoint = target.mount.source, target.mountpoint
    words = [mountpoint] if source == mountpoint else [source, mountpoint]
    return shlex.join(words)


def _sockets(targets: Iterable[Target]) -> list[str]:
    """Of the hintsds of these mounts, as far as we may ask them."""
    found = []
    for target in targets:
        path = hintsd_client.socket_of(target)
        roots = mounts.public_socket(mounts.hintsd_socket(0))
        if path is None and target.mount.uid == 0 and os.getuid() != 0 and os.path.exists(roots):
            path = roots
        if path is not None and path not in found:
            found.append(path)
    return found


def _ask_hintsd(path: str) -> Status | None:
    try:
        status = hintsd_client.status(path)
        check_hintsd(status)
        return status
    except (OSError, ValueError, wire.WireError):
        return None


def maps(value: Any) -> list[Status]:
    """The objects of a JSON array; of what is none: none."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []

"""Readers of a mount whose server is killed all the time: what they got, and how long one waited.

The budgets are smaller than the data, so that files come from memory, from SSD and from the origin,
and eviction never ends. Processes that read in all ways (reader.py) compare every answer while the
present server gets SIGKILL, with busy loops beside.

INVARIANT: it kills servers of its own mount and its own children alone.
It is no measurement of speed: nothing is compared with a mount whose server lives.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fusecache.base.errors import UserError
from fusecache.control import control_client
from tools.campaign_lib import reader
from tools.campaign_lib.ground import Count, Ground

_READERS, _BUSY = 4, 2
_FILES = 400
_LARGE_FILES, _LARGE_BYTES = 4, 12 << 20
_EVERY_S: Final = (1.0, 0.25)  # half of the time each
_ROUND_LEAST_S: Final = 2.0
_READER_END_S: Final = 60.0
_DOING: Final = "while servers were killed"


def run(work: Path, rng: random.Random, until: float, count: Count) -> None:
    """Until the monotonic time `until`; a round of some seconds at least. What a kill meets is the
    machine's choice, not `rng`'s.
    """
    ground = Ground(work, rng, _FILES, 170_000)
    for number in range(_LARGE_FILES):
        ground.add(f"large/{number}", rng.randbytes(_LARGE_BYTES + number))
    plan = work / "plan"
    plan.write_text(json.dumps(_plan(ground)))
    with ground.mounted("--ssd", "48M", "--ram", "24M", "--revalidate", "1"), _beside(_BUSY):
        round_s = max(_ROUND_LEAST_S, (until - time.monotonic()) / len(_EVERY_S))
        for every_s in _EVERY_S:
            with _reading(ground.mountpoint, plan, rng, count) as worst_s:
                _kill_for(round_s, every_s, ground.mountpoint, count)
            count.notes.append(f"longest wait at a kill every {every_s:g} s: {max(worst_s):.2f} s")


def _plan(ground: Ground) -> reader.Plan:
    found = {}
    for name, content in ground.content.items():
        modified_ns = (ground.source / name).stat().st_mtime_ns
        found[name] = (len(content), modified_ns, hashlib.sha256(content).hexdigest())
    return found


def _kill_for(seconds: float, every_s: float, mountpoint: Path, count: Count) -> None:
    """Once at least: on a busy machine a server may take longer to start than `seconds`."""
    next_s = time.monotonic()
    end_s = next_s + seconds
    before = count.tried["kills"]
    while next_s < end_s or count.tried["kills"] == before:
        pid = _server_pid(mountpoint)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                count.tried["kills"] += 1
        next_s = max(next_s + every_s, time.monotonic())
        time.sleep(max(0.0, next_s - time.monotonic()))


def _server_pid(mountpoint: Path) -> int | None:
    """Of the server that lives now, ready or not, by its keeper."""
    try:
        answer = control_client.ask_keeper(control_client.find(str(mountpoint)), {"op": "info"})
    except (ConnectionError, UserError):
        return None
    pid = answer["info"]["server_pid"]
    return int(pid) if pid is not None else None


@contextlib.contextmanager
def _beside(number: int) -> Iterator[None]:
    """So many busy loops."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


# ---- the readers ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _reading(
    mountpoint: Path, plan: Path, rng: random.Random, count: Count
) -> Iterator[list[float]]:
    """Readers, all at work. What they found is in `count` at the end, however it comes to that; the
    longest wait of each is in the list then.
    """
    worst_s = [0.0]
    theirs, ours = os.pipe()  # its end is what tells them to stop, also when we are killed
    readers: list[subprocess.Popen[str]] = []
    try:
        try:
            for _ in range(_READERS):
                readers.append(_begin(mountpoint, plan, rng, theirs))
        finally:
            os.close(theirs)
        for process in readers:
            assert process.stdout is not None
            process.stdout.readline()
        yield worst_s
    finally:
        os.close(ours)
        for process in readers:
            _end(process, count, worst_s)


def _begin(mountpoint: Path, plan: Path, rng: random.Random, stdin: int) -> subprocess.Popen[str]:
    """In a process group of its own: Ctrl-C is for us, and a reader still tells what it found."""
    return subprocess.Popen(
        [sys.executable, reader.__file__, mountpoint, plan, str(rng.randrange(1 << 32))],
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def _end(process: subprocess.Popen[str], count: Count, worst_s: list[float]) -> None:
    try:
        output, _ = process.communicate(timeout=_READER_END_S)
        found = reader.Found(**json.loads(output))
    except (subprocess.TimeoutExpired, ValueError):
        process.kill()
        count.failed(_DOING, f"a reader hung or died (exit code {process.poll()})")
        return
    worst_s.append(found.worst_s)
    count.tried.update(found.tried)
    count.wrong += found.wrong
    count.errors += found.errors
    for line in found.surprises:
        count.surprise(_DOING, line)

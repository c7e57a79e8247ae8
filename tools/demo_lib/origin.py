"""New images behind a slow file server: for the demo and for tools/importance.

INVARIANT: leaving the context takes back the limit, the loop device and both mounts.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.demo_lib import dataset
from tools.latency_origin import LatencyOrigin
from tools.slow_origin import LoopOrigin, can_throttle

LATENCY_S = 0.004  # of each request to the origin
READ_BPS, READ_IOPS = 40_000_000, 1000  # what it gives at most
SPARE_BYTES = 64 << 20  # of the origin's file system, for its own tables


@dataclass(frozen=True)
class Origin:
    directory: Path  # where it is read
    behind: Path  # where its files lie
    kind: str
    device: LoopOrigin | None = None  # that counts what is read


@contextlib.contextmanager
def slow_origin(work: Path, images: int, seed: int, say: Callable[[str], None]) -> Iterator[Origin]:
    """New images, on a limited device if there can be one here, behind a latency."""
    kind = f"{LATENCY_S * 1e3:g} ms a request"
    with contextlib.ExitStack() as stack:
        device: LoopOrigin | None = None
        behind = work / "behind"
        if can_throttle():
            size_bytes = images * dataset.MEDIAN_BYTES * 3 // 2 + SPARE_BYTES
            device = stack.enter_context(LoopOrigin(work, size_bytes))
            behind = device.directory / "train"
        say(f"making {images} JPEG files")
        dataset.make(behind, images, seed)
        os.sync()  # pages that are not written yet could not be forgotten
        if device is None:
            kind += ", no limit (that needs root)"
        else:
            try:
                device.throttle(READ_BPS, READ_IOPS)
                kind += f", {READ_BPS / 1e6:.0f} MB/s, {READ_IOPS} requests/s"
            except OSError as error:
                kind += f", no limit ({error})"
        front = stack.enter_context(LatencyOrigin(behind, work, LATENCY_S))
        yield Origin(front.directory, behind, kind, device)

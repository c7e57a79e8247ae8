"""Processor time of processes that run."""

import os
from collections.abc import Iterable
from pathlib import Path


def processor_s(pids: Iterable[int]) -> float:
    """Seconds that these processes, and the children that they have now, have computed so far.
    Those that are gone count nothing.
    """
    ticks = 0
    for pid in {found for each in pids for found in (each, *_children(each))}:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])  # in user mode, and in the kernel
    return ticks / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    try:
        return [int(child) for path in listed for child in path.read_text().split()]
    except OSError:
        return []

"""How much memory a process may use."""

from __future__ import annotations

import os


def usable_memory_bytes() -> int:
    """What this process may use: free memory of the machine, or less where a cgroup says so."""
    candidates = [available_memory_bytes()]
    candidates += _cgroup_limits("/proc/self/cgroup", "/sys/fs/cgroup")
    return min(candidates)


def total_memory_bytes() -> int:
    """Of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_bytes() -> int:
    """Of the machine: free, or taken by what can be let go of."""
    with open("/proc/meminfo", encoding="ascii") as file:
        table = dict(line.split(":", 1) for line in file)
    amounts = [table[key] for key in ("MemAvailable", "MemTotal") if key in table]
    return min(int(text.split()[0]) for text in amounts) << 10


def _cgroup_limits(listing: str, root: str) -> list[int]:
    """Memory limits of the cgroups in `listing` and of all above them, v1 and v2."""
    found = []
    try:
        with open(listing, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, name = [root, os.path.join(root, "unified")], "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = [os.path.join(root, "memory")], "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for base in roots:
            for depth in range(len(parts) + 1):
                limit = _read_limit(os.path.join(base, *parts[:depth], name))
                if limit is not None:
                    found.append(limit)
    return found


def _read_limit(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max"

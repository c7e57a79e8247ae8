"""Whether a status has the shape that it must have: another user's server may say anything to root.

base/metrics.py knows where figures stand. What is absent is not asked for, but for what every
version has: a server may be of another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fusecache.base.metrics import FAMILIES, Of, figure

KEYS_MOST: Final = 64
JOBS_MOST: Final = 4096
NUMBER_MOST: Final = 2.0**64
_ALWAYS: Final = ("ram.bytes", "ram.limit_bytes", "ssd.bytes", "ssd.limit_bytes", "server_pid")


def check_mount(status: Mapping[str, Any]) -> None:
    """ValueError: a mount's is not to be used."""
    _check_figures(status, "mount")
    for path in _ALWAYS:
        if not _is_number(figure(status, path)):
            raise ValueError(f"{path} is no number")
    if not isinstance(status.get("reads"), dict):
        raise ValueError("there are no reads")
    directories = figure(status, "ssd.directories")
    for one in directories if isinstance(directories, list) else ():
        texts = [one.get(key) for key in ("path", "why_out")] if isinstance(one, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("ssd.directories are none")
    if not isinstance(directories, (list, type(None))):
        raise ValueError("ssd.directories is no list")


def check_hintsd(status: Mapping[str, Any]) -> None:
    """ValueError: a hintsd's is not to be used."""
    _check_figures(status, "hintsd")
    jobs = status.get("jobs")
    if not isinstance(jobs, list) or len(jobs) > JOBS_MOST:
        raise ValueError("jobs is no list")
    for job in jobs:
        if not isinstance(job, dict) or not isinstance(job.get("name"), str):
            raise ValueError("a job is none")
        if not isinstance(job.get("mountpoint"), (str, type(None))):
            raise ValueError("a job's mountpoint is none")
        _check_figures(job, "job")


def _check_figures(values: Mapping[str, Any], of: Of) -> None:
    for family in FAMILIES:
        for label, path in family.figures.items() if family.of == of else ():
            found = figure(values, path)
            if family.kind == "histogram":
                is_sound = _is_histogram(found)
            elif family.label and not label:
                is_sound = _is_map(found)
            else:
                is_sound = _is_number(found)
            if found is not None and not is_sound:
                raise ValueError(f"{path} is none")


def _is_map(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > KEYS_MOST:
        return False
    return all(isinstance(key, str) and _is_number(number) for key, number in value.items())


def _is_histogram(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    bounds, counts = value.get("bounds"), value.get("counts")
    if not isinstance(bounds, list) or not isinstance(counts, list):
        return False
    numbers = [*bounds, *counts, value.get("sum")]
    return len(counts) == len(bounds) + 1 <= KEYS_MOST and all(map(_is_number, numbers))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and -NUMBER_MOST <= value <= NUMBER_MOST

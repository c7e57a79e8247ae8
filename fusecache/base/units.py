"""Sizes in bytes and durations, for people: "500G", "64GiB", "1.5T" <-> int; "1 h 2 min 3 s"."""

from __future__ import annotations

import re

BLOCK_BYTES = 4 << 20  # of a file: what has one place on SSD

_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?b?)\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_bytes(text: str) -> int:
    """Bytes in `text`; K, M, G, T, P (with or without i, B) are powers of 1024.

    Raises ValueError with one line that quotes the text.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 500G, 64GiB or 1048576")
    number, prefix, _ = match.groups()
    return int(float(number) * 1024 ** _POWERS[prefix.lower()])


def format_bytes(count: float) -> str:
    """`count` bytes with three or four digits and a binary prefix: 1.5 GiB, 1023 KiB."""
    for prefix in ("", "Ki", "Mi", "Gi", "Ti"):
        if abs(count) < 1023.5:
            return f"{count:.0f} B" if not prefix else f"{_digits(count)} {prefix}B"
        count /= 1024
    return f"{_digits(count)} PiB"


def format_share(part: float, whole: float) -> str:
    """412 GiB of 480 GiB (85%). Rounded down: 100% is all."""
    percent = min(100, int(100 * part / whole)) if whole else 100
    return f"{format_bytes(part)} of {format_bytes(whole)} ({percent}%)"


def format_duration(seconds: float) -> str:
    """1 h 2 min 3 s"""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"


def format_count(count: int, noun: str) -> str:
    """1 file; 2,000 files"""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _digits(count: float) -> str:
    return f"{count:.3g}" if abs(count) < 999.5 else f"{count:.0f}"

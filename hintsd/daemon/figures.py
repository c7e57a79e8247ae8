"""The figures of one job in hintsd's `status` answer, as text: the same in tables, lines and log.

Every figure may be missing (a job that is being opened): then it is a dash.
"""

from __future__ import annotations

from typing import Any, Final

Values = dict[str, Any]

NONE: Final = "-"


def reads(job: Values) -> str:
    """How far a job's reader is, and what it met, in one line."""
    sample = f"{count(job, 'index')} of {count(job, 'samples')}"
    return (
        f"epoch {epoch(job)}, sample {sample}, {count(job, 'not_late')} not late, "
        f"{_misses(job, 'late')} late, {_misses(job, 'unplanned')} unplanned"
    )


def layout(job: Values) -> str:
    """How its samples lie on SSD, and why (docs/LOG.md)."""
    why = "" if job["layout_why"] == f"--layout {job['layout']}" else f": {job['layout_why']}"
    return f"layout {job['layout']}{why or ', as --layout says'}"


def epoch(job: Values) -> str:
    """3 of 90, or 3 where the number of epochs is not known."""
    epochs = job.get("epochs")
    return count(job, "epoch") + (f" of {epochs:,}" if epochs is not None else "")


def total(job: Values, kind: str) -> str:
    """The number of `late` or `unplanned` reads."""
    return f"{sum((job.get(kind) or {}).values()):,}"


def reasons(job: Values, kind: str) -> str:
    """How many of them there were for each reason."""
    return ", ".join(f"{reason} {number:,}" for reason, number in (job.get(kind) or {}).items())


def _misses(job: Values, kind: str) -> str:
    return total(job, kind) + (f" ({reasons(job, kind)})" if job.get(kind) else "")


def count(values: Values, name: str) -> str:
    """A whole number."""
    value = values.get(name)
    return NONE if value is None else f"{value:,}"

"""Scores that a command is given in a file: how often each sample is expected to be used."""

from __future__ import annotations

import click

from fusecache.base.errors import EXIT_USAGE, UserError
from hintsd.cli.channel import Channel, complain


def read_scores(path: str) -> bytes:
    """Of a .npy file of shape (samples,): f4, little-endian. UsageError: it is no such thing."""
    import numpy as np

    try:
        told = np.load(path, allow_pickle=False)
    except OSError as error:
        raise click.UsageError(f"--importance {path}: {error.strerror or error}") from None
    except (ValueError, EOFError):
        told = None
    if not isinstance(told, np.ndarray):
        raise click.UsageError(f"--importance {path}: is no .npy file of numbers")
    if told.ndim != 1 or told.dtype.kind not in "fiub" or not len(told):
        raise click.UsageError(f"--importance {path}: must be one row of numbers, one a sample")
    with np.errstate(over="ignore"):  # what is too large is infinite, and said to be
        uses = told.astype("<f4")
    wrong = np.flatnonzero(~(np.isfinite(uses) & (uses >= 0)))
    if len(wrong):
        raise click.UsageError(
            f"--importance {path}: sample {wrong[0]} has {told[wrong[0]]}: numbers must be finite, "
            "and 0 or more"
        )
    return uses.tobytes()


def tell_scores(channel: Channel, uses: bytes) -> None:
    """For the job of this conversation. UserError: they are not of its dataset; it ends."""
    from hintsd.client.link import scores_frames

    if not channel.takes_scores:
        complain("this hintsd is older, and takes no --importance; going on without")
        return
    try:
        channel.say(scores_frames({"uses": uses}))
    except UserError as refusal:
        channel.ask("close", {})
        line = str(refusal).removeprefix("scores: ")
        raise UserError(f"--importance: {line}", EXIT_USAGE) from None

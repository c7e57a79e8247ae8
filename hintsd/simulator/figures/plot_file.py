"""The file that a plot is saved to: PNG or SVG, by its extension."""

from __future__ import annotations

import os
from typing import Final

from fusecache.base.errors import ConfigError, UserError

EXTENSIONS: Final = (".png", ".svg")
DOTS_PER_INCH: Final = 120


def check(path: str) -> None:
    """UserError: no plot can be written there. Before the work, not after it."""
    if os.path.splitext(path)[1].lower() not in EXTENSIONS:
        raise ConfigError(f"--plot {path}: the name must end in {' or '.join(EXTENSIONS)}")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ConfigError(f"--plot {path}: there is no such folder")
    if os.path.isdir(path) or not os.access(os.path.dirname(path) or ".", os.W_OK):
        raise ConfigError(f"--plot {path}: it cannot be written")
    try:
        import matplotlib  # noqa: F401  # whether it is there
    except ImportError:
        raise UserError("plots need matplotlib: pip install matplotlib") from None

"""transformers' Trainer with hints: `Trainer(..., callbacks=[hintsd.hf.HintsCallback()])`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hintsd import autohint

if TYPE_CHECKING:
    TrainerCallback = object
else:
    from transformers import TrainerCallback


class HintsCallback(TrainerCallback):
    """All DataLoaders of the process announce their order; the jobs' figures (`hintsd.Job.stats`)
    join what the Trainer logs."""

    def __init__(self) -> None:
        autohint.install()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Called by the Trainer."""
        from hintsd.client.loaders import stats

        if logs is not None:
            logs.update(stats())

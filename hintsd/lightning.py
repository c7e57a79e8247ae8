"""Lightning's Trainer with hints: `Trainer(callbacks=[hintsd.lightning.HintsCallback()])`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hintsd import autohint

if TYPE_CHECKING:
    Callback = object
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class HintsCallback(Callback):
    """All DataLoaders of each process announce their order; after each epoch the jobs' figures
    (`hintsd.Job.stats`) go to the Trainer's loggers."""

    def setup(self, trainer: Any, pl_module: Any, stage: Any) -> None:
        """Called by the Trainer, in each process."""
        autohint.install()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by the Trainer."""
        from hintsd.client.loaders import stats

        figures = stats()
        for logger in trainer.loggers if figures else ():
            logger.log_metrics(figures, step=trainer.global_step)

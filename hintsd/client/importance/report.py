"""What a sampler has done so far, as figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hintsd.sampling.scores import Scores


@dataclass(frozen=True, eq=False)
class Report:
    """What `ImportanceSampler.report` tells; printed, it is one line."""

    epoch: int
    """The one that is read, or was read last; -1: none yet."""
    samples: int
    """Of the dataset."""
    times: npt.NDArray[np.uint16]
    """How often each sample was trained, as far as its losses came: shape (samples,); 65,000 is
    that or more."""
    coverage: float
    """Share of the samples that were trained at least once."""
    recent_coverage: float
    """Of those: in this epoch or the nine before."""
    age_mean: float
    """Epochs since a score was told, of those that there are; NaN: there are none."""
    age_most: int
    refused: int
    """Losses that were not taken."""
    h_list: int
    """Samples on the H-list: `h_share` of those with a score."""
    shuffled: bool
    """This epoch goes by no scores: the warm-up's, or a fallback."""
    repeats: int
    """Reads of this epoch that repeat what is cached, of all ranks."""
    substituted: int
    """Reads of this epoch that stand for another sample's, of all ranks."""

    def __str__(self) -> str:
        least, most = (int(self.times.min()), int(self.times.max())) if self.samples else (0, 0)
        return (
            f"epoch {self.epoch}: each of {self.samples} samples trained {least} to {most} "
            f"times, {self.coverage:.1%} at least once, {self.recent_coverage:.1%} in ten epochs; "
            f"scores {self.age_mean:.1f} epochs old, {self.age_most} at most; "
            f"{self.repeats} reads repeat, {self.substituted} substitute; "
            f"{self.refused} losses refused" + ("; shuffled" if self.shuffled else "")
        )


RECENT_EPOCHS = 10


def report_of(
    scores: Scores,
    epoch: int,
    *,
    refused: int,
    h_list: int,
    shuffled: bool,
    repeats: int,
    substituted: int,
) -> Report:
    """Of these scores, in this epoch; the rest is the report's as it is."""
    ages = scores.ages(max(0, epoch))
    samples = max(1, len(scores))
    return Report(
        epoch=epoch,
        samples=len(scores),
        times=scores.times.copy(),
        coverage=float(np.count_nonzero(scores.times)) / samples,
        recent_coverage=float(np.count_nonzero(ages < RECENT_EPOCHS)) / samples,
        age_mean=float(ages.mean()) if len(ages) else float("nan"),
        age_most=int(ages.max()) if len(ages) else 0,
        refused=refused,
        h_list=h_list,
        shuffled=shuffled,
        repeats=repeats,
        substituted=substituted,
    )

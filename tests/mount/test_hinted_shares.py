"""Two datasets on a real mount whose cache takes a part of them: each has its share."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator

import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_hinted import order, shuffled
from tests.support.directed import Directed, request
from tests.support.mounted import Mount
from tests.support.trees import random_bytes

FILES, FILE_BYTES, BATCH = 300, 120_000, 4
RAM_BYTES, SSD_BYTES = 16 << 20, 40 << 20  # of 36 MB each
PACE_S = 0.005  # of a batch
EARLY_BATCHES, LONGEST_S = 2 * FILES // BATCH, 60.0


class Training:
    """One dataset's."""

    def __init__(self, place: Place, name: str, seed: int) -> None:
        self.name = name
        self._files = [f"{name}/c/{n:04}.jpg" for n in range(FILES)]
        for file in self._files:
            os.utime(place.write(file, random_bytes(file, FILE_BYTES)), (1e9, 1e9))
        self._spec = shuffled(FILES, seed)

    def begin(self, directed: Directed, mount: Mount) -> Iterator[None]:
        """A batch each time."""
        directed.open(self.name, request(mount.path / self.name, self._spec))
        for epoch in itertools.count():
            indices = order(self._spec, epoch)
            for batch, start in enumerate(range(0, FILES, BATCH), 1):
                for file in (self._files[index] for index in indices[start : start + BATCH]):
                    assert (mount.path / file).read_bytes() == random_bytes(file, FILE_BYTES)
                yield
                directed.step(self.name, epoch, batch)


@in_one_mode
def test_a_dataset_that_comes_later_has_its_share_of_the_cache(
    place: Place, mounting: Mounting
) -> None:
    early, late = Training(place, "early", 1), Training(place, "late", 2)
    mount = mounting("--ram", str(RAM_BYTES), "--ssd", str(SSD_BYTES))
    with Directed() as directed:
        batches = early.begin(directed, mount)
        for _ in range(EARLY_BATCHES):
            next(batches)
        assert directed.job("early")["share_why"] is None, "there is no other one"
        both = [batches, late.begin(directed, mount)]
        until_s, shares = time.monotonic() + LONGEST_S, [0.0, 0.0]
        while shares != pytest.approx([1, 1], abs=0.06) and time.monotonic() < until_s:
            for training in both:
                next(training)
            time.sleep(PACE_S)
            jobs = [directed.job(training.name) for training in (early, late)]
            if all(job["share_bytes"] for job in jobs):
                shares = [job["cached_bytes"] / job["share_bytes"] for job in jobs]
        told = repr(directed.status())
        assert shares == pytest.approx([1, 1], abs=0.06), told
        assert {job["state"] for job in jobs} == {"running"}, told

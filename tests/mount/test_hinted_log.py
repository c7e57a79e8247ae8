"""hintsd's policy and a real mount that reorders (docs/LOG.md)."""

from __future__ import annotations

from tests.conftest import Mounting, Place, counts_reads
from tests.directed import Directed, request
from tests.mount.test_hinted import (
    FILES,
    TOTAL_BYTES,
    Reader,
    make_dataset,
    order,
    shuffled,
    staged,
)

pytestmark = counts_reads

EPOCHS = 3
RAM_BYTES = 14 << 20  # less than the dataset, and enough for the buffers of its chunks
STRIDE = 200


def test_each_epoch_is_moved_into_the_next_ones_order(place: Place, mounting: Mounting) -> None:
    names, spec = make_dataset(place), shuffled()
    mount = mounting("--ram", "16M", "--layout", "reorder")
    reader = Reader(mount, names)
    with Directed(ram_bytes=RAM_BYTES) as directed:
        directed.open("job", request(mount.path, spec, epochs=EPOCHS))
        staged(directed, "job", RAM_BYTES // 2)
        with reader.asks_at_most(EPOCHS * FILES // 8, directed):
            for epoch in range(EPOCHS):
                sequence = order(spec, epoch)
                for start in range(0, FILES, STRIDE):
                    reader.read(sequence[start : start + STRIDE])
                    directed.step("job", epoch, (start + STRIDE) // 4)
                    if start + 3 * STRIDE < FILES:
                        staged(directed, "job", RAM_BYTES // 4, (epoch, start))
                    if start == 0 and epoch < EPOCHS - 1:
                        assert directed.job("job")["layout"] == "reorder"
        job = directed.job("job")
        assert (job["layout"], job["layout_why"]) == ("log", "no epoch follows")
        written_bytes = directed.mount()["log_written_bytes"]
        moves = EPOCHS - 1
        assert 0.9 * moves * TOTAL_BYTES < written_bytes <= 1.02 * moves * TOTAL_BYTES

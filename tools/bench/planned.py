"""What meta_cost and plan_cost share: hintsd's job, and a forked process that plays the mount."""

import contextlib
import os
import socket
import traceback
from collections.abc import Callable, Iterator

import numpy as np

from hintsd.orders.drawing import Drawing, Order
from hintsd.orders.spec import OrderSpec
from hintsd.plan.planner import MountPlanner

RAM_BYTES = 64 << 30
_BATCH_SIZE = 256


def order_of(samples: int, drawing: Drawing | None = None) -> Order:
    return Order(OrderSpec("distributed", samples, seed=0, batch_size=_BATCH_SIZE), drawing)


def open_job(planner: MountPlanner, samples_per_epoch: int, epochs: int) -> None:
    """The job "job", at its beginning."""
    planner.open_job(
        "job",
        samples_per_epoch=samples_per_epoch,
        epochs=epochs,
        epoch=0,
        index=0,
        batch_size=_BATCH_SIZE,
        workers=8,
        prefetch_factor=2,
        dataset=np.arange(1, samples_per_epoch + 1, dtype=np.uint32),
        now=0.0,
    )


@contextlib.contextmanager
def mount_played(play: Callable[[socket.socket], object]) -> Iterator[socket.socket]:
    """A connection to a process that runs `play` with its end of it, and has ended afterwards."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            ours.close()
            play(theirs)
        except BaseException:
            traceback.print_exc()  # the parent sees the connection end
        finally:
            os._exit(0)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        os.waitpid(child, 0)

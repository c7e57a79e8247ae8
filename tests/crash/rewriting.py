"""What the crash replay records: a dataset that is stored, and rewritten twice by logs.

Run as a program: `python -m tests.crash.rewriting DIRECTORY`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tests.support.log_support import Mover
from tests.support.store_support import MIB, Opened, content

FILES = 16
CHUNKS = 3
LIMIT_BYTES = 12 * MIB


def path_of(number: int) -> bytes:
    return b"d%d/f%d" % (number % 3, number)


def payload_of(number: int) -> bytes:
    return content(number, 3000 + number * 600)


def rewrite(store: Opened, source: random.Random, old: list[int], moved: int) -> Mover:
    """Move the first `moved` files of a fresh order, then release what is empty by then."""
    log = store.store.begin_log(CHUNKS, MIB)
    assert log is not None
    mover = Mover(log, {}, piece_bytes=40 << 10)
    order = source.sample(range(FILES), FILES)[:moved]
    for position, number in enumerate(order):
        assert mover.append(position * CHUNKS // FILES, path_of(number), payload_of(number))
    mover.finish()
    if moved == FILES:
        assert log.release(old) > 0
    return mover


def main() -> None:
    store = Opened(Path(sys.argv[1]), limit_bytes=LIMIT_BYTES)
    source = random.Random(5)
    for number in range(FILES):
        assert store.put(path_of(number), payload_of(number)) is not None
    store.store.flush()
    store.seal()
    old = [int(path.stem) for path in store.segments()]
    for _ in range(2):
        mover = rewrite(store, source, old, FILES)
        old = mover.log.segnos
    mover.log.end()
    store.store.housekeeping()
    rewrite(store, source, [], FILES // 2).log.end()
    store.store.housekeeping()
    store.close()
    assert store.faults == []


if __name__ == "__main__":
    main()

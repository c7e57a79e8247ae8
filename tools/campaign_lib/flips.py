"""Bits flipped in a cache that a live mount reads from: in segments and in the index."""

import contextlib
import os
import random
import time
from pathlib import Path

from tools.campaign_lib.ground import Count, Ground

FLIPS_A_ROUND = 1_000
_FILES = 300
_PAGE = 4096
_INDEX_SHARE = 0.02  # a damaged index is rebuilt, which takes the time of many flips


def _used_pages(path: Path) -> list[int]:
    """Offsets of the pages that hold anything: segments are allocated ahead."""
    content = path.read_bytes()
    empty = bytes(_PAGE)
    return [at for at in range(0, len(content), _PAGE) if content[at : at + _PAGE] != empty]


def flip(path: Path, places: list[int], rng: random.Random) -> int:
    """One bit at a random place of each page; how many were: the file may have become shorter."""
    flipped = 0
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        for page in places:
            at = page + rng.randrange(_PAGE)
            byte = os.pread(fd, 1, at)
            if byte:
                flipped += os.pwrite(fd, bytes([byte[0] ^ 1 << rng.randrange(8)]), at)
        os.fsync(fd)
    finally:
        os.close(fd)
    return flipped


def run(work: Path, rng: random.Random, until: float, count: Count) -> None:
    """Until the monotonic time `until`; at least one round."""
    ground = Ground(work, rng, _FILES, 30_000)
    with ground.mounted("--ssd", "128M", "--ram", "32M") as mount:
        ground.fill(mount)
        while True:
            in_index = rng.random() < _INDEX_SHARE
            folder, suffix = ("index", "*.db") if in_index else ("segments", "*.seg")
            files = sorted((ground.cache_dir / folder).glob(suffix))
            pages: list[tuple[Path, int]] = []
            for path in files:
                with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                    pages += [(path, page) for page in _used_pages(path)]
            chosen = rng.choices(pages, k=FLIPS_A_ROUND) if pages else []
            for path in files:
                places = [page for which, page in chosen if which == path]
                with contextlib.suppress(FileNotFoundError):
                    count.tried["bits flipped"] += flip(path, places, rng)
            ground.forget()
            ground.check_all(count, f"after bits were flipped in {folder}")
            if time.monotonic() > until:
                break
            if rng.random() < 0.1:
                mount.settle()
        found = mount.status()["integrity"]
        count.tried["damaged blocks noticed"] += found["mismatches"]
        if not found["mismatches"]:
            count.failed("no flipped bit was noticed: this attack attacked nothing")

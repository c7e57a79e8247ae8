"""Digests and checksums: the names and numbers of the algorithms, and nothing else.

Digests name the content of a block (deduplication); checksums find flipped bits. xxh3-128 is fast
but not collision-proof, which is right for a cache that one user fills; blake3 is for shared ones.
The package blake3 is an extra (`pip install blake3`), imported with the first digest.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

import xxhash

Buffer = bytes | bytearray | memoryview

CHUNK_BYTES: Final = 64 << 10


def _xxh3_128(data: Buffer) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _blake3(data: Buffer) -> bytes:
    import blake3

    return blake3.blake3(data).digest()


# The numbers are those of the segment format (docs/FORMAT.md).
ALGORITHMS: Final[dict[str, int]] = {"xxh3-128": 1, "blake3": 2}
_FUNCTIONS: Final[dict[int, Callable[[Buffer], bytes]]] = {1: _xxh3_128, 2: _blake3}


def why_unusable(name: str) -> str:
    """A line for the user; "": this algorithm is known, and its package is installed."""
    if name not in ALGORITHMS:
        return f"unknown digest {name!r}: use {' or '.join(ALGORITHMS)}"
    if name == "blake3" and find_spec("blake3") is None:
        return "the digest blake3 needs the package of that name: pip install blake3"
    return ""


def digest(algorithm: int, data: Buffer) -> bytes:
    """16 bytes for xxh3-128, 32 for blake3. KeyError: unknown algorithm."""
    return _FUNCTIONS[algorithm](data)


def digest_bytes(algorithm: int) -> int:
    """Length of a digest of this algorithm."""
    return 16 if algorithm == ALGORITHMS["xxh3-128"] else 32


def checksum(data: Buffer, seed: int = 0) -> int:
    """xxh3_64, unsigned."""
    return xxhash.xxh3_64_intdigest(data, seed)


def chunk_sums(data: Buffer) -> list[int]:
    """Checksums of each 64 KiB of `data`; the last chunk may be shorter."""
    if len(data) <= CHUNK_BYTES:
        return [xxhash.xxh3_64_intdigest(data)] if len(data) else []
    view = memoryview(data)
    return [
        xxhash.xxh3_64_intdigest(view[at : at + CHUNK_BYTES])
        for at in range(0, len(view), CHUNK_BYTES)
    ]

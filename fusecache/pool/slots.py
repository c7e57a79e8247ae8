"""Which of several independent servers has which slot: the same on each host (docs/POOL.md)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import xxhash

SLOTS: Final = 16_384
NO_SERVER: Final = 255
LOAD_MOST: Final = 1.05
"""Of a server, over the mean."""


def slot_of(key: bytes) -> int:
    """As a Cluster has it: CRC-16 (XMODEM) of the key. Keys here have no hash tag."""
    crc = 0
    for byte in key:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc % SLOTS


def place(names: Sequence[str], away: Collection[str] = ()) -> bytes:
    """The index in `names` of each slot's server, none of which is `away`. Rendezvous hashing with
    bounded loads (Thaler and Ravishankar 1998; Mirrokni et al. 2018): the slot's highest server
    that is not full; slots choose in turn. It depends on the set of names, not on their order.
    """
    return place_with_heirs(names, away)[0]


def place_with_heirs(names: Sequence[str], away: Collection[str] = ()) -> tuple[bytes, bytes]:
    """As `place`; and each slot's heir, who has it while its server does not answer: the highest
    of the others. NO_SERVER: there is no other one.
    """
    order = sorted((i for i, name in enumerate(names) if name not in away), key=names.__getitem__)
    weights = np.array(
        [
            [xxhash.xxh3_64_intdigest(slot.to_bytes(2, "little") + names[i].encode())
             for i in order]
            for slot in range(SLOTS)
        ],
        np.uint64,
    )  # fmt: skip
    room = np.full(len(order), math.ceil(LOAD_MOST * SLOTS / len(order)))
    placed, heirs = bytearray(SLOTS), bytearray([NO_SERVER]) * SLOTS
    for slot, ranked in enumerate(np.argsort(weights, axis=1)[:, ::-1]):
        chosen = next(server for server in ranked if room[server])
        room[chosen] -= 1
        placed[slot] = order[chosen]
        if len(order) > 1:
            heirs[slot] = order[ranked[0] if ranked[0] != chosen else ranked[1]]
    return bytes(placed), bytes(heirs)

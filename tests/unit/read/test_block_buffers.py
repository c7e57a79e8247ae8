"""Memory for blocks of large files: used again, and by nobody else while anything refers to it."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest

from fusecache.read import origin
from fusecache.read.origin import BUFFER_BYTES_LEAST, BUFFERS_MOST, BlockBuffers
from fusecache.store.types import BLOCK_BYTES
from tests.support.mounted import eventually


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_what_is_referred_to_is_given_to_nobody_else() -> None:
    buffers = BlockBuffers()
    first = buffers.take(BLOCK_BYTES)
    first[:] = b"a" * BLOCK_BYTES
    part = first[100:200]
    del first
    second = buffers.take(BLOCK_BYTES - 1)
    second[:] = b"b" * (BLOCK_BYTES - 1)
    assert bytes(part) == b"a" * 100
    assert bytes(second) == b"b" * (BLOCK_BYTES - 1)
    assert buffers.count() == 2
    del part, second
    for _ in range(3):
        buffers.take(BUFFER_BYTES_LEAST)
    assert buffers.count() == 2


def test_where_it_begins_in_a_page() -> None:
    """At its beginning, as the pages of a file do: the kernel copies fast then."""
    assert address(BlockBuffers().take(BLOCK_BYTES)) % 4096 == 0


@pytest.mark.parametrize("length", [0, 1, BUFFER_BYTES_LEAST - 1, BLOCK_BYTES + 1])
def test_other_lengths_are_not_kept(length: int) -> None:
    buffers = BlockBuffers()
    assert len(buffers.take(length)) == length
    assert buffers.count() == 0


def test_so_many_are_kept() -> None:
    buffers = BlockBuffers()
    taken = [buffers.take(BLOCK_BYTES) for _ in range(BUFFERS_MOST + 3)]
    assert len({address(view) for view in taken}) == len(taken)
    assert buffers.count() == BUFFERS_MOST


def test_they_go_when_none_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "BUFFERS_KEPT_S", 0.05)
    buffers = BlockBuffers()
    kept = buffers.take(BLOCK_BYTES)
    kept[:3] = b"abc"
    eventually(lambda: buffers.count() == 0)
    assert bytes(kept[:3]) == b"abc"
    buffers.take(BLOCK_BYTES)
    eventually(lambda: buffers.count() == 0)


def test_threads_that_take_them_at_once() -> None:
    buffers = BlockBuffers()

    def work(number: int) -> bool:
        for _ in range(20):
            view = buffers.take(BUFFER_BYTES_LEAST)
            view[:] = bytes([number]) * BUFFER_BYTES_LEAST
            if bytes(view) != bytes([number]) * BUFFER_BYTES_LEAST:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))

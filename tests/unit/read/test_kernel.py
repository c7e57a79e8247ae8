"""What the kernel is told of, by several threads at once."""

from __future__ import annotations

import threading

import pytest
import trio

from fusecache import _native
from fusecache.read.kernel import Kernel


@pytest.mark.parametrize("other", ["drain_forever", "drain_all"])
def test_all_that_is_flagged_has_been_told(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """Also what another one has taken."""
    flagged: list[list[tuple[int, bool, list[object]]]] = [[(2, False, [])]]
    is_taken, may_be_told, told = threading.Event(), threading.Event(), list[int]()

    def tell(fd: int, ino: int, offset: int, length: int) -> bool:
        is_taken.set()
        return may_be_told.wait(30)

    monkeypatch.setattr(_native, "take_stale", lambda most: flagged.pop() if flagged else [])
    monkeypatch.setattr(_native, "inval_inode", tell)
    monkeypatch.setattr(_native, "settled", told.append)
    kernel = Kernel(-1)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(getattr(kernel, other))
            kernel.notice_stale()
            assert await trio.to_thread.run_sync(is_taken.wait, 30)
            with trio.move_on_after(0.2) as waiting:
                await kernel.drain_all()
            assert waiting.cancelled_caught
            may_be_told.set()
            await kernel.drain_all()
            assert told == [2]
            nursery.cancel_scope.cancel()

    trio.run(main)

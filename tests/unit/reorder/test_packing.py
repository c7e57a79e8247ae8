"""Chunks, their buffers, and who reorders (docs/LOG.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.follow.sequence import EpochOrder, Inos
from hintsd.policies import Mask
from hintsd.reorder import packing, worth
from hintsd.reorder.log import Log
from hintsd.reorder.packing import Contents
from hintsd.reorder.worth import Wanted

MIB = 1 << 20


@dataclass
class FakeProbe:
    mixed_bytes_per_s: float
    random: float
    sequential_bytes_per_s: float = 1e9

    def random_bytes_per_s(self, size_bytes: int) -> float:
        return self.random


@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=300),
    st.integers(0, 400_000),
    st.integers(1, 40),
)
def test_chunks_are_an_eighth_of_the_window(
    sizes: list[int], window_bytes: int, batch: int
) -> None:
    each = np.array([0, *sizes], np.int64)
    order = np.arange(1, len(sizes) + 1, dtype=np.uint32)
    chunks = packing.cut(order, lambda inos: each[inos], window_bytes, batch)
    assert chunks is not None
    ends = chunks.ends.tolist()
    begins = [0, *ends[:-1]]
    assert ends[-1] == len(order)
    totals = [int(each[order[a:b]].sum()) for a, b in zip(begins, ends, strict=True)]
    assert chunks.largest_bytes == max(totals)
    for number, (begin, end, total) in enumerate(zip(begins, ends, totals, strict=True)):
        assert begin < end
        assert total <= window_bytes // 8 or end - begin <= batch
        if number < len(ends) - 1:  # and no smaller than need be
            assert total + each[order[end]] > window_bytes // 8
            assert end - begin >= batch
        for index in (begin, end - 1):
            assert (chunks.begin_of(index), chunks.end_of(index)) == (begin, end)


def test_chunks_have_limits() -> None:
    order = np.arange(1, 3 * packing.CHUNK_SAMPLES_MOST, dtype=np.uint32)
    small = packing.cut(order, lambda inos: np.ones(len(inos), np.int64), 1 << 40, 10**6)
    assert small is not None
    assert np.diff(small.ends, prepend=0).max() == packing.CHUNK_SAMPLES_MOST
    large = packing.cut(order, lambda inos: np.full(len(inos), MIB), 1 << 40, 1)
    assert large is not None
    assert large.largest_bytes == packing.FINE.chunk_bytes
    assert packing.cut(order, lambda inos: np.full(len(inos), MIB), 0, 1) is None


@given(st.integers(1, 4096), st.integers(0, 1 << 40))
def test_buffers_take_a_sixteenth_of_ram(chunks: int, ram_bytes: int) -> None:
    buffer = packing.buffer_bytes(chunks, ram_bytes)
    if buffer == 0:
        assert chunks * (64 << 10) > ram_bytes // 16
        return
    assert buffer & (buffer - 1) == 0
    assert 64 << 10 <= buffer <= MIB
    assert chunks * buffer <= ram_bytes / 16
    assert buffer == MIB or 2 * chunks * buffer > ram_bytes / 16 - 2 * chunks


def test_imagenet_21k_needs_what_the_design_says() -> None:
    """1.3 TB of samples of 110 KB."""
    for ram_bytes, fits in ((3_000_000_000, False), (4_500_000_000, True)):
        count = -(-1_300_000_000_000 // (ram_bytes * 9 // 10 // 8))
        assert bool(packing.buffer_bytes(count, ram_bytes)) == (fits and count <= 4096)
    needed = packing.ram_bytes_needed(count * 45 // 30, 3_000_000_000)
    assert 3_000_000_000 < needed < 4_500_000_000


@pytest.mark.parametrize(
    ("ram_gb", "epochs"), [(1.2, 1), (4, 1), (8, 1), (10, 2), (16, 2), (32, 2), (64, 3), (128, 3)]
)
def test_imagenet_1k_is_written_anew_so_seldom(ram_gb: float, epochs: int) -> None:
    """138 GB in 1,281,167 samples."""
    ram_bytes = int(ram_gb * 1e9)
    window_bytes = ram_bytes - ram_bytes // 10
    served = packing.epochs_served(1_281_167, 138_000_000_000, window_bytes, ram_bytes)
    assert served == epochs


@given(st.data())
def test_a_log_for_several_epochs_has_large_cells_and_buffers(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 1 << 25))
    size_bytes = samples * data.draw(st.integers(1, 1 << 20))
    ram_bytes = data.draw(st.integers(1 << 20, 1 << 40))
    window_bytes = data.draw(st.integers(0, ram_bytes))
    epochs = packing.epochs_served(samples, size_bytes, window_bytes, ram_bytes)
    assert 1 <= epochs <= packing.EPOCHS_MOST
    if epochs > 1:
        chunks = max(math.ceil(size_bytes / (window_bytes // 4)), math.ceil(samples / (1 << 18)))
        assert chunks**epochs <= 4096
        assert size_bytes / chunks**epochs >= 512 << 10
        assert chunks**epochs * (64 << 10) <= ram_bytes / 8


@given(st.integers(0, 1000), st.integers(1, 60), st.integers(1, 3), st.booleans())
def test_cells_are_where_chunks_meet(seed: int, count: int, epochs: int, repeats: bool) -> None:
    rng = np.random.default_rng(seed)
    orders = [
        EpochOrder(rng.choice(count + 9, count, replace=repeats).astype(np.uint32))
        for _ in range(epochs)
    ]
    windows = rng.integers(8000, 40_000, epochs).tolist()
    chunks = [
        packing.cut(order.inos, lambda inos: np.full(len(inos), 100), window_bytes, 1)
        for order, window_bytes in zip(orders, windows, strict=True)
    ]
    assert all(chunks)
    found = packing.cells(orders, [some for some in chunks if some])
    shape = [len(some.ends) for some in chunks if some]
    assert len(found.ends) == math.prod(shape)
    assert set(found.inos.tolist()) == {ino for order in orders for ino in order.inos.tolist()}
    begins = [0, *found.ends[:-1].tolist()]
    for number, (begin, end) in enumerate(zip(begins, found.ends.tolist(), strict=True)):
        numbers = np.unravel_index(number, shape)
        for order, some, chunk in zip(orders, chunks, numbers, strict=True):
            assert some is not None
            inos = found.inos[begin:end]
            first = order.find(inos[inos != 0], 0)
            first = first[first >= 0]
            if epochs > 1:
                assert (np.searchsorted(some.ends, first, "right") == chunk).all()


def test_a_log_is_for_epochs_that_read_the_same_samples() -> None:
    rng = np.random.default_rng(0)
    orders = [EpochOrder((rng.permutation(1000) + 1).astype(np.uint32)) for _ in range(4)]
    other = EpochOrder((rng.permutation(1000) + 100).astype(np.uint32))
    assert worth.following(orders[0], orders[1:]) == 3
    assert worth.following(orders[0], [orders[1], other, orders[2]]) == 1
    assert worth.following(orders[0], [other, orders[1]]) == 0


def test_a_chunk_more_does_not_change_how_much_ram_is_said_to_be_needed() -> None:
    said = {packing.ram_bytes_needed(chunks, 200_000_000) for chunks in range(230, 240)}
    assert len(said) == 1
    assert math.sqrt(240 * (64 << 10) * 16 * 200_000_000) <= said.pop() < 300_000_000


def test_orders_that_are_not_worth_it() -> None:
    rng = np.random.default_rng(0)
    order = (rng.permutation(1000) + 1).astype(np.uint32)
    other = order.copy()
    other[:550] += 2000
    same_files = np.sort(order)
    assert worth.refusal(EpochOrder(order), EpochOrder(order.copy()))
    assert worth.refusal(EpochOrder(order), EpochOrder(other))
    assert not worth.refusal(EpochOrder(order), EpochOrder(same_files))
    other[:450] = order[550:]  # with replacement
    assert not worth.refusal(EpochOrder(order), EpochOrder(other))


def test_what_a_log_does_not_get_is_read_at_random() -> None:
    for in_order, is_packed in ((1.0, True), (0.5, True), (0.2, False)):
        verdict = worth.decide("auto", FAST_LOG, STORED, WAITED, 1, in_order)
        assert verdict.is_packed == is_packed, in_order
        assert ("where 50% of it stays" in verdict.why) == (in_order == 0.5)


@given(st.integers(0, 1000), st.integers(1, 60), st.booleans(), st.booleans())
def test_what_comes_next_time_not_is_a_cell_behind_all_others(
    seed: int, count: int, repeats: bool, is_full: bool
) -> None:
    rng = np.random.default_rng(seed)
    present, coming = (
        EpochOrder((rng.choice(2 * count, count, replace=repeats) + 1).astype(np.uint32))
        for _ in range(2)
    )
    last = packing.unread(present, coming)
    assert len(set(last.tolist())) == len(last)
    assert {*last.tolist()} == {*present.inos.tolist()} - {*coming.inos.tolist()}
    chunks = packing.cut(coming.inos, lambda inos: np.full(len(inos), 100), 8000, 1)
    assert chunks is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "CHUNKS_MOST", len(chunks.ends) + (not is_full))
        found = packing.cells([coming], [chunks], last)
    if is_full or not len(last):
        assert np.array_equal(found.ends, chunks.ends)
        last = last[:0]
    else:
        assert found.ends.tolist() == [*chunks.ends.tolist(), count + len(last)]
    assert found.inos.tolist() == [*coming.inos.tolist(), *last.tolist()]


STORED = Contents(samples=100, size_bytes=MIB, stored_bytes=MIB)
FRESH = Contents(samples=100, size_bytes=MIB, stored_bytes=MIB // 20)
FAST_LOG = FakeProbe(mixed_bytes_per_s=500e6, random=100e6)
SLOW_LOG = FakeProbe(mixed_bytes_per_s=500e6, random=450e6)
SMALL = Contents(samples=1000, size_bytes=3_000_000, stored_bytes=3_000_000)
WAITED = Wanted(400e6, 0.5)


@pytest.mark.parametrize(
    ("layout", "probe", "contents", "wanted", "is_packed"),
    [
        ("static", FAST_LOG, FRESH, None, False),
        ("reorder", SLOW_LOG, STORED, 1.0, True),
        ("reorder", None, STORED, None, True),
        ("reorder", None, Contents(0, 0, 0), None, False),
        ("auto", None, FRESH, None, True),  # written once anyway
        ("auto", None, STORED, None, False),
        ("auto", FAST_LOG, STORED, None, False),  # who has read nothing yet may be slow
        ("auto", FAST_LOG, STORED, WAITED, True),
        ("auto", SLOW_LOG, STORED, Wanted(450e6, 0.5), False),
        ("auto", FAST_LOG, STORED, Wanted(124e6), False),  # no more than 1.25 times that
        ("auto", FAST_LOG, STORED, Wanted(126e6), True),
        ("auto", FAST_LOG, STORED, Wanted(49e6, 0.5), False),  # it was not the device
        ("auto", FAST_LOG, STORED, Wanted(51e6, 0.5), True),
        ("auto", FAST_LOG, STORED, Wanted(30e6, 0.5, 21e6), True),  # it was: others use it, too
        ("auto", FAST_LOG, SMALL, Wanted(1e6, 0.5), True),  # fewer requests cost less anywhere
        ("auto", SLOW_LOG, SMALL, Wanted(1e6, 0.5), False),
        ("auto", FAST_LOG, SMALL, Wanted(1e6), False),
    ],
)
def test_who_reorders(
    layout: str,
    probe: FakeProbe | None,
    contents: Contents,
    wanted: Wanted | None,
    is_packed: bool,
) -> None:
    verdict = worth.decide(layout, probe, contents, wanted)
    assert verdict.is_packed == is_packed
    assert verdict.why


def test_a_log_that_is_read_twice_may_pay_where_one_that_is_read_once_does_not() -> None:
    shared = FakeProbe(mixed_bytes_per_s=300e6, random=400e6, sequential_bytes_per_s=1200e6)
    for epochs, is_packed in ((1, False), (2, False), (3, True)):  # 300, 480, 600 MB/s
        assert worth.decide("auto", shared, STORED, WAITED, epochs).is_packed == is_packed
    modest = Wanted(450e6)
    assert not worth.decide("auto", shared, STORED, modest, 3).is_packed  # no more is wanted
    assert "only in order" in worth.decide("auto", shared, STORED, WAITED, 2).why


def test_a_rate_is_what_the_reader_took() -> None:
    log = Log()
    assert log.wanted(STORED, 100, 0, 5.0) is None
    log.begun = 1.0, 50, 7  # in mid-epoch, after a restart
    assert log.wanted(STORED, 50, 7, 5.0) is None
    assert log.wanted(STORED, 100, 7, 5.0) == Wanted(MIB / 8)
    assert log.wanted(STORED, 150, 8, 5.0) == Wanted(MIB / 4, 0.01)
    waited = log.wanted(STORED, 150, 9, 5.0)
    assert waited == Wanted(MIB / 4, 0.02)
    assert "waited (2.0% late), but not" in worth.decide("auto", SLOW_LOG, STORED, waited).why
    waited = log.wanted(STORED, 150, 9, 1.001)
    assert "readers waited: 2.0% late" in worth.decide("auto", SLOW_LOG, STORED, waited).why


@given(st.integers(0, 1000), st.integers(1, 400), st.integers(100, 20_000))
def test_frames_say_each_chunk_once(seed: int, count: int, window_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    order = rng.integers(0, count, count).astype(np.uint32)
    chunks = packing.cut(order, lambda inos: np.full(len(inos), 100), window_bytes, 1)
    assert chunks is not None

    def is_packed(inos: Inos) -> Mask:
        chosen: Mask = inos % 3 != 0
        return chosen

    cells = packing.cells([EpochOrder(order)], [chunks])
    packing_frames = list(packing.frames(range(4, 5), cells, STORED, 1 << 16, is_packed))
    lengths = np.concatenate([frame["lengths"] for frame in packing_frames])
    inos = np.concatenate([frame["inos"] for frame in packing_frames])
    assert len(lengths) == len(chunks.ends) == packing_frames[0]["chunks"]
    begins = [0, *chunks.ends[:-1].tolist()]
    expected = [order[a:b] for a, b in zip(begins, chunks.ends.tolist(), strict=True)]
    for chunk, said in zip(expected, np.split(inos, np.cumsum(lengths)[:-1]), strict=True):
        assert said.tolist() == chunk[chunk % 3 != 0].tolist()
    assert [frame["last"] for frame in packing_frames[:-1]] == [False] * (len(packing_frames) - 1)
    assert packing_frames[-1]["last"]


def test_long_orders_come_in_several_frames() -> None:
    count = 2 * packing.FRAME_SAMPLES + 5
    order = np.arange(1, count + 1, dtype=np.uint32)
    chunks = packing.cut(order, lambda inos: np.full(len(inos), 4096), 1 << 30, 1)
    assert chunks is not None
    cells = packing.cells([EpochOrder(order)], [chunks])
    said = list(
        packing.frames(range(1, 2), cells, STORED, 1 << 16, lambda inos: np.ones(len(inos), bool))
    )
    assert len(said) == 3
    assert [frame["first"] for frame in said] == [
        0,
        len(said[0]["lengths"]),
        len(said[0]["lengths"]) + len(said[1]["lengths"]),
    ]
    assert max(len(frame["inos"]) for frame in said) <= packing.FRAME_SAMPLES
    assert np.array_equal(np.concatenate([frame["inos"] for frame in said]), order)

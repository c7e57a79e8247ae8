"""The trace format: what is written is read, and nothing that was not written (docs/TRACES.md)."""

from __future__ import annotations

import dataclasses
import itertools
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusecache.base.digest import checksum
from fusecache.base.errors import EXIT_USAGE
from fusecache.cli import trace_command
from fusecache.traces import reader, traces
from fusecache.traces.traces import BY_HINT, OPENED, Gap, Importance, Trace, TraceError, Writer

HEADER_BYTES = 16
BLOCK_HEADER_BYTES = 40


def trace_of(items: list[int], sizes: list[int] | None = None, **fields: Any) -> Trace:
    """A trace with no columns but those given."""
    known = sizes if sizes is not None else [100] * (max(items, default=-1) + 1)
    nothing: dict[str, Any] = {
        "items": np.array(items, np.int64),
        "sizes": np.array(known, np.int64),
        "epoch_starts": np.array([0]),
        "times_s": None,
        "importances": (),
        "readers": None,
        "seen": None,
        "names": None,
        "source": "a test",
    }
    return Trace(**(nothing | fields))


def small_trace() -> Trace:
    """Something of everything."""
    return trace_of(
        [0, 2, 1, 0],
        [10, 0, 1 << 40],
        epoch_starts=np.array([0, 3]),
        times_s=np.array([0.0, 0.25, 0.5, 1e6]),
        importances=(Importance(3, np.array([2, 0]), np.array([0.5, 2.0], np.float32)),),
        readers=np.array([7, 8, 7, 0], np.int32),
        seen=np.array([1, 2, 3, 2], np.uint8),
        names=("a", "b/ä", "c\udcff"),
        gaps=(Gap(1, 5), Gap(3, None)),
    )


def assert_same(got: Trace, wanted: Trace) -> None:
    for field in dataclasses.fields(Trace):
        a, b = getattr(got, field.name), getattr(wanted, field.name)
        if field.name == "importances":
            assert [told.position for told in a] == [told.position for told in b]
            for one, other in zip(a, b, strict=True):
                np.testing.assert_array_equal(one.items, other.items)
                np.testing.assert_array_equal(one.values, other.values)
        elif isinstance(b, np.ndarray):
            np.testing.assert_array_equal(a, b, field.name)
            assert a.dtype == b.dtype, field.name
        else:
            assert a == b, field.name


# ---- round trips -------------------------------------------------------------------------------

names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)


@st.composite
def any_trace(draw: st.DrawFn) -> Trace:
    count = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(0, 2**63 - 1), min_size=count, max_size=count))
    items = draw(st.lists(st.integers(0, count - 1), max_size=30))
    n = len(items)
    starts = sorted(draw(st.sets(st.integers(1, n), max_size=4))) if n else []

    def column(values: st.SearchStrategy[int], dtype: type) -> Any:
        is_there = draw(st.booleans())
        drawn = draw(st.lists(values, min_size=n, max_size=n)) if is_there else []
        return np.array(drawn, dtype) if is_there else None

    times = column(st.integers(-(2**30), 2**30), np.float64)
    told = [
        Importance(
            position, np.arange(count), draw(st.just(np.linspace(0, 1, count, dtype=np.float32)))
        )
        for position in sorted(draw(st.lists(st.integers(0, n), max_size=3)))
    ]
    gaps = [
        Gap(position, draw(st.none() | st.integers(0, 2**63)))
        for position in sorted(draw(st.lists(st.integers(0, n), max_size=3)))
    ]
    return trace_of(
        items,
        sizes,
        epoch_starts=np.array([0, *starts]),
        times_s=times,
        importances=tuple(told),
        readers=column(st.integers(-(2**31), 2**31 - 1), np.int32),
        seen=column(st.integers(0, traces.ELSEWHERE), np.uint8),
        names=draw(st.none() | st.lists(names, min_size=count, max_size=count).map(tuple)),
        source=draw(st.sampled_from(["", "a mount", "ä" * 100])),
        gaps=tuple(gaps),
    )


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_trace())
def test_what_is_written_is_read(tmp_path: Path, trace: Trace) -> None:
    traces.write(tmp_path / "t", trace)
    assert_same(traces.read(tmp_path / "t"), trace)


def test_a_trace_of_several_blocks(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    count = 2 * traces.BLOCK_ACCESSES + 17
    trace = trace_of(
        chance.integers(0, 5000, count).tolist(),
        chance.integers(0, 1 << 50, 5000).tolist(),
        names=tuple(f"class/{number}" for number in range(5000)),
        epoch_starts=np.array([0, traces.BLOCK_ACCESSES - 3, count - 1]),
    )
    traces.write(tmp_path / "t", trace)
    assert_same(traces.read(tmp_path / "t"), trace)


def test_a_shuffled_epoch_costs_about_four_bytes_an_access(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    count = 50_000
    trace = trace_of(
        np.concatenate([chance.permutation(count) for _ in range(4)]).tolist(),
        times_s=np.cumsum(chance.exponential(50e-6, 4 * count)),
        readers=chance.integers(40_000, 40_004, 4 * count).astype(np.int32),
        seen=chance.integers(1, 3, 4 * count).astype(np.uint8),
    )
    traces.write(tmp_path / "t", trace)
    assert os.path.getsize(tmp_path / "t") < 4.2 * 4 * count
    traces.write(tmp_path / "t", dataclasses.replace(trace, times_s=None, readers=None, seen=None))
    assert os.path.getsize(tmp_path / "t") < 2.1 * 4 * count


def test_times_are_kept_to_the_microsecond(tmp_path: Path) -> None:
    times = np.array([0.0, 1 / 3, 86_400.123_456_789])
    traces.write(tmp_path / "t", trace_of([0, 0, 0], times_s=times))
    read = traces.read(tmp_path / "t").times_s
    assert read is not None
    np.testing.assert_allclose(read, times, rtol=0, atol=5.1e-7)


def test_what_continues_an_access_is_left_out_unless_asked_for(tmp_path: Path) -> None:
    again = traces.FROM_SSD | traces.CONTINUES
    trace = trace_of(
        [0, 0, 1, 2],
        epoch_starts=np.array([0, 2]),
        seen=np.array([traces.OPENED, again, traces.FROM_ORIGIN, traces.FROM_SSD], np.uint8),
        gaps=(Gap(1, 3), Gap(4, 1)),
        importances=(Importance(2, np.array([1]), np.array([1], np.float32)),),
    )
    traces.write(tmp_path / "t", trace)
    assert_same(traces.read(tmp_path / "t", parts=True), trace)
    told = dataclasses.replace(trace.importances[0], position=1)
    seen = np.array([traces.OPENED, traces.FROM_ORIGIN, traces.FROM_SSD], np.uint8)
    wanted = dataclasses.replace(
        trace,
        items=np.array([0, 1, 2]),
        epoch_starts=np.array([0, 1]),
        seen=seen,
        gaps=(Gap(1, 3), Gap(3, 1)),
        importances=(told,),
    )
    assert_same(traces.read(tmp_path / "t"), wanted)


def test_a_writer_takes_pieces_as_they_come(tmp_path: Path) -> None:
    with Writer(tmp_path / "t", source="two\nlines", times=True) as writer:
        writer.begin_epoch()  # said or not
        assert writer.add_items(np.array([5, 6])) == 0
        writer.add(np.array([1, 0]), times_s=np.array([1.0, 2.0]))
        writer.begin_epoch()
        writer.begin_epoch()  # it has begun
        assert writer.add_items(np.array([7])) == 2
        writer.add(np.array([2]), times_s=np.array([3.0]))
        writer.note_gap(None)
        assert (writer.accesses, writer.items) == (3, 3)
    wanted = trace_of(
        [1, 0, 2],
        [5, 6, 7],
        epoch_starts=np.array([0, 2]),
        times_s=np.array([1.0, 2.0, 3.0]),
        gaps=(Gap(3, None),),
        source="two lines",
    )
    assert_same(traces.read(tmp_path / "t"), wanted)


# ---- damage ------------------------------------------------------------------------------------


def block_ends(data: bytes) -> list[int]:
    """Where the header and each block end, by the documented layout."""
    at = HEADER_BYTES + struct.unpack_from("<I", data, 12)[0] + 8
    ends = [at]
    while at < len(data):
        at += BLOCK_HEADER_BYTES + struct.unpack_from("<I", data, at + 12)[0]
        ends.append(at)
    return ends


def test_cut_off_anywhere_the_whole_blocks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t"
    trace = small_trace()
    traces.write(path, trace)
    data = path.read_bytes()
    ends = block_ends(data)
    seen = set()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        if length < ends[0]:
            with pytest.raises(TraceError):
                traces.read(path)
            continue
        part = traces.read(path)
        count = len(part.items)
        assert not part.is_complete
        np.testing.assert_array_equal(part.items, trace.items[:count])
        path.write_bytes(data[: max(end for end in ends if end <= length)])
        assert_same(traces.read(path), part)
        seen.add(count)
    assert seen == {0, 1, 3, 4}


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    path = tmp_path / "t"
    traces.write(path, small_trace())
    data = bytearray(path.read_bytes())
    for at in range(len(data)):
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        with pytest.raises(TraceError, match="/t is "):
            traces.read(path)
        data[at] ^= 1 << at % 8


@pytest.mark.parametrize("change", ["twice", "exchanged", "left out", "appended"])
def test_blocks_belong_where_they_stand(tmp_path: Path, change: str) -> None:
    path = tmp_path / "t"
    traces.write(path, small_trace())
    data = path.read_bytes()
    ends = block_ends(data)
    head = data[: ends[0]]
    blocks = [data[a:b] for a, b in itertools.pairwise(ends)]
    if change == "twice":
        blocks.insert(2, blocks[1])
    elif change == "exchanged":
        blocks[1:3] = blocks[2:0:-1]
    elif change == "left out":
        del blocks[1]
    else:
        blocks.append(b"\0")
    path.write_bytes(head + b"".join(blocks))
    with pytest.raises(TraceError, match="is damaged: block"):
        traces.read(path)


def forged(kind: int, rows: int, payload: bytes, size_bytes: int | None = None) -> bytes:
    """A file with one block whose checksums are right, by the documented layout."""
    head = struct.pack("<8sHHI", b"FCTRACE\n", 1, 0, 0)
    size = len(payload) if size_bytes is None else size_bytes
    header = struct.pack(
        "<IBBHIIIIQ", 0x42544346, kind, 0, 0, rows, len(payload), size, 0, checksum(payload)
    )
    sums = [checksum(part).to_bytes(8, "little") for part in (head, header)]
    return head + sums[0] + header + sums[1] + payload


@pytest.mark.parametrize(
    ("kind", "rows", "payload"),
    [
        (9, 0, b""),
        (1, 1, b""),
        (1, 1, b"\x09" + bytes(9)),
        (1, 1, b"\x01\x05\x00"),
        (1, 1, b"\x81\x01"),  # size -1
        (1, 1 << 31, b"\x00"),
        (2, 1, b"\x01\x00"),  # an access, and no items
        (3, 1, bytes(4)),
        (3, 1, bytes(8)),  # an epoch where one begins already
        (3, 1, b"\x05" + bytes(7)),  # an epoch far away
        (6, 0, b"\x01" + bytes(15)),  # the end of something else
    ],
)
def test_a_block_that_makes_no_sense_is_refused(
    tmp_path: Path, kind: int, rows: int, payload: bytes
) -> None:
    (tmp_path / "t").write_bytes(forged(kind, rows, payload))
    with pytest.raises(TraceError, match="is damaged: block 0"):
        traces.read(tmp_path / "t")


def test_forged_is_what_a_writer_writes(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(forged(1, 2, b"\x01\x05\x07"))
    assert traces.read(tmp_path / "t").sizes.tolist() == [5, 7]
    (tmp_path / "t").write_bytes(forged(1, 2, b"\x01\x05\x07", size_bytes=4))
    with pytest.raises(TraceError, match="block 0"):
        traces.read(tmp_path / "t")


def test_more_rows_than_memory_holds_are_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of zeros cost a file nothing."""
    path, rows = tmp_path / "t", traces.BLOCK_ACCESSES
    with Writer(path, source="") as writer:
        writer.add_items(np.zeros(1, np.int64))
        for _ in range(8):
            writer.add(np.zeros(rows, np.int64))
    assert path.stat().st_size < 1000
    assert len(traces.read(path).items) == 8 * rows
    monkeypatch.setattr(reader, "usable_memory_bytes", lambda: 64 << 20)
    tracemalloc.start()
    with pytest.raises(TraceError, match=r"/t: block 7: .* usable$") as caught:
        traces.read(path)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_reading_takes_no_more_memory_than_it_is_refused_for(tmp_path: Path) -> None:
    path, rows = tmp_path / "t", 4 * traces.BLOCK_ACCESSES
    items = np.repeat(np.random.default_rng(1).integers(0, 1000, rows // 2), 2)
    seen = np.where(np.arange(rows) % 2, BY_HINT, OPENED)
    with Writer(path, source="", times=True, readers=True, seen=True) as writer:
        writer.add_items(np.ones(1000, np.int64))
        writer.add(items, times_s=np.zeros(rows), readers=np.zeros(rows, np.int64), seen=seen)
    tracemalloc.start()
    trace = traces.read(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace.items) == rows // 2
    assert peak_bytes <= reader._MEMORY_PER_ROW * rows


def test_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    traces.write(tmp_path / "t", small_trace())
    data = bytearray((tmp_path / "t").read_bytes())
    data[8] = 2
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(TraceError, match=r"version 2; this fusecache reads version 1$") as caught:
        traces.read(tmp_path / "t")
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize("content", [b"", b"FCTRACE", b"#!/bin/sh\n" * 10])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(TraceError, match="/t is no access trace"):
        traces.read(tmp_path / "t")


# ---- writers that fail -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("items", np.array([0, 3])),
        ("items", np.array([0, -1])),
        ("sizes", np.array([1, 2, -3])),
        ("epoch_starts", np.array([1])),
        ("epoch_starts", np.array([0, 0])),
        ("epoch_starts", np.array([0, 3])),
        ("times_s", np.array([0.0, np.nan])),
        ("readers", np.zeros(3, np.int32)),
        ("seen", np.zeros(1, np.uint8)),
        ("names", ("a",)),
        ("gaps", (Gap(2, 1), Gap(1, 1))),
        ("importances", (Importance(3, np.array([0]), np.array([1], np.float32)),)),
        ("importances", (Importance(0, np.array([9]), np.array([1], np.float32)),)),
    ],
)
def test_what_does_not_belong_together_is_not_written(
    tmp_path: Path, field: str, value: Any
) -> None:
    (tmp_path / "t").write_text("before")
    trace = dataclasses.replace(trace_of([0, 2]), **{field: value})
    with pytest.raises(ValueError, match=f"^{field}: "):
        traces.write(tmp_path / "t", trace)
    assert (tmp_path / "t").read_text() == "before"
    assert os.listdir(tmp_path) == ["t"]


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("before")
    with pytest.raises(FileExistsError):
        Writer(tmp_path / "t", source="")
    assert (tmp_path / "t").read_text() == "before"
    with Writer(tmp_path / "t", source="", force=True):
        pass
    assert traces.read(tmp_path / "t").is_complete


def test_a_killed_writer_leaves_what_it_flushed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        writer = Writer(tmp_path / "t", source="")
        writer.add_items(np.array([1]))
        writer.add(np.zeros(10, np.int64))
        writer.flush()
        writer.add(np.zeros(5, np.int64))
        os._exit(0)
    os.waitpid(pid, 0)
    part = traces.read(tmp_path / "t")
    assert (len(part.items), part.is_complete) == (10, False)


# ---- what was seen and what hints told -----------------------------------------------------------

HINT, SSD, OPEN = traces.BY_HINT, traces.FROM_SSD, traces.OPENED


def rows_of(*rows: tuple[int, int] | tuple[int, int, int], **fields: Any) -> Trace:
    """Rows of item, seen, reader (those told are job -1's else), each a second later."""
    readers = [row[2] if len(row) > 2 else -(row[1] == HINT) for row in rows]
    return trace_of(
        [row[0] for row in rows],
        seen=np.array([row[1] for row in rows], np.uint8),
        readers=np.array(readers, np.int32),
        times_s=np.arange(len(rows), dtype=np.float64),
        **fields,
    )


def merged(trace: Trace) -> list[tuple[int, int]]:
    after = traces.accesses(trace)
    after.check()
    assert after.times_s is not None
    assert sorted(after.times_s) == after.times_s.tolist()
    assert after.seen is not None
    return list(zip(after.items.tolist(), after.seen.tolist(), strict=True))


def test_what_was_seen_and_told_is_one_access_in_the_jobs_order() -> None:
    trace = rows_of((3, SSD), (1, OPEN), (0, HINT), (1, HINT), (2, HINT), (3, HINT), (4, HINT))
    assert merged(trace) == [(0, HINT), (1, OPEN), (2, HINT), (3, SSD), (4, HINT)]
    after = traces.accesses(trace)
    assert after.readers is not None
    assert after.readers.tolist() == [-1] * 5
    assert after.times_s is not None
    assert after.times_s.tolist() == [1, 1, 1, 1, 1]


def test_times_of_what_was_only_told_lie_between() -> None:
    trace = rows_of((0, SSD), (3, SSD), (0, HINT), (1, HINT), (2, HINT), (3, HINT), (4, HINT))
    after = traces.accesses(trace)
    assert after.times_s is not None
    np.testing.assert_allclose(after.times_s, [0, 1 / 3, 2 / 3, 1, 1])


def test_an_item_of_two_epochs_is_two_accesses() -> None:
    """Around an epoch's end both are seen before the first one is told."""
    trace = rows_of((0, SSD), (0, SSD), (1, HINT), (0, HINT), (0, HINT), (1, HINT))
    assert [item for item, _ in merged(trace)] == [1, 0, 0, 1]
    assert traces.accesses(trace).times_s is not None


def test_what_was_seen_after_it_was_told_is_another_access() -> None:
    """Rows of what was seen may be written before those of what was told earlier."""
    trace = rows_of((0, SSD), (0, OPEN), (0, HINT), (1, HINT))
    trace = dataclasses.replace(trace, times_s=np.array([0.0, 0.5, 0.4, 0.4]))
    assert merged(trace) == [(0, SSD), (1, HINT), (0, OPEN)]


def test_what_is_not_told_stays_and_a_later_row_is_another_access() -> None:
    trace = rows_of((7, SSD), (0, SSD), (0, HINT), (1, HINT), (0, SSD), (8, SSD))
    assert merged(trace) == [(7, SSD), (0, SSD), (1, HINT), (0, SSD), (8, SSD)]


def test_two_jobs_keep_their_orders() -> None:
    trace = rows_of(
        (0, SSD), (5, SSD), (2, OPEN), (0, HINT, -1), (1, HINT, -1), (5, HINT, -2), (2, HINT, -1),
        (6, HINT, -2), (0, HINT, -2),
    )  # fmt: skip
    after = traces.accesses(trace)
    assert after.readers is not None
    for job, order in ((-1, [0, 1, 2]), (-2, [5, 6, 0])):
        assert after.items[after.readers == job].tolist() == order
    assert len(after.items) == 6


def test_rows_that_continue_an_access_take_no_part() -> None:
    trace = rows_of((0, OPEN), (0, SSD | traces.CONTINUES), (0, HINT))
    assert merged(trace) == [(0, OPEN)]


def test_positions_move_to_the_same_accesses() -> None:
    values = np.array([1.0], np.float32)
    trace = rows_of(
        (9, SSD), (1, SSD), (0, HINT), (1, HINT), (1, SSD), (1, HINT), (0, HINT),
        epoch_starts=np.array([0, 2, 5]),
        gaps=(Gap(1, 3), Gap(5, None), Gap(7, 2)),
        importances=(Importance(4, np.array([1]), values),),
    )  # fmt: skip
    after = traces.accesses(trace)
    assert after.items.tolist() == [9, 0, 1, 1, 0]
    assert after.epoch_starts.tolist() == [0, 1, 3]
    assert after.gaps == (Gap(2, 3), Gap(3, None), Gap(5, 2))
    assert [told.position for told in after.importances] == [3]


@settings(deadline=None)
@given(st.data())
def test_each_access_of_a_job_is_merged_to_one(data: st.DataObject) -> None:
    """Whatever part of it the mount saw, in whatever order of asking."""
    count, epochs = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    behind = data.draw(st.integers(0, 4))
    order = [item for _ in range(epochs) for item in data.draw(st.permutations(range(count)))]
    rows: list[tuple[int, int]] = []
    for start in range(0, len(order), behind + 1):
        stretch = order[start : start + behind + 1]
        seen = [item for item in stretch if data.draw(st.booleans())]
        rows += [(item, SSD) for item in data.draw(st.permutations(seen))]
        rows += [(item, HINT) for item in stretch]
    assert [item for item, _ in merged(rows_of(*rows))] == order


def test_the_parts_that_are_shown_add_up(tmp_path: Path) -> None:
    """Opens, READs and what hints told, less what continues an access."""
    seen = [OPENED, traces.FROM_SSD | traces.CONTINUES, traces.FROM_ORIGIN, BY_HINT, BY_HINT]
    trace = trace_of(
        [0, 0, 1, 1, 2],
        times_s=np.arange(5.0),
        readers=np.array([7, 7, 7, -1, -1], np.int32),
        seen=np.array(seen, np.uint8),
    )
    traces.write(tmp_path / "t", trace)
    facts = trace_command._facts(str(tmp_path / "t"))
    parts = dict(facts["seen"])
    assert parts == {
        **{"opened": 1, "from_ssd": 1, "from_origin": 1, "elsewhere": 0},
        **{"continued": 1, "by_hint": 1},
    }
    assert sum(parts.values()) - 2 * parts["continued"] == facts["accesses"] == 3

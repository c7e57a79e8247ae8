"""A recording that loses accesses: the ring in C, and what the recorder makes of its count.

With a mount: tests/mount/test_trace.py.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fusecache import _native
from fusecache.base import mounts
from fusecache.base.wire import encode
from fusecache.control.control_client import Target
from fusecache.recording.recorder import Limits, Recorder
from fusecache.traces import traces
from fusecache.traces.traces import Gap
from tests.support.native_table import ROOT, attach

RING_ACCESSES = 1 << 18
ACCESS_BYTES = 16
TAKEN_MOST = 1 << 16


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[int]:
    """A recording, and the inode number of a file to note."""
    (tmp_path / "f").write_bytes(b"x")
    attach(tmp_path)
    _native.trace_begin(wires=False, lookups=False)
    yield _native.lookup(ROOT, b"f")
    _native.trace_end()


def test_a_full_ring_keeps_the_first_accesses_and_counts_the_others(ring: int) -> None:
    for number in range(RING_ACCESSES + 3):
        _native.note_open(ring, number)
    taken, lost = _native.take_accesses(TAKEN_MOST)
    assert lost == 3
    for _ in range(RING_ACCESSES // TAKEN_MOST - 1):
        more, lost = _native.take_accesses(TAKEN_MOST)
        taken += more
        assert lost == 0
    assert len(taken) == RING_ACCESSES * ACCESS_BYTES
    assert [who >> 8 for _, _, who in struct.iter_unpack("<QII", taken)] == list(
        range(RING_ACCESSES)
    )
    _native.note_open(ring, 7)  # there is room again, and it goes round
    more, lost = _native.take_accesses(TAKEN_MOST)
    assert (len(more), lost) == (ACCESS_BYTES, 0)


def test_nobody_records_and_nothing_is_kept(ring: int) -> None:
    _native.note_open(ring, 1)
    _native.trace_end()
    _native.note_open(ring, 2)
    assert _native.take_accesses(TAKEN_MOST) == (b"", 0)


def described(inos: list[int]) -> list[tuple[int, bytes]]:
    """Size and path of each, asked for until all have been told."""
    packed = np.array(inos, np.uint32).tobytes()
    found: list[tuple[int, bytes]] = []
    while packed:
        sizes, lengths, text = _native.describe_files(packed)
        assert len(lengths) > 0
        told = len(lengths) // 4
        at = 0
        for size, length in zip(
            np.frombuffer(sizes, np.uint64), np.frombuffer(lengths, np.uint32).tolist(), strict=True
        ):
            found.append((int(size), text[at : at + length]))
            at += length
        assert at == len(text)
        packed = packed[4 * told :]
    return found


def test_files_are_described_and_nothing_else(tmp_path: Path) -> None:
    folder, long = tmp_path / "folder", "n" * 250
    folder.mkdir()
    (folder / "f").write_bytes(b"four")
    (folder / "empty").write_bytes(b"")
    (folder / long).write_bytes(b"x")
    attach(tmp_path)
    parent = _native.lookup(ROOT, b"folder")
    _native.scan(parent)
    file, empty, named = (_native.lookup(parent, n) for n in (b"f", b"empty", long.encode()))
    unknown = _native.count() + 1
    paths = [path for _, path in described([file, parent, empty, unknown, 0])]
    assert paths == [b"folder/f", b"", b"folder/empty", b"", b""]
    many = [named, file] * 10_000  # more than a call tells, in number and in bytes
    assert described(many) == [(1, b"folder/" + long.encode()), (4, b"folder/f")] * 10_000


class FakeServer(threading.Thread):
    """Answers recorders, one script of frames each. Then the mount has ended, and the socket is
    that of the next mount with its number.
    """

    def __init__(self, directory: Path, scripts: list[list[bytes]], every_open: bool) -> None:
        super().__init__(daemon=True)
        self._scripts, self._every_open = scripts, every_open
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / mounts.CONTROL_SOCKET))
        self._listener.listen()
        self.is_mounted = True

    def run(self) -> None:
        for number, frames in enumerate(self._scripts, 1):
            connection, _ = self._listener.accept()
            with connection:
                connection.recv(1 << 16)
                self.is_mounted = number < len(self._scripts)
                answer = {"ok": True, "every_open": self._every_open, "now_ns": 0}
                connection.sendall(json.dumps(answer).encode() + b"\n" + b"".join(frames))

    def was_asked_again(self) -> bool:
        with self._listener:
            self._listener.settimeout(0)
            while True:
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    return False
                with connection:
                    if connection.recv(16):
                        return True


def names(*inos: int) -> bytes:
    of = [f"f{ino}".encode() for ino in inos]
    return encode(
        "names",
        {
            "inos": np.array(inos, np.uint32),
            "sizes": np.ones(len(inos), np.uint64),
            "lengths": np.array([len(name) for name in of], np.uint32),
            "names": b"".join(of),
        },
    )


def accesses(*inos: int, lost: int = 0) -> bytes:
    return encode(
        "accesses",
        {
            "inos": np.array(inos, np.uint32),
            "times_ns": np.zeros(len(inos), np.uint64),
            "who": np.full(len(inos), traces.OPENED, np.uint32),
            "lost": lost,
        },
    )


def record(
    directory: Path, scripts: list[list[bytes]], *, every_open: bool = True
) -> tuple[Recorder, traces.Trace]:
    """What a recorder makes of these frames."""
    server = FakeServer(directory, scripts, every_open)
    server.start()
    options = {"user_id": str(os.getuid())}
    mount = mounts.Mount(0, "0:0", "/mnt", mounts.FILESYSTEM_TYPE, "/src", options)
    recorder = Recorder(
        Target(mount, str(directory)), str(directory / "t"), every_open=every_open, force=False
    )
    ours, theirs = os.pipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mounts, "is_mounted", lambda _: server.is_mounted)
        assert recorder.run(Limits(), ours, lambda: None) == "the mount is gone"
    server.join()
    assert not server.was_asked_again()
    os.close(ours)
    os.close(theirs)
    return recorder, traces.read(directory / "t")


def test_lost_accesses_are_gaps(tmp_path: Path) -> None:
    ended = encode("ended", {})
    recorder, trace = record(
        tmp_path, [[names(5, 9), accesses(9, 5, lost=3), accesses(9, lost=4), ended]]
    )
    assert trace.items.tolist() == [1, 0, 1]
    assert trace.gaps == (Gap(2, 3), Gap(3, 4))
    assert (recorder.lost, recorder.reconnections) == (7, 0)


def test_a_lost_connection_is_a_gap_and_files_keep_their_item(tmp_path: Path) -> None:
    ended = encode("ended", {})
    recorder, trace = record(
        tmp_path,
        [[names(5, 9), accesses(9, 5)], [names(16, 9, 7), accesses(7, 16, 9), ended]],
    )
    assert trace.names == ("f5", "f9", "f16", "f7")
    assert trace.items.tolist() == [1, 0, 3, 2, 1]
    assert trace.gaps == (Gap(2, None),)
    assert (recorder.lost, recorder.reconnections) == (0, 1)


def passed(position: int, *inos: int, job: str = "j", samples: int = 8) -> bytes:
    return encode(
        "passed",
        {
            "job": job,
            "position": position,
            "samples": samples,
            "inos": np.array(inos, np.uint32),
            "time_ns": 10**9,
        },
    )


def told(tmp_path: Path, *stretches: bytes) -> traces.Trace:
    """What a recording makes of stretches of epochs whose order is 1 … 8."""
    frames = [names(*range(1, 9)), *stretches, encode("ended", {})]
    trace = record(tmp_path, [frames], every_open=False)[1]
    assert trace.readers is not None
    assert trace.names is not None
    return trace


def files(trace: traces.Trace) -> list[str]:
    assert trace.names is not None
    return [trace.names[item] for item in trace.items]


def f(*inos: int) -> list[str]:
    return [f"f{ino}" for ino in inos]


def test_what_hints_tell_is_written_and_epochs_begin(tmp_path: Path) -> None:
    trace = told(
        tmp_path, passed(5, 6, 7, 8), passed(8, 1, 2, 3, 0), passed(0, 4, job="other"),
        passed(12, 5, 6, 7, 8), passed(16, 1),
    )  # fmt: skip
    assert files(trace) == f(6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1)
    assert trace.readers is not None
    assert trace.readers.tolist() == [-1] * 6 + [-2] + [-1] * 5
    assert trace.epoch_starts.tolist() == [0, 3, 11]
    assert trace.gaps == (Gap(12, None),)  # neither job was told to the end of an epoch
    assert trace.times_s is not None
    assert set(trace.times_s) == {1.0}


def test_what_is_told_again_is_written_once(tmp_path: Path) -> None:
    """A new hintsd begins where the one before had last written down that the reader was."""
    trace = told(tmp_path, passed(8, 1, 2, 3, 4), passed(10, 3), passed(11, 4, 5, 6))
    assert files(trace) == f(1, 2, 3, 4, 5, 6)
    assert trace.epoch_starts.tolist() == [0]
    assert trace.gaps == (Gap(4, None), Gap(6, None))


def test_an_epoch_that_is_begun_again_is_written_again(tmp_path: Path) -> None:
    trace = told(tmp_path, passed(8, 1, 2, 3, 4, 5), passed(8, 1, 2))
    assert files(trace) == f(1, 2, 3, 4, 5, 1, 2)
    assert trace.epoch_starts.tolist() == [0, 5]
    assert trace.gaps == (Gap(5, None), Gap(7, None))


def test_what_is_left_out_is_a_gap(tmp_path: Path) -> None:
    trace = told(tmp_path, passed(8, 1, 2), passed(13, 6, 7, 8), passed(18, 3))
    assert files(trace) == f(1, 2, 6, 7, 8, 3)
    assert trace.epoch_starts.tolist() == [0, 5]
    assert trace.gaps == (Gap(2, None), Gap(5, None), Gap(6, None))


def test_a_job_with_epochs_of_another_length_begins_anew(tmp_path: Path) -> None:
    trace = told(tmp_path, passed(8, 1, 2), passed(0, 1, 2, samples=4))
    assert files(trace) == f(1, 2, 1, 2)
    assert trace.gaps == (Gap(2, None), Gap(4, None))


@pytest.mark.parametrize("told_last", [6, 8])
def test_an_epoch_that_is_not_told_to_its_end_ends_in_a_gap(tmp_path: Path, told_last: int) -> None:
    frames = [names(*range(1, 9)), passed(8, *range(1, told_last + 1)), encode("ended", {})]
    recorder, trace = record(tmp_path, [frames], every_open=False)
    is_whole = told_last == 8
    assert recorder.untold == ([] if is_whole else [("j", 6, 8)])
    assert trace.gaps == (() if is_whole else (Gap(6, None),))

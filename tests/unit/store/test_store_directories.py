"""A cache of several directories: striping, and what the loss of one costs."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fusecache.base.errors import UserError
from fusecache.store import Store, StoreSettings
from fusecache.store import log as log_module
from fusecache.store.directory.membership import Said, decide
from fusecache.store.segment import format as fmt
from tests.support.log_support import Mover
from tests.support.store_support import DATASET, MIB, Opened, content, opened, version_of

FILE_BYTES = MIB
FILES = 40  # some six segments


def path_of(number: int) -> bytes:
    return b"f%d" % number


def payload_of(number: int) -> bytes:
    return content(number, FILE_BYTES)


@contextlib.contextmanager
def striped(
    paths: Sequence[Path], limit_bytes: int = 128 * MIB, **settings: int
) -> Iterator[Opened]:
    with opened(paths[0], limit_bytes=limit_bytes, further=paths[1:], **settings) as store:
        yield store


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in "abc"]


def fill(store: Opened, numbers: range = range(FILES)) -> None:
    for number in numbers:
        assert store.put(path_of(number), payload_of(number)) is not None


def here(store: Opened, numbers: range = range(FILES)) -> set[int]:
    """Files that are cached; their bytes are the right ones."""
    found = set()
    for number in numbers:
        got = store.get(path_of(number), version_of(payload_of(number)))
        if got is not None:
            assert got == payload_of(number)
            found.add(number)
    return found


def segments(path: Path) -> list[int]:
    return sorted(int(file.stem) for file in (path / "segments").glob("*.seg"))


def all_segments(paths: Sequence[Path]) -> list[int]:
    """INVARIANT: no number lies in two directories."""
    found = [segno for path in paths for segno in segments(path)]
    assert len(found) == len(set(found))
    return found


def files_in(store: Opened, path: Path) -> set[int]:
    there = set(segments(path))
    found = set()
    for number in range(FILES):
        location = store.find(path_of(number), version_of(payload_of(number)))
        if location is not None and location.segno in there:
            found.add(number)
    return found


def break_disk(monkeypatch: pytest.MonkeyPatch, path: Path, error: int = errno.EIO) -> None:
    """From now nothing below the path can be opened."""
    real = os.open

    def failing(
        name: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        if str(name).startswith(f"{path}/"):
            raise OSError(error, os.strerror(error))
        return real(name, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", failing)


# ---- striping ------------------------------------------------------------------------------------


def test_segments_alternate_and_are_found_again(paths: list[Path]) -> None:
    with striped(paths) as store:
        fill(store)
        assert here(store) == set(range(FILES))
    counts = [len(segments(path)) for path in paths]
    assert max(counts) - min(counts) <= 1, counts
    all_segments(paths)
    for order in (paths, paths[::-1]):
        with striped(order) as store:
            assert here(store) == set(range(FILES))
            assert store.faults == []
    assert not (paths[1] / "index").exists(), "home stays home in whatever order they are given"


def test_one_directory_is_as_it_was(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        fill(store, range(3))
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [
        *("format", "high", "index", "lock", "segments")
    ]
    assert fmt.format_version_of((tmp_path / "cache/format").read_bytes()) == 1


def test_a_cache_of_one_directory_grows(paths: list[Path]) -> None:
    with opened(paths[0], limit_bytes=128 * MIB) as store:
        fill(store, range(10))
        before = all_segments(paths)
    with striped(paths) as store:
        assert here(store, range(10)) == set(range(10))
        fill(store, range(10, FILES))
        assert here(store) == set(range(FILES))
        assert store.faults == []
    assert segments(paths[1])
    assert set(before) <= set(segments(paths[0]))


def test_the_limit_is_of_all_together(paths: list[Path]) -> None:
    with striped(paths, limit_bytes=64 * MIB) as store:
        fill(store, range(90))
        assert store.gone
        usage = store.store.usage()
        lying = sum(
            file.stat().st_blocks * 512
            for path in paths
            for file in path.rglob("*.*")
            if file.is_file()
        )
        assert lying <= usage.limit_bytes
        assert usage.reserved_bytes <= usage.limit_bytes
        assert here(store, range(80, 90)) == set(range(80, 90))
        assert sum(state.bytes for state in store.store.directories()) <= usage.reserved_bytes
        assert all(segments(path) for path in paths)


def test_a_log_is_striped_by_chunk(paths: list[Path]) -> None:
    with striped(paths[:2]) as store:
        log = store.store.begin_log(4, 16 * MIB)
        assert log is not None
        mover = Mover(log, {})
        for number in range(8):
            payload = content(number, 10_000)
            assert mover.append(number % 4, path_of(number), payload)
        mover.finish()
        assert [segno % 2 for segno in segments(paths[0])] == [0, 0]
        assert [segno % 2 for segno in segments(paths[1])] == [1, 1]
        for number in range(8):
            assert store.read(mover.locations[path_of(number)]) == content(number, 10_000)
        assert log.release(log.segnos[:2]) > 0
        assert sorted(all_segments(paths)) == log.segnos[2:]
        log.end()
        store.store.housekeeping()
    with striped(paths[:2]) as store:
        assert sum(
            store.get(path_of(n), version_of(content(n, 10_000))) is not None for n in range(8)
        ) == 4  # fmt: skip


def test_a_log_begins_in_the_others_if_a_disk_is_read_only(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with striped(paths[:2]) as store, monkeypatch.context() as patch:
        break_disk(patch, paths[1] / "segments", errno.EROFS)
        log = store.store.begin_log(4, 16 * MIB)
        assert log is not None
        assert segments(paths[0]) == log.segnos
        assert store.faults == []
        log.finish([])
        log.end()


def let_be_full(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """The disk of this directory has no room left, as far as one is told."""
    real = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        found = list(real(path))
        if Path(path) == directory:
            found[4] = 0
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_a_disk_without_room_is_passed_over(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_be_full(monkeypatch, paths[1])
    with striped(paths) as store:
        fill(store)
        assert store.faults == []
    assert not segments(paths[1])
    assert segments(paths[0])
    assert segments(paths[2])


def test_a_disk_that_others_have_filled_does_not_hold_the_rest_up(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_be_full(monkeypatch, paths[1])
    with striped(paths[:2], keep_free_bytes=MIB) as store:
        for number in range(6):
            fill(store, range(number, number + 1))
            store.store.housekeeping()
        assert len(segments(paths[0])) == 1
        assert store.faults == []


def test_two_processes_share_them(paths: list[Path]) -> None:
    with striped(paths) as one, striped(paths) as two:
        fill(one, range(20))
        one.store.flush()
        fill(two, range(20, FILES))
        two.store.flush()
        assert here(one) == here(two) == set(range(FILES))
        all_segments(paths)
        assert one.faults == two.faults == []


def test_a_killed_writer_leaves_orphans_everywhere(paths: list[Path]) -> None:
    child = os.fork()
    if child == 0:
        store = Opened(paths[0], limit_bytes=128 * MIB, further=paths[1:])
        fill(store)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    for path in paths:
        (path / "high").unlink()
    with striped(paths) as store:
        assert here(store) == set(range(FILES))
        assert store.faults == []
    shutil.rmtree(paths[0] / "index")
    with striped(paths) as store:
        assert here(store) == set(range(FILES))
        assert all(segments(path) for path in paths)


def test_an_eviction_frees_the_disk_that_is_too_full(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        found = list(real(path))
        if Path(path) == paths[1]:
            found[4] = (1 - len(segments(paths[1]))) * 8 * MIB // found[1]
        return os.statvfs_result(found)

    with striped(paths) as store:
        fill(store)
        before = [len(segments(path)) for path in paths]
        monkeypatch.setattr(os, "statvfs", statvfs)
        store.store.housekeeping()
        after = [len(segments(path)) for path in paths]
        assert after == [before[0], 1, before[2]]
        assert store.faults == []


# ---- who belongs together ------------------------------------------------------------------------


def test_two_caches_are_never_mixed(paths: list[Path]) -> None:
    for path in paths[:2]:
        with opened(path) as store:
            store.put(b"a", b"a")
    with pytest.raises(UserError, match="two different caches"), striped(paths[:2]):
        pass
    with opened(paths[1]) as store:
        assert store.get(b"a", version_of(b"a")) == b"a"


def test_a_copy_is_refused(paths: list[Path]) -> None:
    with striped(paths[:2]) as store:
        fill(store)
    shutil.copytree(paths[1], paths[2])
    with pytest.raises(UserError, match="copy"), striped(paths):
        pass


def test_other_directories_while_it_is_used(paths: list[Path]) -> None:
    with striped(paths[:2]) as store:
        fill(store)
        store.store.flush()
        with pytest.raises(UserError, match="together with others"):
            Opened(paths[0], limit_bytes=128 * MIB)
        with striped(paths) as wider:
            assert [bool(state.why_out) for state in wider.store.directories()] == [0, 0, 1]
            assert wider.kinds == {"directory"}
            assert here(wider) == here(store) == set(range(FILES))
        assert store.faults == []


def test_an_older_fusecache_refuses_a_further_directory(paths: list[Path]) -> None:
    with striped(paths[:2]) as store:
        fill(store)
    assert fmt.format_version_of((paths[0] / "format").read_bytes()) == 1
    assert fmt.format_version_of((paths[1] / "format").read_bytes()) == 2


def test_decide_ends_what_was_begun() -> None:
    """Whoever wrote a new lineage was killed after any number of the directories."""
    first = [Said(Path(name)) for name in "abc"]
    made = decide(first)
    lines = made.lines
    assert lines[0] is not None
    uuid = lines[0].uuid
    old = [
        Said(Path(name), uuid, line, n > 0)
        for n, (name, line) in enumerate(zip("abc", lines, strict=True))
    ]
    # A new disk in the place of home.
    promoted = decide([first[0], *old[1:]])
    assert (promoted.home, promoted.is_promoted, promoted.discarded) == (0, True, [])
    for done in range(1, 4):
        partly = [
            Said(said.path, uuid, promoted.lines[n], n > 0) if n < done else said
            for n, said in enumerate([first[0], *old[1:]])
        ]
        again = decide(partly)
        assert (again.home, again.discarded, again.is_promoted) == (0, [], False)
        assert again.lines == promoted.lines
    # The disk that was home before comes back as a further one.
    late = decide(
        [*[Said(s.path, uuid, promoted.lines[n], n > 0) for n, s in enumerate(old)], old[0]]
    )
    assert (late.home, late.discarded) == (0, [3])


# ---- the loss of one -----------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_new_disk_in_its_place(paths: list[Path], lost: int) -> None:
    with striped(paths) as store:
        fill(store)
        rest = here(store) - files_in(store, paths[lost])
    highest = max(all_segments(paths))
    shutil.rmtree(paths[lost])
    with striped(paths) as store:
        assert here(store) == rest
        assert store.kinds == {"directory"}
        assert len(store.faults) == 1
        assert 0 < len(rest) < FILES
        fill(store)
        assert here(store) == set(range(FILES))
        assert max(all_segments(paths)) > highest
    with striped(paths) as store:
        assert here(store) == set(range(FILES))
        assert store.faults == []


@pytest.mark.parametrize("lost", [0, 1])
def test_one_that_cannot_be_used_is_left_out_and_comes_back(paths: list[Path], lost: int) -> None:
    with striped(paths) as store:
        fill(store)
        rest = here(store) - files_in(store, paths[lost])
    away = paths[lost].rename(paths[lost].with_name("away"))
    paths[lost].write_bytes(b"no directory")
    with striped(paths) as store:
        assert here(store) == rest
        assert store.kinds == {"directory"}
        assert len(store.faults) == 1 + (lost == 0)
        assert [bool(state.why_out) for state in store.store.directories()][lost]
        fill(store, range(FILES, FILES + 10))
    paths[lost].unlink()
    away.rename(paths[lost])
    with striped(paths) as store:
        if lost == 0:
            # Numbers have gone on elsewhere: what it holds is of no use, whatever it is.
            assert store.kinds == {"directory"}
            assert here(store, range(FILES + 10)) == rest | set(range(FILES, FILES + 10))
        else:
            assert store.faults == []
            assert here(store, range(FILES + 10)) == set(range(FILES + 10))
        fill(store, range(FILES + 10, FILES + 30))
        all_segments(paths)


def test_one_that_was_taken_away_comes_back_with_what_it_held(paths: list[Path]) -> None:
    with striped(paths[:2]) as store:
        fill(store)
    with striped(paths[:1]) as store:
        rest = here(store)
        assert 0 < len(rest) < FILES
        fill(store, range(FILES, FILES + 10))
        ((kind, said),) = store.faults
        assert kind == "directory"
        assert "had 2 directories, 1 of them is not given now" in said
        assert "not used until given again" in said
    with striped(paths[:2]) as store:
        assert here(store, range(FILES + 10)) == set(range(FILES + 10))
        all_segments(paths)
        assert [said for _, said in store.faults] == [
            f"cache directory {paths[1]} is back, with what it holds"
        ]


def test_what_is_said_of_those_that_change(paths: list[Path]) -> None:
    """Each line names the directory that it is about, and is said once."""

    def said(*names: Path) -> list[str]:
        for _ in range(2):
            with striped(names) as store:
                found.append([message for _, message in store.faults])
        assert found[-1] == []
        return found[-2]

    found: list[list[str]] = []
    a, b, c = paths
    assert said(a, b) == []
    (line,) = said(b)  # without home
    assert line.startswith(f"cache directory {b}: this cache had 2 directories, 1 of them is not")
    assert "discarded when given again" in line
    (line,) = said(a, b)
    assert line.startswith(f"cache directory {a} is back, but")
    assert "discarded" in line
    (line,) = said(b, c)  # swapped
    assert line.startswith(f"cache directory {c} is empty, and one that this cache had is missing")
    back, missing = said(b, a)
    assert back == f"cache directory {a} is back, with what it holds"
    assert missing.startswith(f"cache directory {b}: this cache had 2 directories, 1 of them")


def test_a_fault_names_its_directory(paths: list[Path]) -> None:
    """Home is not the first that was given."""
    with striped(paths[:2]) as store:
        fill(store)
    with striped([paths[1], paths[0]]) as store:
        current, given = store.store._attachment.current, store.store._given
        current.error(current.index, sqlite3.DatabaseError("torn"))
        given.tell_error(OSError(errno.EIO, "no disk", str(paths[1] / "segments/1.seg")))
        segno = segments(paths[1])[0]
        given.tell_error(OSError(errno.EIO, "no disk"), segno)
        assert [message.split(":")[0] for _, message in store.faults] == [
            f"index of {paths[0]}",
            f"cache directory {paths[1]}",
            f"cache directory {paths[1]}",
        ]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_writes_of_a_log_that_failed_are_counted(paths: list[Path], code: int) -> None:
    with striped(paths[:2]) as store:
        log = store.store.begin_log(6, 16 * MIB)
        assert log is not None
        there = set(segments(paths[1]))
        log.finish(
            (segno, fmt.SEGMENT_HEADER_BYTES, code if segno in there else 0) for segno in log.segnos
        )
        log.end()
        store.store.housekeeping()
        is_out = [bool(state.why_out) for state in store.store.directories()]
        assert is_out == [False, code == errno.EIO]


def test_a_disk_that_cannot_be_synced_keeps_no_release_back(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = paths[:1]
    monkeypatch.setattr(
        log_module,
        "_sync_file_system",
        lambda path: OSError(errno.EIO, "no disk") if path in failing else None,
    )
    with striped(paths[:2]) as store:
        directory = store.store._given.opened
        assert directory is not None
        for number, member in enumerate(directory.members):
            member.device = number
        log = store.store.begin_log(6, 16 * MIB)
        assert log is not None
        log.finish([])
        for count in range(3):
            assert not directory.failed()
            assert log.release(log.segnos[count : count + 1]) > 0
        assert list(directory.failed()) == paths[:1]
        failing.append(paths[1])
        assert log.release(log.segnos[3:4]) == 0
        log.end()


def test_a_number_is_not_met_again_whoever_becomes_home(paths: list[Path]) -> None:
    """One after the other is lost and comes back, emptied: locations of a mount that lives on may
    lead to what was there before.
    """
    with opened(paths[0], limit_bytes=128 * MIB) as store:
        fill(store)
    given = set(segments(paths[0]))
    for lost in (0, 1, 0):
        with striped(paths[:2]) as store:
            assert here(store) == set(range(FILES))  # nothing is written into the one that joins
        away = paths[lost].rename(paths[lost].with_name("away"))
        paths[lost].write_bytes(b"no directory")
        with striped(paths[:2]) as store:
            fill(store)
        numbers = set(segments(paths[1 - lost]))
        assert numbers.isdisjoint(given)
        given |= numbers
        paths[lost].unlink()
        away.rename(paths[lost])


def test_a_further_directory_alone(paths: list[Path]) -> None:
    """After home was given up: what the others hold is kept, and home's claim is void."""
    with striped(paths[:2]) as store:
        fill(store)
        rest = files_in(store, paths[1])
    with striped(paths[1:2]) as store:
        assert here(store) == rest
        fill(store, range(FILES, FILES + 10))
    with striped(paths[:2]) as store:
        assert here(store, range(FILES + 10)) == rest | set(range(FILES, FILES + 10))
        assert store.kinds == {"directory"}
        all_segments(paths)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_disk_that_fails_while_it_is_used(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    with striped(paths) as store:
        fill(store)
        rest = here(store) - files_in(store, paths[lost])
        with monkeypatch.context() as patch:
            break_disk(patch, paths[lost])
            for _ in range(3):
                assert here(store) >= (rest if lost else set())
                current = store.store._attachment.current
                current._repair_at = 0.0
                current._why_bad = "gone" if lost == 0 else None
                store.suspect()
                store.store.housekeeping()
            store.store._given._reopen_at = 0.0
            store.store.housekeeping()
            assert [bool(state.why_out) for state in store.store.directories()][lost]
            assert here(store) == rest
            store.end_pause()
            fill(store)
            assert here(store) == set(range(FILES))
            said = [message for kind, message in store.faults if "out of service" in message]
            assert len(said) == 1
        # It works again: not used until the next start.
        before = segments(paths[lost])
        fill(store, range(FILES, FILES + 10))
        assert segments(paths[lost]) == before
    with striped(paths) as store:
        fill(store)
        assert here(store) == set(range(FILES))
        all_segments(paths)


def test_a_read_only_disk_takes_no_new_segments(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with striped(paths) as store:
        fill(store)
        with monkeypatch.context() as patch:
            break_disk(patch, paths[1] / "segments", errno.EROFS)
            for number in range(FILES, FILES + 90):
                store.end_pause()
                assert store.put(path_of(number), payload_of(number)) is not None
            store.store.housekeeping()
            assert store.store.directories()[1].why_out
            assert "directory" in store.kinds


def test_a_directory_that_is_deleted_while_it_is_used(paths: list[Path]) -> None:
    with striped(paths) as store:
        fill(store)
        rest = here(store) - files_in(store, paths[1])
        shutil.rmtree(paths[1])
        store.store.housekeeping()
        assert here(store) == rest
        fill(store)
        assert here(store) == set(range(FILES))
        assert not paths[1].exists()


def test_a_server_that_takes_over_leaves_a_dead_one_out(paths: list[Path]) -> None:
    with striped(paths) as store:
        fill(store)
        rest = here(store) - files_in(store, paths[2])
    shutil.rmtree(paths[2])
    paths[2].write_bytes(b"no directory")
    store = Opened.__new__(Opened)
    store.faults, store.gone, store.directory = [], [], paths[0]
    store.store = Store.reopen(
        paths[0],
        StoreSettings(128 * MIB, 0),
        further=paths[1:],
        on_fault=lambda kind, message: store.faults.append((kind, message)),
        on_segment_gone=store.gone.append,
    )
    with store.store:
        store.store.housekeeping()
        assert here(store) == rest
        assert store.kinds == {"directory"}
        assert store.store.lookup(DATASET, b"none", version_of(b""), 0) is None

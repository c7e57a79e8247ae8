"""`fusecache gc`: what it counts, what compaction keeps, and when it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fusecache.base.errors import EXIT_BUSY, EXIT_NOT_A_MOUNT, UserError
from fusecache.base.units import format_bytes
from fusecache.cli.gc_command import gc
from fusecache.store.gc import compact, survey
from tests.support.log_support import Mover
from tests.support.store_support import MIB, Opened, check_invariants, content, opened, version_of

FILES = range(60)


def payload_of(number: int, version: int = 0) -> bytes:
    return content(number + 1000 * version, 10_000)


def put_all(store: Opened, version: int = 0) -> None:
    for n in FILES:
        assert store.put(b"f%d" % n, payload_of(n, version)) is not None
    store.store.flush()
    store.seal()


def assert_all_there(store: Opened, version: int = 0) -> None:
    for n in FILES:
        payload = payload_of(n, version)
        assert store.get(b"f%d" % n, version_of(payload)) == payload


def run(*arguments: str) -> Result:
    return CliRunner().invoke(gc, list(arguments), standalone_mode=False)


def test_alive_and_dead_bytes_by_kind(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        put_all(store)
        (static,) = survey(store.store)
        assert (static.kind, static.bytes - static.alive_bytes) == ("static", 4096)
        log = store.store.begin_log(1, MIB)
        assert log is not None
        mover = Mover(log, {})
        for n in range(20):
            assert mover.append(0, b"f%d" % n, payload_of(n))
        mover.flush(log.segnos[0])
        static, packed = survey(store.store)
        # What is written, not what is reserved.
        assert (packed.kind, packed.bytes) == ("open", 4096 + 20 * 12_288)
        mover.finish()
        log.end()
        store.store.housekeeping()
        static, packed = survey(store.store)
        assert (static.kind, static.alive_bytes) == ("static", 40 * 10_240)
        assert (packed.kind, packed.alive_bytes) == ("packed", 20 * 10_240)


def test_compaction_keeps_what_is_alive_and_gives_the_rest_back(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        put_all(store)
        for n in FILES:
            if n % 3:
                assert store.put(b"f%d" % n, payload_of(n, 1)) is not None
        assert store.put(b"same", payload_of(3)) is not None  # an entry, for a block elsewhere
        store.store.flush()
        store.seal()
        before = sum(use.bytes for use in survey(store.store))
        old = survey(store.store)[0]
        assert old.alive_bytes < old.bytes / 2
        # f3's block is used by a file that only another segment names
        assert compact(store.store) == 0
        # it need not be, when that file is gone
        later = version_of(payload_of(999))._replace(ctime_ns=1_800_000_000_000_000_000)
        assert store.put(b"same", payload_of(999), later) is not None
        freed = compact(store.store)
        store.store.flush()
        store.seal()
        after = sum(use.bytes for use in survey(store.store))
        assert freed > 39 * 10_240
        assert after <= before - freed + 2 * 12_288 + 4096
        assert old.segno not in {use.segno for use in survey(store.store)}
        check_invariants(store)
    for path in (tmp_path / "cache/index").glob("*.db*"):
        path.unlink()  # what was rewritten is found without the index, too
    for _ in range(2):
        with opened(tmp_path / "cache") as store:
            for n in FILES:
                payload = payload_of(n, 1 if n % 3 else 0)
                assert store.get(b"f%d" % n, version_of(payload)) == payload
            assert store.get(b"same", later) == payload_of(999)
            check_invariants(store)


def test_entries_of_a_compacted_segment_are_written_again(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        put_all(store)
        for n in range(10):  # a segment of entries and of blocks that are replaced
            assert store.put(b"twin%d" % n, payload_of(n)) is not None
            assert store.put(b"gone%d" % n, payload_of(n, 2)) is not None
        store.seal()
        for n in range(10):
            assert store.put(b"gone%d" % n, payload_of(n, 3)) is not None
        store.seal()
        victim = survey(store.store)[1].segno
        assert compact(store.store) > 0
        assert victim not in {use.segno for use in survey(store.store)}
    for path in (tmp_path / "cache/index").glob("*.db*"):
        path.unlink()
    with opened(tmp_path / "cache") as store:
        for n in range(10):
            assert store.get(b"twin%d" % n, version_of(payload_of(n))) == payload_of(n)
            assert store.get(b"gone%d" % n, version_of(payload_of(n, 3))) == payload_of(n, 3)


def test_the_command_shows_and_compacts(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    with opened(directory) as store:
        put_all(store)
        put_all(store, version=1)
    before = json.loads(run(str(directory), "--json").stdout)
    assert [use["kind"] for use in before["segments"]] == ["static", "static"]
    assert before["segments"][0]["alive_bytes"] == 0
    table = run(str(directory)).stdout
    assert "static" in table
    assert "packed" in table
    rows = [line.split() for line in table.splitlines()]
    total, alive = (sum(use[key] for use in before["segments"]) for key in ("bytes", "alive_bytes"))
    assert rows[-1] == [
        *("in", "all", "2"),
        *format_bytes(alive).split(),
        *format_bytes(total - alive).split(),
    ]
    answer = json.loads(run(str(directory), "--json", "--compact").stdout)
    assert answer["freed_bytes"] > 60 * 10_240
    assert len(answer["segments"]) == 1
    with opened(directory) as store:
        assert_all_there(store, version=1)


def test_it_refuses_what_it_must_not_do(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    with opened(directory) as store:
        put_all(store)
        put_all(store, version=1)
        failed = run(str(directory), "--compact").exception
        assert isinstance(failed, UserError)
        assert failed.exit_code == EXIT_BUSY
        assert "is used by a mount" in str(failed)
        assert run(str(directory)).exception is None  # looking is allowed
        assert len(store.segments()) == 2
    failed = run(str(tmp_path)).exception
    assert isinstance(failed, UserError)
    assert failed.exit_code == EXIT_NOT_A_MOUNT
    assert not (tmp_path / "segments").exists()


@pytest.mark.parametrize("policy", ["lrf", "keep"])
def test_a_full_directory_is_compacted(tmp_path: Path, policy: str) -> None:
    directory = tmp_path / "cache"
    with opened(directory, limit_bytes=24 * MIB, policy=policy) as store:
        for n in range(2000):
            if store.put(b"f%d" % (n % 700), content(n, 10_000)) is None:
                break
    before = json.loads(run(str(directory), "--json").stdout)["segments"]
    result = run(str(directory), "--compact", "--json")
    assert result.exception is None
    after = json.loads(result.stdout)["segments"]
    assert sum(use["alive_bytes"] for use in after) == sum(use["alive_bytes"] for use in before)
    assert sum(use["bytes"] for use in after) <= sum(use["bytes"] for use in before)


def test_directories_of_a_set_that_changed(tmp_path: Path) -> None:
    """Whatever is named, it is said what to name."""
    x, y = tmp_path / "x", tmp_path / "y"
    with opened(x, further=[y]) as store:
        put_all(store)
    with opened(x):
        pass
    assert "mount once with those that are left" in str(run(str(y)).exception)
    said = str(run(str(x), str(y)).exception)
    assert said.startswith(f"{x} was last used by itself")
    assert "mount once with all of them" in said
    assert run(str(x)).exit_code == 0
    with opened(x, further=[y]):
        pass
    assert run(str(x), str(y)).exit_code == 0


def test_a_directory_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    x, y = tmp_path / "x", tmp_path / "y"
    with opened(x, further=[y]) as store:
        put_all(store)
        before = len(survey(store.store))
    (tmp_path / "link").symlink_to(y)
    named = [str(x), str(y), f"{x}/", str(tmp_path / "link")]
    done = run(*named, "--json")
    answer = json.loads(done.stdout)
    assert answer["cache_dirs"] == [str(x), str(y)]
    assert len(answer["segments"]) == before
    assert done.stderr == f"fusecache: warning: the same twice: {' '.join(named)}\n"


def test_a_cache_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_file(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", is_file)
    said = run(str(tmp_path)).exception
    assert isinstance(said, UserError)
    assert f"{tmp_path}: another user's cache directory" in str(said)

"""Faults of the cache: readers get the origin's bytes, whatever happens to its files."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.support.mounted import Mount, drop_file, eventually
from tests.support.trees import assert_same, make_files, random_bytes

MIB = 1 << 20
MAGIC = b"FCB1"
PAGE = 4096
FAULT_LINES = ["fault", "(?i)cache director", "(?i)index", "(?i)segment", "(?i)rebuil"]

# Where in a record a bit is flipped: byte offset from the record's start, as docs/FORMAT.md has it.
HEADER_REGIONS = {
    "magic": 0,
    "header length": 4,
    "payload length": 8,
    "record length": 12,
    "digest": 20,
    "fetched": 50,
    "chunk count": 56,
    "entry length": 60,
    "digest algorithm": 62,
    "record type": 63,
    "header checksum": 66,
    "first chunk checksum": 74,
    "file entry": 110,
}


def segments(cache_dir: Path) -> list[Path]:
    """One that the mount is about to delete may be gone by now."""
    return sorted((cache_dir / "segments").glob("*.seg"))


def index_files(cache_dir: Path) -> list[Path]:
    return sorted(path for path in (cache_dir / "index").iterdir() if ".db" in path.name)


def records(segment: Path) -> list[int]:
    content = segment.read_bytes()
    return [at for at in range(PAGE, len(content), 512) if content[at : at + 4] == MAGIC]


def flip(path: Path, offset: int, bit: int = 3) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        if byte:
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1 << bit]))


def flip_everywhere(cache_dir: Path, payload_bytes: int) -> int:
    """One bit in every record, each in another region; returns how many records there were."""
    count = 0
    regions = [*HEADER_REGIONS.values(), -1, -2, -3]
    middle = payload_bytes // 2
    for segment in segments(cache_dir):
        with contextlib.suppress(FileNotFoundError):
            for at in records(segment):
                with open(segment, "rb") as file:
                    file.seek(at + 4)
                    header = int.from_bytes(file.read(4), "little")
                region = regions[count % len(regions)]
                payload = {-1: header, -2: header + middle, -3: header + payload_bytes - 1}
                flip(segment, at + payload.get(region, region), count % 8)
                count += 1
    return count


@pytest.mark.claim("F1", "F3")
@in_one_mode
def test_bits_flipped_while_mounted_and_between_mounts(place: Place, mounting: Mounting) -> None:
    make_files(place.source, 48, lambda _: 150_000)
    mount = mounting(allow_log=FAULT_LINES)
    assert_same(place.source, mount.path)
    for _ in range(2):
        eventually(lambda: mount.value("ssd", "blocks") >= 48)
        assert flip_everywhere(place.cache_dir, 150_000) >= 48
        bad = mount.value("integrity", "mismatches")
        mount.drop_kernel_caches()
        assert_same(place.source, mount.path)
        assert mount.value("integrity", "mismatches") > bad
        mount.drop_kernel_caches()
        assert_same(place.source, mount.path)
    lines = [line for line in mount.log().splitlines() if "checksum" in line]
    assert 1 <= len(lines) <= 3, "a kind of fault is logged once"
    eventually(lambda: mount.value("ssd", "blocks") >= 48)
    mount.umount()
    flip_everywhere(place.cache_dir, 150_000)
    for segment in segments(place.cache_dir):
        flip(segment, random.Random(segment.name).randrange(PAGE))  # the segment's own header
    mount.start()
    assert_same(place.source, mount.path)
    eventually(lambda: mount.value("ssd", "blocks") >= 48)
    done = mount.run("verify", mount.path)
    assert done.returncode in (0, 1)
    assert mount.run("verify", mount.path).returncode == 0, "what was bad is quarantined"
    mount.drop_kernel_caches()
    assert_same(place.source, mount.path)


@in_one_mode
def test_what_verify_finds_is_remembered(place: Place, mounting: Mounting) -> None:
    make_files(place.source, 12, lambda _: 150_000)
    mount = mounting(allow_log=FAULT_LINES)
    assert_same(place.source, mount.path)
    eventually(lambda: mount.value("ssd", "blocks") == 12)
    (segment,) = segments(place.cache_dir)
    at = records(segment)[3]
    flip(segment, at + 70_000, 0)
    done = mount.run("verify", mount.path)
    assert done.returncode == 1
    line = f"record at byte {at} of segment {int(segment.stem)} is bad (found by verify)"
    assert done.stderr.endswith(f"fusecache: {line}\n")
    assert "12 blocks, 1.72 MiB checked, 1 bad, dropped; fetched again on use" in done.stdout
    assert mount.log().count(line) == 1
    integrity = mount.value("integrity")
    assert (integrity["mismatches"], integrity["faults"]) == (1, {"checksum": 1})


def _cut_in_half(cache_dir: Path) -> None:
    for segment in segments(cache_dir):
        with contextlib.suppress(FileNotFoundError):
            os.truncate(segment, segment.stat().st_size // 2 + 1234)


def _tear_tails(cache_dir: Path) -> None:
    """As after a power cut: the last records are there in part."""
    for segment in segments(cache_dir):
        with contextlib.suppress(FileNotFoundError):
            found = records(segment)
            if found:
                os.truncate(segment, found[-1] + 70_000)


def _empty(cache_dir: Path) -> None:
    for segment in segments(cache_dir):
        with contextlib.suppress(FileNotFoundError):
            os.truncate(segment, 0)


def _overwrite(cache_dir: Path) -> None:
    for segment in segments(cache_dir):
        with contextlib.suppress(FileNotFoundError):
            segment.write_bytes(random_bytes(segment.name, segment.stat().st_size))


def _remove_segments(cache_dir: Path) -> None:
    for segment in segments(cache_dir):
        segment.unlink(missing_ok=True)


def _swap_segments(cache_dir: Path) -> None:
    """Each segment under another's name: every location leads to another file's record."""
    found: dict[Path, bytes] = {}
    for segment in segments(cache_dir):
        with contextlib.suppress(FileNotFoundError):
            found[segment] = segment.read_bytes()
    for segment, content in zip(found, reversed(found.values()), strict=True):
        segment.write_bytes(content)


@pytest.mark.claim("F3")
@pytest.mark.parametrize("mounted", [True, False], ids=["mounted", "between-mounts"])
@in_one_mode
def test_broken_segments(place: Place, mounting: Mounting, mounted: bool) -> None:
    make_files(place.source, 60, lambda _: 200_000)
    mount = mounting("--ssd", "128M", allow_log=FAULT_LINES)
    for damage in (_cut_in_half, _tear_tails, _empty, _overwrite, _swap_segments, _remove_segments):
        assert_same(place.source, mount.path)
        eventually(lambda: mount.value("ssd", "blocks") > 0)
        _damage(mount, damage, mounted)
        assert_same(place.source, mount.path)
        mount.drop_kernel_caches()
        assert_same(place.source, mount.path)


def _damage(mount: Mount, damage: Callable[[Path], None], mounted: bool) -> None:
    if mounted:
        damage(mount.cache_dir)
        mount.drop_kernel_caches()
    else:
        mount.umount()
        damage(mount.cache_dir)
        mount.start()


def _flip_index(cache_dir: Path) -> None:
    for path in index_files(cache_dir):
        if not path.name.endswith("-shm"):
            for offset in range(100, path.stat().st_size, 512):
                flip(path, offset, offset % 8)


def _flip_rows(cache_dir: Path) -> None:
    """Sparse flips in the rows, not in the structure: only the rows' checksums can tell."""
    for path in index_files(cache_dir):
        if not path.name.endswith("-shm"):
            for offset in range(PAGE - 40, path.stat().st_size, PAGE):
                flip(path, offset, 0)


def _truncate_index(cache_dir: Path) -> None:
    for path in index_files(cache_dir):
        if not path.name.endswith("-shm"):
            os.truncate(path, path.stat().st_size // 2)


def _overwrite_index(cache_dir: Path) -> None:
    for path in index_files(cache_dir):
        if not path.name.endswith("-shm"):
            path.write_bytes(random_bytes(path.name, 5 * PAGE))


def _remove_index(cache_dir: Path) -> None:
    for path in index_files(cache_dir):
        path.unlink()


@pytest.mark.claim("F2")
@pytest.mark.parametrize("mounted", [True, False], ids=["mounted", "between-mounts"])
@in_one_mode
def test_a_broken_index(place: Place, mounting: Mounting, mounted: bool) -> None:
    make_files(place.source, 60, lambda index: 20_000 + index)
    mount = mounting(allow_log=FAULT_LINES)
    assert_same(place.source, mount.path)
    for damage in (_flip_rows, _flip_index, _truncate_index, _overwrite_index, _remove_index):
        eventually(lambda: mount.value("ssd", "blocks") >= 60)
        _damage(mount, damage, mounted)
        assert_same(place.source, mount.path)
        mount.drop_kernel_caches()
        assert_same(place.source, mount.path)
    mount.umount()
    _remove_index(place.cache_dir)
    mount.start()
    assert_same(place.source, mount.path)
    assert mount.value("origin", "bytes") == 0, "the index comes back from the segments"


@in_one_mode
@pytest.mark.claim("F2", "X4")
def test_a_dataset_cannot_plant_records(place: Place, mounting: Mounting) -> None:
    """A file that holds the bytes of a segment is content, also when the index is rebuilt."""
    victim = place.write("victim", random_bytes("victim", 50_000))
    place.write("beside", b"keeps the first segment alive")
    mount = mounting("--revalidate", "1", allow_log=FAULT_LINES)
    assert_same(place.source, mount.path)
    eventually(lambda: mount.value("ssd", "blocks") == 2)
    mount.umount()
    (segment,) = segments(place.cache_dir)
    content = segment.read_bytes()
    victim.write_bytes(random_bytes("another", 50_000))
    mount.start()
    assert_same(place.source, mount.path)
    mount.umount()
    place.write("planted", content)
    mount.start()
    assert_same(place.source, mount.path)
    eventually(lambda: mount.value("ssd", "blocks") == 4)
    mount.umount()
    _remove_index(place.cache_dir)
    mount.start()
    assert_same(place.source, mount.path)
    assert (mount.path / "victim").read_bytes() == random_bytes("another", 50_000)


@pytest.mark.claim("F4")
@in_one_mode
def test_a_full_disk(place: Place, small_disk: Path, mounting: Mounting) -> None:
    files = make_files(place.source, 60, lambda _: MIB)
    mount = mounting(
        *("--ssd", "60M", "--keep-free", "0"),
        cache_dir=small_disk / "cache",
        allow_log=[*FAULT_LINES, "(?i)disk"],
    )
    for path in files[:10]:
        assert (mount.path / path.relative_to(place.source)).read_bytes() == path.read_bytes()
    with open(small_disk / "other", "wb") as other:
        for _ in range(64):
            try:
                other.write(random_bytes("other", MIB))
                other.flush()
            except OSError:
                break
    for _ in range(2):
        assert_same(place.source, mount.path)
        mount.drop_pages()
    faults = [line for line in mount.log().splitlines() if "fault" in line]
    assert len(faults) <= 4, faults
    assert "THE DISK OF THE CACHE IS FULL: 0 B free; " in mount.run("status", mount.path).stdout
    (small_disk / "other").unlink()
    assert "FULL" not in mount.run("status", mount.path).stdout
    assert_same(place.source, mount.path)
    mount.kill_server()
    assert_same(place.source, mount.path)


@pytest.mark.claim("F4", "F3")
def test_a_dying_disk(place: Place, dying_disk: tuple[Path, Path], mounting: Mounting) -> None:
    """Reads and writes of the cache's disk give EIO."""
    directory, device = dying_disk
    files = make_files(place.source, 40, lambda _: 500_000)
    mount = mounting(
        *("--ssd", "32M", "--revalidate", "1"),
        cache_dir=directory / "cache",
        allow_log=[*FAULT_LINES, "(?i)disk|error"],
    )
    assert_same(place.source, mount.path)
    eventually(lambda: mount.value("ssd", "blocks") == len(files))
    os.sync()
    os.truncate(device, 2 * MIB)
    for segment in segments(mount.cache_dir):
        drop_file(segment)
    mount.drop_kernel_caches()
    assert_same(place.source, mount.path)
    assert "fault" in mount.log(), "its disk was not asked"
    place.write("new", random_bytes("new", 3 * MIB))
    eventually(lambda: (mount.path / "new").read_bytes() == random_bytes("new", 3 * MIB))
    mount.kill_server()
    assert (mount.path / "new").read_bytes() == random_bytes("new", 3 * MIB)


@pytest.mark.claim("F5")
@in_one_mode
def test_the_cache_directory_deleted_under_the_mount(place: Place, mounting: Mounting) -> None:
    make_files(place.source, 60, lambda index: 100_000 + index)
    mount = mounting("--revalidate", "1", allow_log=FAULT_LINES)
    assert_same(place.source, mount.path)
    for _ in range(2):
        eventually(place.cache_dir.is_dir)
        shutil.rmtree(place.cache_dir, ignore_errors=True)
        mount.drop_kernel_caches()
        assert_same(place.source, mount.path)
        eventually(lambda: (place.cache_dir / "format").exists())
        place.write("class000/new", os.urandom(300_000))
        eventually(lambda: assert_same(place.source, mount.path))
    mount.drop_kernel_caches()
    assert_same(place.source, mount.path)
    eventually(lambda: mount.value("ssd", "blocks") > 0)
    shutil.rmtree(place.cache_dir, ignore_errors=True)
    mount.kill_server()
    mount.drop_kernel_caches()
    assert_same(place.source, mount.path)


@in_one_mode
@pytest.mark.claim("F5")
@pytest.mark.parametrize("is_empty", [False, True])
def test_a_deleted_cache_begins_again_where_restart_is_told_so(
    place: Place, mounting: Mounting, is_empty: bool
) -> None:
    make_files(place.source, 20, lambda index: 100_000 + index)
    allowed = [*FAULT_LINES, r"is stopped \(SIGSTOP\)", "killed by SIGKILL|died, with threads"]
    mount = mounting(log_file=place.base / "mount.log", allow_log=allowed)
    server = mount.server_pid()
    os.kill(server, signal.SIGSTOP)  # it would make the cache anew
    shutil.rmtree(place.cache_dir)
    if is_empty:
        place.cache_dir.mkdir()
    os.kill(server, signal.SIGKILL)
    eventually(lambda: mount.value("ssd", "directories")[0]["why_out"] != "")
    assert mount.run("restart", mount.path).returncode == 1
    done = mount.run("restart", mount.path, "--cache-dir", place.cache_dir)
    assert done.returncode == 0, done.stderr
    assert_same(place.source, mount.path)
    eventually(lambda: mount.value("ssd", "blocks") == 20)


@in_one_mode
@pytest.mark.claim("F5")
@pytest.mark.parametrize("name", ["", "cache"], ids=["its root", "below"])
def test_the_disk_is_unmounted_under_the_mount(
    place: Place, small_disk: Path, mounting: Mounting, name: str
) -> None:
    """What it was mounted on is on another disk: nothing is written there, killed or not."""
    disk = place.base / "ssd"
    disk.mkdir()
    bind = ["mount", "--bind", str(small_disk), str(disk)]
    subprocess.run(bind, check=True)
    try:
        make_files(place.source, 20, lambda index: 100_000 + index)
        mount = mounting(
            *("--ssd", "32M", "--keep-free", "0"),
            cache_dir=disk / name,
            log_file=place.base / "mount.log",
            allow_log=FAULT_LINES,
        )
        assert_same(place.source, mount.path)
        eventually(lambda: mount.value("ssd", "blocks") == 20)

        subprocess.run(["umount", "-l", disk], check=True)
        eventually(lambda: mount.value("ssd", "directories")[0]["why_out"] != "")
        for _ in range(2):
            mount.drop_kernel_caches()
            assert_same(place.source, mount.path)
            said = mount.run("status", mount.path).stdout
            assert f"{disk / name}: OUT OF SERVICE: " in " ".join(said.split())
            assert said.count("is its disk mounted?") == 1
            assert os.listdir(disk) == []
            mount.kill_server()
            eventually(lambda: mount.value("ssd", "directories")[0]["why_out"] != "")
        assert mount.log().count("nothing is cached until") == 3  # of three servers
        done = mount.run("restart", mount.path, "--ram", "32M")
        assert (done.returncode, os.listdir(disk)) == (1, [])
        assert "is its disk mounted?" in done.stderr

        subprocess.run(bind, check=True)
        eventually(lambda: mount.value("ssd", "blocks") == 20)
        mount.drop_kernel_caches()
        before = mount.value("reads", "from_origin")
        assert_same(place.source, mount.path)
        assert mount.value("reads", "from_origin") == before
        mount.umount()
    finally:
        subprocess.run(["umount", "-l", disk], check=False)

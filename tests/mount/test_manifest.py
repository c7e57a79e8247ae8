"""A second copy of a dataset, under whatever path: with a manifest it costs no read of the origin.
What a manifest may not do: show a byte that is not the origin's.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fusecache.base.digest import ALGORITHMS, digest
from fusecache.manifest.format import NAME, Entry, Whole, entry_bytes, header
from tests.conftest import Mounting, OrdinaryUser, Place, in_one_mode
from tests.support.mounted import Mount, command, eventually
from tests.support.plan_client import PlanClient
from tests.support.trees import make_files, random_bytes

XXH3 = ALGORITHMS["xxh3-128"]
STRANGER = 1234
MIB = 1 << 20
STORED, STAGED_AND_STORED = 2, 3
NOT_USED = r"the manifest is not used"


def digested(root: Path, *flags: str | Path) -> str:
    done = command("digest", root, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_read(source: Path, mount: Mount, files: list[Path]) -> None:
    for path in files:
        name = path.relative_to(source)
        assert (mount.path / name).read_bytes() == path.read_bytes(), name


def cached(place: Place, mounting: Mounting, files: list[Path], blocks: int) -> None:
    """All of them are in the cache, and the mount is gone."""
    first = place.base / "first"
    first.mkdir()
    mount = mounting("--manifest", "none", mountpoint=first)

    def look() -> None:
        assert_read(place.source, mount, files)
        mount.drop_kernel_caches()
        assert mount.value("ssd", "blocks") == blocks

    eventually(look, 60, 0.2)
    mount.umount()


def counts(mount: Mount) -> tuple[int, int, int, int]:
    """Files and bytes that were read at the origin; the same that were linked."""
    status = mount.status()
    origin, manifest = status["origin"], status["manifest"]
    linked = manifest["linked_files"], manifest["linked_bytes"]
    return (origin["files"], origin["bytes"], *linked)


@pytest.mark.claim("R8")
def test_a_copy_is_read_without_the_origin(place: Place, mounting: Mounting) -> None:
    """Files of one block and of several, after its manifest took over what the first one's says."""
    files = make_files(place.source, 300, lambda index: 3000 + 10 * index)
    files.append(place.write("large", random_bytes("large", 9 * MIB)))
    place.write("empty", b"")
    digested(place.source)
    cached(place, mounting, files, 303)
    copy = place.base / "copy"
    subprocess.run(["cp", "-a", place.source, copy], check=True)
    assert "; read 0 files, 0 B; " in digested(copy, "--copy-of", copy / NAME)
    copies = [copy / path.relative_to(place.source) for path in files]
    total = sum(path.stat().st_size for path in files)
    mount = mounting(source=copy)
    assert_read(copy, mount, copies)
    assert mount.value("manifest", "files") == 302
    assert counts(mount) == (0, 0, 301, total)
    mount.drop_kernel_caches()
    assert_read(copy, mount, copies)
    assert counts(mount) == (0, 0, 301, total)  # once is enough
    assert mount.value("reads", "from_origin") == 0
    mount.umount()
    (copy / NAME).unlink()
    mount = mounting(source=copy)
    assert_read(copy, mount, copies)
    assert counts(mount) == (0, 0, 0, 0)  # the index knows it now


@in_one_mode
@pytest.mark.claim("R8")
def test_of_a_copy_what_has_changed_is_read(place: Place, mounting: Mounting) -> None:
    files = make_files(place.source, 100, lambda index: 3000 + index)
    digested(place.source)
    cached(place, mounting, files, 100)
    copy = place.base / "copy"
    subprocess.run(["cp", "-a", place.source, copy], check=True)
    digested(copy, "--copy-of", copy / NAME)
    copies = [copy / path.relative_to(place.source) for path in files]
    copies[7].write_bytes(random_bytes("changed", 5000))
    mount = mounting(source=copy)
    assert_read(copy, mount, copies)
    total = sum(path.stat().st_size for path in copies) - 5000
    assert counts(mount) == (1, 5000, 99, total)


@in_one_mode
@pytest.mark.claim("R8")
def test_a_dataset_that_was_renamed_is_known(place: Place, mounting: Mounting) -> None:
    """Its files' ctimes are the same, so its manifest needs no word of ours. So is one in a file
    elsewhere, and after the server was killed.
    """
    files = make_files(place.source, 40, lambda index: 3000 + index)
    elsewhere = place.base / "elsewhere"
    digested(place.source)
    digested(place.source, "-o", elsewhere)
    cached(place, mounting, files, 40)
    for number, flags in enumerate([[], ["--manifest", str(elsewhere)]]):
        moved = place.base / f"moved {number}"
        place.source.rename(moved)
        place.source = moved
        files = [moved / path.relative_to(path.parents[1]) for path in files]
        mount = mounting(*flags, source=moved, allow_log=["killed by SIGKILL"])
        assert_read(moved, mount, files[:20])
        if flags:
            mount.kill_server()
            eventually(lambda: mount.value("manifest", "files") == 41 - len(flags) // 2)  # noqa: B023
        assert_read(moved, mount, files[20:])
        assert mount.value("origin", "files") == 0
        assert mount.value("manifest", "linked_files") == (20 if flags else 40)
        assert f"{moved if not flags else elsewhere}" in mount.log()
        mount.umount()


@in_one_mode
@pytest.mark.claim("C3", "C14")
def test_a_manifest_says_nothing_of_other_versions(place: Place, mounting: Mounting) -> None:
    """Of files that were rewritten with size and mtime kept: before the mount, or under it. Nor
    does one that was merely copied with its files.
    """
    files = make_files(place.source, 20, lambda _: 3000)
    digested(place.source)
    cached(place, mounting, files, 20)
    copy = place.base / "copy"
    subprocess.run(["cp", "-a", place.source, copy], check=True)
    copies = [copy / path.relative_to(place.source) for path in files]

    def rewrite(path: Path) -> None:
        before = path.stat()
        path.write_bytes(random_bytes(path, 3000))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    rewrite(copies[0])
    mount = mounting(source=copy)
    assert mount.value("manifest", "files") == 20
    assert_read(copy, mount, copies)
    assert (mount.value("origin", "files"), mount.value("manifest", "linked_files")) == (20, 0)
    mount.umount()
    digested(copy)
    rewrite(copies[1])
    moved = copy.rename(place.base / "moved")
    copies = [moved / path.relative_to(copy) for path in copies]
    mount = mounting(source=moved, mountpoint=place.mountpoint)
    assert_read(moved, mount, copies[:10])
    assert (mount.value("origin", "files"), mount.value("manifest", "linked_files")) == (1, 9)
    rewrite(copies[15])
    mount.run("restart", mount.path, "--revalidate", "0.2")
    eventually(lambda: assert_read(moved, mount, copies))


@in_one_mode
@pytest.mark.claim("S8")
@pytest.mark.parametrize(
    "how", ["of another", "others may write", "link", "two names", "fifo", "way"]
)
def test_a_manifest_that_others_may_have_written_is_refused(
    place: Place, mounting: Mounting, how: str
) -> None:
    """It names the digest of another user's private file, in the version of a file of theirs."""
    private = place.write("private", b"nobody else's")
    cached(place, mounting, [private], 1)
    hostile = place.base / "hostile"
    hostile.mkdir()
    os.chown(hostile, STRANGER, STRANGER)
    (hostile / "file").write_bytes(b"of a stranger")
    lie(hostile / NAME, hostile / "file", private.read_bytes())
    flags: list[str] = []
    if how == "of another":
        os.chown(hostile / NAME, STRANGER, STRANGER)
    elif how == "others may write":
        (hostile / NAME).chmod(0o620)
    elif how == "link":
        (hostile / NAME).rename(place.base / "elsewhere")
        (hostile / NAME).symlink_to(place.base / "elsewhere")
    elif how == "two names":
        os.link(hostile / NAME, place.base / "elsewhere")
    elif how == "fifo":
        (hostile / NAME).unlink()
        os.mkfifo(hostile / NAME)
    else:
        (hostile / NAME).rename(place.base / "elsewhere")
        (hostile / "way").symlink_to(place.base)
        os.chown(hostile / "way", STRANGER, STRANGER, follow_symlinks=False)
        flags = ["--manifest", str(hostile / "way" / "elsewhere")]
    mount = mounting(*flags, source=hostile, allow_log=[NOT_USED])
    assert (mount.path / "file").read_bytes() == b"of a stranger"
    assert mount.value("manifest", "linked_files") == 0
    assert mount.value("origin", "files") == 1
    assert mount.log().count("the manifest is not used") == 1


@in_one_mode
@pytest.mark.claim("S8")
def test_one_of_ours_is_believed(place: Place, mounting: Mounting) -> None:
    """The lie of the test above, told by us: so that test is about who tells it. For another
    version it says nothing even so.
    """
    private = place.write("private", b"nobody else's")
    cached(place, mounting, [private], 1)
    for name in ("file", "other"):
        (place.base / "ours").mkdir(exist_ok=True)
        (place.base / "ours" / name).write_bytes(b"of a stranger")
    lie(place.base / "ours" / NAME, place.base / "ours" / "file", private.read_bytes())
    mount = mounting(source=place.base / "ours")
    assert (mount.path / "file").read_bytes() == b"nobody else's"
    assert (mount.path / "other").read_bytes() == b"of a stranger"
    mount.umount()
    os.utime(place.base / "ours" / "file")
    mount = mounting(source=place.base / "ours", mountpoint=place.mountpoint)
    assert (mount.path / "file").read_bytes() == b"of a stranger"


def lie(path: Path, file: Path, content: bytes) -> None:
    """A sound manifest: the file has this content, of the same length."""
    found = file.stat()
    version = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    entry = Entry(os.fsencode(file.name), *version, digest(XXH3, content))
    whole = Whole(XXH3)
    whole.add(entry)
    path.write_bytes(header(XXH3) + entry_bytes(entry) + whole.end())
    path.chmod(0o600)


@in_one_mode
@pytest.mark.claim("S8")
def test_an_ordinary_user_has_the_same_rule(
    ordinary_user: OrdinaryUser, tmp_path: Path, zero_open: bool
) -> None:
    """A stranger's is refused, root's is used, if it may be read."""
    source = ordinary_user.directory("source")
    (source / "file").write_bytes(b"content")
    digested(source)
    mount = ordinary_user.mount(source, zero_open=zero_open)
    mount.allow_log.append(NOT_USED)
    for owner, mode, files in (
        (0, 0o600, 0),
        (0, 0o644, 1),
        (STRANGER, 0o644, 0),
        (ordinary_user.uid, 0o600, 1),
    ):
        os.chown(source / NAME, owner, owner)
        os.chmod(source / NAME, mode)
        with mount:
            assert mount.value("manifest", "files") == files


@in_one_mode
def test_damaged_manifests_are_refused_with_a_line(place: Place, mounting: Mounting) -> None:
    """And the bytes are the origin's. (More mutations: tests/unit/manifest.)"""
    files = make_files(place.source, 12, lambda index: 3000 + index)
    digested(place.source)
    data = (place.source / NAME).read_bytes()
    cached(place, mounting, files, 12)
    draw = random.Random(0)
    moved = place.source.rename(place.base / "moved")
    files = [moved / path.relative_to(place.source) for path in files]
    mount = mounting("--manifest", "none", source=moved, allow_log=[NOT_USED])
    damages: list[Callable[[bytearray], object]] = [
        lambda some: some.clear(),
        lambda some: some.__delitem__(slice(len(some) - 30, None)),
        lambda some: some.extend(b"more"),
        lambda some: some.__setitem__(slice(None), draw.randbytes(4000)),
    ]
    damages += [lambda some: some.__setitem__(draw.randrange(len(some)), 0x80)] * 4
    for number, damage in enumerate(damages, 1):
        changed = bytearray(data)
        damage(changed)
        if changed == data:
            continue
        (moved / NAME).write_bytes(changed)
        done = mount.run("restart", mount.path, "--manifest", "auto")
        assert (done.returncode, done.stderr.count("\n")) == (0, 1)
        assert re.search(f"the manifest is not used: {moved}/{NAME}: (its? |an entry)", done.stderr)
        assert mount.log().count("the manifest is not used") == number
        mount.drop_kernel_caches()
        assert_read(moved, mount, files)
        assert mount.value("manifest", "files") == 0
    assert mount.value("manifest", "linked_files") == 0


@in_one_mode
def test_why_a_manifest_is_not_used_is_said(place: Place, mounting: Mounting) -> None:
    files = make_files(place.source, 3, lambda _: 3000)
    digested(place.source, "--digest", "blake3")
    mount = mounting(allow_log=[NOT_USED])
    line = f"the manifest is not used: {place.source}/{NAME}: its digests are blake3, and xxh3"
    assert line in mount.log()
    for path, why in (
        (place.base / "none", "No such file or directory"),
        (place.source, "Is a directory"),
    ):
        done = mount.run("restart", mount.path, "--manifest", str(path))
        assert (done.returncode, done.stderr.count("\n")) == (0, 1)
        assert why in done.stderr
    done = mount.run("restart", mount.path, "--manifest", "none")
    assert (done.returncode, done.stderr) == (0, "")
    done = mount.run("restart", mount.path, "--manifest", "sometimes")
    assert done.returncode == 2
    (place.source / NAME).unlink()
    mount.restart("--manifest", "auto")
    assert "not used" not in mount.log().splitlines()[-1]
    assert_read(place.source, mount, files)
    assert "listed" not in mount.run("status", mount.path).stdout


@in_one_mode
def test_a_manifest_below_the_mount_itself_hangs_nothing(place: Place, mounting: Mounting) -> None:
    files = make_files(place.source, 3, lambda _: 3000)
    digested(place.source)
    mount = mounting("--manifest", str(place.source / NAME), mountpoint=place.source)
    assert mount.value("manifest", "files") == 3
    done = command("digest", place.source)  # the mount is read-only
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "-o FILE" in done.stderr
    before = mount.value("origin", "bytes")
    assert "; read 3 files" in digested(place.source, "-o", place.base / "out")
    assert_read(place.source, mount, files)
    assert mount.value("origin", "bytes") == before + 3 * 3000
    # What was read through a mount is of the origin, whose inode numbers it does not show.
    eventually(lambda: mount.value("ssd", "blocks") == 4)  # and the manifest
    mount.umount()
    moved = place.source.rename(place.base / "moved")
    mount = mounting("--manifest", str(place.base / "out"), source=moved)
    assert_read(moved, mount, [moved / path.relative_to(place.source) for path in files])
    assert counts(mount) == (0, 0, 3, 9000)


@in_one_mode
def test_what_the_cache_does_not_hold_any_more_is_fetched(place: Place, mounting: Mounting) -> None:
    files = make_files(place.source, 10, lambda _: 3000)
    digested(place.source)
    cached(place, mounting, files[:5], 5)
    moved = place.source.rename(place.base / "moved")
    files = [moved / path.relative_to(place.source) for path in files]
    mount = mounting(source=moved)
    assert_read(moved, mount, files)
    assert (mount.value("origin", "files"), mount.value("manifest", "linked_files")) == (5, 5)
    mount.umount()
    shutil.rmtree(place.cache_dir)
    mount = mounting(source=moved, mountpoint=place.mountpoint)
    assert_read(moved, mount, files)
    assert (mount.value("origin", "files"), mount.value("manifest", "linked_files")) == (10, 0)


@in_one_mode
def test_a_bad_block_is_fetched(place: Place, mounting: Mounting) -> None:
    """Every read from SSD is verified, also of what was found by its digest."""
    files = make_files(place.source, 10, lambda _: 3000)
    digested(place.source)
    cached(place, mounting, files, 10)
    for segment in (place.cache_dir / "segments").glob("*.seg"):
        data = segment.read_bytes()
        at = data.index(files[4].read_bytes())
        with open(segment, "r+b") as file:
            file.seek(at + 100)
            file.write(b"x")
    moved = place.source.rename(place.base / "moved")
    files = [moved / path.relative_to(place.source) for path in files]
    mount = mounting(source=moved, allow_log=["is bad"])
    assert_read(moved, mount, files)
    assert (mount.value("origin", "files"), mount.value("integrity", "mismatches")) == (1, 1)


@in_one_mode
def test_warm_and_hints_fetch_nothing_either(place: Place, mounting: Mounting) -> None:
    files = make_files(place.source, 60, lambda index: 3000 + index)
    digested(place.source)
    cached(place, mounting, files, 60)
    moved = place.source.rename(place.base / "moved")
    files = [moved / path.relative_to(place.source) for path in files]
    mount = mounting(source=moved)
    done = mount.run("warm", mount.path, "class000/**")
    assert done.returncode == 0, done.stderr
    with PlanClient(mount.path) as client:
        inos = [entry[0] for entry in client.listing(b"class001").values()]
        assert client.fetch_all(inos[:5]) == {STORED: 5}
        assert client.stage_all(inos) == {STAGED_AND_STORED: 10}
    total = sum(path.stat().st_size for path in files)
    assert counts(mount) == (0, 0, 60, total)
    assert_read(moved, mount, files)
    assert counts(mount) == (0, 0, 60, total)

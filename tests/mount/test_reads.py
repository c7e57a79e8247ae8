"""Reading: every way of reading gives the origin's bytes, and the origin is asked once."""

from __future__ import annotations

import concurrent.futures
import ctypes
import hashlib
import mmap
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.support.mounted import ROOT, Mount, digest, drop_file, environment, errno_of, eventually
from tests.support.trees import assert_same, make_files, random_bytes

MIB = 1 << 20
BLOCK = 4 * MIB
# Around every border: empty, one byte, a page, a checksum chunk, a block.
SIZES = [
    *(0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 110_000, MIB, 3 * MIB + 17),
    *(BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 70_001),
]


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory, zero_open: bool) -> Iterator[Mount]:
    """A mount of one file of each size."""
    place = Place(tmp_path_factory.mktemp("sized"))
    for size in SIZES:
        place.write(f"{size}", random_bytes(size, size))
    with Mount(
        *(place.source, place.mountpoint, place.cache_dir, "--ssd", "512M"), zero_open=zero_open
    ) as mount:
        yield mount


def test_self_check(sized: Mount) -> None:
    assert sorted(os.listdir(sized.path)) == sorted(map(str, SIZES))


@pytest.mark.claim("R1")
@pytest.mark.parametrize("caches", ["empty", "from-ssd", "hot"])
def test_pread_at_any_offset(sized: Mount, caches: str) -> None:
    if caches == "from-ssd":
        sized.drop_kernel_caches()
    rng = random.Random(caches)
    for size in SIZES:
        content = (sized.source / str(size)).read_bytes()
        borders = [0, 1, size - 1, size, size + 1, size + 70_000, BLOCK - 1, BLOCK, 65536, 131072]
        with open(sized.path / str(size), "rb", buffering=0) as file:
            for offset in [*borders, *(rng.randrange(size + 1) for _ in range(20))]:
                if offset < 0:
                    continue
                length = rng.choice((1, 100, 4096, 70_000, 200_000, 2 * MIB))
                expected = content[offset : offset + length]
                assert os.pread(file.fileno(), length, offset) == expected, (size, offset, length)
            assert os.preadv(file.fileno(), [bytearray(10), bytearray(size)], 0) == size
            file.seek(0)
            assert file.read() == content


@pytest.mark.claim("R1")
def test_mmap_and_sendfile(sized: Mount) -> None:
    for size in SIZES[1:]:
        content = (sized.source / str(size)).read_bytes()
        sized.drop_pages()
        with open(sized.path / str(size), "rb") as file:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                assert mapped[size - 1] == content[size - 1]
                assert mapped[:] == content
            with open(os.memfd_create("copy"), "w+b") as copy:
                sent = 0
                while step := os.sendfile(copy.fileno(), file.fileno(), sent, size):
                    sent += step
                copy.seek(0)
                assert copy.read() == content


@pytest.mark.claim("R1")
def test_direct_reads(sized: Mount) -> None:
    for size in SIZES[1:]:
        content = (sized.source / str(size)).read_bytes()
        descriptor = os.open(sized.path / str(size), os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, 2 * MIB) as aligned:
                for offset in range(0, size + 1, 2 * MIB):
                    count = os.preadv(descriptor, [aligned], offset)
                    assert aligned[:count] == content[offset : offset + 2 * MIB]
                    assert count == max(0, min(2 * MIB, size - offset))
        finally:
            os.close(descriptor)


def _hash_all(paths: list[Path], seed: int) -> dict[str, str]:
    order = list(paths)
    random.Random(seed).shuffle(order)
    return {str(path): digest(path) for path in order}


def _hash_in_child(
    paths: list[Path], seed: int, answers: multiprocessing.Queue[dict[str, str]]
) -> None:
    answers.put(_hash_all(paths, seed))


@pytest.mark.claim("R2")
def test_many_readers_at_once(place: Place, mounting: Mounting) -> None:
    """Threads and forked children, all over the same cold files: each file is fetched once."""
    files = make_files(place.source, 150, lambda index: 1000 + index * 1511 % 200_000)
    big = place.write("big", random_bytes("big", 9 * MIB + 5))
    mount = mounting("--revalidate", "never")
    names = [path.relative_to(place.source) for path in [*files, big]]
    expected = {str(mount.path / name): digest(place.source / name) for name in names}
    paths = [mount.path / name for name in names]
    fork = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[dict[str, str]] = fork.Queue()
    inherited = os.open(paths[0], os.O_RDONLY)
    readers = [fork.Process(target=_hash_in_child, args=(paths, n, answers)) for n in range(4)]
    for reader in readers:
        reader.start()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for seen in pool.map(lambda seed: _hash_all(paths, seed), range(10, 14)):
            assert seen == expected
    for _ in readers:
        assert answers.get(timeout=60) == expected
    for reader in readers:
        reader.join(30)
    assert os.pread(inherited, 10**6, 0) == (place.source / names[0]).read_bytes()
    os.close(inherited)
    size = sum((place.source / name).stat().st_size for name in names)
    assert mount.value("origin", "bytes") <= size * 1.05


@pytest.mark.claim("R4", "K2")
def test_the_origin_is_read_once(place: Place, mounting: Mounting) -> None:
    make_files(place.source, 100, lambda index: 20_000 + index)
    place.write("large", random_bytes("large", 9 * MIB))
    mount = mounting()
    assert_same(place.source, mount.path)
    eventually(lambda: mount.value("ssd", "blocks") == 103)
    once = mount.value("origin", "bytes")
    mount.drop_kernel_caches()
    assert_same(place.source, mount.path)
    status = mount.status()
    assert status["origin"]["bytes"] == once
    assert status["reads"]["from_ssd"] > 0
    mount.restart()
    mount.drop_kernel_caches()
    assert_same(place.source, mount.path)
    assert mount.value("origin", "bytes") in (0, once)
    mount.umount()
    mount.start()
    assert_same(place.source, mount.path)
    status = mount.status()
    assert status["reads"]["from_origin"] == 0
    assert status["origin"]["bytes"] == 0


@pytest.mark.claim("R4")
@in_one_mode
def test_odd_times_do_not_keep_a_file_out_of_the_cache(place: Place, mounting: Mounting) -> None:
    for index, second in enumerate((-1, 0, 4_000_000_000)):
        os.utime(place.write(f"{index}", b"content %d" % index), (second, second))
    mount = mounting()
    for _ in range(2):
        assert_same(place.source, mount.path)
        eventually(lambda: mount.value("ssd", "blocks") == 3)
        mount.drop_kernel_caches()
    assert mount.value("reads", "from_origin") == 3


@pytest.mark.claim("R6")
def test_random_reads_of_a_large_file_stay_small(place: Place, mounting: Mounting) -> None:
    """One read in each of many blocks: far less than the file is fetched."""
    blocks = 24
    path = place.write("large", random_bytes("random", blocks * BLOCK))
    mount = mounting("--ssd", "512M")
    order = list(range(blocks))
    random.Random(1).shuffle(order)
    with open(mount.path / "large", "rb", buffering=0) as file, open(path, "rb") as origin:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for block in order:
            offset = block * BLOCK + 1_000_003
            assert os.pread(file.fileno(), 8192, offset) == os.pread(origin.fileno(), 8192, offset)
    assert mount.value("origin", "bytes") < blocks * BLOCK / 4


def test_a_large_file_streams(place: Place, mounting: Mounting) -> None:
    """Read from end to end the origin gives each byte once, and the next time none."""
    size = 50 * MIB + 4321
    path = place.write("stream", random_bytes("stream", size))
    mount = mounting("--ssd", "512M", "--ram", "128M")
    assert digest(mount.path / "stream") == digest(path)
    eventually(lambda: mount.value("ssd", "blocks") == 13)
    fetched = mount.value("origin", "bytes")
    assert size <= fetched <= size * 1.1
    drop_file(mount.path / "stream")
    assert digest(mount.path / "stream") == digest(path)
    assert mount.value("origin", "bytes") == fetched


def fill_ssd(place: Place, mount: Mount) -> None:
    """No block finds room any more."""
    place.write("first", random_bytes("first", 16 * MIB))
    assert (mount.path / "first").read_bytes() == (place.source / "first").read_bytes()
    eventually(lambda: mount.value("ssd", "bytes") > 8 * MIB)


@pytest.mark.claim("R6")
def test_a_block_that_is_not_stored_is_fetched_once(place: Place, mounting: Mounting) -> None:
    """Random reads of a large file, where SSD has no room: the second one of a block brings all of
    it to the kernel.
    """
    content = random_bytes("large", 3 * BLOCK)
    large = place.write("large", content)
    os.utime(large, (1e9, 1e9))
    mount = mounting("--ram", "64M", "--ssd", "16M", "--policy", "keep")
    fill_ssd(place, mount)
    before = mount.value("origin", "bytes"), mount.value("ram", "bytes")
    with open(mount.path / "large", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

        def read(offset: int) -> None:
            assert os.pread(file.fileno(), 4096, offset) == content[offset : offset + 4096]

        for number in range(2):
            read(BLOCK + number * MIB)
        assert mount.value("origin", "bytes") - before[0] == BLOCK + 4096
        eventually(lambda: mount.value("ram", "bytes") - before[1] >= BLOCK)
        requests = mount.value("reads", "requests")
        for number in range(200):
            read(BLOCK + number * 5 * 4096 % BLOCK)
        assert mount.value("reads", "requests") == requests
    assert mount.value("origin", "bytes") - before[0] == BLOCK + 4096


def test_a_stream_that_is_not_stored_is_fetched_once(place: Place, mounting: Mounting) -> None:
    """Of what is pushed ahead the reader's own READs bring the heads, and fetch no more."""
    content = random_bytes("large", 10 * BLOCK)
    large = place.write("large", content)
    os.utime(large, (1e9, 1e9))
    mount = mounting("--ram", "64M", "--ssd", "16M", "--policy", "keep")
    fill_ssd(place, mount)
    before = mount.value("origin", "bytes")
    assert (mount.path / "large").read_bytes() == content
    # the first block has two first touches, each other one its head of 128 KiB, or readahead's
    assert mount.value("origin", "bytes") - before <= 11 * BLOCK


@pytest.mark.claim("R7")
def test_pages_over_the_ram_budget_are_dropped(place: Place, mounting: Mounting) -> None:
    files = make_files(place.source, 100, lambda _: 500_000)
    mount = mounting("--ram", "16M")
    for _ in range(2):
        for path in files:
            assert digest(mount.path / path.relative_to(place.source)) == digest(path)
    eventually(lambda: mount.value("ram", "bytes") <= mount.value("ram", "limit_bytes") == 16 * MIB)
    eventually(lambda: _resident(mount.path, place.source, files) <= 24 * MIB)
    for path in files:
        assert digest(mount.path / path.relative_to(place.source)) == digest(path)


def _resident(view: Path, source: Path, files: list[Path]) -> int:
    """Bytes of the files' pages that are in memory, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    total = 0
    for path in files:
        with open(view / path.relative_to(source), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            pages = (size + 4095) // 4096
            address = ctypes.c_void_p(
                libc.mmap(None, ctypes.c_size_t(size), 1, 2, file.fileno(), ctypes.c_long(0))
            )
            vector = (ctypes.c_ubyte * pages)()
            assert libc.mincore(address, ctypes.c_size_t(size), vector) == 0
            libc.munmap(address, ctypes.c_size_t(size))
            total += 4096 * sum(flag & 1 for flag in vector)
    return total


IMAGE_FOLDER = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from tools.torchvision_cpu import import_torchvision
import_torchvision()
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import PILToTensor
for root in sys.argv[2:]:
    loader = DataLoader(ImageFolder(root, PILToTensor()), batch_size=8, shuffle=True,
                        num_workers=2, generator=torch.Generator().manual_seed(7))
    seen = hashlib.sha256()
    for epoch in range(2):
        for images, labels in loader:
            seen.update(images.numpy().tobytes() + labels.numpy().tobytes())
    print(seen.hexdigest())
"""


@pytest.mark.claim("R2")
@in_one_mode
def test_stock_image_folder_with_forked_workers(place: Place, mounting: Mounting) -> None:
    """Stock ImageFolder and DataLoader see the same batches from the mount as from the origin."""
    from PIL import Image

    for index in range(60):
        path = place.source / f"class{index % 3}" / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.frombytes("RGB", (32, 32), random_bytes(index, 3072)).save(path)
    mount = mounting()
    done = subprocess.run(
        [sys.executable, "-c", IMAGE_FOLDER, str(ROOT), str(mount.path), str(place.source)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env=environment(),
    )
    seen, expected = done.stdout.split()
    assert seen == expected
    assert mount.value("origin", "files") >= 60


@pytest.mark.claim("R5")
def test_same_content_is_stored_once(place: Place, mounting: Mounting) -> None:
    content = random_bytes("shared", 300_000)
    for index in range(20):
        place.write(f"{index}", content)
    mount = mounting()
    for index in range(20):
        assert hashlib.sha256((mount.path / f"{index}").read_bytes()).digest() == (
            hashlib.sha256(content).digest()
        )
    assert eventually(lambda: mount.value("ssd", "blocks") == 1)


@pytest.mark.claim("R7")
@in_one_mode
def test_the_ram_budget_outlives_the_server(place: Place, mounting: Mounting) -> None:
    """What the kernel holds is known to the next server, which drops it when over its budget."""
    make_files(place.source, 40, lambda _: 500_000)
    mount = mounting("--ram", "64M")
    assert_same(place.source, mount.path)
    eventually(lambda: mount.value("ram", "bytes") >= 20_000_000)
    mount.kill_server()
    assert mount.value("ram", "bytes") >= 20_000_000
    assert mount.run("restart", mount.path, "--ram", "16M").returncode == 0
    eventually(lambda: mount.value("ram", "bytes") <= 16 << 20)
    assert_same(place.source, mount.path)


@pytest.mark.claim("U4")
def test_nowait_reads_are_refused_by_the_kernel(place: Place, mounting: Mounting) -> None:
    place.write("file", b"in memory")
    mount = mounting()
    assert (mount.path / "file").read_bytes() == b"in memory"
    fd = os.open(mount.path / "file", os.O_RDONLY)
    try:
        assert errno_of(os.preadv, fd, [bytearray(9)], 0, os.RWF_NOWAIT) == "ENOTSUP"
        buffer = bytearray(9)
        assert os.preadv(fd, [buffer], 0, os.RWF_HIPRI) == 9, "other flags are as anywhere"
        assert buffer == b"in memory"
    finally:
        os.close(fd)

"""SIGKILL to the server at any moment: no reader sees an error or a wrong byte.

The readers are processes of their own that hash what they read; the killer draws its moments from a
seed that a failure prints.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.control import control_client
from tests.conftest import Mounting, Place, in_one_mode
from tests.support import PATIENCE_S
from tests.support.faulty_origin import Fault, FaultyOrigin
from tests.support.mounted import (
    Mount,
    alive,
    command,
    digest,
    environment,
    eventually,
    is_mounted,
    processes_of,
    started,
    watched,
)
from tests.support.trees import assert_same, make_files, random_bytes

MIB = 1 << 20
KILLS = 4
LIVES_S = 0.2  # of a server, at least; Python and its imports take longer
_KILLED = r"killed by SIGKILL|died, with threads"

# Reads, maps, lists and stats until the stop file appears, once at least; the first surprise ends
# it with a line.
READER = """
import hashlib, json, mmap, os, random, sys
root, plan, stop, seed = sys.argv[1:5]
expected = json.load(open(plan))
directories = {}
for path in expected:
    directories.setdefault(os.path.dirname(path), set()).add(os.path.basename(path))
rng, paths, rounds = random.Random(seed), sorted(expected), 0
while not rounds or not os.path.exists(stop):
    rounds += 1
    path = rng.choice(paths)
    size, sha = expected[path]
    full = os.path.join(root, path)
    way = rng.randrange(6)
    try:
        if way == 0:
            found = os.stat(full)
            assert found.st_size == size, (path, found.st_size)
        elif way == 1:
            directory = os.path.dirname(path)
            names = os.listdir(os.path.join(root, directory))
            assert sorted(names) == sorted(directories[directory]), directory
        else:
            with open(full, "rb", buffering=0) as file:
                if way == 2:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if way == 3 and size:
                    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                        content = mapped[:]
                else:
                    content = b"".join(iter(lambda: file.read(200_000), b""))
            assert len(content) == size, (path, len(content), size)
            assert hashlib.sha256(content).hexdigest() == sha, path
    except BaseException as error:
        print(f"{path} (way {way}): {error!r}")
        sys.exit(1)
print(rounds)
"""


@contextlib.contextmanager
def readers(mount: Mount, files: list[Path], count: int, base: Path) -> Iterator[None]:
    """`count` reader processes run meanwhile; at the end each must have had no surprise."""
    plan, stop = base / "plan.json", base / "stop"
    plan.write_text(
        json.dumps(
            {
                str(path.relative_to(mount.source)): (path.stat().st_size, digest(path))
                for path in files
            }
        )
    )
    stop.unlink(missing_ok=True)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(mount.path), str(plan), str(stop), str(seed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for seed in range(count)
    ]
    try:
        yield
    finally:
        stop.touch()
        outputs = []
        for reader in running:
            try:
                outputs.append((reader.wait(PATIENCE_S), reader.communicate()[0].strip()))
            except subprocess.TimeoutExpired:
                reader.kill()
                outputs.append((-1, "the reader hangs"))
    assert all(code == 0 and int(output) > 0 for code, output in outputs), outputs


@pytest.mark.claim("K1", "F6")
@pytest.mark.timeout(200)
def test_killed_while_everything_happens(place: Place, mounting: Mounting) -> None:
    """Listing, reading, fetching, pushing, dropping and eviction go on; the server keeps dying."""
    seed = time.time_ns()
    rng = random.Random(seed)
    files = make_files(place.source, 100, lambda index: index * index * 13 % 400_000)
    files += [place.write(f"large/{n}", random_bytes(n, 9 * MIB + n)) for n in range(2)]
    # Both budgets are smaller than the data, so eviction and dropping never end.
    mount = mounting("--ssd", "32M", "--ram", "16M", "--revalidate", "0.5", env=started())
    with readers(mount, files, 2, place.base):
        for _ in range(KILLS):
            time.sleep(rng.random() ** 2 * 1.5)
            mount.kill_servers_now()
            if rng.random() < 0.3:
                mount.drop_kernel_caches()
    assert eventually(mount.status)["restarts"] > 0, f"seed {seed}"
    assert_same(place.source, mount.path)


@pytest.mark.claim("K1")
@in_one_mode
def test_killed_while_a_directory_is_listed(place: Place, mounting: Mounting) -> None:
    """Half of a listing comes from one server and half from the next."""
    names = {f"{index:06d}" for index in range(3000)}
    for name in names:
        place.write(f"wide/{name}", b"")
    mount = mounting("--revalidate", "0.5")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            listing = pool.submit(os.listdir, mount.path / "wide")
            counting = pool.submit(lambda: sum(1 for _ in os.scandir(mount.path / "wide")))
            mount.kill_servers_now()
            found = listing.result(PATIENCE_S)
            assert len(found) == len(names)
            assert set(found) == names
            assert counting.result(PATIENCE_S) == len(names)
            mount.drop_kernel_caches()


@pytest.mark.claim("K1", "R1")
def test_killed_while_a_large_file_streams(place: Place, mounting: Mounting) -> None:
    path = place.write("large", random_bytes("large", 60 * MIB + 99))
    expected = digest(path)
    mount = mounting("--ssd", "128M", "--ram", "64M")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            reading = [pool.submit(digest, mount.path / "large") for _ in range(2)]
            while not all(future.done() for future in reading):
                time.sleep(0.15)
                mount.kill_servers_now()
                eventually(lambda: mount.status()["server_pid"] > 0)
            assert [future.result() for future in reading] == [expected] * 2
            mount.drop_pages()


@pytest.mark.claim("K1")
def test_killed_while_requests_wait_for_the_origin(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    """What the dead server had taken and not answered is sent again to the next one."""
    make_files(place.source, 8, lambda index: 100_000 + index)
    (place.source / "link").symlink_to("class000")
    mount = mounting(source=faulty.mountpoint)
    faulty.add(Fault("read", hang=True))
    faulty.add(Fault("readlink", hang=True))
    faulty.add(Fault("readdir", "class000", hang=True))
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        reads = [
            pool.submit((mount.path / f"class000/{index:05d}.jpg").read_bytes) for index in range(4)
        ]
        link = pool.submit(os.readlink, mount.path / "link")
        eventually(lambda: faulty.hanging() == 5)
        listing = pool.submit(os.listdir, mount.path / "class000")
        eventually(lambda: faulty.hanging() == 6)
        for _ in range(3):
            mount.kill_servers_now()
            eventually(lambda: mount.status()["server_pid"] > 0)
        faulty.clear()
        for index, read in enumerate(reads):
            assert (
                read.result(PATIENCE_S) == (place.source / f"class000/{index:05d}.jpg").read_bytes()
            )
        assert link.result(PATIENCE_S) == "class000"
        assert len(listing.result(PATIENCE_S)) == 8
    assert_same(place.source, mount.path)


@in_one_mode
@pytest.mark.claim("K1")
def test_servers_that_live_shorter_than_a_start_takes(place: Place, mounting: Mounting) -> None:
    """Readers get on all the same: what was done for the next server is not lost with one."""
    files = make_files(place.source, 40, lambda index: 10_000 + index)
    mount = mounting(env=started())
    mount.restart()
    took = re.search(r"is ready after (.*) s", mount.log())
    assert took is not None
    lives_s = max(LIVES_S, 0.4 * float(took[1]))
    target = control_client.find(str(mount.path))
    mount.allow_log.append(_KILLED)

    def server() -> int:
        """The one that there is now, ready or not."""
        return int(control_client.ask_keeper(target, {"op": "info"})["info"]["server_pid"] or 0)

    def read_all() -> None:
        for path in files:
            found = mount.path / path.relative_to(place.source)
            assert found.read_bytes() == path.read_bytes()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        kills, killed = 0, 0
        reading: concurrent.futures.Future[None] | None = None
        deadline = time.monotonic() + PATIENCE_S
        while reading is None or not reading.done():
            assert time.monotonic() < deadline, f"no read in {kills} kills"
            pid = server()
            if pid not in (0, killed):
                time.sleep(lives_s)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                kills, killed = kills + 1, pid
                if kills == 3:  # the first had answered already
                    reading = pool.submit(read_all)
            time.sleep(0.01)
        reading.result()


@pytest.mark.claim("K1")
@in_one_mode
def test_killed_during_the_first_start(place: Place, zero_open: bool) -> None:
    """The mount command either succeeds all the same, or fails with a line and leaves nothing."""
    make_files(place.source, 20, lambda index: 1000 + index)
    mount = Mount(
        place.source, place.mountpoint, place.cache_dir, "--ssd", "64M", zero_open=zero_open
    )
    rng = random.Random(5)
    for _ in range(3):
        with watched(place.mountpoint), concurrent.futures.ThreadPoolExecutor(1) as pool:
            starting = pool.submit(command, *mount.mount_arguments(), env=started())
            end = time.monotonic() + 0.2 + rng.random()
            while time.monotonic() < end and not starting.done():
                for pid in processes_of(mount.path, "server"):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
            done = starting.result(PATIENCE_S)
            if done.returncode == 0:
                assert_same(place.source, place.mountpoint)
                assert command("umount", place.mountpoint).returncode == 0
            else:
                assert len(done.stderr.strip().splitlines()) == 1, done.stderr
            assert not is_mounted(place.mountpoint)
            eventually(lambda: not processes_of(mount.path))


def _is_over(group: int) -> bool:
    """No process of this group holds anything any more."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, _, of, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(of) == group and state not in "ZX":
                return False
    return True


@pytest.mark.claim("K3")
def test_readers_are_killed_all_the_time(place: Place, mounting: Mounting) -> None:
    files = make_files(place.source, 100, lambda index: 20_000 + index)
    mount = mounting("--ram", "16M", "--ssd", "16M")
    rng = random.Random(9)
    victim = "while true; do find . -type f -exec cat {} + >/dev/null; done"
    with readers(mount, files, 1, place.base):
        for _ in range(4):
            victims = [
                subprocess.Popen(["sh", "-c", victim], cwd=mount.path, start_new_session=True)
                for _ in range(3)
            ]
            time.sleep(0.1 + rng.random() * 0.2)
            mount.drop_kernel_caches()
            for process in victims:
                os.killpg(process.pid, signal.SIGKILL)
            for process in victims:
                process.wait(PATIENCE_S)
                eventually(functools.partial(_is_over, process.pid))
    assert mount.status()["restarts"] == 0


@in_one_mode
def test_the_log_says_why(place: Place, mounting: Mounting) -> None:
    mount = mounting()
    pid = mount.kill_server()
    eventually(lambda: mount.status()["restarts"] == 1)
    eventually(lambda: not alive(pid))
    assert "SIGKILL" in mount.log()
    assert command("status", mount.path, env=environment()).returncode == 0

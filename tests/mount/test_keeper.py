"""The keeper and the commands when processes hang, are stopped, or begin at the same time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.support import PATIENCE_S
from tests.support.faulty_origin import Fault, FaultyOrigin
from tests.support.mounted import (
    COMMAND,
    Mount,
    alive,
    children,
    command,
    environment,
    eventually,
    is_mounted,
    processes_of,
    watched,
    without_patience,
)
from tests.support.trees import assert_same, make_files

BUSY = 4
_STUCK_S = 25.0  # less than the 30 s that a command waits for who does not answer
_PR_SET_CHILD_SUBREAPER = 36


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alone(before: set[int]) -> bool:
    """Whether all children of this process that are not among those have ended."""
    return all(state(pid) in "ZX" for pid in set(children(os.getpid())) - before)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: state(pid) == "T")
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# ---- beginning -----------------------------------------------------------------------------------


@in_one_mode
@pytest.mark.parametrize("over_itself", [False, True])
def test_of_mounts_at_the_same_time_one_wins(
    place: Place, zero_open: bool, over_itself: bool
) -> None:
    make_files(place.source, 4, lambda index: 1000 + index)
    places = [place.source] if over_itself else [place.source, place.mountpoint]
    mountpoint, cache = places[-1], place.cache_dir
    arguments = [*COMMAND, "mount", *places, "--cache-dir", cache, "--ssd", "64M"]
    arguments += ["--hintsd", "none"]
    with watched(mountpoint):
        for _ in range(3):
            running = [
                subprocess.Popen(
                    [str(argument) for argument in arguments],
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd="/",
                    env=environment(),
                )
                for _ in range(4)
            ]
            said = [process.communicate(timeout=60)[1] for process in running]
            codes = sorted(process.returncode for process in running)
            with open("/proc/self/mountinfo") as table:
                count = sum(line.split()[4] == str(mountpoint) for line in table)
            assert command("umount", mountpoint).returncode == 0
            assert (codes, count) == ([0, BUSY, BUSY, BUSY], 1), said
            lines = [line for line in map(without_patience, said) if line]
            assert all(line.count("\n") == 1 and "already" in line for line in lines), said


@in_one_mode
@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_mounted_with_closed_descriptors(place: Place, zero_open: bool, closed: str) -> None:
    """They are /dev/null: nothing else gets their numbers, and a killed server is replaced."""
    place.write("file", b"content")
    words = [*COMMAND, "mount", place.source, place.mountpoint, "--cache-dir", place.cache_dir]
    line = shlex.join([str(word) for word in [*words, "--ssd", "64M", "--hintsd", "none"]])
    with watched(place.mountpoint):
        done = subprocess.run(
            ["sh", "-c", f"{line} {closed}"],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
        )
        assert (done.returncode, done.stdout, without_patience(done.stderr)) == (0, "", "")
        status = json.loads(command("status", "--json", place.mountpoint).stdout)
        keeper, server = status["keeper_pid"], status["server_pid"]
        for fd in range(3):
            assert not os.readlink(f"/proc/{keeper}/fd/{fd}").startswith(("/dev/fuse", "socket:"))
        os.kill(server, signal.SIGKILL)
        eventually(lambda: server not in children(keeper) and len(children(keeper)) > 0)
        assert (place.mountpoint / "file").read_bytes() == b"content"
        os.kill(keeper, signal.SIGTERM)
        eventually(lambda: not is_mounted(place.mountpoint))
        eventually(lambda: not alive(keeper))


@in_one_mode
def test_a_first_start_that_fails_leaves_nobody(place: Place, zero_open: bool) -> None:
    """Not even who asked whether the mount answers, and is killed while it waits for that."""
    place.write("file", b"content")
    mount = Mount(place.source, place.mountpoint, place.cache_dir, "--ssd", "64M")
    words = [*COMMAND, *mount.mount_arguments()]
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        command("--version")  # its process stays
        codes = list[int]()
        # so little that servers do not start, or have no memory to answer with
        for limit_kb in (500_000, 400_000, 300_000):
            limited = f"ulimit -v {limit_kb}; exec {shlex.join(words)}"
            with watched(place.mountpoint):
                before = set(children(os.getpid()))
                done = subprocess.run(
                    ["sh", "-c", limited], capture_output=True, env=environment(), timeout=110
                )
                codes.append(done.returncode)
                if not done.returncode:
                    assert command("umount", place.mountpoint).returncode == 0
            assert not is_mounted(place.mountpoint)
            eventually(lambda: not processes_of(mount.path))
            # one that was killed may just be ending
            eventually(functools.partial(is_alone, before))
        assert any(codes)
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


@in_one_mode
@pytest.mark.claim("E3")
def test_mount_of_an_origin_that_hangs(place: Place, faulty: FaultyOrigin, zero_open: bool) -> None:
    place.write("file", b"content")
    faulty.add(Fault("*", hang=True))
    try:
        done = command(
            *("mount", faulty.mountpoint, place.mountpoint, "--cache-dir", place.cache_dir),
            *("--ssd", "64M", "--origin-timeout", "1", "--hintsd", "none"),
            timeout_s=_STUCK_S,
        )
    finally:
        faulty.clear()
    assert done.returncode == 1
    assert f"{faulty.mountpoint} does not answer within 1 s" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not is_mounted(place.mountpoint)


@in_one_mode
def test_mount_of_a_dead_mount_heals_it(place: Place, mounting: Mounting) -> None:
    make_files(place.source, 4, lambda index: 1000 + index)
    mount = mounting()
    assert_same(place.source, mount.path)
    server = mount.server_pid()
    os.kill(mount.keeper_pid, signal.SIGKILL)
    eventually(lambda: not alive(mount.keeper_pid))
    done = mount.run(*mount.mount_arguments())
    assert done.returncode == BUSY
    assert "its keeper is gone" in done.stderr
    os.kill(server, signal.SIGKILL)
    eventually(lambda: not alive(server))
    done = mount.run(*mount.mount_arguments())
    assert done.returncode == 0, done.stderr
    assert "was a dead fusecache" in done.stderr
    mount.keeper_pid = mount.status()["keeper_pid"]
    assert_same(place.source, mount.path)
    with open("/proc/self/mountinfo") as table:
        assert sum(line.split()[4] == str(mount.path) for line in table) == 1


# ---- stopped, or hanging -------------------------------------------------------------------------


@in_one_mode
@pytest.mark.claim("K4")
def test_a_stopped_server_is_replaced(place: Place, mounting: Mounting) -> None:
    make_files(place.source, 8, lambda index: 1000 + index)
    allowed = [r"is stopped \(SIGSTOP\)", "killed by SIGKILL|died, with threads"]
    mount = mounting(allow_log=allowed)
    server = mount.server_pid()
    os.kill(server, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(assert_same, place.source, mount.path).result(PATIENCE_S)
    assert mount.server_pid() != server
    assert mount.value("restarts") == 1


@in_one_mode
@pytest.mark.claim("K4")
def test_commands_beside_a_stopped_keeper(place: Place, mounting: Mounting) -> None:
    place.write("file", b"content")
    mount = mounting()
    keeper, server = mount.keeper_pid, mount.server_pid()
    with stopped(keeper):
        said = mount.run("status", mount.path, timeout_s=_STUCK_S)
        assert f"THE KEEPER IS STOPPED: kill -CONT {keeper}" in said.stdout
        refused = mount.run("restart", mount.path, timeout_s=_STUCK_S)
        assert refused.returncode == 1
        assert f"its keeper (process {keeper}) is stopped" in refused.stderr
        with stopped(server):
            silent = mount.run("status", mount.path, timeout_s=_STUCK_S)
            assert silent.returncode == 1
            assert f"its keeper (process {keeper}) is stopped" in silent.stderr
        done = mount.run("umount", mount.path, timeout_s=_STUCK_S)
        assert done.returncode == 0, done.stderr
        assert f"kill -CONT {keeper}" in done.stderr
        assert not is_mounted(mount.path)
        eventually(lambda: not alive(server))
    mount.wait_gone()


# ---- found again ---------------------------------------------------------------------------------


@in_one_mode
def test_a_mount_is_found_with_another_runtime_directory(place: Place, zero_open: bool) -> None:
    """XDG_RUNTIME_DIR counts for who is not root: here nobody has one."""
    place.write("file", b"content")
    other = place.base / "runtime"
    other.mkdir(mode=0o700)
    os.chown(other, 65534, 65534)
    code = (
        "import os, sys; from fusecache.base import mounts\n"
        "print(mounts.runtime_directory(mounts.Mount(1, '0:77', '/m', 'fuse.fusecache', '/s',"
        " {'user_id': '65534'})))"
    )
    directory = other / "fusecache" / "0:77"
    directory.mkdir(parents=True)
    for path in (directory, directory.parent):
        path.chmod(0o700)
        os.chown(path, 65534, 65534)
    os.chmod(place.base, 0o755)
    keeper = subprocess.Popen(  # by no Python: nobody may not see the directory that ours is in
        ["sh", "-c", "read line", "fusecache.keeper", "{}"],
        stdin=subprocess.PIPE,
        env={**environment(), "XDG_RUNTIME_DIR": str(other)},
        user=65534,
        group=65534,
    )
    try:
        eventually(lambda: b"fusecache.keeper" in Path(f"/proc/{keeper.pid}/cmdline").read_bytes())
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
        )
        assert done.stdout.strip() == str(directory), done.stderr
    finally:
        keeper.kill()
        keeper.wait()


@in_one_mode
def test_ps_shows_processes_with_their_mount(place: Place, mounting: Mounting) -> None:
    def shown(pid: int) -> str:
        done = subprocess.run(
            ["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True
        )
        return done.stdout.rstrip()

    mount = mounting()
    keeper = f"fusecache: keeper {mount.path}"
    assert shown(mount.keeper_pid) == keeper
    assert shown(mount.server_pid()) == f"fusecache: server {mount.path}"
    mount.kill_server()
    eventually(lambda: bool(processes_of(mount.path, "spare")))
    (spare,) = processes_of(mount.path, "spare")
    assert shown(spare) == f"fusecache: spare {mount.path}"
    mount.kill_server()
    eventually(lambda: mount.server_pid() == spare)
    assert shown(spare) == f"fusecache: server {mount.path}"


@in_one_mode
def test_umount_of_the_source_leaves_the_mount(place: Place, mounting: Mounting) -> None:
    place.write("file", b"content")
    mount = mounting()
    assert subprocess.run(["umount", "-l", place.source], capture_output=True).returncode != 0
    assert (mount.path / "file").read_bytes() == b"content"
    listed = json.loads(mount.run("list", "--json").stdout)
    assert str(place.source) in [item["source"] for item in listed]
    shown = subprocess.run(
        ["findmnt", "-n", "-o", "SOURCE", mount.path], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == f"fusecache@{place.source}"


@in_one_mode
def test_mount_a_leaves_what_is_mounted(place: Place, zero_open: bool) -> None:
    """With either way to write the source in /etc/fstab."""
    place.write("file", b"content")
    options = f"cache-dir={place.cache_dir},ssd=64M,hintsd=none"
    for source in (f"{place.source}", f"fusecache@{place.source}"):
        fstab = place.base / "fstab"
        fstab.write_text(f"{source} {place.mountpoint} fuse.fusecache {options} 0 0\n")
        with watched(place.mountpoint):
            keepers = []
            for _ in range(2):
                done = subprocess.run(
                    ["mount", "-a", "-T", fstab], capture_output=True, text=True, timeout=60
                )
                assert (done.returncode, without_patience(done.stderr)) == (0, "")
                status = json.loads(command("status", "--json", place.mountpoint).stdout)
                keepers.append(status["keeper_pid"])
            assert status["source"] == str(place.source)
            assert keepers[0] == keepers[1]
            subprocess.run(["umount", place.mountpoint], check=True, timeout=60)
            eventually(lambda: not is_mounted(place.mountpoint))
            eventually(lambda: not alive(status["keeper_pid"]))  # noqa: B023


@in_one_mode
def test_a_mount_in_a_private_namespace_ends_with_it(place: Place, zero_open: bool) -> None:
    place.write("file", b"content")
    mount = Mount(place.source, place.mountpoint, place.cache_dir, "--ssd", "64M")
    words = shlex.join([*COMMAND, *mount.mount_arguments()])
    inside = f"{words} && cat {shlex.quote(str(place.mountpoint / 'file'))} && read line"
    # "/" itself cannot be made private in a chroot to a directory that is no mount point
    subprocess.run(["mount", "--bind", place.base, place.base], check=True)
    subprocess.run(["mount", "--make-private", place.base], check=True)
    shell = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", inside],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert shell.stdin is not None
    assert shell.stdout is not None
    try:
        assert shell.stdout.read(7) == b"content"
        assert processes_of(mount.path)
        shell.stdin.write(b"\n")
        shell.stdin.close()
        assert shell.wait(PATIENCE_S) == 0
        eventually(lambda: not processes_of(mount.path))
        assert "no process is left" in mount.log()
    finally:
        shell.kill()
        mount.destroy()
        subprocess.run(["umount", "-l", place.base], check=True)

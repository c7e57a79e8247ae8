"""The commands as a user types them: exit codes, the lines they print, the JSON they promise."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.base.mounts import listen
from tests.conftest import Mounting, OrdinaryUser, Place, in_one_mode
from tests.support import PATIENCE_S
from tests.support.faulty_origin import SETTLED_S, Fault, FaultyOrigin
from tests.support.hintsd_support import Daemon
from tests.support.mounted import (
    Mount,
    alive,
    command,
    digest,
    environment,
    errno_of,
    eventually,
    is_mounted,
    started,
    watched,
    without_patience,
)
from tests.support.trees import assert_same, make_files, snapshot

OK, FAILED, USAGE, NOT_A_MOUNT, BUSY = 0, 1, 2, 3, 4


def refused(*arguments: str | Path, says: str, **how: object) -> int:
    """The command fails with one line on stderr that says why; returns its exit code."""
    done = command(*arguments, **how)  # type: ignore[arg-type]  # passed through as they came
    assert done.returncode != 0, done
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert says in lines[0], lines[0]
    assert "Traceback" not in done.stderr
    return done.returncode


def test_mount_refuses_with_one_line(place: Place) -> None:
    source, target, cache = place.source, place.mountpoint, ("--cache-dir", str(place.cache_dir))
    place.write("file", b"")
    refused("mount", place.base / "missing", target, *cache, says="does not exist")
    refused("mount", source / "file", target, *cache, says="not a directory")
    missing = place.base / "not there"
    refused(
        "mount", source, missing, *cache, says=f"does not exist: make it (mkdir -p '{missing}')"
    )
    refused("mount", source, source / "file", *cache, says="not a directory")
    refused("mount", source, target, *cache, "--ssd", "many", says="many")
    refused("mount", source, target, *cache, "--ssd", "900P", says="exceeds the disk")
    refused("mount", source, target, *cache, "--ram", "1x", says="1x")
    refused("mount", source, target, *cache, "--keep-free", "100%", says="keep")
    refused("mount", source, target, *cache, "--revalidate", "soon", says="revalidate")
    refused("mount", source, target, *cache, "-o", "nonsense=1", says="nonsense")
    blocked = place.base / "blocked"
    blocked.write_bytes(b"a file where a directory should be")
    refused("mount", source, target, "--cache-dir", blocked / "cache", says="cache directory")
    refused("mount", source, target, "--cache-dir", source / "cache", says="inside the source")
    config = place.base / "config.toml"
    config.write_text('sdd = "1G"\n')
    refused("mount", source, target, *cache, "--config", config, says="sdd")
    assert not is_mounted(target)


@in_one_mode
def test_a_cache_directory_of_another_format_is_refused(place: Place, mounting: Mounting) -> None:
    place.write("file", b"content")
    mount = mounting(allow_log=["newer fusecache"])
    mount.umount()
    path = place.cache_dir / "format"
    words = path.read_text().split(" ")
    words[1] = "99"
    path.write_text(" ".join(words))
    refused(*mount.mount_arguments(), says="newer")
    assert not is_mounted(mount.path)
    eventually(lambda: not mount_processes(mount))


def mount_processes(mount: Mount) -> list[int]:
    from tests.support.mounted import processes_of

    return processes_of(mount.path)


@in_one_mode
def test_already_mounted_and_not_mounted(place: Place, mounting: Mounting) -> None:
    mount = mounting()
    assert refused(*mount.mount_arguments(), says="already a fusecache") == BUSY
    mount.umount()
    for name in ("status", "umount", "warm", "verify", "restart"):
        assert refused(name, place.mountpoint, says=str(place.mountpoint)) == NOT_A_MOUNT


def test_what_an_ordinary_user_cannot(ordinary_user: OrdinaryUser) -> None:
    how = {
        "prefix": ordinary_user.prefix,
        "program": ordinary_user.program,
        "env": ordinary_user.env,
    }
    mine, readable = ordinary_user.directory("mine"), ordinary_user.directory("readable")
    (readable / "file").touch()
    closed = ordinary_user.base / "closed"
    closed.mkdir(mode=0o700)
    foreign = ordinary_user.base / "foreign"
    foreign.mkdir(mode=0o755)
    refused("mount", closed, mine, says="cannot be read", **how)
    refused("mount", readable, foreign, says="not yours", **how)
    refused("mount", readable, mine, "--cache-dir", foreign / "c", says="not writable", **how)
    refused("mount", readable, mine, "--allow-other", says="user_allow_other", **how)
    nowhere = {**ordinary_user.env, "PATH": str(closed)}
    how["env"] = nowhere
    how["prefix"] = ["/usr/bin/" + ordinary_user.prefix[0], *ordinary_user.prefix[1:]]
    refused("mount", readable, mine, says="fusermount3", **how)


def test_no_dev_fuse(place: Place) -> None:
    """In a mount namespace where /dev has everything but fuse."""
    script = (
        "mount --make-rprivate /dev && mount -t tmpfs none /dev && "
        'mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9 && exec "$@"'
    )
    done = command(
        *("mount", place.source, place.mountpoint, "--cache-dir", place.cache_dir),
        # "/" itself cannot be made private in a chroot to a directory that is no mount point
        prefix=["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", script, "sh"],
    )
    assert done.returncode == FAILED
    assert "/dev/fuse" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@in_one_mode
def test_status_has_what_was_promised(place: Place, mounting: Mounting) -> None:
    make_files(place.source, 10, lambda index: 1000 + index)
    mount = mounting("--ram", "32M")
    assert_same(place.source, mount.path)
    eventually(lambda: mount.value("ssd", "blocks") == 10)
    status = mount.status()
    assert status["mountpoint"] == str(mount.path)
    assert status["source"] == str(mount.source)
    assert status["restarts"] == 0
    assert status["zero_open"] is mount.zero_open
    assert alive(status["keeper_pid"])
    assert alive(status["server_pid"])
    assert status["ram"]["limit_bytes"] == 32 << 20
    assert 0 <= status["ram"]["bytes"] <= 32 << 20
    assert status["ssd"]["limit_bytes"] == 256 << 20
    assert 0 < status["ssd"]["bytes"] <= status["ssd"]["reserved_bytes"] <= 256 << 20
    assert status["ssd"]["blocks"] == 10
    assert status["reads"]["requests"] >= 10
    assert status["reads"]["from_origin"] == 10
    assert status["reads"]["from_ssd"] == 0
    assert status["origin"] == {**status["origin"], "files": 10, "bytes": 10_045, "errors": 0}
    assert status["integrity"]["mismatches"] == 0
    assert 0 < status["uptime_s"] < 600
    mount.drop_kernel_caches()
    assert_same(place.source, mount.path)
    assert mount.value("reads", "from_ssd") == 10
    human = mount.run("status", mount.path)
    assert human.returncode == OK
    assert str(mount.path) in human.stdout
    below = mount.run("status", "--json", mount.path / "class000")
    assert json.loads(below.stdout)["mountpoint"] == str(mount.path)
    mount.kill_server()
    status = eventually(mount.status)
    assert status["restarts"] == 1
    assert status["uptime_s"] > 0


@in_one_mode
def test_warm_and_verify(place: Place, mounting: Mounting) -> None:
    make_files(place.source, 120, lambda index: 10_000 + index)
    place.write("large", os.urandom(9 << 20))
    mount = mounting()
    done = mount.run("warm", mount.path, "class001")
    assert done.returncode == OK, done.stderr
    assert mount.value("ssd", "blocks") == 50
    done = mount.run("warm", mount.path, "**/0000*.jpg", "large")
    assert done.returncode == OK, done.stderr
    assert mount.value("ssd", "blocks") == 63
    assert refused("warm", mount.path / "class001", "large", says="no file matches") == FAILED
    assert mount.run("warm", mount.path / "class001", "*.jpg").returncode == OK
    assert mount.value("ssd", "blocks") == 63
    assert refused("warm", mount.path, "large", "no*", says="no file matches no*") == FAILED
    assert refused("warm", mount.path, "no such*", says="no such") == FAILED
    assert mount.run("warm", mount.path).returncode == OK
    assert mount.value("ssd", "blocks") == 123
    fetched = mount.value("origin", "bytes")
    assert mount.run("warm", mount.path).returncode == OK
    assert_same(place.source, mount.path)
    assert mount.value("origin", "bytes") == fetched
    done = mount.run("verify", mount.path)
    assert done.returncode == OK
    assert "123" in done.stdout


def warm_list(
    mount: Mount, tmp_path: Path, lines: list[bytes], path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "list"
    file.write_bytes(b"\n".join(lines))
    return mount.run("warm", path or mount.path, "--list", file)


@in_one_mode
def test_warm_of_a_list(place: Place, mounting: Mounting, tmp_path: Path) -> None:
    """Of more files than a request has, and of lines that name none."""
    make_files(place.source, 4200, lambda index: 500 + index)
    place.write("not named", b"x")
    names = sorted(str(path.relative_to(place.source)) for path in place.source.glob("class*/*"))
    mount = mounting()
    lines = [os.fsencode(name) for name in names]
    lines[0] = os.fsencode(mount.path / names[0])
    lines[1] = os.fsencode(place.source / names[1])
    lines[2] = b"class000/.././/" + lines[2]
    done = warm_list(mount, tmp_path, lines)
    assert (done.returncode, done.stderr) == (OK, ""), done.stderr
    assert done.stdout.startswith("4,200 files, ")
    assert mount.value("ssd", "blocks") == 4200
    bad = [b"../../etc/passwd", b"/etc/passwd", b"\xff", b"class000", b"no/such", b"", b"a" * 9000]
    done = warm_list(mount, tmp_path, [*bad, b"not named", b"class000/../.."])
    assert done.returncode == FAILED
    assert mount.value("ssd", "blocks") == 4201
    assert done.stdout.startswith("1 files, ")
    [line] = done.stderr.splitlines()
    assert line.startswith("fusecache: 7 lines of the list left out: ../../etc/passwd (not below")
    assert line.endswith(", …")
    name = names[-1].encode().rpartition(b"/")
    done = warm_list(mount, tmp_path, [name[2]], mount.path / os.fsdecode(name[0]))
    assert done.stdout.endswith("; 1 were there before\n")
    assert (
        refused("warm", mount.path, "--list", "/no/such", says="--list /no/such: No such") == USAGE
    )
    assert refused("warm", mount.path, "x", "--list", "-", says="not both") == USAGE


@in_one_mode
def test_a_list_that_does_not_fit_keeps_its_beginning(
    place: Place, mounting: Mounting, tmp_path: Path
) -> None:
    """Though its requests come one after the other."""
    make_files(place.source, 6500, lambda index: 4000)
    names = sorted(str(path.relative_to(place.source)) for path in place.source.glob("class*/*"))
    mount = mounting("--ssd", "24M")
    done = warm_list(mount, tmp_path, [os.fsencode(name) for name in names])
    assert done.returncode == FAILED
    said = re.search(
        r"([\d,]+) files \(.* MiB\) do not fit in --ssd 24 MiB; --ssd (\d+)M", done.stderr
    )
    assert said is not None, done.stderr
    fitting = 6500 - int(said[1].replace(",", ""))
    assert mount.value("ssd", "blocks") == fitting > 4200
    before = mount.value("origin", "files")
    for name in names[:4200]:
        assert (mount.path / name).read_bytes() == (place.source / name).read_bytes()
    assert mount.value("origin", "files") == before
    assert mount.run("restart", mount.path, "--ssd", f"{said[2]}M").returncode == OK
    assert warm_list(mount, tmp_path, [os.fsencode(name) for name in names]).returncode == OK


@in_one_mode
def test_a_glob_of_many_stars_stops_nobody(place: Place, mounting: Mounting) -> None:
    """One that a regular expression tries in more ways than there is time for."""
    place.write("a" * 60, b"")
    place.write("other", b"other")
    mount = mounting()
    done = mount.run("warm", mount.path, "*a" * 28 + "b", timeout_s=30)
    assert (done.returncode, done.stderr.count("\n")) == (FAILED, 1), done.stderr
    assert "no file matches" in done.stderr
    assert (mount.path / "other").read_bytes() == b"other"


@in_one_mode
def test_what_is_no_glob_is_refused(place: Place, mounting: Mounting) -> None:
    place.write("file", b"")
    mount = mounting()
    assert refused("warm", mount.path, "[z-a]", says="[z-a] has a range that ends") == USAGE


def assert_warm_says_which_ssd_holds(
    mount: Mount, ssd_mib: str, count: int, *, fitting_least: int
) -> None:
    """More than `fitting_least` of `count` files fit in --ssd, and all in the one that it names."""
    done = mount.run("warm", mount.path)
    assert done.returncode == FAILED
    said = re.fullmatch(
        rf"fusecache: ([\d,]+) files \(.* MiB\) do not fit in --ssd {ssd_mib} MiB; "
        r"--ssd (\d+M) would hold all that was asked for\n",
        done.stderr,
    )
    assert said is not None, done.stderr
    fitting = count - int(said[1].replace(",", ""))
    assert mount.value("ssd", "blocks") == fitting > fitting_least, "none made room for another"
    assert mount.run("restart", mount.path, "--ssd", said[2]).returncode == OK
    done = mount.run("warm", mount.path)
    assert done.returncode == OK, done.stderr
    assert mount.value("ssd", "blocks") == count


@in_one_mode
def test_warm_says_what_does_not_fit_and_with_which_ssd_it_would(
    place: Place, mounting: Mounting
) -> None:
    make_files(place.source, 4500, lambda index: 4000)  # headers are 4 % of them, rows 6 %
    mount = mounting("--ssd", "16M")
    assert_warm_says_which_ssd_holds(mount, "16", 4500, fitting_least=3000)


@in_one_mode
def test_warm_counts_the_bytes_of_long_paths(place: Place, mounting: Mounting) -> None:
    """Nearly PATH_MAX of them, of names of 255: with so many a record takes another page."""
    long_name = "ü" * 127 + "x"
    directory = "/".join([long_name] * 14)
    for number in range(3400):
        place.write(f"{directory}/{number:06}{'語' * 83}", os.urandom(1500))
    mount = mounting("--ssd", "16M")
    assert_warm_says_which_ssd_holds(mount, "16", 3400, fitting_least=500)
    before = mount.value("origin", "files")
    assert_same(place.source, mount.path)
    assert mount.value("origin", "files") == before


@in_one_mode
def test_warm_is_interrupted_and_goes_on(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    make_files(place.source, 300, lambda index: 50_000 + index)
    time.sleep(SETTLED_S)  # what is younger is fetched again
    mount = mounting(source=faulty.mountpoint)
    faulty.add(Fault("read", "class00[1-5]/*", delay_s=3.0))
    running = subprocess.Popen(
        [*mount.program, "warm", str(mount.path)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    eventually(lambda: mount.value("ssd", "blocks") > 0, every_s=0.01)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert mount.value("ssd", "blocks") < 300
    faulty.clear()
    assert mount.run("warm", mount.path).returncode == OK
    assert mount.value("ssd", "blocks") == 300
    assert mount.value("origin", "bytes") < 300 * 50_000 * 1.3


@in_one_mode
def test_umount_while_busy(place: Place, mounting: Mounting) -> None:
    place.write("file", b"content")
    mount = mounting()
    with open(mount.path / "file", "rb") as file:
        assert refused("umount", mount.path, says=str(mount.path)) == BUSY
        assert file.read() == b"content"
        assert (mount.path / "file").read_bytes() == b"content"
        assert mount.run("umount", "--lazy", mount.path).returncode == OK
        assert not is_mounted(mount.path)
        assert os.pread(file.fileno(), 7, 0) == b"content"
    mount.wait_gone()


@in_one_mode
def test_a_mount_below_another(place: Place, mounting: Mounting) -> None:
    place.write("train/file", b"content")
    outer = mounting()
    train = outer.path / "train"
    flags = ("--cache-dir", place.base / "more", "--hintsd", "none", "--ssd", "64M")
    done = command("mount", train, *flags)
    assert done.returncode == OK
    try:
        assert without_patience(done.stderr) == (
            f"fusecache: warning: source {train} lies on the fusecache mount {outer.path}: files "
            f"are cached twice; {outer.path} serves train already\n"
        )
        says = f"{outer.path} is in use by the fusecache mount {train}: umount that first"
        assert refused("umount", outer.path, says=says) == BUSY
        assert (train / "file").read_bytes() == b"content"
    finally:
        assert command("umount", train).returncode == OK


@in_one_mode
def test_umount_while_hinted_trainings_read(
    place: Place, mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold nothing open between two files."""
    place.write("file", b"content")
    daemon = Daemon(place.base)
    try:
        mount = mounting("--hintsd", daemon.path)
        (mount.path / "file").read_bytes()
        here = {"mountpoint": str(mount.path), "state": "running", "pid": 4711}
        jobs = [
            {**here, "name": "train.py-1"},
            {**here, "name": "elsewhere-2", "mountpoint": "/data"},
            {**here, "name": "detached-3", "pid": None, "state": "idle"},
            {**here, "name": "over-4", "state": "done"},
        ]
        monkeypatch.setattr(daemon.director, "status", lambda: {"mounts": [], "jobs": jobs})
        code = refused("umount", mount.path, says="read with hints by train.py-1 (process 4711);")
        assert code == BUSY
        jobs[0].update(state="wrong")
        jobs[2].update(state="running")
        refused(
            "umount",
            mount.path,
            says="train.py-1 (process 4711), detached-3 (hintsd end detached-3); end that first",
        )
        assert mount.run("umount", "--force", mount.path).returncode == OK
        mount.wait_gone()
        mount.start()
        del jobs[0]
        jobs[1].update(state="waiting")
        assert mount.run("umount", mount.path).returncode == OK
        mount.wait_gone()
    finally:
        daemon.kill()


@in_one_mode
def test_umount_with_a_hintsd_that_does_not_answer(place: Place, mounting: Mounting) -> None:
    path = place.base / "sock"
    with listen(str(place.base), path.name, 1) as listener:
        mount = mounting("--hintsd", str(path))
        done = mount.run("umount", mount.path)
        # a mount namespace of another test may hold a copy of the mount
        held = "fusecache: detached; open files are served until they are closed\n"
        assert (done.returncode, done.stderr.replace(held, "")) == (OK, "")
        mount.wait_gone()
        mount.start()
        listener.shutdown(socket.SHUT_RDWR)
        assert mount.run("umount", mount.path).returncode == OK
        mount.wait_gone()
        path.unlink()
        done = mount.run(*mount.mount_arguments())
        line = f"warning: --hintsd {path}: nobody listens there"
        assert line in done.stderr
        assert line in mount.run("restart", mount.path, "--hintsd", path).stderr
        assert line not in mount.run("restart", mount.path).stderr
        done = mount.run("umount", mount.path)
        assert done.returncode == OK
        assert f"nobody listens at {path}, so nobody knew whether a training" in done.stderr
        mount.wait_gone()


@pytest.mark.claim("K2")
@in_one_mode
def test_restart_changes_the_configuration(place: Place, mounting: Mounting) -> None:
    make_files(place.source, 100, lambda index: 5000 + index)
    mount = mounting("--ram", "32M")
    assert_same(place.source, mount.path)
    mount.restart("--ram", "48M", "--ssd", "200M", "--revalidate", "0.5")
    status = mount.status()
    assert status["ram"]["limit_bytes"] == 48 << 20
    assert status["ssd"]["limit_bytes"] == 200 << 20
    place.write("class000/new", b"new")
    eventually(lambda: assert_same(place.source, mount.path))
    assert refused("restart", mount.path, "--ram", "nonsense", says="nonsense") == USAGE
    assert refused("restart", mount.path, "--allow-other", says="allow") != OK
    assert mount.status()["ram"]["limit_bytes"] == 48 << 20
    assert_same(place.source, mount.path)


@in_one_mode
def test_mounted_over_the_source_itself(tmp_path: Path, zero_open: bool) -> None:
    source = tmp_path / "data"
    files = make_files(source, 60, lambda index: 3000 * index)
    expected = snapshot(source)[0]
    with Mount(
        source,
        source,
        tmp_path / "cache",
        "--ssd",
        "64M",
        "--revalidate",
        "0.5",
        zero_open=zero_open,
    ) as mount:
        assert is_mounted(source)
        assert snapshot(source)[0] == expected
        mount.kill_server()
        mount.drop_kernel_caches()
        assert snapshot(source)[0] == expected
        mount.restart()
        assert snapshot(source)[0] == expected
        assert errno_of(files[0].unlink) == "EROFS"
    assert not is_mounted(source)
    assert snapshot(source)[0] == expected
    with watched(source):
        done = command(
            *("mount", source, "--cache-dir", tmp_path / "cache", "--ssd", "64M"),
            *("--hintsd", "none"),
        )
        assert done.returncode == OK, done.stderr
        assert snapshot(source)[0] == expected
        assert command("umount", source).returncode == OK


@contextlib.contextmanager
def unmounted(mountpoint: Path) -> Iterator[None]:
    """Whatever happens: nothing is left mounted."""
    try:
        yield
    finally:
        while os.path.ismount(mountpoint):
            subprocess.run(["umount", mountpoint], check=True, timeout=60)


def test_mount_helper_and_fstab(place: Place) -> None:
    """mount(8) and an fstab line; what `tools/setup` installed is what is called."""
    make_files(place.source, 20, lambda index: 100 * index)
    options = f"ro,noatime,cache-dir={place.cache_dir},ssd=64M,revalidate=never,hintsd=none,x-any"
    mount_8 = ["mount", "-t", "fuse.fusecache"]
    with watched(place.mountpoint), unmounted(place.mountpoint):
        subprocess.run(
            [*mount_8, "-o", options, place.source, place.mountpoint], check=True, timeout=60
        )
        assert_same(place.source, place.mountpoint)
        status = json.loads(command("status", "--json", place.mountpoint).stdout)
        assert status["ssd"]["limit_bytes"] == 64 << 20
        subprocess.run(["umount", place.mountpoint], check=True, timeout=60)
        eventually(lambda: not alive(status["keeper_pid"]))
        fstab = place.base / "fstab"
        fstab.write_text(f"{place.source} {place.mountpoint} fuse.fusecache {options} 0 0\n")
        subprocess.run(["mount", "-T", fstab, place.mountpoint], check=True, timeout=60)
        assert_same(place.source, place.mountpoint)
        status = json.loads(command("status", "--json", place.mountpoint).stdout)
        subprocess.run(["umount", place.mountpoint], check=True, timeout=60)
        eventually(lambda: not alive(status["keeper_pid"]))
        failed = subprocess.run(
            [*mount_8, "-o", options, place.base / "missing", place.mountpoint],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert failed.returncode != 0
        assert "does not exist" in failed.stderr


@in_one_mode
def test_foreground(place: Place, zero_open: bool) -> None:
    place.write("file", b"content")
    mode = [] if zero_open else ["--no-zero-open"]
    arguments = ["mount", place.source, place.mountpoint, "--cache-dir", place.cache_dir]
    with watched(place.mountpoint):
        running = subprocess.Popen(
            [
                *(sys.executable, "-m", "fusecache.cli.main"),
                *(str(argument) for argument in arguments),
                *("--foreground", "--ssd", "64M", *mode),
            ],
            env=environment(),
            stderr=subprocess.PIPE,
            cwd="/",
        )
        try:
            eventually(lambda: (place.mountpoint / "file").read_bytes() == b"content")
            running.send_signal(signal.SIGTERM)
            assert running.wait(PATIENCE_S) == OK
            assert not is_mounted(place.mountpoint)
        finally:
            if running.poll() is None:
                running.kill()
                running.wait()
        assert running.stderr is not None
        assert b"Traceback" not in running.stderr.read()


@pytest.mark.claim("K1")
@in_one_mode
def test_a_server_that_dies_again_and_again(place: Place, mounting: Mounting) -> None:
    """Back-off, the reason in the log, and the mount is served again in the end."""
    path = place.write("file", os.urandom(100_000))
    mount = mounting(env=started())
    for _ in range(6):
        mount.kill_servers_now()
        time.sleep(0.05)  # some deaths before it is ready, some after
    assert digest(mount.path / "file") == digest(path)
    assert mount.status()["restarts"] >= 1
    assert "SIGKILL" in mount.log()


@in_one_mode
def test_list_shows_all_mounts(place: Place, mounting: Mounting) -> None:
    mount = mounting()
    done = mount.run("list")
    assert done.returncode == OK
    assert mount.path.name in done.stdout.replace("\n", "")


def test_help_teaches() -> None:
    for arguments in (
        [],
        ["mount"],
        ["umount"],
        ["status"],
        ["warm"],
        ["evict"],
        ["pin"],
        ["verify"],
        ["restart"],
    ):
        done = command(*arguments, "--help")
        assert done.returncode == OK
        assert "fusecache" in done.stdout
    assert "--revalidate" in command("mount", "--help").stdout

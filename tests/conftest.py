"""Fixtures of several files of tests. The harness of mounts is `tests/support/mounted.py`."""

from __future__ import annotations

import compileall
import contextlib
import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.support.mounted", "tests.support.trees")

# Pytest keeps the tests it has compiled, whatever the environment says: each of its processes needs
# all of them.
sys.dont_write_bytecode = False

# Nobody here multiplies matrices, and to start threads for that takes half of `import numpy`.
for _threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")

from hintsd.client import link, warning  # noqa: E402
from hintsd.client.client import Job  # noqa: E402
from tests.support import (  # noqa: E402  (after its asserts were told to explain themselves)
    PATIENCE_S,
    mounted,
)
from tests.support.fake_hintsd import FakeHintsd  # noqa: E402
from tests.support.faulty_origin import FaultyOrigin  # noqa: E402
from tests.support.mounted import Mount  # noqa: E402

Mounting = Callable[..., Mount]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "claim(*numbers): claims of SEMANTICS.md, SECURITY.md")
    # A shell that runs this in the background has SIGINT ignored, and so would all processes here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("tests", deadline=None)  # on a busy machine any example may be slow
    settings.load_profile("tests")
    if not hasattr(config, "workerinput"):
        # Thousands of processes are started. As in an installation, none of them has to compile.
        for package in ("fusecache", "hintsd"):
            compileall.compile_dir(mounted.ROOT / package, quiet=2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """By one process, and then by all others: what the first one compiles they find."""
    tests = os.open(mounted.ROOT / "tests", os.O_RDONLY)
    try:
        fcntl.flock(tests, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(tests, fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        os.close(tests)
        gc.collect()
        gc.freeze()  # no later collection of garbage looks at torch and thousands of tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of tests that compute, and of tests that wait, are mixed evenly: workers, who take the
    list from several points, would else fight for processors first, and leave them idle at the end.
    """
    kinds = ["unit" in item.path.parts for item in items]
    counts, before, place = Counter(kinds), Counter[bool](), dict[Path, float]()
    for item, kind in zip(items, kinds, strict=True):
        place.setdefault(item.path, before[kind] / counts[kind])
        before[kind] += 1
    items.sort(key=lambda item: place[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows the logs of the mounts that the test used."""
    report = yield
    if report.failed:
        for mount in mounted.live_mounts:
            report.sections.append((f"log of {mount.path}", mount.log()[-6000:]))
    if report.when == "teardown":
        mounted.live_mounts[:] = [mount for mount in mounted.live_mounts if mount.keeper_pid]
    return report


@pytest.fixture(scope="session", autouse=True)
def spread(tmp_path_factory: pytest.TempPathFactory) -> None:
    """ext4 is to put directories of tests far from one another, as it does at the top of its tree.
    It shuns inodes that were freed in the last seconds: where one test removes thousands of files,
    another one close by pays for each that it makes, up to thirty times as much.
    """
    base = tmp_path_factory.getbasetemp()
    subprocess.run(["chattr", "+T", base], capture_output=True)  # other file systems have no need


@pytest.fixture(scope="module", params=[True, False], ids=["zero-open", "ordinary"])
def zero_open(request: pytest.FixtureRequest) -> bool:
    """Both open modes pass the same tests."""
    return bool(request.param)


in_one_mode = pytest.mark.parametrize("zero_open", [True], ids=["zero-open"], indirect=True)
"""For a test of what knows no open modes: commands, the plan channel, the files of the cache."""


class Place:
    """The directories of one test."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.source, self.mountpoint = base / "source", base / "mnt"
        self.cache_dir = base / "cache"
        self.source.mkdir()
        self.mountpoint.mkdir()

    def write(self, name: str, content: bytes) -> Path:
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def mounting(place: Place, zero_open: bool) -> Iterator[Mounting]:
    """Mounts that end with the test: `mounting(*flags, source=…, mountpoint=…, allow_log=…)`."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, **changes: Any) -> Mount:
            arguments: dict[str, Any] = {
                "source": place.source,
                "mountpoint": place.mountpoint,
                "cache_dir": place.cache_dir,
                "zero_open": zero_open,
                **changes,
            }
            source, mountpoint = arguments.pop("source"), arguments.pop("mountpoint")
            cache_dir = arguments.pop("cache_dir")
            if not any(flag.startswith("--ssd") for flag in flags):
                flags = ("--ssd", "256M", *flags)
            return stack.enter_context(Mount(source, mountpoint, cache_dir, *flags, **arguments))

        yield start


@pytest.fixture
def faulty(place: Place) -> Iterator[FaultyOrigin]:
    """The place's source through an origin that fails on command, at `faulty.mountpoint`."""
    mountpoint = place.base / "origin"
    mountpoint.mkdir()
    with FaultyOrigin(place.source, mountpoint, place.base / "origin.sock") as origin:
        yield origin


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 64 MiB."""
    mountpoint = tmp_path / "small disk"
    mountpoint.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", mountpoint], check=True)
    yield mountpoint
    subprocess.run(["umount", "-l", mountpoint], check=True)


@pytest.fixture
def dying_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """An ext4 on a loop device, and its backing file: truncate that, and the disk gives EIO."""
    backing, mountpoint = tmp_path / "disk.img", tmp_path / "dying disk"
    mountpoint.mkdir()
    with open(backing, "wb") as file:
        file.truncate(80 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", backing], check=True)
    subprocess.run(["mount", "-o", "loop,errors=continue", backing, mountpoint], check=True)
    yield mountpoint, backing
    os.truncate(backing, 80 << 20)  # let the unmount write what it still has
    subprocess.run(["umount", "-l", mountpoint], check=True)


@pytest.fixture
def fake_hintsd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHintsd]:
    """A running hintsd, which every path leads to; behind the test no link of it runs on."""
    gc.freeze()  # what is collected below is of the test
    monkeypatch.setattr(warning, "_warned", set())
    fake = FakeHintsd(tmp_path / "hintsd.sock")
    monkeypatch.setattr(link, "find_socket", lambda path: (str(fake.path), path))
    monkeypatch.setattr(link, "CONNECT_TIMEOUT_S", PATIENCE_S)
    for waiting in (Job.close, Job.cached, Job.next_chunk):
        monkeypatch.setattr(waiting, "__defaults__", (PATIENCE_S,))
    fake.start()
    yield fake
    if link._links:
        gc.collect()  # they end with what holds them, unless that is in a cycle
    fake.stop()
    for running in list(link._links):
        running.stop(10.0)
        assert running.is_over


class OrdinaryUser:
    """A user without rights (nobody), with a directory, and this checkout where he can read it."""

    uid = gid = 65534

    def __init__(self, base: Path) -> None:
        self.base = base
        self.home = base / "home"
        self.python = str(base / "venv/bin/python")
        self.prefix = [
            *("setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"),
        ]
        self.program = [self.python, "-m", "fusecache.cli.main"]
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        self.env = {
            **kept,
            "HOME": str(self.home),
            "PYTHONPATH": str(base / "checkout"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def directory(self, name: str) -> Path:
        path = self.base / name
        path.mkdir()
        os.chown(path, self.uid, self.gid)
        return path

    def run(self, code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run Python code as this user."""
        return mounted.command(
            *("-c", code, *arguments), prefix=self.prefix, program=[self.python], env=self.env
        )

    def mount(self, source: Path, *options: str, zero_open: bool) -> Mount:
        """Through fusermount3; it begins with the `with`."""
        return Mount(
            source,
            self.directory("mnt"),
            self.home / "cache",
            *("--ssd", "64M", *options),
            zero_open=zero_open,
            prefix=self.prefix,
            program=self.program,
            env=self.env,
            log_file=self.directory("logs") / "log",
        )


@pytest.fixture
def ordinary_user() -> Iterator[OrdinaryUser]:
    """The checkout and the environment are bound below a directory that everyone may enter."""
    base = Path(tempfile.mkdtemp(prefix="fusecache-test-"))
    base.chmod(0o755)
    bound = {"checkout": mounted.ROOT, "venv": Path(sys.prefix)}
    try:
        for name, directory in bound.items():
            (base / name).mkdir()
            subprocess.run(["mount", "--bind", directory, base / name], check=True)
        user = OrdinaryUser(base)
        user.directory("home")
        yield user
    finally:
        for name in bound:
            subprocess.run(["umount", "-l", base / name], check=True)
        shutil.rmtree(base)

"""Both distributions, built by tools/build and installed where nothing else of ours is."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache import __version__
from fusecache.base import command
from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_hinted import make_dataset, running
from tests.support.hintsd_support import DaemonProcess
from tests.support.mounted import ROOT, eventually
from tools import packages
from tools.packages import Wheel

CLIENT_NEEDS = ("msgpack", "numpy")
SERVER_NEEDS = (
    *CLIENT_NEEDS, "click", "prometheus-client", "pyfuse3", "rich", "trio", "valkey", "xxhash",
)  # fmt: skip
STRANGE = ("blake3", "click", "pyfuse3", "rich", "torch", "trio", "valkey", "xxhash")


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tools/build` makes, once for all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    out = base / "dist"
    with open(base / "dist.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            made = base / "dist.made"
            build = [str(ROOT / "tools/build"), "--out", str(made)]
            done = subprocess.run(build, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.splitlines()[-1].startswith("build: all is well")
            made.rename(out)
    return out


def only(dist: Path, pattern: str) -> Path:
    (path,) = dist.glob(pattern)
    return path


class Environment:
    """A fresh virtual environment. What it needs is linked from ours, and nothing else is there."""

    def __init__(self, path: Path, needs: tuple[str, ...]) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
        self.bin, self.python = path / "bin", str(path / "bin/python")
        (self.site,) = path.glob("lib/python*/site-packages")
        for name in _closure(needs):
            distribution = importlib.metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
                (self.site / top).symlink_to(str(distribution.locate_file(top)))

    def pip(self, *arguments: str | Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        subprocess.run([*pip, "-q", *arguments], check=True)

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-deps", "--no-index", "--no-compile", "--force-reinstall", wheel)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd="/")

    def script(self, code: str, *arguments: str | Path) -> str:
        done = self.run(self.python, "-W", "error", "-c", code, *arguments)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.strip()


def _closure(names: tuple[str, ...]) -> set[str]:
    """With what they need in turn."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lines = importlib.metadata.requires(name) or []
            if name not in found:
                found.add(name)
                todo += [re.split(r"[^\w.-]", one)[0] for one in lines if ";" not in one]
    return found


@pytest.fixture(scope="module")
def client(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("client") / "venv", CLIENT_NEEDS)
    environment.install(only(dist, "hintsd-*.whl"))
    return environment


@pytest.fixture(scope="module")
def server(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Without blake3, and without torch."""
    environment = Environment(tmp_path_factory.mktemp("server") / "venv", SERVER_NEEDS)
    environment.install(only(dist, "fusecache-*.whl"))
    return environment


def links_of_the_client() -> list[Path]:
    """Its modules; a build there has left others."""
    return [path for path in (ROOT / "client").glob("*/**/*.py") if path.is_symlink()]


# ---- what was built ------------------------------------------------------------------------------


def test_the_wheels_hold_the_checkout(dist: Path, tmp_path: Path) -> None:
    server, client = (Wheel(only(dist, f"{name}-*.whl")) for name in ("fusecache", "hintsd"))
    for wheel in (server, client):
        assert wheel.version == __version__ == wheel.metadata()["Version"]
        for name, data in wheel.modules.items():
            file = f"hintsd/{name}" if name.endswith(".pth") else name
            if not name.endswith(".so"):
                assert (ROOT / file).read_bytes() == data, name
        headers = wheel.metadata()
        assert headers["License-Expression"] == "Apache-2.0"
        assert headers["Summary"]
        assert len(headers.get_all("Classifier") or []) > 8
        assert not [n for n in wheel.files if re.search(r"(^|/)(tests|tools)/|^client/", n)]
    # in a process of its own: tests before this one may have added commands
    subprocess.run([sys.executable, "-m", "tools.man", tmp_path], cwd=ROOT, check=True)
    pages = {page.name: page.read_bytes() for page in tmp_path.iterdir()}
    assert (server.pages, client.pages) == (pages, {})
    links = {str(path.relative_to(ROOT / "client")) for path in links_of_the_client()}
    assert {name for name in client.modules if name.endswith(".py")} == links
    assert server.requires() == sorted(SERVER_NEEDS)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("fusecache/native/base/map64.c", "holds C sources"),
        ("fusecache/_other.so", "extensions are"),
        ("hintsd/cli/main.py", "lacks hintsd/cli/main.py"),
    ],
)
def test_a_wrong_wheel_is_noticed(dist: Path, change: str, problem: str) -> None:
    wheel = Wheel(only(dist, "fusecache-*.whl"))
    if change in wheel.files:
        del wheel.files[change]
    else:
        wheel.files[change] = b""
    with pytest.raises(packages.Problem, match=problem):
        packages._check_server(wheel, False)


def test_ruff_knows_which_modules_run_on_the_oldest_python() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    known: set[str] = set()
    for pattern, version in settings["per-file-target-version"].items():
        assert version == "py39"
        head, _, names = pattern.partition("{")
        names, _, tail = names.partition("}")
        texts = [head + name + tail for name in names.split(",")]
        known |= {str(p.relative_to(ROOT)) for text in texts for p in ROOT.glob(text)}
    assert known == {str(path.resolve().relative_to(ROOT)) for path in links_of_the_client()}


# ---- the client ----------------------------------------------------------------------------------


def test_an_import_costs_nothing_and_shows_its_names(client: Environment) -> None:
    shown = client.script(
        "import sys, hintsd; print(hintsd.__version__, *dir(hintsd)); "
        "assert not {'numpy', 'msgpack', 'socket', 'importlib.metadata'} & {*sys.modules}"
    )
    names = "ChunkedSampler ImportanceSampler Job Ranges SubstitutableSampler __version__ attach"
    names += " connect files order_of paths_of rows_of"
    assert shown == f"{__version__} {names}"


def test_the_client_needs_numpy_and_msgpack_only(client: Environment) -> None:
    code = """
import importlib.util, pkgutil, sys
assert not [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
import fusecache, hintsd
for package in (fusecache, hintsd):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        # The last two are of a Trainer's callback: they need the Trainer's library.
        if not module.name.endswith(("sitecustomize", "hintsd.hf", "hintsd.lightning")):
            importlib.import_module(module.name)
    print(*package.__path__)
hintsd.attach, hintsd.connect, hintsd.Job, hintsd.ChunkedSampler, hintsd.ImportanceSampler
hintsd.SubstitutableSampler
"""
    for path in client.script(code, *STRANGE).splitlines():
        assert Path(path).parent == client.site


def pythons() -> list[str]:
    """One of each version that may run the client."""
    found = {sys.version_info[:2]: sys.executable}
    for minor in range(9, 30):
        places = (Path.home() / ".pyenv/versions").glob(f"3.{minor}.*/bin/python3")
        for path in (shutil.which(f"python3.{minor}"), *map(str, places)):
            if path and (3, minor) not in found:
                with contextlib.suppress(OSError):
                    if subprocess.run([path, "-V"], capture_output=True).returncode == 0:
                        found[3, minor] = path
    return [found[version] for version in sorted(found)]


@pytest.mark.parametrize("python", pythons())
def test_each_python_imports_the_client(dist: Path, tmp_path: Path, python: str) -> None:
    """With something that stands for numpy and msgpack: ours are for our Python."""
    shutil.unpack_archive(only(dist, "hintsd-*.whl"), tmp_path, "zip")
    code = """
import sys
from unittest.mock import MagicMock
for name in ("msgpack", "numpy", "numpy.typing"):
    sys.modules[name] = MagicMock()
import hintsd, hintsd.autohint, fusecache.base.wire, fusecache.base.mounts
print(hintsd.__file__, hintsd.attach.__name__, hintsd.connect("/").__class__.__name__)
hintsd.Job(None).close()
hintsd.autohint.install()
"""
    command = [
        python,
        "-I",
        "-B",
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [f"{tmp_path}/hintsd/__init__.py", "attach", "Connection"]


@pytest.mark.parametrize("value", ["1", "0", None])
def test_a_variable_alone_hints(client: Environment, value: str | None) -> None:
    code = """
import sys
print([type(one).__module__ for one in sys.meta_path if not isinstance(one, type)])
print("numpy" in sys.modules)
"""
    words = [f"HINTSD={value}"] if value is not None else []
    done = client.run("env", *words, client.python, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    hooks, has_numpy = done.stdout.splitlines()
    assert ("hintsd.autohint" in hooks) == (value == "1")
    assert has_numpy == "False", "every Python of the environment starts with it"


def test_a_variable_without_the_package_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "hintsd.pth").write_bytes((ROOT / "hintsd/hintsd.pth").read_bytes())
    code = "import site, sys; sys.modules['hintsd'] = None; site.addsitedir(sys.argv[1]); print(1)"
    command = ["env", "HINTSD=1", sys.executable, "-I", "-S", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.startswith("hintsd: HINTSD=1, but no hints: ModuleNotFoundError(")
    assert done.stderr.count("\n") == 1


def test_a_script_that_uses_it_passes_strict_mypy(client: Environment, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import hintsd\n"
        "\n"
        "def main(path: str) -> str:\n"
        "    job: hintsd.Job = hintsd.connect(path).order([[1, 2]], epochs=1)\n"
        "    with job:\n"
        "        job.step(0)\n"
        "    other = hintsd.connect(path).shuffle(seed=0, epochs=3)\n"
        "    reveal_type(other)\n"
        "    reveal_type(hintsd.attach)\n"
        "    reveal_type(hintsd.SubstitutableSampler(9, 2).epoch)\n"
        "    return hintsd.__version__\n"
        "\n"
        "hintsd.connect(3)\n"
        "hintsd.other\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", client.python]
    command = [*mypy, "--cache-dir", str(tmp_path / "cache"), "--config-file=", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    found = done.stdout
    assert 'train.py:8: note: Revealed type is "hintsd.client.client.Job"' in found
    assert re.search(r"train.py:9: note: Revealed type is .*-> hintsd.client.client.Job", found)
    assert re.search(r'train.py:10: note: Revealed type is "(builtins\.)?int"', found)
    errors = [line.partition(": error")[0] for line in found.splitlines() if ": error" in line]
    assert errors == ["train.py:13", "train.py:14"], found


@in_one_mode
def test_the_client_alone_hints_a_real_mount(
    place: Place, mounting: Mounting, client: Environment
) -> None:
    names = make_dataset(place, 40)
    daemon = DaemonProcess(place.base, "--ram", "4M", is_forked=False)
    daemon.start()
    try:
        mount = mounting("--hintsd", daemon.path, "--ram", "16M")
        code = """
import sys, time, hintsd
job = hintsd.connect(sys.argv[1]).order([list(reversed(range(40)))], epochs=1, batch_size=4)
end_s = time.monotonic() + 30
while job.state == "waiting" and time.monotonic() < end_s:
    time.sleep(0.01)
print(job.state, flush=True)
sys.stdin.read()
job.close()
assert not {"torch", "trio"} & {*sys.modules}
"""
        with running(client.python, "-I", "-c", code, str(mount.path)) as script:
            assert script.stdin is not None
            assert script.stdout is not None
            assert script.stdout.readline() == "hinted\n"
            eventually(lambda: mount.value("prefetch", "files") >= len(names))
            script.stdin.close()
            assert script.wait(30) == 0
    finally:
        daemon.kill()


# ---- the server ----------------------------------------------------------------------------------


def test_the_servers_wheel_mounts_without_what_is_optional(
    server: Environment, tmp_path: Path
) -> None:
    source, mountpoint = tmp_path / "source", tmp_path / "mnt"
    source.mkdir()
    mountpoint.mkdir()
    (source / "file").write_bytes(b"content")
    fusecache = server.bin / "fusecache"
    for program in (fusecache, server.bin / "hintsd"):
        assert __version__ in server.run(program, "--version").stdout
    flags = ("--cache-dir", tmp_path / "cache", "--hintsd", "none", "--ssd", "64M")
    arguments = (fusecache, "mount", source, mountpoint, *flags)
    done = server.run(*arguments, "--digest", "blake3")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "needs the package of that name: pip install blake3" in done.stderr
    assert "Traceback" not in done.stderr
    with unmounted(server, mountpoint):
        done = server.run(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert (mountpoint / "file").read_bytes() == b"content"


@contextlib.contextmanager
def unmounted(server: Environment, mountpoint: Path) -> Iterator[None]:
    try:
        yield
    finally:
        done = server.run(server.bin / "fusecache", "umount", mountpoint)
    assert done.returncode == 0, done.stderr


def test_both_of_one_version_work(dist: Path, server: Environment) -> None:
    """The environment is at the end what it was: that of the server alone."""
    both = server

    def works() -> None:
        for name in ("fusecache", "hintsd"):
            done = both.run(both.bin / name, "--version")
            assert (done.returncode, done.stderr) == (0, "")
        assert both.script("import hintsd; print(hintsd.__version__)") == __version__

    works()
    for name in ("hintsd", "fusecache"):  # in either order
        both.install(only(dist, f"{name}-*.whl"))
        works()
    both.pip("uninstall", "-y", "hintsd")
    assert not (both.site / "fusecache/__init__.py").exists()
    both.install(only(dist, "fusecache-*.whl"))  # as docs/PACKAGES.md says
    works()


def test_files_of_another_version_are_one_line(server: Environment) -> None:
    own = server.site / "fusecache/__init__.py"
    text = own.read_text()
    own.write_text(text.replace(__version__, "99.1"))
    try:
        for name in ("fusecache", "hintsd"):
            done = server.run(server.bin / name, "--version")
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == (
                f"{name}: this is fusecache {__version__}, with files of hintsd 99.1: install the "
                "same version of both (pip install --force-reinstall --no-deps "
                f"fusecache=={__version__} brings this one back)\n"
            )
    finally:
        own.write_text(text)


def test_what_has_no_version_beside_it_is_whole(tmp_path: Path) -> None:
    assert command.mixture() == ""  # a checkout
    assert command.mixture(str(tmp_path / "that cannot be listed")) == ""

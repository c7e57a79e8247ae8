"""tools/build: wheels and sdists of both distributions, and what must be true of them.

Each wheel is built from the unpacked sdist, so that an sdist lacks nothing, and nothing that lies
about in the checkout (build/, a stale extension) gets into a wheel. Needs binutils and, for the man
pages, what fusecache needs; the Python that builds needs setuptools.
"""

from __future__ import annotations

import argparse
import email
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.message import Message
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
EXTENSIONS: Final = ("fusecache/_native", "hintsd/orders/_mt19937")
GLIBC: Final = (2, 28)  # of --manylinux
LIBC: Final = re.compile(r"(libc|libm|libdl|libpthread|librt)\.so\.\d+|ld-linux[-.\w]*\.so\.\d+")
NOT_SOURCES: Final = (
    ".git", ".*_cache", ".hypothesis", ".venv", "*.egg-info", "*.so", "__pycache__", "build",
    "dist", "out",
)  # fmt: skip
SETUPTOOLS: Final = 77
BACKEND: Final = """
import sys
from setuptools import build_meta
hook, directory, *options = sys.argv[1:]
getattr(build_meta, hook)(directory, {"--build-option": options} if options else None)
"""


class Problem(Exception):
    """What was built is not as it should be, or could not be; one line, or a compiler's output."""


# ---- building ------------------------------------------------------------------------------------


def build(python: str, out: Path, *, manylinux: bool) -> list[Path]:
    """Both sdists and both wheels, in `out`. Problem: one could not be built."""
    version = "import setuptools; print(setuptools.__version__.partition('.')[0])"
    done = subprocess.run([python, "-c", version], capture_output=True, text=True)
    if done.returncode or int(done.stdout) < SETUPTOOLS:
        wanted = f"{python} -m pip install 'setuptools>={SETUPTOOLS}'"
        raise Problem(f"setuptools {SETUPTOOLS} or later is needed: {wanted}")
    out.mkdir(parents=True, exist_ok=True)
    made = []
    with tempfile.TemporaryDirectory(prefix="fusecache-build-") as name:
        work = Path(name)
        ignore = shutil.ignore_patterns(*NOT_SOURCES)
        shutil.copytree(ROOT, work / "tree", symlinks=True, ignore=ignore)
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        _write_man_pages(work / "tree/man", env)
        options: list[str] = []
        if manylinux:
            env |= _zig(python, work)
            options = [f"--plat-name=manylinux_{GLIBC[0]}_{GLIBC[1]}_{platform.machine()}"]
        for project in ("tree", "tree/client"):
            sdist = _run(python, work / project, "build_sdist", work, env)
            shutil.unpack_archive(sdist, work / "unpacked")
            unpacked = work / "unpacked" / sdist.name.removesuffix(".tar.gz")
            is_pure = project != "tree"
            wheel = _run(python, unpacked, "build_wheel", work, env, *([] if is_pure else options))
            made += [Path(shutil.copy(built, out)) for built in (wheel, sdist)]
    return made


def _write_man_pages(directory: Path, env: dict[str, str]) -> None:
    directory.mkdir()
    command = [sys.executable, "-m", "tools.man", str(directory)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise Problem(f"{done.stderr}the man pages need what fusecache needs: run tools/setup")


def _run(
    python: str, project: Path, hook: str, out: Path, env: dict[str, str], *options: str
) -> Path:
    before = set(out.iterdir())
    done = subprocess.run(
        [python, "-c", BACKEND, hook, str(out), *options],
        cwd=project,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    made = [path for path in set(out.iterdir()) - before if path.is_file()]
    if done.returncode or len(made) != 1:
        raise Problem(f"{done.stdout}{hook} of {project.name} failed with {python}")
    return made[0]


def _zig(python: str, work: Path) -> dict[str, str]:
    """The environment in which setuptools compiles with zig, for a C library of GLIBC."""
    if subprocess.run([python, "-m", "ziglang", "version"], capture_output=True).returncode:
        raise Problem(f"--manylinux needs zig: {python} -m pip install ziglang")
    machine = platform.machine()
    # zig brings the C library's headers; xxhash's and Python's are the system's.
    compiler = work / "cc"
    compiler.write_text(
        "#!/bin/sh\n"
        f'exec "{python}" -m ziglang cc -target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]} '
        f'-fno-sanitize=undefined "$@" -idirafter /usr/include '
        f"-idirafter /usr/include/{machine}-linux-gnu\n"
    )
    compiler.chmod(0o755)
    return {
        "CC": str(compiler),
        "LDSHARED": f"{compiler} -shared",
        "ZIG_GLOBAL_CACHE_DIR": str(work / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(work / "zig"),
    }


# ---- an installable tree -------------------------------------------------------------------------


def make_tree(python: str, server: Path, file: Path, more: list[str]) -> str:
    """Writes `file` (.tar.gz): deploy, its `install` on top, pip, and the wheel `server` with what
    pip finds for it and for the requirements `more`. A line for it. CalledProcessError: pip said
    why.
    """
    name = "-".join(server.name.split("-", 2)[:2])
    with tempfile.TemporaryDirectory(prefix="fusecache-build-") as work:
        tree = Path(work) / name
        wheels = tree / "wheels"
        wheels.mkdir(parents=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
        subprocess.run([*pip, "--wheel-dir", wheels, server, "pip", *more], check=True)
        version = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        for part in ("LICENSE", "deploy/tree/install"):
            shutil.copy(ROOT / part, tree)
        shutil.copytree(ROOT / "deploy", tree / "deploy", ignore=shutil.ignore_patterns("tree"))
        (tree / "python-version").write_bytes(subprocess.check_output(version))
        file.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(file, "w:gz") as archive:
            archive.add(tree, name, filter=_as_root)
        count = len(list(wheels.iterdir()))
    return f"{_size(file)}: {count} wheels, ./install"


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


# ---- checking ------------------------------------------------------------------------------------


class Wheel:
    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self.files = {name: archive.read(name) for name in archive.namelist()}
        self.name, self.version, self.tag = path.stem.split("-", 2)

    @property
    def modules(self) -> dict[str, bytes]:
        """What is neither metadata nor man pages."""
        return {
            n: data for n, data in self.files.items() if not re.search(r"\.(dist-info|data)/", n)
        }

    @property
    def pages(self) -> dict[str, bytes]:
        """The man pages, by name."""
        before = f"{self.name}-{self.version}.data/data/share/man/man1/"
        return {n[len(before) :]: data for n, data in self.files.items() if n.startswith(before)}

    def metadata(self, name: str = "METADATA") -> Message:
        file = self.files[f"{self.name}-{self.version}.dist-info/{name}"]
        return email.message_from_bytes(file)

    def requires(self) -> list[str]:
        """Names of what it needs, without extras."""
        needed = self.metadata().get_all("Requires-Dist", [])
        return sorted(
            re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in needed if ";" not in line
        )


def check(made: list[Path], *, manylinux: bool) -> list[str]:
    """A line for each file. Problem: the first thing that is wrong."""
    wheels = {path.name.split("-")[0]: Wheel(path) for path in made if path.suffix == ".whl"}
    sdists = {path.name.split("-")[0]: path for path in made if path.suffix == ".gz"}
    server, client = wheels["fusecache"], wheels["hintsd"]
    _require(server.version == client.version, "the versions differ")
    for wheel in (server, client):
        _require("hintsd.pth" in wheel.files, f"{wheel.path.name} lacks hintsd.pth")
    lines = [_check_server(server, manylinux), _check_client(client, server)]
    for name, path in sorted(sdists.items()):
        with tarfile.open(path) as archive:
            members = {member.name.partition("/")[2]: member for member in archive}
        _require(not any(m.issym() or m.islnk() for m in members.values()), f"{path.name}: a link")
        wanted = {"LICENSE", "README.md", "PKG-INFO"}
        wanted |= {"pyproject.toml", "setup.py", "hintsd/hintsd.pth"}
        if name == "fusecache":
            tree = (
                "*.md",
                "docs/*.md",
                "deploy/*/*",
                "systemd/*",
                "fusecache/native/*/*.[ch]",
                "hintsd/native/*.c",
            )
            wanted |= {str(p.relative_to(ROOT)) for pattern in tree for p in ROOT.glob(pattern)}
        missing = wanted - members.keys()
        _require(not missing, f"{path.name} lacks {', '.join(sorted(missing))}")
        lines.append(f"{_size(path)}: {len(members)} files")
    return lines


def _check_server(wheel: Wheel, manylinux: bool) -> str:
    name = wheel.path.name
    code = [file for file in wheel.files if re.search(r"\.(c|h|cc|o)$", file)]
    _require(not code, f"{name} holds C sources: {', '.join(code)}")
    for package in ("fusecache", "hintsd"):
        kept = ("py", "pyi", "service", "socket", "toml", "typed")
        tree = {
            str(path.relative_to(ROOT))
            for path in (ROOT / package).rglob("*")
            if path.suffix[1:] in kept
        }
        missing = tree - wheel.files.keys()
        _require(not missing, f"{name} lacks {', '.join(sorted(missing))}")
    _require(bool(wheel.pages), f"{name} has no man pages")
    extensions = sorted(file for file in wheel.files if file.endswith(".so"))
    known = [file.partition(".")[0] for file in extensions]
    _require(known == list(EXTENSIONS), f"{name}: extensions are {extensions}")
    newest = max(_check_extension(wheel, file, manylinux) for file in extensions)
    return (
        f"{_size(wheel.path)}: {len(wheel.files)} files, {wheel.tag}, "
        f"needs glibc {'.'.join(map(str, newest))}, "
        f"{', '.join(wheel.requires())}"
    )


def _check_extension(wheel: Wheel, extension: str, manylinux: bool) -> tuple[int, ...]:
    """The glibc that it needs."""
    name = wheel.path.name
    with tempfile.NamedTemporaryFile() as file:
        file.write(wheel.files[extension])
        file.flush()
        libraries, glibc, sections = _elf(file.name)
    foreign = [library for library in libraries if not LIBC.fullmatch(library)]
    _require(not foreign, f"{name} needs {', '.join(foreign)}")
    debug = [section for section in sections if re.match(r"\.(symtab|z?debug)", section)]
    _require(not debug, f"{name} is not stripped: {', '.join(debug)}")
    _require(not manylinux or glibc <= GLIBC, f"{name} needs glibc {'.'.join(map(str, glibc))}")
    return glibc


def _check_client(wheel: Wheel, server: Wheel) -> str:
    name = wheel.path.name
    _require(wheel.tag == "py3-none-any", f"{name} is not py3-none-any")
    tag = wheel.metadata("WHEEL").get_all("Tag")
    _require(tag == ["py3-none-any"], f"{name}: its tag is {tag}")
    _require(wheel.requires() == ["msgpack", "numpy"], f"{name} needs {wheel.requires()}")
    _require(wheel.metadata()["Requires-Python"] == ">=3.9", f"{name}: not for Python 3.9")
    others = [file for file, data in wheel.modules.items() if server.modules.get(file) != data]
    _require(not others, f"{name} differs from {server.path.name} in {', '.join(others)}")
    scripts = [file for file in wheel.files if file.endswith("/entry_points.txt")]
    _require(not scripts, f"{name} has commands, which are fusecache's")
    return (
        f"{_size(wheel.path)}: {len(wheel.files)} files, {wheel.tag}, "
        f"needs {', '.join(wheel.requires())}"
    )


def _elf(path: str) -> tuple[list[str], tuple[int, ...], list[str]]:
    """The libraries that it needs, the newest version of glibc, and its sections."""

    def readelf(flag: str) -> str:
        command = ["readelf", flag, path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    libraries = re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("-dW"))
    versions = re.findall(r"Name: GLIBC_([\d.]+)", readelf("-VW"))
    newest = max(tuple(map(int, version.split("."))) for version in versions)
    return libraries, newest, re.findall(r"\] (\.\S+)", readelf("-SW"))


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise Problem(problem)


def _size(path: Path) -> str:
    return f"{path.name}, {path.stat().st_size / 1000:.0f} kB"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("tools/build")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--manylinux", action="store_true")
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--with", dest="more", action="append", default=[])
    given = parser.parse_args(arguments)
    try:
        made = build(given.python, given.out.resolve(), manylinux=given.manylinux)
        for line in check(made, manylinux=given.manylinux):
            print(line)
        if given.tree is not None:
            (server,) = (path for path in made if path.match("fusecache-*.whl"))
            print(make_tree(given.python, server, given.tree.resolve(), given.more))
    except (Problem, OSError, subprocess.CalledProcessError) as problem:
        print(f"build: {problem}", file=sys.stderr)
        return 1
    print(f"build: all is well, in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The peers: each shows the same files below a mount point, until its context is left.

INVARIANT: a peer's processes are our children in the foreground, in a session of their own
(fusecache's are known by its status), so leaving the context ends exactly them, and unmounts,
whatever happened before.

Every peer gets the options that its manual names for read-only data that does not change;
docs/BENCHMARKS.md says what is unfair all the same.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tools.fusecache_command import FusecacheMount

ALL = ("native", "fusecache", "bindfs", "mergerfs", "juicefs", "rclone")
_MOUNT_TIMEOUT_S = 30.0
_NOTED_S = "3600"  # how long peers may trust attributes and names


class Peer:
    """One way to read the files; `root` is where they are while the context is entered."""

    name: str

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing to undo for a plain directory."""

    def warm(self) -> None:
        """Bring all bytes into the peer's own cache on disk, where it has a command for that."""


class Fusecache(Peer):
    def __init__(
        self, source: Path, root: Path, cache_dir: Path, options: tuple[str, ...] = ()
    ) -> None:
        super().__init__("fusecache", root)
        self.mount = FusecacheMount(source, root, cache_dir, options)

    def __enter__(self) -> Self:
        self.mount.__enter__()
        return self

    def close(self) -> None:
        self.mount.close()

    def warm(self) -> None:
        self.mount.command("warm", str(self.root), timeout_s=900)
        self.mount.settle()


class _Foreground(Peer):
    """A file system whose process stays our child."""

    def __init__(self, name: str, root: Path, command: Sequence[str], log: Path) -> None:
        super().__init__(name, root)
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _MOUNT_TIMEOUT_S
        try:
            while not os.path.ismount(self.root):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    said = self._log.read_text(errors="replace").strip().splitlines()
                    raise RuntimeError(f"{self.name} did not mount: {said[-1] if said else '?'}")
                time.sleep(0.05)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        process, self._process = self._process, None
        deadline = time.monotonic() + 10
        while os.path.ismount(self.root):
            if subprocess.run(["umount", str(self.root)], capture_output=True).returncode == 0:
                break
            if time.monotonic() > deadline:
                print(f"{self.name}: unmounting lazily", file=sys.stderr)
                subprocess.run(["umount", "-l", str(self.root)], check=False)
                break
            time.sleep(0.2)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):  # JuiceFS has children of its own
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def program(name: str) -> str:
    """The peer's program. RuntimeError: it is not installed."""
    found = _tool(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed")
    return found


def _tool(name: str) -> str | None:
    """Installed beside this Python (registry wheels) or anywhere on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def missing(name: str) -> bool:
    """True when the peer's program is not installed here."""
    return name != "native" and _tool(name) is None


class JuicefsVolume:
    """Its metadata (SQLite) and log in `work`, its objects in the directory `bucket`."""

    def __init__(self, work: Path, bucket: Path) -> None:
        self._program = program("juicefs")
        self._meta, self._log = f"sqlite3://{work}/juicefs.db", work / "juicefs.log"
        self._bucket, self._filling = bucket, work / "juicefs-filling"

    def fill(self, source: Path, cache: Path) -> None:
        """Make it, and copy the files into it."""
        storage = ["--storage", "file", "--bucket", f"{self._bucket}/"]
        subprocess.run(
            [self._program, "format", self._meta, "bench", *storage],
            check=True,
            capture_output=True,
            timeout=60,
        )
        with self._mount(self._filling, cache, "30G", self._bucket):
            subprocess.run(["cp", "-r", f"{source}/.", str(self._filling)], check=True, timeout=900)
        self._filling.rmdir()

    def mount(
        self,
        root: Path,
        cache: Path | str,
        cache_size: str = "30G",
        bucket: Path | None = None,
        options: tuple[str, ...] = (),
    ) -> Peer:
        """Read-only, not yet entered; `bucket`: where the objects are seen now."""
        names = ("attr", "entry", "dir-entry", "open")
        trust = (w for name in names for w in (f"--{name}-cache", _NOTED_S))
        options = ("--read-only", *trust, *options)
        return self._mount(root, cache, cache_size, bucket or self._bucket, options)

    def _mount(
        self,
        root: Path,
        cache: Path | str,
        cache_size: str,
        bucket: Path,
        options: tuple[str, ...] = (),
    ) -> Peer:
        command = [self._program, "mount", "--no-usage-report", "--backup-meta", "0", "--no-syslog"]
        command += ["--bucket", f"{bucket}/", "--cache-dir", str(cache), "--cache-size", cache_size]
        command += ["--free-space-ratio", "0.02", *options, self._meta, str(root)]
        return _Foreground("juicefs", root, command, self._log)


def make(name: str, source: Path, work: Path, more: Sequence[str] = ()) -> Peer:
    """The peer `name` over `source`, not yet mounted (JuiceFS: with the files already in it).

    `more`: further options, of rclone.
    """
    root, log = work / f"mnt-{name}", work / f"{name}.log"
    if name == "native":
        return Peer(name, source)
    if name == "fusecache":
        return Fusecache(source, root, work / "fusecache-cache")
    tool = program(name)
    if name == "bindfs":
        options = f"ro,kernel_cache,attr_timeout={_NOTED_S},entry_timeout={_NOTED_S}"
        command = [tool, "-f", "-o", options, str(source), str(root)]
    elif name == "mergerfs":
        options = f"ro,cache.files=full,cache.readdir=true,cache.attr={_NOTED_S}"
        options += f",cache.entry={_NOTED_S},fsname=bench"
        command = [tool, "-f", "-o", options, str(source), str(root)]
    elif name == "rclone":
        command = [tool, "mount", str(source), str(root), "--read-only"]
        command += ["--vfs-cache-mode", "full", "--cache-dir", str(work / "rclone-cache")]
        command += ["--attr-timeout", "1h", "--dir-cache-time", "1h", "--vfs-cache-max-age", "24h"]
        command += ["--config", str(work / "rclone.conf"), *more]
    elif name == "juicefs":
        volume = JuicefsVolume(work, work / "juicefs")
        volume.fill(source, work / "juicefs-cache")
        return volume.mount(root, work / "juicefs-cache")
    else:
        raise RuntimeError(f"no peer {name}")
    return _Foreground(name, root, command, log)


def versions(names: Sequence[str]) -> dict[str, str]:
    """First line that each program says about its version."""
    found: dict[str, str] = {}
    for name in names:
        tool = None if name == "native" else _tool(name)
        if tool is None:
            continue
        argument = "version" if name == "rclone" else "--version"
        done = subprocess.run([tool, argument], capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).strip().splitlines()
        found[name] = lines[0] if lines else "?"
    return found

"""The peers: each shows the same files below a mount point, until its context is left.

INVARIANT: a peer's processes are our children in the foreground (fusecache's are known by its
status), so leaving the context ends exactly them, and unmounts, whatever happened before.

Every peer gets the options that its manual names for read-only data that does not change;
docs/BENCHMARKS.md says what is unfair all the same.
"""

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
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
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
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait(10)


def _tool(name: str) -> str | None:
    """Installed beside this Python (registry wheels) or anywhere on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def missing(name: str) -> bool:
    """True when the peer's program is not installed here."""
    return name != "native" and _tool(name) is None


def _juicefs(source: Path, root: Path, work: Path, program: str) -> Peer:
    """A JuiceFS volume, SQLite metadata and file storage; the files are copied into it first."""
    meta, log = f"sqlite3://{work}/juicefs.db", work / "juicefs.log"
    quiet = ["--no-usage-report", "--backup-meta", "0", "--no-syslog"]
    subprocess.run(
        [program, "format", meta, "bench", "--storage", "file", "--bucket", f"{work}/juicefs/"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    mount = [program, "mount", *quiet, "--cache-dir", str(work / "juicefs-cache")]
    mount += ["--cache-size", "30G", "--free-space-ratio", "0.02"]
    with _Foreground("juicefs", root, [*mount, meta, str(root)], log):
        subprocess.run(["cp", "-r", f"{source}/.", str(root)], check=True, timeout=900)
    trust = [w for k in ("attr", "entry", "dir-entry", "open") for w in (f"--{k}-cache", _NOTED_S)]
    return _Foreground("juicefs", root, [*mount, "--read-only", *trust, meta, str(root)], log)


def make(name: str, source: Path, work: Path) -> Peer:
    """The peer `name` over `source`, not yet mounted (JuiceFS: with the files already in it)."""
    root, log = work / f"mnt-{name}", work / f"{name}.log"
    if name == "native":
        return Peer(name, source)
    if name == "fusecache":
        return Fusecache(source, root, work / "fusecache-cache")
    program = _tool(name)
    if program is None:
        raise RuntimeError(f"{name} is not installed")
    if name == "bindfs":
        options = f"ro,kernel_cache,attr_timeout={_NOTED_S},entry_timeout={_NOTED_S}"
        command = [program, "-f", "-o", options, str(source), str(root)]
    elif name == "mergerfs":
        options = f"ro,cache.files=full,cache.readdir=true,cache.attr={_NOTED_S}"
        options += f",cache.entry={_NOTED_S},fsname=bench"
        command = [program, "-f", "-o", options, str(source), str(root)]
    elif name == "rclone":
        command = [program, "mount", str(source), str(root), "--read-only"]
        command += ["--vfs-cache-mode", "full", "--cache-dir", str(work / "rclone-cache")]
        command += ["--attr-timeout", "1h", "--dir-cache-time", "1h", "--vfs-cache-max-age", "24h"]
        command += ["--config", str(work / "rclone.conf")]
    elif name == "juicefs":
        return _juicefs(source, root, work, program)
    else:
        raise RuntimeError(f"no peer {name}")
    return _Foreground(name, root, command, log)


def versions(names: Sequence[str]) -> dict[str, str]:
    """First line that each program says about its version."""
    found: dict[str, str] = {}
    for name in names:
        program = None if name == "native" else _tool(name)
        if program is None:
            continue
        argument = "version" if name == "rclone" else "--version"
        done = subprocess.run([program, argument], capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).strip().splitlines()
        found[name] = lines[0] if lines else "?"
    return found

"""The process `fusecache cached`: its directory, its socket, its end. Raises UserError."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import signal
import socket
import stat
from pathlib import Path
from typing import Final

from fusecache.base import processes, trust
from fusecache.base.digest import why_unusable
from fusecache.base.errors import EXIT_BUSY, EXIT_USAGE, ConfigError, UserError
from fusecache.base.units import format_bytes, parse_bytes
from fusecache.cached import groups
from fusecache.cached.group import caches_in, is_folder
from fusecache.cached.serving import Service
from fusecache.config.building import share_of_disk
from fusecache.config.options import parse_setting

log = logging.getLogger(__name__)

QUOTA_PART: Final = 4
_OWN: Final = ("lock", "numbers", "numbers.new", "lost+found")
_BACKLOG: Final = 128


def run(directory: str, path: str, ssd: str | None, quota: str | None, keep_free: str) -> None:
    """Until SIGTERM or SIGINT. `path`: of the socket; sizes as they were written. UserError."""
    if why := why_unusable("blake3"):
        raise ConfigError(f"cached: {why}")
    handed = processes.handed_over()
    path, root = os.path.abspath(path), _own(os.path.abspath(directory))
    keep: str = parse_setting("keep_free", keep_free, "--keep-free")[1]
    limit_bytes, keep_bytes = share_of_disk(
        str(root), list(map(str, caches_in(root))), _size("--ssd", ssd), keep
    )
    least = groups.LIMIT_BYTES_LEAST
    if limit_bytes < least:
        line = f"{format_bytes(limit_bytes)} is too little: at least {format_bytes(least)}"
        raise ConfigError(f"--ssd: {line}")
    quota_bytes = _size("--quota", quota) or limit_bytes // QUOTA_PART
    if quota_bytes > limit_bytes:
        raise ConfigError(f"--quota: more than --ssd has ({format_bytes(limit_bytes)})")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        listener = handed[0] if handed else _listen(path)
        kept = groups.Groups(root, limit_bytes, quota_bytes, keep_bytes, _report)
    except (OSError, ValueError) as error:
        raise UserError(f"--dir {root}: {error}") from None
    service = Service(kept, listener)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    sizes = f"{format_bytes(limit_bytes)} of SSD, {format_bytes(quota_bytes)} for each user"
    log.info("%s: %s", path, sizes)
    processes.tell_systemd("READY=1")
    service.run()
    log.info("ended")
    if not handed:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _size(name: str, text: str | None) -> int | None:
    """ConfigError."""
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{name}: {error}") from None


def _own(path: str) -> Path:
    """The directory, which is ours alone from now on. UserError."""
    try:
        fd = trust.open_directory(path, make=True)
        try:
            others = [name for name in os.listdir(fd) if not _is_ours(name)]
            if others:
                line = f"--dir {path}: it holds {others[0]}: name a directory for it alone"
                raise UserError(line, EXIT_USAGE)
            os.fchmod(fd, 0o700)
        finally:
            os.close(fd)
        # Held as long as the process lives.
        lock = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        line = f"--dir {path}: another fusecache cached uses it"
        raise UserError(line, EXIT_BUSY) from None
    except FileNotFoundError as error:  # its disk may not be mounted
        raise UserError(f"--dir {path}: make {error.filename} first", EXIT_USAGE) from None
    except OSError as error:
        line = f"--dir {path}: {error.strerror}: it is to belong to the user who runs this"
        raise UserError(line, EXIT_USAGE) from None
    return Path(path)


def _is_ours(name: str) -> bool:
    return name in _OWN or is_folder(name)


def _listen(path: str) -> socket.socket:
    """UserError."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except FileNotFoundError:
                pass
            except ConnectionRefusedError:  # of one that was killed
                if not stat.S_ISSOCK(os.lstat(path).st_mode):
                    raise UserError(f"--socket {path}: that is no socket", EXIT_USAGE) from None
                os.unlink(path)
            else:
                raise UserError(f"--socket {path}: another service answers there", EXIT_BUSY)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        os.chmod(path, 0o666)  # who may have what is decided by digests
        listener.listen(_BACKLOG)
    except OSError as error:
        folder = os.path.dirname(path)
        line = f"{error.strerror or error}: {folder} is to belong to the user who runs this"
        raise UserError(f"--socket {path}: {line}", EXIT_USAGE) from None
    return listener


def _report(kind: str, message: str) -> None:
    log.warning("%s: %s", kind, message)

"""Can a Config be mounted? Its source, mount point, cache directories, FUSE; and what is odd."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator
from typing import Any

from fusecache.base import mounts, processes, trust
from fusecache.base.disk import cache_names
from fusecache.base.errors import EXIT_BUSY, EXIT_USAGE, ConfigError, UserError
from fusecache.base.units import format_bytes
from fusecache.config.building import default_cache_dir
from fusecache.config.settings import Config


def check_places(config: Config) -> Config:
    """Look at source, mount point, cache directory and FUSE; make the cache directory.

    Returns the Config with links in its paths resolved. UserError: the first thing that is wrong.
    """
    table = mounts.mounts()
    _check_not_fusecache(config.mountpoint, table)  # before any look-up: it may hang
    is_empty = _look_at_origin(config)
    source, mountpoint = os.path.realpath(config.source), os.path.realpath(config.mountpoint)
    _check_not_fusecache(mountpoint, table)
    _check_source(source)
    _check_mountpoint(mountpoint)
    if mountpoint != source and mounts.is_below(mountpoint, source):
        raise UserError(
            f"mount point {mountpoint} lies inside the source {source}: "
            "mount over the source itself, or elsewhere",
            EXIT_USAGE,
        )
    if mountpoint != source and mounts.is_below(source, mountpoint):
        raise UserError(
            f"mount point {mountpoint} would hide the source {source} below it: "
            "mount over the source itself, or elsewhere",
            EXIT_USAGE,
        )
    check_fuse(config.allow_other)
    _check_is_mounted(config, source, is_empty)
    return check_cache_dirs(dataclasses.replace(config, source=source, mountpoint=mountpoint))


def check_cache_dirs(config: Config) -> Config:
    """The same of the cache directories alone; source and mount point are not looked up."""
    from fusecache.base import digest

    if why := digest.why_unusable(config.digest):
        raise ConfigError(f"--digest {config.digest}: {why}")
    cache_dirs = tuple(dict.fromkeys(map(_trusted, config.cache_dirs)))
    for cache_dir in cache_dirs:
        _check_cache_dir(cache_dir, config.source, config.mountpoint, others=len(cache_dirs) - 1)
        for other in cache_dirs:
            if other != cache_dir and mounts.is_below(cache_dir, other):
                raise UserError(
                    f"cache directory {cache_dir} lies inside another one, {other}", EXIT_USAGE
                )
    return dataclasses.replace(config, cache_dir=cache_dirs[0], further_cache_dirs=cache_dirs[1:])


def _trusted(cache_dir: str) -> str:
    """The path without links. UserError: others may choose where it leads."""
    try:
        return trust.real_path(cache_dir)
    except trust.Untrusted as error:
        raise cache_names.refusal(cache_dir, error) from None
    except OSError:
        return cache_dir  # whoever uses it will say what is wrong


def begin_caches(config: Config) -> None:
    """Have the server of a live mount take each of these directories for a cache, new ones, too:
    it begins none itself, as where there is none the disk may not be mounted.
    """
    for cache_dir in config.cache_dirs:
        with contextlib.suppress(OSError):  # the server says what is wrong
            os.mkdir(os.path.join(cache_dir, "segments"), 0o700)


def warnings_of(config: Config) -> list[str]:
    """What is odd about a Config that `check_places` let pass; a line each."""
    found = []
    if config.mountpoint != config.source:
        try:
            count = len(os.listdir(config.mountpoint))
        except OSError:
            count = 0
        if count:
            entries = "its 1 entry is" if count == 1 else f"its {count:,} entries are"
            found.append(
                f"mount point {config.mountpoint} is not empty: {entries} hidden while mounted"
            )
    below = mounts.holding(config.source)
    if below is not None and below.is_fusecache:
        part = os.path.relpath(config.source, below.mountpoint)
        found.append(
            f"source {config.source} lies on the fusecache mount {below.mountpoint}: files are "
            f"cached twice; {below.mountpoint} serves {'it' if part == '.' else part} already"
        )
    for mount, other in _other_mounts():
        if other.get("cache_dir") != config.cache_dir:
            continue
        limit = other.get("ssd_bytes")
        # A limit of "what is free" is never the same twice.
        if isinstance(limit, int) and abs(limit - config.ssd_bytes) > 0.1 * config.ssd_bytes:
            found.append(
                f"{mount.mountpoint} uses the same cache directory with --ssd "
                f"{format_bytes(limit)}, not {format_bytes(config.ssd_bytes)}: "
                "the smaller limit wins for all"
            )
            break
    return found


def users_of_more(config: Config) -> list[str]:
    """Mounts that use one of these cache directories together with others; a line each."""
    found = []
    for mount, other in _other_mounts():
        theirs = [other.get("cache_dir"), *(other.get("further_cache_dirs") or [])]
        if set(theirs).intersection(config.cache_dirs) and set(theirs) - {*config.cache_dirs}:
            found.append(f"{mount.mountpoint} uses {', '.join(map(str, theirs))}")
    return found


def _other_mounts() -> Iterator[tuple[mounts.Mount, dict[str, Any]]]:
    """Our mounts of fusecache, and their settings: no other user can share a cache with us."""
    for mount in mounts.mounts():
        is_ours = mount.is_fusecache and mount.uid == os.getuid()
        directory = mounts.runtime_directory(mount) if is_ours else None
        other = mounts.keeper_record(directory).get("config") if directory else None
        if isinstance(other, dict):
            yield mount, other


def _check_not_fusecache(mountpoint: str, table: list[mounts.Mount]) -> None:
    mount = mounts.at(mountpoint, table)
    if mount is not None and mount.is_fusecache:
        raise UserError(
            f"mount point {mountpoint} is already a fusecache (of {mount.source}); "
            f"to end it: fusecache umount {mountpoint}",
            EXIT_BUSY,
        )


def _look_at_origin(config: Config) -> bool:
    """Whether the source is a directory without entries. UserError: it does not answer."""

    def look() -> str:  # one that hangs in the kernel could not be interrupted
        os.path.realpath(config.mountpoint)
        os.close(os.open(config.source, os.O_RDONLY | os.O_DIRECTORY))
        with os.scandir(config.source) as entries:
            return "" if next(entries, None) else _EMPTY

    answer = processes.ask(look, config.origin_timeout_s)
    if answer is None:
        raise UserError(
            f"source {config.source} does not answer within {config.origin_timeout_s:g} s "
            "(--origin-timeout): is its server, or the network, down?"
        )
    return answer == _EMPTY


def _check_is_mounted(config: Config, source: str, is_empty: bool) -> None:
    """A directory that a file system is to be mounted on is there before it is, mostly empty. No
    mistake of usage (EXIT_USAGE): it may be mounted in a moment, so a service tries again.
    """
    holding = mounts.holding(source)
    if config.require_mounted and (holding is None or holding.mountpoint == "/"):
        raise UserError(
            f"source {source} lies on the file system of /: mount its own first (--require-mounted)"
        )
    if is_empty and not config.allow_empty:
        raise UserError(
            f"source {source} is empty: mount its file system first; "
            "if nothing is meant to be there yet: --allow-empty"
        )


def _check_source(source: str) -> None:
    try:
        status = os.stat(source)
        if not stat.S_ISDIR(status.st_mode):
            raise UserError(f"source {source} is not a directory")
        os.close(os.open(source, os.O_RDONLY | os.O_DIRECTORY))
        os.stat(os.path.join(source, "."))  # searchable
    except FileNotFoundError:
        raise UserError(f"source {source} does not exist") from None
    except OSError as error:
        raise UserError(f"source {source} cannot be read: {error.strerror}") from None


def _check_mountpoint(mountpoint: str) -> None:
    try:
        status = os.stat(mountpoint)
    except FileNotFoundError:
        raise UserError(
            f"mount point {mountpoint} does not exist: make it (mkdir -p {shlex.quote(mountpoint)})"
        ) from None
    except OSError as error:
        hint = ""
        if error.errno == errno.ENOTCONN:
            hint = f"; a dead FUSE mount is there: fusermount3 -u {mountpoint}"
        raise UserError(
            f"mount point {mountpoint} cannot be used: {error.strerror}{hint}"
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise UserError(f"mount point {mountpoint} is not a directory")
    if os.getuid() == 0:
        return
    # what fusermount3 demands of everybody but root
    if not os.access(mountpoint, os.W_OK):
        raise UserError(
            f"mount point {mountpoint} is not yours to mount on: you cannot write to it"
        )
    if status.st_mode & stat.S_ISVTX and status.st_uid != os.getuid():
        raise UserError(
            f"mount point {mountpoint} is not yours to mount on: sticky, and another user's"
        )


def check_fuse(allow_other: bool) -> None:
    """UserError: this user cannot mount a FUSE file system here."""
    if not os.path.exists("/dev/fuse"):
        raise UserError("/dev/fuse does not exist: load the fuse module (modprobe fuse)")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise UserError("/dev/fuse is closed to you; as root: chmod 666 /dev/fuse")
    if os.getuid() == 0:
        return
    if shutil.which("fusermount3") is None:
        raise UserError("fusermount3 is not installed (Debian: apt install fuse3)")
    if allow_other and not _is_user_allow_other():
        raise UserError("--allow-other: only root may, unless /etc/fuse.conf has user_allow_other")


def _is_user_allow_other(path: str = "/etc/fuse.conf") -> bool:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return any(line.strip() == "user_allow_other" for line in file)
    except OSError:
        return False


def _check_cache_dir(cache_dir: str, source: str, mountpoint: str, others: int = 0) -> None:
    """With `others`, one that does not work is left out by the store, with a warning."""
    for what, directory in (("source", source), ("mount point", mountpoint)):
        if mounts.is_below(cache_dir, directory):
            raise UserError(
                f"cache directory {cache_dir} lies inside the {what} {directory}: "
                "choose another with --cache-dir",
                EXIT_USAGE,
            )
    try:
        if _is_default(cache_dir):
            os.makedirs(os.path.dirname(cache_dir), exist_ok=True)
        cache_names.check(cache_dir, make=True, claim=True)
        with tempfile.NamedTemporaryFile(dir=cache_dir, prefix=cache_names.CHECK_PREFIX):
            pass
    except FileNotFoundError:
        parent = os.path.dirname(cache_dir)
        raise UserError(
            f"cache directory {cache_dir} is not made: {parent} does not exist; mistyped, or a "
            f"disk that is not mounted? else make it (mkdir -p {shlex.quote(parent)})",
            EXIT_USAGE,
        ) from None
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"cache directory {cache_dir} is, or lies below, a file: "
            "choose a directory with --cache-dir",
            EXIT_USAGE,
        ) from None
    except OSError as error:
        if not others or error.errno not in _FAILED_DISK:
            raise UserError(
                f"cache directory {cache_dir} is not writable: {error.strerror}; "
                "choose another with --cache-dir"
            ) from None


def _is_default(cache_dir: str) -> bool:
    try:
        return cache_dir == os.path.realpath(default_cache_dir())
    except ConfigError:
        return False


_EMPTY = "empty"

# What the disk says of a directory that must not keep the others from being used.
_FAILED_DISK = (
    errno.EIO,
    errno.EROFS,
    errno.ENXIO,
    errno.ENODEV,
    errno.EUCLEAN,
    errno.ENOTCONN,
    errno.ENOSPC,
    errno.EDQUOT,
)

"""A Config of settings: what was not given comes from the defaults, the disks and the memory."""

from __future__ import annotations

import dataclasses
import os
import pwd
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fusecache.base.errors import ConfigError
from fusecache.base.processes import total_memory_bytes, usable_memory_bytes
from fusecache.base.units import format_bytes
from fusecache.config.settings import KEEP_FREE, RAM_BYTES_MIN, RAM_SHARE, SSD_BYTES_MIN, Config
from fusecache.pool.address import Credentials, PoolAddress, parse_address

_FIELDS = {  # of Config, where a setting has another name
    "revalidate": "revalidate_s",
    "origin_timeout": "origin_timeout_s",
    "pool_min_age": "pool_min_age_s",
    "prefetch_bandwidth": "prefetch_bytes_per_s",
}


class Disk(NamedTuple):
    size_bytes: int
    free_bytes: int


def default_cache_dir() -> str:
    if os.getuid() == 0:
        return "/var/cache/fusecache"
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return os.path.join(base, "fusecache")
    home = os.environ.get("HOME") or _home_of_record()
    return os.path.join(home, ".cache", "fusecache")


def _home_of_record() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        raise ConfigError("no HOME: say where to keep the cache with --cache-dir") from None


def _existing_parent(path: str) -> str:
    """The deepest directory on the way to `path` that exists: it is on the same disk."""
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return path


def _check_links(cache_dir: str) -> None:
    """A link to a directory is no leave to make that: its disk may not be mounted."""
    path = cache_dir
    while path != "/":
        try:
            if os.path.islink(path):
                os.stat(path)
        except FileNotFoundError:
            target = os.path.realpath(path)
            raise ConfigError(
                f"cache directory {cache_dir}: {path} is a link to {target}, which does not exist: "
                f"mount its disk, or make it (mkdir -p {shlex.quote(target)}), or choose another "
                "with --cache-dir"
            ) from None
        except OSError:
            return  # whoever uses it will say what is wrong
        path = os.path.dirname(path)


def _stored_bytes(cache_dir: str) -> int:
    """What the cache takes on its disk now. Other files in the directory are not the cache's."""
    total = 0
    for part in ("segments", "index"):
        for directory, _, names in os.walk(os.path.join(cache_dir, part)):
            for name in names:
                try:
                    total += os.lstat(os.path.join(directory, name)).st_blocks * 512
                except OSError:
                    continue
    return total


def build(settings: Mapping[str, Any], base: Config | None = None) -> Config:
    """A Config of parsed settings, over the defaults, or over `base` (a running mount's).

    ConfigError for a size that cannot be; nothing is created.
    """
    if base is None and "mountpoint" not in settings:
        raise ConfigError("no mount point: fusecache mount [SOURCE] MOUNTPOINT")
    values: dict[str, Any] = dataclasses.asdict(base) if base is not None else {}
    for name, value in settings.items():
        if name not in ("ssd", "ram", "keep_free"):
            values[_FIELDS.get(name, name)] = value
    values.setdefault("source", values["mountpoint"])
    given = values.setdefault("cache_dir", default_cache_dir())
    if "cache_dir" in settings:
        values["further_cache_dirs"] = ()
    if isinstance(given, tuple):
        values["cache_dir"], *further = given
        values["further_cache_dirs"] = tuple(further)
    cache_dirs = (values["cache_dir"], *values.get("further_cache_dirs", ()))
    disks = _disks(cache_dirs)
    if "keep_free" in settings or base is None:
        values["keep_free_bytes"] = _keep_free_bytes(settings.get("keep_free", KEEP_FREE), disks)
    keep = values["keep_free_bytes"] * len(disks)
    if "ssd" in settings:
        values["ssd_bytes"] = _checked_ssd(settings["ssd"], disks, keep)
    elif base is None:
        values["ssd_bytes"] = _default_ssd(cache_dirs, disks, keep)
    if "ram" in settings:
        values["ram_bytes"] = _checked_ram(settings["ram"])
    elif base is None:
        values["ram_bytes"] = max(RAM_BYTES_MIN, int(usable_memory_bytes() * RAM_SHARE))
    config = Config(**values)
    _check_pool(config)
    return config


def pool_of(config: Config) -> tuple[PoolAddress, Credentials] | None:
    """None: the mount has none."""
    if config.pool is None:
        return None
    return parse_address(config.pool), credentials_of(dataclasses.asdict(config))


def credentials_of(settings: Mapping[str, Any]) -> Credentials:
    """Of parsed settings, or of a Config's fields."""
    return Credentials(
        user=settings.get("pool_user"),
        password_file=settings.get("pool_password_file"),
        ca=settings.get("pool_ca"),
        certificate=settings.get("pool_cert"),
        private_key=settings.get("pool_key"),
    )


def _check_pool(config: Config) -> None:
    pool = pool_of(config)
    if config.pool_listen is not None and (pool is None or not pool[0].has_peers):
        raise ConfigError("--pool-listen: only with --pool peers://…")
    if pool is not None:
        try:
            pool[1].check(pool[0], config.pool_insecure)
        except ValueError as error:
            raise ConfigError(str(error)) from None


def share_of_disk(
    directory: str, caches: Sequence[str], ssd: int | None, keep_free: str
) -> tuple[int, int]:
    """Bytes of SSD (None: what is free, with what these caches hold), and what is kept free on the
    disk of this directory, in which they are. ConfigError.
    """
    disks = _disks([directory])
    keep = _keep_free_bytes(keep_free, disks)
    if ssd is not None:
        return _checked_ssd(ssd, disks, keep), keep
    return _default_ssd(caches, disks, keep), keep


def _keep_free_bytes(text: str, disks: Sequence[Disk]) -> int:
    """Of a share or a size; the same on each disk."""
    share = float(text[:-1]) / 100 if text.endswith("%") else None
    least = min(disk.size_bytes for disk in disks)
    keep = int(text) if share is None else int(least * share)
    if not 0 <= keep < least:
        raise ConfigError(
            f"--keep-free {format_bytes(keep)} leaves nothing of the cache directory's disk "
            f"({format_bytes(least)})"
        )
    return keep


def _checked_ssd(ssd: int, disks: Sequence[Disk], keep: int) -> int:
    disk_bytes = sum(disk.size_bytes for disk in disks)
    if ssd > disk_bytes - keep:
        raise ConfigError(
            f"--ssd {format_bytes(ssd)} exceeds the disk: {format_bytes(disk_bytes)} less "
            f"{format_bytes(keep)} to keep free"
        )
    return ssd


def _default_ssd(cache_dirs: Sequence[str], disks: Sequence[Disk], keep: int) -> int:
    """What is free. On a full disk the store keeps nothing while less than --keep-free is left;
    reads go on.
    """
    free_bytes = sum(disk.free_bytes for disk in disks)
    most = sum(disk.size_bytes for disk in disks)
    usable = min(sum(map(_stored_bytes, cache_dirs)) + free_bytes, most) - keep
    return max(SSD_BYTES_MIN, usable)


def _checked_ram(ram: int) -> int:
    if ram > total_memory_bytes():
        raise ConfigError(
            f"--ram {format_bytes(ram)} exceeds the memory of this machine "
            f"({format_bytes(total_memory_bytes())})"
        )
    return ram


def _disks(cache_dirs: Sequence[str]) -> list[Disk]:
    """Each disk that they are on."""
    found: dict[int, Disk] = {}
    for cache_dir in cache_dirs:
        _check_links(cache_dir)
        try:
            parent = _existing_parent(cache_dir)
            disk, device = os.statvfs(parent), os.stat(parent).st_dev
        except OSError as error:
            raise ConfigError(f"--cache-dir {cache_dir}: {error.strerror}") from None
        if disk.f_blocks == 0:
            raise ConfigError(
                f"--cache-dir {cache_dir}: that file system stores nothing; "
                "choose a directory on an SSD"
            )
        found[device] = Disk(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize)
    return list(found.values())

"""The one frozen Config of a mount: defaults < TOML file < flags; every limit is checked here.

A setting has one name, written with `-` on the command line, with `-` or `_` in TOML and in `-o`.
`parse_setting` turns texts into values, `build` makes a Config of them, and `check_places` looks
whether it can be mounted. Each mistake is a ConfigError or UserError with one line.

INVARIANT: a Config crosses processes as JSON; paths are str with surrogateescape, of any bytes.
It starts nothing, and imports neither click nor rich: the server reads its Config from here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import pwd
import re
import reprlib
import shlex
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusecache import cache_names, mounts, processes, trust
from fusecache.errors import EXIT_BUSY, EXIT_USAGE, ConfigError, UserError
from fusecache.memory import total_memory_bytes, usable_memory_bytes
from fusecache.units import format_bytes, parse_bytes

SIZE_MOST = 1 << 60
SSD_BYTES_MIN = 16 << 20
RAM_BYTES_MIN = 16 << 20
RAM_SHARE = 0.25
KEEP_FREE = "5%"
# Less than these, but not 0, is a unit that was forgotten.
KEEP_FREE_BYTES_MIN = 1 << 20
PREFETCH_BYTES_PER_S_MIN = 1 << 10
SECONDS_MIN, SECONDS_MAX = 0.1, 1e7
THREADS_MAX = 1024
PREFETCH_DEPTH_MAX = 256
CACHE_DIRS_MAX = 32
POLICIES = ("reuse", "lrf", "keep")
DIGESTS = ("xxh3-128", "blake3")
LAYOUTS = ("static", "reorder", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What keeper and server are told. All paths are absolute."""

    source: str
    mountpoint: str
    cache_dir: str
    ssd_bytes: int  # of all cache directories, all mounts on them together
    ram_bytes: int
    keep_free_bytes: int  # on each disk
    further_cache_dirs: tuple[str, ...] = ()
    policy: str = "reuse"  # docs/POLICIES.md
    digest: str = "xxh3-128"
    layout: str = "static"  # of hinted samples on SSD: docs/TUNING.md
    allow_other: bool = False
    noexec: bool = False
    revalidate_s: float | None = 60.0  # None: never
    zero_open: bool = True
    origin_timeout_s: float = 30.0
    origin_threads: int = 32
    prefetch_bytes_per_s: int | None = None  # None: no limit
    prefetch_depth: int = 128
    hintsd: str = "auto"  # or "none", or the path of its socket
    log_file: str | None = None  # None: in the runtime directory; on stderr when in the foreground
    foreground: bool = False

    @property
    def cache_dirs(self) -> tuple[str, ...]:
        return (self.cache_dir, *self.further_cache_dirs)

    def to_json(self) -> str:
        """ASCII: bytes of paths that are no UTF-8 become escapes."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Fields that this version does not know are left out: a keeper may be older or newer."""
        fields = json.loads(text)
        fields["further_cache_dirs"] = tuple(fields.get("further_cache_dirs", ()))
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in fields.items() if name in known})


# ---- settings: text or TOML value -> value -------------------------------------------------------


def _size(value: Any) -> int:
    size: float
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        try:
            size = parse_bytes(value)
        except OverflowError:
            size = math.inf
    else:
        raise ValueError(f'{value!r} is not a size; write for example "500G" or 1048576')
    if abs(size) > SIZE_MOST:
        line = f"{reprlib.repr(value)} is not a size: at most {format_bytes(SIZE_MOST)}"
        raise ValueError(line)
    return int(size)


def _budget(least: int, example: str) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        size = _size(value)
        if size < least:
            raise ValueError(
                f"{value!r} is {format_bytes(size)}: at least {format_bytes(least)}; "
                f'write for example "{example}"'
            )
        return size

    return parse


def _keep_free(value: Any) -> str:
    """A share ("5%") or a size; kept as text until the disk is known."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            share = float(value.strip()[:-1])
        except ValueError:
            share = math.nan
        if not 0 <= share < 100:
            raise ValueError(f"{value!r} is not between 0% and 100%")
        return value.strip()
    try:
        size = _size(value)
    except ValueError as error:
        raise ValueError(f'{error}; or a share of the disk: "5%"') from None
    if size and size < KEEP_FREE_BYTES_MIN:
        raise ValueError(
            f"{value!r} is {format_bytes(size)}: 0, or at least "
            f'{format_bytes(KEEP_FREE_BYTES_MIN)}; write for example "5%" or "10G"'
        )
    return str(size)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _seconds(value: Any) -> float:
    try:
        seconds = _number(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number of seconds") from None
    if not math.isfinite(seconds) or not SECONDS_MIN <= seconds <= SECONDS_MAX:
        raise ValueError(f"{value!r} is not between {SECONDS_MIN:g} and {SECONDS_MAX:g} seconds")
    return seconds


def _revalidate(value: Any) -> float | None:
    if value == "never":
        return None
    try:
        return _seconds(value)
    except ValueError as error:
        raise ValueError(f'{error}; or write "never"') from None


def _count(most: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        with contextlib.suppress(ValueError, OverflowError):
            number = _number(value)
            if 1 <= number <= most and number == int(number):
                return int(number)
        raise ValueError(f"{value!r} is not a whole number between 1 and {most}")

    return parse


def _bandwidth(value: Any) -> int | None:
    if value == "none":
        return None
    try:
        size = _size(value)
    except ValueError as error:
        raise ValueError(f'{error}; or write "none"') from None
    if size and size < PREFETCH_BYTES_PER_S_MIN:
        raise ValueError(
            f"{value!r} is {format_bytes(size)} a second: at least "
            f'{format_bytes(PREFETCH_BYTES_PER_S_MIN)}, or "none"; write for example "100M"'
        )
    return size or None


def _hintsd(value: Any) -> str:
    if value in ("auto", "none"):
        return str(value)
    if not isinstance(value, str) or "/" not in value:
        raise ValueError(f'{value!r} is neither "auto" nor "none" nor a path with a /')
    return _path(value)


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("", "true", "yes", "1"):  # "": the bare name in -o
        return True
    if value in ("false", "no", "0"):
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a path")
    if "\0" in value:
        raise ValueError("a path cannot hold a NUL")
    return os.path.abspath(os.path.expanduser(value))


def _paths(value: Any) -> str | tuple[str, ...]:
    """One path as it is, several as a tuple."""
    if not isinstance(value, (list, tuple)):
        return _path(value)
    paths = tuple(dict.fromkeys(map(_path, value)))
    if not 1 <= len(paths) <= CACHE_DIRS_MAX:
        raise ValueError(f"between 1 and {CACHE_DIRS_MAX} directories")
    return paths if len(paths) > 1 else paths[0]


def _choice(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
        return str(value)

    return parse


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "source": _path,
    "mountpoint": _path,
    "cache_dir": _paths,
    "ssd": _budget(SSD_BYTES_MIN, "500G"),
    "ram": _budget(RAM_BYTES_MIN, "64G"),
    "keep_free": _keep_free,
    "policy": _choice(*POLICIES),
    "digest": _choice(*DIGESTS),
    "layout": _choice(*LAYOUTS),
    "allow_other": _truth,
    "noexec": _truth,
    "revalidate": _revalidate,
    "zero_open": _truth,
    "origin_timeout": _seconds,
    "origin_threads": _count(THREADS_MAX),
    "prefetch_bandwidth": _bandwidth,
    "prefetch_depth": _count(PREFETCH_DEPTH_MAX),
    "hintsd": _hintsd,
    "log_file": _path,
    "foreground": _truth,
}

_SIZES = frozenset(("ssd", "ram", "prefetch_bandwidth"))

# What mount(8) and fstab(5) put into -o beside our own settings. A mount is read-only, nosuid and
# nodev whatever they say; the rest is for mount(8) itself.
# fmt: off
_MOUNT_WORDS = frozenset((
    "ro", "rw", "nosuid", "suid", "nodev", "dev", "exec", "async", "sync", "atime", "noatime",
    "relatime", "norelatime", "strictatime", "lazytime", "nolazytime", "diratime", "nodiratime",
    "defaults", "auto", "noauto", "nofail", "user", "nouser", "users", "owner", "group", "_netdev",
    "silent", "loud", "default_permissions",
))
# fmt: on
_MOUNT_PREFIXES = ("x-", "X-", "comment=", "fsname=", "subtype=", "uhelper=", "helper=")


def parse_setting(name: str, value: Any, shown: str) -> tuple[str, Any]:
    """(canonical name, value) of one setting. `shown` is its name in the line of a ConfigError."""
    canonical = name.replace("-", "_")
    negated = canonical.startswith("no_") and canonical[3:] in _PARSERS
    parser = _PARSERS.get(canonical[3:] if negated else canonical)
    if parser is None or (negated and parser is not _truth):
        raise ConfigError(f"{shown}: unknown setting; there are: {', '.join(_names())}")
    try:
        parsed = parser(value)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{shown}: {error}") from None
    return (canonical[3:], not parsed) if negated else (canonical, parsed)


def _names() -> list[str]:
    return [name.replace("_", "-") for name in _PARSERS]


def read_file(path: str) -> dict[str, Any]:
    """The settings of a TOML file."""
    named = path or "''"
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {named}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        hint = 'texts and sizes are in quotes, as ssd = "10G"'
        raise ConfigError(f"--config {named}: {error}; {hint}") from None
    except ValueError as error:  # no UTF-8, a number of too many digits
        raise ConfigError(f"--config {named}: {error}") from None
    except RecursionError:
        raise ConfigError(f"--config {named}: nested too deep") from None
    settings: dict[str, Any] = {}
    for name, value in table.items():
        shown = f"--config {named}: {name}"
        canonical, parsed = parse_setting(name, value, shown)
        if canonical in settings:
            raise ConfigError(f"{shown}: {canonical.replace('_', '-')} is set twice")
        # TOML has types; a flag and -o have not. A size has a unit, so it may be text.
        if isinstance(value, str) and canonical not in _SIZES:
            if isinstance(parsed, bool):
                raise ConfigError(f"{shown}: {value!r} is text: write true or false, unquoted")
            if isinstance(parsed, (int, float)):
                raise ConfigError(f"{shown}: {value!r} is text: write {value}, unquoted")
        settings[canonical] = parsed
    return settings


def read_options(texts: Iterable[str]) -> dict[str, Any]:
    r"""The settings in `-o a,b=c` texts; a comma in a value is written `\,`."""
    settings: dict[str, Any] = {}
    cache_dirs: list[str] = []
    for text in texts:
        for word in re.findall(r"(?:\\.|[^,\\])+", text, re.DOTALL):
            word = re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL)
            if word in _MOUNT_WORDS or word.startswith(_MOUNT_PREFIXES):
                continue
            name, separator, value = word.partition("=")
            if name == "config" and value:
                settings = {**read_file(value), **settings}
                continue
            if not separator and _PARSERS.get(name.replace("-", "_").removeprefix("no_")) not in (
                _truth,
                None,
            ):
                raise ConfigError(f"-o {name}: needs a value, {name}=…")
            canonical, parsed = parse_setting(name, value, f"-o {name}")
            if canonical == "cache_dir":  # each word names one of them
                cache_dirs.append(parsed)
                parsed = parse_setting(name, cache_dirs, f"-o {name}")[1]
            settings[canonical] = parsed
    return settings


# ---- settings -> Config --------------------------------------------------------------------------


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
    rename = {
        "revalidate": "revalidate_s",
        "origin_timeout": "origin_timeout_s",
        "prefetch_bandwidth": "prefetch_bytes_per_s",
    }
    for name, value in settings.items():
        if name not in ("ssd", "ram", "keep_free"):
            values[rename.get(name, name)] = value
    values.setdefault("source", values["mountpoint"])
    given = values.setdefault("cache_dir", default_cache_dir())
    if "cache_dir" in settings:
        values["further_cache_dirs"] = ()
    if isinstance(given, tuple):
        values["cache_dir"], *further = given
        values["further_cache_dirs"] = tuple(further)
    cache_dirs = (values["cache_dir"], *values.get("further_cache_dirs", ()))

    disks = _disks(cache_dirs)
    disk_bytes = sum(size for size, _ in disks)
    free_bytes = sum(free for _, free in disks)
    if "keep_free" in settings or base is None:
        text = settings.get("keep_free", KEEP_FREE)
        share = float(text[:-1]) / 100 if text.endswith("%") else None
        least = min(size for size, _ in disks)
        keep = int(text) if share is None else int(least * share)
        if not 0 <= keep < least:
            raise ConfigError(
                f"--keep-free {format_bytes(keep)} leaves nothing of the cache directory's disk "
                f"({format_bytes(least)})"
            )
        values["keep_free_bytes"] = keep
    keep = values["keep_free_bytes"] * len(disks)
    if "ssd" in settings:
        _check_ssd(settings["ssd"], disk_bytes, keep)
        values["ssd_bytes"] = settings["ssd"]
    elif base is None:
        usable = min(sum(map(_stored_bytes, cache_dirs)) + free_bytes, disk_bytes) - keep
        # On a full disk the store keeps nothing while less than --keep-free is left; reads go on.
        values["ssd_bytes"] = max(SSD_BYTES_MIN, usable)
    if "ram" in settings:
        if settings["ram"] > total_memory_bytes():
            raise ConfigError(
                f"--ram {format_bytes(settings['ram'])} exceeds the memory of this machine "
                f"({format_bytes(total_memory_bytes())})"
            )
        values["ram_bytes"] = settings["ram"]
    elif base is None:
        values["ram_bytes"] = max(RAM_BYTES_MIN, int(usable_memory_bytes() * RAM_SHARE))
    return Config(**values)


def _disks(cache_dirs: Sequence[str]) -> list[tuple[int, int]]:
    """(size, what is free) of each disk that they are on."""
    found: dict[int, tuple[int, int]] = {}
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
        found[device] = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    return list(found.values())


def _check_ssd(ssd: int, disk_bytes: int, keep: int) -> None:
    if ssd > disk_bytes - keep:
        raise ConfigError(
            f"--ssd {format_bytes(ssd)} exceeds the disk: {format_bytes(disk_bytes)} less "
            f"{format_bytes(keep)} to keep free"
        )


# ---- can it be mounted? --------------------------------------------------------------------------


def check_places(config: Config) -> Config:
    """Look at source, mount point, cache directory and FUSE; make the cache directory.

    Returns the Config with links in its paths resolved. UserError: the first thing that is wrong.
    """
    table = mounts.mounts()
    _check_not_fusecache(config.mountpoint, table)  # before any look-up: it may hang
    _check_origin_answers(config)
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
    _check_fuse(config.allow_other)
    return check_cache_dirs(dataclasses.replace(config, source=source, mountpoint=mountpoint))


def check_cache_dirs(config: Config) -> Config:
    """The same of the cache directories alone; source and mount point are not looked up."""
    from fusecache import digest

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


def _check_origin_answers(config: Config) -> None:
    """A look that hangs in the kernel could not be interrupted."""

    def look() -> str:
        os.path.realpath(config.mountpoint)
        os.close(os.open(config.source, os.O_RDONLY | os.O_DIRECTORY))
        with os.scandir(config.source) as entries:
            next(entries, None)
        return ""

    if processes.ask(look, config.origin_timeout_s) is None:
        raise UserError(
            f"source {config.source} does not answer within {config.origin_timeout_s:g} s "
            "(--origin-timeout): is its server, or the network, down?"
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


def _check_fuse(allow_other: bool) -> None:
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

"""Settings as they are written: by name, in a TOML file, in `-o`; texts become values."""

from __future__ import annotations

import contextlib
import math
import os
import re
import reprlib
import tomllib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fusecache.base.errors import ConfigError
from fusecache.base.logs import FORMATS, LEVELS
from fusecache.base.units import format_bytes, parse_bytes
from fusecache.config.settings import (
    CACHE_DIRS_MAX,
    DIGESTS,
    KEEP_FREE_BYTES_MIN,
    LAYOUTS,
    POLICIES,
    PREFETCH_BYTES_PER_S_MIN,
    PREFETCH_DEPTH_MAX,
    RAM_BYTES_MIN,
    SECONDS_MAX,
    SECONDS_MIN,
    SIZE_MOST,
    SSD_BYTES_MIN,
    THREADS_MAX,
)
from fusecache.pool.address import PEERS_PORT, parse_address, parse_server


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


def _path_or_word(value: Any) -> str:
    if value in ("auto", "none"):
        return str(value)
    if not isinstance(value, str) or "/" not in value:
        raise ValueError(f'{value!r} is neither "auto" nor "none" nor a path with a /')
    return _path(value)


def _socket(value: Any) -> str | None:
    return None if value == "none" else _path(value)


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


def _pool(value: Any) -> str | None:
    if value == "none":
        return None
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    parse_address(value)
    return value


def _listen(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    parse_server(value, PEERS_PORT)
    return value


def _user(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]{1,64}", value):
        raise ValueError(f"{value!r} is no name of a user")
    return value


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
    "cache": _socket,
    "manifest": _path_or_word,
    "layout": _choice(*LAYOUTS),
    "allow_other": _truth,
    "noexec": _truth,
    "require_mounted": _truth,
    "allow_empty": _truth,
    "revalidate": _revalidate,
    "zero_open": _truth,
    "origin_timeout": _seconds,
    "origin_threads": _count(THREADS_MAX),
    "prefetch_bandwidth": _bandwidth,
    "prefetch_depth": _count(PREFETCH_DEPTH_MAX),
    "pool": _pool,
    "pool_listen": _listen,
    "pool_ca": _path,
    "pool_cert": _path,
    "pool_key": _path,
    "pool_user": _user,
    "pool_password_file": _path,
    "pool_insecure": _truth,
    "pool_min_age": _seconds,
    "hintsd": _path_or_word,
    "log_file": _path,
    "log_level": _choice(*LEVELS),
    "log_format": _choice(*FORMATS),
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


def read_file(path: str, opener: Callable[[str, int], int] | None = None) -> dict[str, Any]:
    """The settings of a TOML file. `opener` is that of `open`."""
    named = path or "''"
    try:
        with open(path, "rb", opener=opener) as file:
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


def relative_paths(data: bytes) -> Iterator[tuple[str, str]]:
    """Names and values of settings in a TOML file, one that `read_file` takes, whose path depends
    on the directory of whoever reads it.
    """
    for name, value in tomllib.loads(data.decode()).items():
        parser = _PARSERS.get(name.replace("-", "_"))
        for path in value if isinstance(value, list) else [value]:
            is_path = parser in (_path, _paths, _socket) or (
                parser is _path_or_word and "/" in path
            )
            if is_path and not path.startswith(("/", "~")):
                yield name, path


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

"""`fusecache service`: files for systemd, and what was done, in lines.

Whatever runs is what root alone may change: program and settings of others are refused.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fusecache
from fusecache.base import trust
from fusecache.base.digest import why_unusable
from fusecache.base.errors import ConfigError, UserError
from fusecache.config.building import default_cache_dir
from fusecache.config.options import parse_setting, read_file, relative_paths
from fusecache.service import units

CACHED_USER = "fusecache-cached"
"""Mounts use a service of this user's (fusecache/cached/client.py)."""
_DROP_IN = "mounts.conf"


@dataclass(frozen=True)
class Places:
    """Where things are on a machine with systemd."""

    units: Path = Path("/etc/systemd/system")
    settings: Path = Path("/etc/fusecache")
    booted: Path = Path("/run/systemd/system")  # there while systemd runs: sd_booted(3)
    programs: Path = Path(sys.executable).parent
    code: tuple[Path, ...] = (Path(sys.executable), Path(fusecache.__file__))
    """What the programs run: the interpreter, the package."""

    def drop_in(self, name: str) -> Path:
        return self.units / f"fusecache@{name}.service.d" / _DROP_IN

    def cached_drop_in(self) -> Path:
        return self.units / f"{units.CACHED[0]}.d" / "install.conf"

    def instances(self) -> set[str]:
        """Names of the mounts that are installed, or enabled."""
        found = {*self.units.glob("fusecache@?*.service.d")}
        found.update(self.units.glob("*.wants/fusecache@?*.service"))
        names = (path.name.removeprefix("fusecache@").removesuffix(".d") for path in found)
        return {name.removesuffix(".service") for name in names}


def install(name: str, config_file: str | None, places: Places) -> Iterator[str]:
    """Units and drop-in of the mount `name`; a line for each file. UserError.

    `config_file` is copied to where the unit reads it; None: it is there.
    """
    _check(name, places)
    _check_programs(places)
    there = places.settings / f"{name}.toml"
    given = Path(os.path.abspath(config_file)) if config_file is not None else there
    data, drop_in = _read(given, "--config ")
    _check_place(there)
    if os.path.lexists(there) and _read(there)[0] != data:
        raise UserError(f"{there} is there, and differs from {given}: remove it, or edit it")
    yield from _write(there, data)
    for unit, text in units.rendered(str(places.programs), units.NAMES).items():
        yield from _write(places.units / unit, text.encode())
    yield from _write(places.drop_in(name), drop_in.encode())
    _systemctl("daemon-reload")


def uninstall(name: str, places: Places) -> Iterator[str]:
    """Ends the mount, and removes what `install` wrote; the units with the last mount. Settings
    and cache stay. UserError.
    """
    _check(name, places)
    if name not in places.instances():
        others = ", ".join(sorted(places.instances())) or "none"
        raise UserError(f"there is no service fusecache@{name}; installed: {others}")
    _systemctl("disable", "--now", f"fusecache@{name}.service")
    yield from _remove_drop_in(places.drop_in(name))
    if not places.instances():
        present = [unit for unit in units.NAMES if (places.units / unit).exists()]
        hints = [unit for unit in present if "@" not in unit]
        if hints:
            _systemctl("disable", "--now", *hints)
        yield from _remove_units(present, places)
    _systemctl("daemon-reload")


def install_cached(
    directory: str | None, sizes: Mapping[str, str], places: Places
) -> Iterator[str]:
    """User, directory and units of the host's cache service; a line for each. UserError.

    `directory`: None: the unit's own. `sizes`: by the option of `fusecache cached`. Nothing given:
    what was given before stays.
    """
    _check_host(places)
    _check_programs(places)
    if why := why_unusable("blake3"):
        raise UserError(why)
    for option, text in sizes.items():
        parse_setting("keep_free" if option == "--keep-free" else "ssd", text, option)
    yield from _make_user()
    program = str(places.programs / "fusecache")
    try:
        _run_as_cached(program, "--version")
    except UserError as error:
        raise UserError(
            f"the user {CACHED_USER} cannot run {program} ({error}): "
            "install fusecache where all may read it"
        ) from None
    if directory is not None:
        yield from _make_directory(directory := os.path.abspath(directory))
    for unit, text in units.rendered(str(places.programs), units.CACHED).items():
        yield from _write(places.units / unit, text.encode())
    if directory is not None or sizes:
        words = [f"{option}={''.join(text.split())}" for option, text in sizes.items()]
        drop_in = units.cached_drop_in(directory, words)
        yield from _write(places.cached_drop_in(), drop_in.encode())
    _systemctl("daemon-reload")


def uninstall_cached(places: Places) -> Iterator[str]:
    """Ends the cache service, and removes what `install_cached` wrote. User and directory stay.
    UserError.
    """
    _check_host(places)
    present = [unit for unit in units.CACHED if (places.units / unit).exists()]
    if not present:
        raise UserError("the cache service is not installed")
    _systemctl("disable", "--now", *present)
    yield from _remove_drop_in(places.cached_drop_in())
    yield from _remove_units(present, places)
    _systemctl("daemon-reload")


def _make_user() -> Iterator[str]:
    """UserError."""
    with contextlib.suppress(KeyError):
        pwd.getpwnam(CACHED_USER)
        return
    _run(
        *("useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"),
        *("--shell", "/usr/sbin/nologin", CACHED_USER),
    )
    yield f"made the user {CACHED_USER}"


def _make_directory(path: str) -> Iterator[str]:
    """It is the service's user's, and only root and that user can put another one there.

    UserError.
    """
    user = pwd.getpwnam(CACHED_USER)
    try:
        real = trust.real_path(path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(real, 0o700)
            os.chown(real, user.pw_uid, user.pw_gid)
            yield f"made {path}"
        owner = os.stat(real).st_uid
    except OSError as error:
        raise UserError(f"--dir {path}: {error.strerror}") from None
    if owner != user.pw_uid or not os.path.isdir(real):
        raise UserError(
            f"--dir {path} is there, and is no directory of the user {CACHED_USER}: "
            "name one that is not there yet"
        )
    try:
        _run_as_cached("test", "-w", real)
    except UserError:
        raise UserError(
            f"--dir {path}: the user {CACHED_USER} cannot get there: "
            "a directory above it is closed to others"
        ) from None


def _run_as_cached(*words: str) -> None:
    """UserError: what it said."""
    user = (f"--reuid={CACHED_USER}", f"--regid={CACHED_USER}", "--clear-groups")
    _run("setpriv", *user, *words)


def _remove_drop_in(path: Path) -> Iterator[str]:
    if path.exists():
        path.unlink()
        yield f"removed {path}"
    with contextlib.suppress(OSError):  # somebody else's drop-ins keep it
        path.parent.rmdir()


def _remove_units(names: Iterable[str], places: Places) -> Iterator[str]:
    for name in names:
        (places.units / name).unlink()
        yield f"removed {places.units / name}"


def _check(name: str, places: Places) -> None:
    if not units.INSTANCE.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a service: letters, digits, and . _ - in it")
    _check_host(places)


def _check_host(places: Places) -> None:
    if os.geteuid() != 0:
        raise UserError("only root may install services of systemd")
    if not places.booted.is_dir():
        raise UserError("no systemd runs here: use fusecache mount, or /etc/fstab")


def _check_programs(places: Places) -> None:
    """UserError: they are not there, or another user may change what root would run."""
    programs = [places.programs / name for name in ("fusecache", "hintsd")]
    for program in programs:
        if not os.access(program, os.X_OK):
            raise UserError(f"{program} does not exist: install the package with pip first")
    for file in (*programs, *places.code):
        try:
            real = trust.real_path(str(file))
            trust.check_unwritable(os.stat(real), real)
        except OSError as error:
            raise UserError(
                f"{file} is no program for root to run: {error.strerror}; "
                "install fusecache in a directory of root's"
            ) from None


def _check_place(settings: Path) -> None:
    """UserError: another user may put another file there, which root's mount would obey."""
    try:
        trust.real_path(str(settings))
    except OSError as error:
        raise UserError(f"{settings} is no place for root's settings: {error.strerror}") from None


def _read(config_file: Path, flag: str = "") -> tuple[bytes, str]:
    """The file, and the drop-in that it needs. ConfigError."""
    try:
        fd = trust.open_file(str(config_file))
    except OSError as error:
        raise ConfigError(f"{flag}{config_file}: {error.strerror}") from None
    with open(fd, "rb") as file:  # one descriptor: another user could put another file there
        settings: dict[str, Any] = read_file(str(config_file), lambda *_: os.dup(fd))
        file.seek(0)
        data = file.read()
    for name, path in relative_paths(data):
        raise ConfigError(
            f"--config {config_file}: {name}: {path!r} is not absolute, as a service needs it"
        )
    if "mountpoint" not in settings:
        raise ConfigError(f"--config {config_file}: no mountpoint")
    cache = settings.get("cache_dir", default_cache_dir())
    mountpoint = settings["mountpoint"]
    caches = [cache] if isinstance(cache, str) else cache
    paths = [settings.get("source", mountpoint), os.path.dirname(mountpoint), *caches]
    return data, units.drop_in(paths, has_pool=settings.get("pool") is not None)


def _write(path: Path, data: bytes) -> Iterator[str]:
    """The whole file, or none of it; a line if it was not as it is now. UserError."""
    try:
        if path.is_file() and path.read_bytes() == data:
            return
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fd, new = tempfile.mkstemp(dir=path.parent, prefix=".fusecache-")
        try:
            with open(fd, "wb") as file:
                file.write(data)
                os.fchmod(fd, 0o644)
                file.flush()
                os.fsync(fd)
            os.replace(new, path)
        except OSError:
            os.unlink(new)
            raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    yield f"wrote {path}"


def _systemctl(*words: str) -> None:
    """UserError: what it said."""
    _run("systemctl", *words)


def _run(name: str, *words: str) -> None:
    """UserError: what it said."""
    program = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if program is None:
        raise UserError(f"{name} is not installed")
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, errors="replace", cwd="/"
    )
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise UserError(f"{name} {' '.join(words)}: {said}")

"""`fusecache mount`, `restart` and `umount`: a mount begins, changes and ends.

The keeper does it (keeper/keeper.py); here its settings are collected, it is started or asked, and
its report is told.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Any, Final

import click

from fusecache.base import command, mounts, processes, trust
from fusecache.base.command import PATH
from fusecache.base.errors import EXIT_BUSY, EXIT_FAILED, EXIT_USAGE, ConfigError, UserError
from fusecache.base.logs import FORMATS, LEVELS
from fusecache.config.building import build
from fusecache.config.options import parse_setting, read_file, read_options
from fusecache.config.places import (
    begin_caches,
    check_cache_dirs,
    check_places,
    users_of_more,
    warnings_of,
)
from fusecache.config.settings import DIGESTS, LAYOUTS, POLICIES, Config
from fusecache.control import control_client, hintsd_client
from fusecache.keeper import mounting, server_process

_HINTSD_START_S: Final = 5.0
_DEAD_ANSWER_S: Final = 2.0  # a dead mount answers at once


def _settings_flags(*, shows_defaults: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The flags of `mount` and `restart`: each is a setting of the same name in TOML."""

    def flag(names: str, help_: str, default: str = "", **more: Any) -> Callable[..., Any]:
        shown = f"[{default}]" if default and shows_defaults else ""
        return click.option(names, default=None, help=f"{help_} {shown}".strip(), **more)

    flags = [
        click.option(
            "--config", "config_file", type=PATH, metavar="FILE", help="TOML with these same names."
        ),
        flag(
            "--cache-dir",
            "Where the SSD tier lies, made if its parent exists; several, on several disks.",
            "/var/cache/fusecache",
            type=PATH,
            metavar="DIR",
            multiple=True,
        ),
        flag("--ssd", "Limit of the SSD tier.", "what is free", metavar="SIZE"),
        flag("--ram", "Budget of the RAM tier.", "a quarter of the memory", metavar="SIZE"),
        flag("--keep-free", "Left to others on that disk.", "5%", metavar="SIZE|%"),
        flag("--policy", "What may go when it is full.", "reuse", metavar="|".join(POLICIES)),
        flag("--digest", "blake3 where users share.", metavar="|".join(DIGESTS)),
        flag(
            "--cache",
            "The host's cache service, for what the manifest lists (`fusecache cached`).",
            type=PATH,
            metavar="SOCKET",
        ),
        flag(
            "--manifest",
            "What `fusecache digest` wrote; auto: SOURCE/.fusecache-manifest.",
            "auto",
            type=PATH,
            metavar="auto|none|FILE",
        ),
        flag(
            "--layout",
            "reorder: hinted samples lie on SSD as the next epoch reads them.",
            "static",
            metavar="|".join(LAYOUTS),
        ),
        flag("--allow-other", "Other users may read, too.", is_flag=True),
        flag("--revalidate", "See changes within this.", "60", metavar="SECONDS|never"),
        flag("--zero-open/--no-zero-open", "Reads without round trips.", "on"),
        flag("--origin-timeout", "A hung origin gives EIO.", "30", metavar="SECONDS"),
        flag("--origin-threads", "Calls to the origin at a time.", "32", metavar="N"),
        flag("--prefetch-bandwidth", "Of hinted reads, a second.", "none", metavar="SIZE|none"),
        flag("--prefetch-depth", "Hinted reads at a time.", "128", metavar="N"),
        flag("--pool", "Share what is read with other hosts.", "none", metavar="URL"),
        flag("--pool-listen", "Answer the other hosts there.", metavar="HOST:PORT"),
        flag("--pool-ca", "Whose certificates to trust.", type=PATH, metavar="FILE"),
        flag("--pool-cert", "This host's certificate.", type=PATH, metavar="FILE"),
        flag("--pool-key", "Its private key.", type=PATH, metavar="FILE"),
        flag("--pool-user", "User of the engine's ACL.", metavar="NAME"),
        flag("--pool-password-file", "Its password, in a file.", type=PATH, metavar="FILE"),
        flag("--pool-insecure", "Allow a pool without TLS.", is_flag=True),
        flag("--pool-min-age", "Younger files are not shared.", "60", metavar="SECONDS"),
        flag("--hintsd", "Who takes hints; auto starts it.", "auto", metavar="auto|none|SOCKET"),
        flag(
            "--log-file",
            "Where the log goes.",
            "in the runtime directory",
            type=PATH,
            metavar="FILE",
        ),
        flag("--log-level", "Of what is logged, the least.", "info", metavar="|".join(LEVELS)),
        flag("--log-format", "json: an object a line.", "text", metavar="|".join(FORMATS)),
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(flags):
            function = option(function)
        return function

    return decorate


def _collect(
    config_file: str | None, options: tuple[str, ...], flags: dict[str, Any]
) -> dict[str, Any]:
    """Settings from file, then -o, then flags: the later wins."""
    settings = read_file(config_file) if config_file is not None else {}
    settings.update(read_options(options))
    for name, value in flags.items():
        if value not in (None, ()):
            canonical, parsed = parse_setting(name, value, "--" + name.replace("_", "-"))
            settings[canonical] = parsed
            if isinstance(value, tuple) and len({*map(os.path.abspath, value)}) < len(value):
                command.complain(
                    "fusecache",
                    f"warning: the same twice: --{name.replace('_', '-')} {' '.join(value)}",
                )
    return settings


# ---- mount ---------------------------------------------------------------------------------------


@click.command()
@click.argument("places", nargs=-1, type=PATH, metavar="[SOURCE] [MOUNTPOINT]")
@_settings_flags(shows_defaults=True)
@click.option(
    "--require-mounted",
    is_flag=True,
    default=None,
    help="Refuse a SOURCE on the file system of /: its own is not mounted.",
)
@click.option("--allow-empty", is_flag=True, default=None, help="SOURCE may hold nothing.")
@click.option("--foreground", "-f", is_flag=True, default=None, help="Stay, and log on stderr.")
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="A,B=C",
    help="Settings, as from fstab; also noexec: nothing on it is executed.",
)
def mount(
    places: tuple[str, ...], config_file: str | None, options: tuple[str, ...], **flags: Any
) -> None:
    """Mount SOURCE on MOUNTPOINT, or over itself. Returns when the mount answers.

    \b
    fusecache mount /data/imagenet
    fusecache mount /mnt/nfs/imagenet /data/imagenet --cache-dir /ssd/cache --ssd 500G --ram 64G
    fusecache mount /data/imagenet --cache-dir /ssd1/cache --cache-dir /ssd2/cache
    fusecache mount --config /etc/fusecache/imagenet.toml --foreground

    \b
    The same in TOML (flags win over the file):
      source = "/mnt/nfs/imagenet"
      mountpoint = "/data/imagenet"
      ssd = "500G"
      revalidate = "never"       # the data does not change
    """
    if len(places) > 2:
        raise ConfigError("too many places: fusecache mount [SOURCE] MOUNTPOINT")
    settings = _collect(config_file, options, flags)
    if len(places) == 1:
        settings.pop("source", None)  # one place: over itself
    for name, place in zip(("mountpoint", "source"), reversed(places), strict=False):
        settings[name] = parse_setting(name, place, name)[1]
    start(build(settings))


def start(given: Config) -> None:
    """Start the keeper and wait for its report. Of what is mounted already, the hintsd alone."""
    _take_off_dead(given.mountpoint)
    try:
        wanted = check_places(given)
    except UserError as error:
        if error.exit_code != EXIT_BUSY:
            raise
        more = _keeperless(given.mountpoint)
        if not (more or given.foreground or given.hintsd == "none"):
            more = _restarted_hintsd(given.mountpoint)
        raise UserError(f"{error}{more}", EXIT_BUSY) from None
    warnings = warnings_of(wanted)
    if len(wanted.cache_dirs) < len(given.cache_dirs):
        warnings.append(f"the same directory twice, by a link: {', '.join(given.cache_dirs)}")
    arguments = [sys.executable, "-P", "-m", "fusecache.keeper", wanted.to_json()]
    environment = {**os.environ, **server_process.package_environment()}
    sys.stdout.flush()
    if wanted.foreground:
        for line in warnings:
            command.complain("fusecache", f"warning: {line}")
        os.execve(sys.executable, arguments, environment)
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    process = subprocess.Popen(
        [*arguments, str(theirs)],
        pass_fds=[theirs],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    os.close(theirs)
    report = _read_report(ours, process, wanted)
    if report.get("ready"):
        for line in warnings:
            command.complain("fusecache", f"warning: {line}")
    for line in report.get("warnings") or []:
        command.complain("fusecache", f"warning: {line}")
    if not report.get("ready"):
        process.wait()
        others = users_of_more(wanted)
        line = "; ".join([str(report.get("error")), *others])
        raise UserError(line, int(report.get("exit", EXIT_FAILED)))
    _have_hintsd(wanted.hintsd)


def is_mounted(given: Config) -> bool:
    """Whether a fusecache that lives is on the mount point already, with the same source."""
    _take_off_dead(given.mountpoint)
    mount = mounts.at(mounts.resolve(given.mountpoint))
    return (
        mount is not None
        and mount.is_fusecache
        and mount.source in (given.source, mounts.resolve(given.source))
    )


def _take_off_dead(mountpoint: str) -> None:
    """A fusecache whose keeper and server were both killed gives nothing but ENOTCONN."""
    mount = mounts.at(mounts.resolve(mountpoint))
    if mount is None or not mount.is_fusecache or os.getuid() not in (0, mount.uid):
        return

    def look() -> str:
        # Asks the server, whatever the kernel remembers; not the origin, which may be dead itself.
        try:
            fd = os.open(mount.mountpoint, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.ioctl(fd, termios.TCGETS)
        except OSError as error:
            return "dead" if error.errno in (errno.ENOTCONN, errno.ECONNABORTED) else ""
        return ""

    if processes.ask(look, _DEAD_ANSWER_S) != "dead":
        return
    target = control_client.find(mount.mountpoint)
    if control_client.is_kept(target):
        return
    answer = _umount_alone(target, lazy=True)
    if not answer["ok"]:
        raise UserError(
            f"{mount.mountpoint} is a dead fusecache, and cannot be unmounted: {answer['error']}"
        )
    command.complain(
        "fusecache",
        f"warning: {mount.mountpoint} was a dead fusecache (its keeper and server had been "
        "killed): it was unmounted",
    )


def _keeperless(mountpoint: str) -> str:
    """What is to be done with a mount that is there, but without a keeper; "" if it has one."""
    target = control_client.find(mountpoint)
    try:
        control_client.ask_keeper(target, {"op": "info"})
    except ConnectionError:
        return "; its keeper is gone: umount it, then mount again"
    except UserError:
        return ""
    return ""


def _have_hintsd(setting: str) -> None:
    """Start this user's, if it is wanted; warn where there is none."""
    if setting == "auto":
        try:
            start_hintsd(mounts.hintsd_socket(os.getuid()))
        except OSError as error:
            command.complain(
                "fusecache", f"warning: hintsd was not started, hints have no effect: {error}"
            )
    elif setting != "none" and not _listens(*os.path.split(setting)):
        command.complain(
            "fusecache",
            f"warning: --hintsd {setting}: nobody listens there, hints have no effect until "
            f"somebody does: hintsd serve --socket {setting}",
        )


def _restarted_hintsd(mountpoint: str) -> str:
    """Starts the hintsd of a mount that is there, if it has ended; what is to be said of that."""
    target = control_client.find(mountpoint)
    if target.mount.uid != os.getuid() or hintsd_client.setting(target) != "auto":
        return ""
    try:
        is_new = start_hintsd(mounts.hintsd_socket(os.getuid()))
    except OSError as error:
        return f"; its hintsd has ended, and was not started again: {error}"
    return "; its hintsd had ended: it was started again" if is_new else ""


def start_hintsd(path: str) -> bool:
    """Have a daemon listen on `path` that lives as long as this user's mounts. Whether it had to be
    started. OSError: none does, and none can be started.
    """
    directory, name = os.path.split(path)
    if _listens(directory, name):
        return False
    log_path = os.path.join(directory, "hintsd.log")
    with open(trust.open_log(log_path), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hintsd", "serve", "--socket", path, "--until-unmounted"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={**os.environ, **server_process.package_environment()},
        )
    deadline = time.monotonic() + _HINTSD_START_S
    while not _listens(directory, name):
        code = process.poll()
        if code is not None and not _listens(directory, name):
            raise OSError(f"it ended at once ({server_process.reason(code)}), see {log_path}")
        if time.monotonic() > deadline:
            raise OSError(f"it does not listen yet, see {log_path}")
        time.sleep(0.02)
    return True


def _listens(directory: str, name: str) -> bool:
    try:
        mounts.connect(directory, name, 1.0).close()
    except OSError:
        return False
    return True


def _read_report(fd: int, process: subprocess.Popen[bytes], wanted: Config) -> dict[str, Any]:
    received, patience_s = b"", 10.0
    try:
        while not received.endswith(b"\n"):
            if not select.select([fd], [], [], patience_s)[0]:
                command.complain(
                    "fusecache",
                    f"still opening {wanted.cache_dir} (a large index may be rebuilt) …",
                )
                patience_s = 60.0
                continue
            data = os.read(fd, 65536)
            if not data:
                code = process.wait()
                raise UserError(
                    f"the keeper died before the mount was there ({server_process.reason(code)})"
                )
            received += data
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    finally:
        os.close(fd)
    report: dict[str, Any] = json.loads(received)
    return report


# ---- restart, umount -----------------------------------------------------------------------------


def _place(path: str | None, settings: dict[str, Any]) -> str:
    """The mount that a command is about: as given, or the mount point in the config file."""
    place = path or settings.get("mountpoint")
    if place is None:
        raise ConfigError("which mount? give a PATH, or a --config with a mountpoint")
    return str(place)


@click.command()
@click.argument("path", required=False, type=PATH)
@_settings_flags(shows_defaults=False)
@click.option("-o", "options", multiple=True, metavar="A,B=C", help="Settings, as from fstab.")
def restart(
    path: str | None, config_file: str | None, options: tuple[str, ...], **flags: Any
) -> None:
    """Swap the server, and settings if some are given; readers notice nothing.

    Settings that are not given stay. To use a new version: install it, then restart.

    \b
    fusecache restart /data/imagenet
    fusecache restart /data/imagenet --ram 128G --revalidate never
    fusecache restart --config /etc/fusecache/imagenet.toml
    """
    settings = _collect(config_file, options, flags)
    target = control_client.find(_place(path, settings))
    settings.pop("mountpoint", None)
    try:
        info = control_client.ask_keeper(target, {"op": "info"})["info"]
        current = Config.from_json(json.dumps(info["config"]))
        if os.path.realpath(settings.get("source", current.source)) == current.source:
            settings.pop("source", None)  # a link to it, perhaps; the keeper refuses another
        wanted = build(settings, current)
        if "cache_dir" in settings:
            wanted = check_cache_dirs(wanted)
            begin_caches(wanted)
        request = {"op": "restart", "config": json.loads(wanted.to_json())}
        answer = control_client.ask_keeper(target, request, control_client.RESTART_TIMEOUT_S)
    except ConnectionError as error:
        raise UserError(f"{error}: umount and mount again") from None
    if not answer.get("ok"):
        raise UserError(str(answer.get("error")), int(answer.get("exit", EXIT_FAILED)))
    for line in answer.get("warnings") or []:
        command.complain("fusecache", f"warning: {line}")
    if "hintsd" in settings and target.mount.uid == os.getuid() and not wanted.foreground:
        _have_hintsd(wanted.hintsd)


@click.command()
@click.argument("path", required=False, type=PATH)
@click.option("--lazy", "-l", is_flag=True, help="Detach now; what is open stays readable.")
@click.option("--force", is_flag=True, help="Also while hinted trainings read from it.")
@click.option(
    "--config", "config_file", type=PATH, metavar="FILE", help="TOML that names the mount point."
)
@command.json_flag
def umount(
    path: str | None, lazy: bool, force: bool, config_file: str | None, as_json: bool
) -> None:
    """End the mount. What is cached stays on SSD for the next one.

    Refused while a file or directory of it is in use, or while a training with hints runs, which
    may hold nothing open between two files. A training without hints is seen only while it holds
    something open.

    \b
    fusecache umount /data/imagenet
    fusecache umount --lazy /data/imagenet       even while programs use it
    """
    settings = read_file(config_file) if config_file is not None else {}
    place = _place(path, settings)
    target = control_client.find(place)
    if target.mountpoint not in (os.path.abspath(place), mounts.resolve(place)):
        raise UserError(
            f"{place} is inside of the mount {target.mountpoint}; to end that: "
            f"fusecache umount {target.mountpoint}",
            EXIT_USAGE,
        )
    os.chdir("/")  # our own directory may be what keeps it busy
    readers, absent = ([], "") if lazy or force else hintsd_client.readers(target)
    if readers:
        raise UserError(
            f"{target.mountpoint} is read with hints by {', '.join(readers)}; "
            "end that first, or: --force",
            EXIT_BUSY,
        )
    try:
        answer = control_client.ask_keeper(target, {"op": "umount", "lazy": lazy})
    except (ConnectionError, UserError) as error:
        if target.mount.uid != os.getuid() and os.getuid() != 0:
            raise
        answer = _umount_alone(target, lazy)
        if answer["ok"] and isinstance(error, control_client.KeeperStoppedError):
            command.complain("fusecache", f"unmounted; {error}, and so end")
    if answer.get("ok"):
        if absent:
            command.complain(
                "fusecache",
                f"warning: nobody listens at {absent}, so nobody knew whether a training with "
                "hints was reading: mount again if one fails",
            )
        if answer.get("detached"):
            line = "detached; open files are served until they are closed"
            command.complain("fusecache", line, "INFO")
        if as_json:
            detached = bool(answer.get("detached"))
            command.say_json({"mountpoint": target.mountpoint, "detached": detached})
        return
    line, code = str(answer.get("error")), int(answer.get("exit", EXIT_FAILED))
    if code == EXIT_BUSY:
        line = _busy(target, [pid for pid in answer.get("pids") or [] if isinstance(pid, int)])
    raise UserError(line, code)


def _busy(target: control_client.Target, pids: list[int]) -> str:
    """Who uses it, and what to do; fusecache mounts by their names, the last mounted first."""
    others, daemons = [], set()
    for other in reversed(control_client.find_all()):
        record = mounts.keeper_record(other.directory) if other.directory else {}
        theirs = {record.get("keeper_pid"), record.get("server_pid")}
        if other.mountpoint != target.mountpoint and theirs.intersection(pids):
            others.append(other.mountpoint)
            daemons |= theirs
    users = [f"{processes.program(pid) or 'process'} ({pid})" for pid in pids if pid not in daemons]
    if others:
        users.append(f"the fusecache mount{'s' * (len(others) > 1)} {', '.join(others)}")
    by = f" by {', '.join(users)}" if users else ""
    if others:
        return (
            f"{target.mountpoint} is in use{by}: umount {'those' if others[1:] else 'that'} first"
        )
    return f"{target.mountpoint} is in use{by}; --lazy detaches it all the same"


def _umount_alone(target: control_client.Target, lazy: bool) -> dict[str, Any]:
    """Without a keeper. A server that lives on ends by itself when the mount is gone."""
    left = None  # the runtime directory: the keeper did not live to remove it
    with contextlib.suppress(OSError):
        if target.directory is not None and target.mount.uid == os.getuid():
            left = os.open(target.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mounting.unmount(target.mountpoint, lazy)
        if left is not None and not control_client.stopped(target):
            assert target.directory is not None
            mounts.remove_runtime_directory(target.directory, left)
    except OSError as error:
        busy = "busy" in str(error)
        return {
            "ok": False,
            "error": f"{target.mountpoint}: {error.strerror or error}",
            "exit": EXIT_BUSY if busy else EXIT_FAILED,
            "pids": mounting.users_of(target.mountpoint) if busy else [],
        }
    finally:
        if left is not None:
            os.close(left)
    return {"ok": True}

"""The commands: what a person or a script calls. Parses, asks, prints; does none of the work.

A mistake is one line on stderr and an exit code: `command.run`.
`mount.fusecache` is the same package as a helper of mount(8): see `mount_helper`.
It imports nothing that mounts or serves; keeper and server import nothing from here.
Most commands are modules of their own, *_command.py, which are imported when they are called.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Final, NoReturn

import click

from fusecache import __version__
from fusecache.base import command, mounts
from fusecache.base.command import PATH, Commands
from fusecache.base.errors import (
    EXIT_BUSY,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_A_MOUNT,
    EXIT_OK,
    EXIT_USAGE,
    ConfigError,
    UserError,
)
from fusecache.base.units import format_bytes
from fusecache.config.building import build
from fusecache.config.options import parse_setting, read_options
from fusecache.config.places import check_places
from fusecache.control import control_client

_COMMANDS: Final = {
    "mount": "mount_command:mount",
    "status": "status_command:status",
    "list": "status_command:list_mounts",
    "top": "host_commands:top",
    "doctor": "host_commands:doctor",
    "metrics": "host_commands:metrics",
    "pool": "host_commands:pool",
    "probe": "probe_command:probe_device",
    "warm": "warm_command:warm",
    "evict": "evict_command:evict",
    "pin": "evict_command:pin",
    "verify": "main:verify",
    "digest": "digest_command:digest",
    "gc": "gc_command:gc",
    "trace": "trace_command:trace",
    "restart": "mount_command:restart",
    "umount": "mount_command:umount",
    "install-helpers": "main:install_helpers",
    "service": "service_command:service",
    "cached": "service_command:cached",
}

HELPER_NAMES = ("mount.fusecache", "mount.fuse.fusecache")
HELPER_DIRECTORY = "/sbin"

EXIT_CODES = f"""\b
Exit codes:
  {EXIT_OK}    done
  {EXIT_FAILED}    failed; verify: bad blocks were found; warm, evict, pin: not all that was named;
       digest: not all could be read; doctor: there is a problem
  {EXIT_USAGE}    a flag or a setting cannot be used
  {EXIT_NOT_A_MOUNT}    the path is on no fusecache mount
  {EXIT_BUSY}    busy: the mount is in use, or the mount point is a fusecache already
  {EXIT_INTERRUPTED}  interrupted with Ctrl-C"""


@click.group(
    cls=Commands,
    places={name: f"fusecache.cli.{place}" for name, place in _COMMANDS.items()},
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="fusecache")
def cli() -> None:
    """A cache mounted over a dataset directory: RAM and SSD here, the origin only once.

    \b
    fusecache mount /data/imagenet                     over the directory itself
    fusecache mount /mnt/nfs/imagenet /data/imagenet --cache-dir /ssd/cache --ssd 500G
    fusecache status /data/imagenet
    fusecache warm /data/imagenet 'train/n01*'         fetch before it is needed
    fusecache evict /data/imagenet 'train/n02*'        give their room back
    fusecache pin /data/imagenet 'val/**'              what is cached of these stays
    fusecache umount /data/imagenet

    Sizes are like 500G, 64GiB or 1048576. Each command has its own --help.
    """


# ---- verify --------------------------------------------------------------------------------


@click.command()
@click.argument("path", type=PATH)
@command.json_flag
def verify(path: str, as_json: bool) -> None:
    """Check every cached byte against its digest. Bad blocks are dropped and fetched again on use.

    \b
    fusecache verify /data/imagenet && echo all good
    """
    from fusecache.cli.files import progress

    target = control_client.find(path)
    result: dict[str, Any] = {}
    with progress("verifying") as show:
        for message in control_client.converse(target, {"op": "verify"}):
            if "progress" in message:
                done = message["progress"]
                note = f"{done['blocks_done']:,} of {done['blocks_total']:,} blocks, "
                note += f"{done['bad']:,} bad"
                show(done["bytes_done"], done.get("bytes_total"), note)
            else:
                result = message["result"]
    lines = result.get("faults") or []
    for line in lines:
        command.complain("fusecache", line)
    if result["bad"] > len(lines) > 0:
        command.complain("fusecache", f"… and {result['bad'] - len(lines):,} more")
    dropped = ", dropped; fetched again on use" if result["bad"] else ""
    if as_json:
        command.say_json(result)
    else:
        command.say(
            f"{result['blocks']:,} blocks, {format_bytes(result['bytes'])} checked, "
            f"{result['bad']:,} bad{dropped}"
        )
    if result["bad"]:
        sys.exit(EXIT_FAILED)


# ---- mount(8) ------------------------------------------------------------------------------------


@click.command("install-helpers")
@click.option("--remove", is_flag=True, help="Take them away again.")
@click.option("--directory", default=HELPER_DIRECTORY, show_default=True, type=PATH, metavar="DIR")
def install_helpers(remove: bool, directory: str) -> None:
    """Let mount(8) and /etc/fstab find fusecache (as root).

    \b
    Links mount.fusecache and mount.fuse.fusecache in /sbin to this installation. Then these work:
      mount -t fuse.fusecache /mnt/nfs/imagenet /data/imagenet -o ssd=500G
    and as a line of /etc/fstab:
      /mnt/nfs/imagenet /data/imagenet fuse.fusecache ssd=500G,_netdev 0 0
    """
    program = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), "mount.fusecache")
    if not remove and not os.access(program, os.X_OK):
        raise UserError(f"{program} does not exist: install the package with pip first")
    for name in HELPER_NAMES:
        link = os.path.join(directory, name)
        try:
            if os.path.lexists(link) and not os.path.islink(link):
                raise UserError(f"{link} is not a link of ours: left as it is")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(link)
            if not remove:
                os.symlink(program, link)
        except OSError as error:
            raise UserError(f"{link}: {error.strerror}") from None


def mount_helper() -> NoReturn:
    """Entry point of mount.fusecache: SOURCE MOUNTPOINT [-sfnvrw] [-N NS] [-t TYPE] [-o OPTIONS].

    The interface is mount(8)'s. -s, -n, -v, -r and -w change nothing here; -f only checks.
    """
    command.run("fusecache", lambda: _help_mount(sys.argv[1:]))


def _help_mount(arguments: list[str]) -> None:
    places: list[str] = []
    options: list[str] = []
    fake = False
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("-") or word == "-":
            places.append(word)
            continue
        for position, letter in enumerate(word[1:], start=1):
            if letter in "otN":
                value = word[position + 1 :] or next(rest, "")
                if letter == "o":
                    options.append(value)
                break
            if letter == "f":
                fake = True
            elif letter not in "snvrw":
                raise ConfigError(f"unknown flag -{letter}")
    if len(places) != 2:
        raise ConfigError("usage: mount.fusecache SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS]")
    settings = read_options(options)
    places[0] = places[0].removeprefix(mounts.SOURCE_PREFIX)
    for name, place in zip(("source", "mountpoint"), places, strict=True):
        settings[name] = parse_setting(name, place, name)[1]
    given = build(settings)
    if fake:
        check_places(given)
        return
    from fusecache.cli import mount_command

    if not mount_command.is_mounted(given):  # mount -a compares the source's name only
        mount_command.start(given)


# ---- entry ---------------------------------------------------------------------------------------


def main() -> NoReturn:
    command.run("fusecache", lambda: cli(prog_name="fusecache", standalone_mode=False))


if __name__ == "__main__":
    main()

"""What systemd runs: `fusecache service` (mounts; the work is done in fusecache/service/), and
`fusecache cached` (the cache service of a host; in fusecache/cached/).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from fusecache.base import command, logs
from fusecache.base.command import PATH, Commands
from fusecache.config.settings import KEEP_FREE
from fusecache.service import installing


def _sizes(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `fusecache cached` that say how much it keeps."""
    for option in (
        click.option("--keep-free", metavar="SIZE|%", help=f"Left to others. [{KEEP_FREE}]"),
        click.option("--quota", metavar="SIZE", help="What each user keeps. [a quarter of --ssd]"),
        click.option("--ssd", metavar="SIZE", help="Limit of it all, from 64M on. [what is free]"),
    ):
        command = option(command)
    return command


@click.group(cls=Commands)
def service() -> None:
    """Mounts, and the host's cache service, as services of systemd (as root).

    \b
    fusecache service install imagenet --config imagenet.toml
    systemctl enable --now fusecache@imagenet
    fusecache service uninstall imagenet
    fusecache service install-cached --ssd 2T
    """


@service.command()
@click.argument("name")
@click.option(
    "--config",
    "config_file",
    type=PATH,
    metavar="FILE",
    help="Copied to /etc/fusecache/NAME.toml. [it is there]",
)
def install(name: str, config_file: str | None) -> None:
    """Write the units of systemd for the mount NAME, and say what was written.

    It will start after the file systems of its source and its cache are mounted.
    As often as you like: after an upgrade, or when the paths in the FILE have changed.
    """
    for line in installing.install(name, config_file, installing.Places()):
        command.say(line)
    command.say(f"installed; to start it, now and at boot: systemctl enable --now fusecache@{name}")


@service.command()
@click.argument("name")
def uninstall(name: str) -> None:
    """End the mount NAME and remove its units. Its settings and its cache stay."""
    for line in installing.uninstall(name, installing.Places()):
        command.say(line)


@service.command("install-cached")
@click.option(
    "--dir",
    "directory",
    type=PATH,
    metavar="DIR",
    help="Made if it is not there. [/var/cache/fusecache-cached]",
)
@_sizes
def install_cached(
    directory: str | None, ssd: str | None, quota: str | None, keep_free: str | None
) -> None:
    """Write the units of the host's cache service (`fusecache cached`), make its user
    fusecache-cached, and say what was done.

    As often as you like. Options take the place of all that were given before; without any, those
    stay.
    """
    given = {"--ssd": ssd, "--quota": quota, "--keep-free": keep_free}
    told = {option: text for option, text in given.items() if text is not None}
    for line in installing.install_cached(directory, told, installing.Places()):
        command.say(line)
    command.say(
        "installed; to start it, now and at boot: systemctl enable --now fusecache-cached "
        "(if it runs: systemctl restart fusecache-cached)"
    )


@service.command("uninstall-cached")
def uninstall_cached() -> None:
    """End the host's cache service and remove its units. Its directory and its user stay."""
    for line in installing.uninstall_cached(installing.Places()):
        command.say(line)


@click.command()
@click.option(
    "--dir",
    "directory",
    default="/var/cache/fusecache-cached",
    show_default=True,
    type=PATH,
    metavar="DIR",
    help="Its own, on an SSD.",
)
@click.option(
    "--socket",
    "path",
    default="/run/fusecache-cached/socket",
    show_default=True,
    type=PATH,
    metavar="PATH",
)
@_sizes
@click.option("--log-level", type=click.Choice(logs.LEVELS), default="info", show_default=True)
@click.option("--log-format", type=click.Choice(logs.FORMATS), default="text", show_default=True)
def cached(
    directory: str,
    path: str,
    ssd: str | None,
    quota: str | None,
    keep_free: str | None,
    log_level: str,
    log_format: str,
) -> None:
    """Be the cache service of this host, in the foreground: one copy on SSD of what its users read.

    \b
    fusecache cached --ssd 2T
    fusecache mount /nfs/imagenet ~/imagenet --cache /run/fusecache-cached/socket

    For users who cannot have one mount for all (--allow-other): root may not read the origin, or
    each has a copy of the dataset. What a dataset's manifest lists (fusecache digest --digest
    blake3) is read at the origin once a host, and kept once. A user gets what that user's own
    manifest lists, and sees nothing else (SECURITY.md).

    It needs no rights: run it as a user of its own, fusecache-cached. SIGTERM ends it; mounts go on
    with their own caches.
    """
    from fusecache.cached import process

    logs.begin(log_level, log_format)
    process.run(directory, path, ssd, quota, keep_free or KEEP_FREE)

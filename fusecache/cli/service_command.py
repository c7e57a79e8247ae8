"""`fusecache service`: mounts as services of systemd. The work is done in fusecache/service/."""

from __future__ import annotations

import click

from fusecache.base import command
from fusecache.base.command import PATH, Commands
from fusecache.service import installing


@click.group(cls=Commands)
def service() -> None:
    """Mounts as services of systemd (as root).

    \b
    fusecache service install imagenet --config imagenet.toml
    systemctl enable --now fusecache@imagenet
    fusecache service uninstall imagenet
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

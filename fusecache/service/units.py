"""The units as they are installed: `units/`, with the paths of this installation, and drop-ins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from typing import Final

NAMES: Final = ("fusecache@.service", "hintsd.service", "hintsd.socket")
"""What mounts need."""
CACHED: Final = ("fusecache-cached.service", "fusecache-cached.socket")
"""The cache service of the host."""
INSTANCE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Names that systemd takes as they are (systemd-escape(1))."""


def rendered(directory: str, names: Sequence[str]) -> dict[str, str]:
    """Text of each unit, by name. `directory` holds the commands `fusecache` and `hintsd`."""
    found = {}
    for name in names:
        text = resources.files(__package__).joinpath("units", name).read_text(encoding="utf-8")
        for command in ("fusecache", "hintsd"):
            text = text.replace(f"@{command}@", quoted(f"{directory}/{command}"))
        found[name] = text
    return found


def drop_in(paths: Sequence[str], *, has_pool: bool) -> str:
    """Of one mount: it is started after the file systems that these paths lie on. With a pool it
    may use the network.
    """
    words = " ".join(quoted(path) for path in dict.fromkeys(paths))
    text = f"# Written by `fusecache service install`.\n[Unit]\nRequiresMountsFor={words}\n"
    if has_pool:
        text += "[Service]\nRestrictAddressFamilies=AF_INET AF_INET6 AF_NETLINK\n"
    return text


def cached_drop_in(directory: str | None, sizes: Sequence[str]) -> str:
    """Of the cache service: where it keeps what it keeps (None: the unit's own place), and options
    of one word each.
    """
    words = [quoted(f"SIZES={' '.join(sizes)}")]
    unit = place = ""
    if directory is not None:
        words.append(quoted(f"DIR={directory}"))
        unit = f"[Unit]\nRequiresMountsFor={quoted(directory)}\n"
        place = f"ReadWritePaths={quoted(directory)}\n"
    head = "# Written by `fusecache service install-cached`.\n"
    return f"{head}{unit}[Service]\nEnvironment={' '.join(words)}\n{place}"


def quoted(path: str) -> str:
    """One word of a unit file, whatever is in it (systemd.syntax(7), systemd.unit(5))."""
    text = path.replace("%", "%%")
    if re.fullmatch(r"[\w./%@:,+-]+", text, re.ASCII):
        return text
    escaped = "".join(
        f"\\x{byte:02x}" if byte < 0x20 or chr(byte) in "\"'\\" or byte >= 0x7F else chr(byte)
        for byte in text.encode("utf-8", "surrogateescape")
    )
    return f'"{escaped}"'

"""What names a pool, and how it is entered."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from typing import Final

from fusecache.base import trust

PORT: Final = 6379
PEERS_PORT: Final = 7411
SERVERS_MOST: Final = 64
EXAMPLE: Final = "valkeys://pool-1:6379,pool-2:6379/imagenet"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HOST: Final = r"\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*"
_HOST_MOST: Final = 253
_PASSWORD_BYTES_MOST: Final = 512


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """`servers`: (host, port) of each, in the order of the URL; `dataset`: the name that all hosts
    have for what they have mounted.
    """

    is_tls: bool
    servers: tuple[tuple[str, str], ...]
    dataset: str
    has_peers: bool = False
    """The servers are hosts that mount the dataset. Else they are an engine's."""

    @property
    def prefix(self) -> str:
        """Of all keys."""
        return f"fusecache:{self.dataset}:"


def parse_address(url: str) -> PoolAddress:
    """ValueError: one line."""
    if "@" in url:
        raise ValueError("no user or password in the address: --pool-user, --pool-password-file")
    found = re.fullmatch(r"(valkeys?|peers?)://([^/?#]*)/?([^?#]*)", url)
    if not found:
        raise ValueError(f'{url!r} is no address of a pool; write for example "{EXAMPLE}"')
    scheme, places, dataset = found.groups()
    if not _NAME.fullmatch(dataset):
        raise ValueError(
            f"{url!r} ends with no name of the dataset (A-Z a-z 0-9 . _ -, at most 64); "
            f'write for example "{EXAMPLE}"'
        )
    has_peers = scheme.startswith("peer")
    port = PEERS_PORT if has_peers else PORT
    servers = tuple(dict.fromkeys(parse_server(text, port) for text in places.split(",")))
    if len(servers) > SERVERS_MOST:
        raise ValueError(f"{len(servers)} servers: at most {SERVERS_MOST}")
    return PoolAddress(scheme.endswith("s"), servers, dataset, has_peers)


def parse_server(text: str, port: int) -> tuple[str, str]:
    """Host and port; `port`: where none is said. ValueError: one line."""
    found = re.fullmatch(rf"({_HOST})(?::(\d{{1,5}}))?", text)
    host, port_text = found.groups(str(port)) if found else ("", "0")
    if not 0 < int(port_text) < 65536 or len(host) > _HOST_MOST:
        raise ValueError(f'{text!r} is no server; write HOST:PORT, for example "pool-1:{port}"')
    return host.strip("[]").lower(), str(int(port_text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Paths are absolute; None: not given."""

    user: str | None = None
    password_file: str | None = None
    ca: str | None = None
    certificate: str | None = None
    private_key: str | None = None

    def check(self, address: PoolAddress, is_insecure: bool) -> None:
        """ValueError: one line that names the option."""
        plain = "peer" if address.has_peers else "valkey"
        if not address.is_tls and not is_insecure:
            raise ValueError(
                f"--pool {plain}://: bytes and password would cross the network in the clear; "
                f"use {plain}s://, or say --pool-insecure"
            )
        if address.is_tls and self.ca is None:
            raise ValueError(
                f"--pool {plain}s:// needs --pool-ca FILE: whose certificates to trust"
            )
        if not address.is_tls and (self.ca or self.certificate or self.private_key):
            raise ValueError(f"--pool {plain}:// uses no certificates: write {plain}s://")
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("--pool-cert and --pool-key go together")
        if address.has_peers:
            self._check_peers(address)
        if self.user is not None and self.password_file is None:
            raise ValueError("--pool-user needs --pool-password-file FILE")

    def _check_peers(self, address: PoolAddress) -> None:
        if address.is_tls and self.certificate is None:
            raise ValueError("--pool peers:// needs --pool-cert and --pool-key: hosts ask for them")
        if self.user is not None or self.password_file is not None:
            raise ValueError("--pool peers:// has no users: certificates let hosts in")

    def open_all(self) -> None:
        """ValueError: one of the files cannot be read; one line that names the option."""
        named = (
            ("--pool-ca", self.ca), ("--pool-cert", self.certificate),
            ("--pool-key", self.private_key),
        )  # fmt: skip
        for option, path in named:
            if path is not None:
                try:
                    os.close(_open(path, os.O_RDONLY))
                except OSError as error:
                    raise ValueError(f"{option} {path}: {error.strerror}") from None

    def password(self) -> str | None:
        """The file's one line. ValueError: one line that names the option."""
        path = self.password_file
        if path is None:
            return None
        try:
            return self._read_password(path)
        except OSError as error:
            line = f"--pool-password-file {path}: {error.strerror}"
            raise ValueError(line) from None
        except ValueError as error:
            raise ValueError(f"--pool-password-file {error}") from None

    @staticmethod
    def _read_password(path: str) -> str:
        with open(path, "rb", opener=_open) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or not trust.is_ours(found.st_uid):
                raise ValueError(f"{path}: not a file of yours: whoever owns it knows the password")
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise ValueError(f"{path}: others may read or write it: chmod 600 {path}")
            text = file.read(_PASSWORD_BYTES_MOST + 1)
        lines = text.split(b"\n")
        if len(text) > _PASSWORD_BYTES_MOST or any(lines[1:]) or not lines[0] or b"\0" in text:
            raise ValueError(f"{path}: must hold the password alone, in one line")
        try:
            return lines[0].removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            raise ValueError(f"{path}: must hold the password in UTF-8") from None


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO must not make anybody wait

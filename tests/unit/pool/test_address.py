"""The URL of a pool, and who may enter it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from fusecache.pool.address import Credentials, PoolAddress, parse_address

PLAIN = PoolAddress(False, (("h", "6379"),), "d")
TLS = PoolAddress(True, (("h", "6379"),), "d")
PEER = PoolAddress(False, (("h", "7411"),), "d", has_peers=True)
PEERS = PoolAddress(True, (("h", "7411"),), "d", has_peers=True)
WHOLE = Credentials(ca="/ca", certificate="/c", private_key="/k")


@pytest.mark.parametrize(
    ("url", "is_tls", "servers", "dataset"),
    [
        ("valkey://h/d", False, [("h", "6379")], "d"),
        ("valkeys://h:1/imagenet-1k_v2.0", True, [("h", "1")], "imagenet-1k_v2.0"),
        ("valkeys://h:65535/d", True, [("h", "65535")], "d"),
        ("valkeys://B:7,a:0008,b:7/d", True, [("b", "7"), ("a", "8")], "d"),
        ("valkeys://10.0.0.1,[fe80::1],[::1]:7/d", True,
         [("10.0.0.1", "6379"), ("fe80::1", "6379"), ("::1", "7")], "d"),
        (f"valkey://{'a' * 63}.example.org/{'n' * 64}", False,
         [(f"{'a' * 63}.example.org", "6379")], "n" * 64),
        (f"valkey://{','.join(f'h{n}' for n in range(64))}/d", False,
         [(f"h{n}", "6379") for n in range(64)], "d"),
    ],
)  # fmt: skip
def test_addresses(url: str, is_tls: bool, servers: list[tuple[str, str]], dataset: str) -> None:
    assert parse_address(url) == PoolAddress(is_tls, tuple(servers), dataset)


@pytest.mark.parametrize(("scheme", "is_tls"), [("peers", True), ("peer", False)])
def test_addresses_of_peers(scheme: str, is_tls: bool) -> None:
    found = parse_address(f"{scheme}://a,b:7/d")
    assert found == PoolAddress(is_tls, (("a", "7411"), ("b", "7")), "d", has_peers=True)


BAD_URLS = {
    "peer://h": "no name of the dataset",
    "peerss://h/d": "is no address",
    f"peers://{','.join(f'h{n}' for n in range(65))}/d": "65 servers: at most 64",
    "peers://me:secret@h/d": "no user or password",
    "": "is no address",
    "h:6379/d": "is no address",
    "redis://h/d": "is no address",
    "VALKEY://h/d": "is no address",
    "valkey:/h/d": "is no address",
    "valkey://h/d?x=1": "is no address",
    "valkey://h/d#x": "is no address",
    "valkey://h": "no name of the dataset",
    "valkey://h/": "no name of the dataset",
    "valkey://h/a/b": "no name of the dataset",
    "valkey://h/a b": "no name of the dataset",
    "valkey://h/d\n": "no name of the dataset",
    "valkey://h/{d}": "no name of the dataset",
    f"valkey://h/{'n' * 65}": "no name of the dataset",
    "valkey:///d": "is no server",
    "valkey://h,/d": "is no server",
    "valkey://h:0/d": "is no server",
    "valkey://h:65536/d": "is no server",
    "valkey://h:123456/d": "is no server",
    "valkey://h:/d": "is no server",
    "valkey://h:x/d": "is no server",
    "valkey://::1/d": "is no server",
    "valkey://h i/d": "is no server",
    "valkey://[h]/d": "is no server",
    "valkey://a..b/d": "is no server",
    "valkey://.a/d": "is no server",
    f"valkey://{'a' * 64}/d": "is no server",
    f"valkey://{'a.' * 127}aaaa/d": "is no server",
    f"valkey://{','.join(f'h{n}' for n in range(65))}/d": "65 servers: at most 64",
    "valkeys://me:secret@h/d": "no user or password",
    "valkeys://secret@h/d": "no user or password",
    "redis://me:secret@h/d": "no user or password",
    "valkeys://me:secret@h": "no user or password",
    "valkeys://me:secret#@h/d": "no user or password",
}


@pytest.mark.parametrize("url", BAD_URLS)
def test_what_is_no_address_is_told_in_one_line(url: str) -> None:
    with pytest.raises(ValueError, match=BAD_URLS[url]) as told:
        parse_address(url)
    assert "\n" not in str(told.value)
    assert "secret" not in str(told.value)


@pytest.mark.claim("S15")
@pytest.mark.parametrize(
    ("address", "credentials", "is_insecure", "told"),
    [
        (PLAIN, Credentials(), False, "--pool-insecure"),
        (PLAIN, Credentials(ca="/ca"), True, "write valkeys://"),
        (PLAIN, Credentials(certificate="/c", private_key="/k"), True, "write valkeys://"),
        (TLS, Credentials(), False, "--pool-ca"),
        (TLS, Credentials(), True, "--pool-ca"),
        (TLS, Credentials(ca="/ca", certificate="/c"), False, "--pool-cert and --pool-key"),
        (TLS, Credentials(ca="/ca", private_key="/k"), False, "--pool-cert and --pool-key"),
        (TLS, Credentials(ca="/ca", user="me"), False, "--pool-password-file"),
        (PEER, Credentials(), False, "peer://.*use peers://, or say --pool-insecure"),
        (PEER, WHOLE, True, "write peers://"),
        (PEERS, Credentials(), True, "peers:// needs --pool-ca"),
        (PEERS, Credentials(ca="/ca"), False, "needs --pool-cert and --pool-key"),
        (PEERS, dataclasses.replace(WHOLE, user="me"), False, "has no users"),
        (PEERS, dataclasses.replace(WHOLE, password_file="/p"), False, "has no users"),
    ],
)
def test_what_does_not_go_together(
    address: PoolAddress, credentials: Credentials, is_insecure: bool, told: str
) -> None:
    with pytest.raises(ValueError, match=told) as error:
        credentials.check(address, is_insecure)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("address", "credentials", "is_insecure"),
    [
        (PLAIN, Credentials(), True),
        (PLAIN, Credentials(user="me", password_file="/p"), True),
        (PLAIN, Credentials(password_file="/p"), True),
        (TLS, Credentials(ca="/ca"), False),
        (TLS, Credentials(ca="/ca", certificate="/c", private_key="/k"), False),
    ],
)
def test_what_goes_together(
    address: PoolAddress, credentials: Credentials, is_insecure: bool
) -> None:
    credentials.check(address, is_insecure)
    assert credentials.password is not None


# ---- the file of the password --------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.touch(0o600)
    return path


@pytest.mark.parametrize(
    ("content", "password"),
    [(b"a", "a"), (b"a b#\n", "a b#"), ("ü\r\n".encode(), "ü"), (b"x" * 512, "x" * 512)],
)
def test_passwords(file: Path, content: bytes, password: str) -> None:
    file.write_bytes(content)
    assert Credentials(password_file=str(file)).password() == password


@pytest.mark.parametrize("content", [b"", b"\n", b"a\nb\n", b"\na", b"a\0b\n", b"x" * 513])
def test_what_is_no_password(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ValueError, match="the password alone, in one line"):
        Credentials(password_file=str(file)).password()


def test_the_file_is_ours_alone(file: Path, tmp_path: Path) -> None:
    file.write_bytes(b"a")
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(ValueError, match="chmod 600"):
            Credentials(password_file=str(file)).password()
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("fifo", "."):
        with pytest.raises(ValueError, match=r"(?s)--pool-password-file .*(not a file|Is a dir)"):
            Credentials(password_file=str(tmp_path / name)).password()
    with pytest.raises(ValueError, match=r"--pool-password-file .*none: No such file"):
        Credentials(password_file=str(tmp_path / "none")).password()
    assert Credentials().password() is None


def test_a_file_that_cannot_be_read_is_named_with_its_option(tmp_path: Path) -> None:
    there, none = tmp_path / "there", tmp_path / "none"
    there.touch()
    Credentials(ca=str(there), certificate=str(there), private_key=str(there)).open_all()
    for option, given in (
        ("--pool-ca", Credentials(ca=str(none))),
        ("--pool-cert", Credentials(certificate=str(none))),
        ("--pool-key", Credentials(private_key=str(none))),
    ):
        with pytest.raises(ValueError, match=rf"{option} .*none: No such file"):
            given.open_all()

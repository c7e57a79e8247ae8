"""The pool as docs/POOL.md has it set up: deploy/pool, TLS, one user a dataset.

The origin is slow to open: a server has as long to answer as a few of its reads take, and this
machine may be busy.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from configparser import RawConfigParser
from pathlib import Path

import pytest

from fusecache.pool.address import Credentials, parse_address
from fusecache.pool.engine import Engine, Unreachable
from tests.support.faulty_origin import SETTLED_S, Fault, FaultyOrigin
from tests.support.mounted import ROOT, Mount, digest, eventually

DEPLOY = ROOT / "deploy/pool"
FILES, FILE_BYTES = 12, 30_000
SPARE = "spare"
"""A file beside them, which is read by itself."""
DELAY_S = 0.25
TESTS = 8  # that mount, at most
SIZES = ("--ram", "16M", "--ssd", "64M", "--pool-min-age", "0.1")


def certify(folder: Path, dataset: str, *hosts: str) -> None:
    subprocess.run(
        [DEPLOY / "certificates", folder, dataset, *hosts], check=True, capture_output=True
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By `certificates`: of localhost, and of a host that is not there."""
    folder = tmp_path_factory.mktemp("pool") / "made"
    certify(folder, "photos", "localhost", "elsewhere")
    return folder


def words_of_unit(folder: Path, config: Path) -> list[str]:
    """What the unit would start, with `folder` as its credentials."""
    unit = RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "fusecache-engine.service")
    text = unit["Service"]["ExecStart"].replace("\\\n", " ").replace("%d/engine.conf", str(config))
    return shlex.split(text.replace("%d", str(folder)))


def begin(folder: Path, name: str, work: Path) -> tuple[subprocess.Popen[bytes], int]:
    """An engine that runs as the unit's, with the certificate of the host `name`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = work / f"{name}.conf"
    text = (DEPLOY / "engine.conf").read_text().replace("tls-port 6379", f"tls-port {port}")
    config.write_text(text.replace("maxmemory 64gb", "maxmemory 64mb"))
    with (work / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            words_of_unit(folder / name, config), cwd=work, stdout=log, stderr=log
        )
    try:
        eventually(lambda: is_open(port) or process.poll() is not None)
        assert process.poll() is None, (work / f"{name}.log").read_text()
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process, port


def is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def ports(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Of an engine with a certificate of localhost's, and of one with another host's."""
    work = tmp_path_factory.mktemp("engines")
    processes, found = [], {}
    try:
        for name in ("localhost", "elsewhere"):
            process, found[name] = begin(made, name, work)
            processes.append(process)
        yield found
    finally:
        for process in processes:
            process.kill()
            process.wait()


def options(made: Path, port: int, dataset: str = "photos") -> list[str]:
    host = made / "localhost"
    return [
        *("--pool", f"valkeys://localhost:{port}/{dataset}", "--pool-ca", str(host / "ca.pem")),
        *("--pool-cert", str(host / "host.pem"), "--pool-key", str(host / "host.key")),
        *("--pool-user", "photos", "--pool-password-file", str(host / "photos.password")),
    ]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Path]]:
    """One for each test, seen through the slow origin."""
    base = tmp_path_factory.mktemp("origin")
    (base / "origin").mkdir()
    for test in range(TESTS):
        (base / f"backing/{test}").mkdir(parents=True)
        for number in range(FILES):
            (base / f"backing/{test}/{number:02}").write_bytes(os.urandom(FILE_BYTES))
        (base / f"backing/{test}/{SPARE}").write_bytes(b"x")
    made_s = time.time()
    with FaultyOrigin(base / "backing", base / "origin", base / "socket") as faulty:
        faulty.add(Fault("open", delay_s=DELAY_S))
        time.sleep(max(0.0, made_s + SETTLED_S - time.time()))
        yield (base / f"origin/{test}" for test in range(TESTS))


@pytest.fixture
def source(datasets: Iterator[Path]) -> Path:
    return next(datasets)


Mounted = Callable[..., Mount]


@pytest.fixture
def mounted(tmp_path: Path, source: Path) -> Iterator[Mounted]:
    mounts: list[Mount] = []

    def make(*flags: str) -> Mount:
        number = len(mounts)
        place = tmp_path / f"mnt{number}"
        place.mkdir()
        mounts.append(Mount(source, place, tmp_path / f"cache{number}", *SIZES, *flags))
        return mounts[-1].start()

    try:
        yield make
    finally:
        for mount in mounts:
            mount.destroy()


def truth(source: Path) -> dict[str, str]:
    return read_all(source.parents[1] / "backing" / source.name)


def read_all(directory: Path) -> dict[str, str]:
    """Four at a time."""
    names = sorted(set(os.listdir(directory)) - {SPARE})
    with ThreadPoolExecutor(4) as threads:
        return dict(
            zip(names, threads.map(digest, (directory / name for name in names)), strict=True)
        )


def pool(mount: Mount, key: str) -> int:
    found: int = mount.value("pool", key)
    return found


def test_certificates_are_strict_enough_for_later_pythons(made: Path) -> None:
    """3.13 has ssl look at them as closely as this does."""
    command = ["openssl", "verify", "-x509_strict", "-CAfile", str(made / "ca.pem")]
    subprocess.run([*command, str(made / "localhost/host.pem")], check=True, capture_output=True)


@pytest.mark.claim("R9")
def test_what_one_host_has_read_the_next_one_needs_not(
    made: Path, ports: dict[str, int], source: Path, mounted: Mounted
) -> None:
    first = mounted(*options(made, ports["localhost"]))
    assert read_all(first.path) == truth(source)
    eventually(lambda: pool(first, "written") == FILES)
    second = mounted(*options(made, ports["localhost"]))
    (second.path / SPARE).read_bytes()  # the origin's time, by which the server's is bounded
    assert read_all(second.path) == truth(source)
    late = pool(second, "failures") + pool(second, "skipped")
    assert late <= FILES / 2
    assert pool(second, "files") >= FILES - late
    assert second.value("origin", "files") <= 1 + late
    said = second.run("pool", "status", second.path)
    assert (said.returncode, said.stderr) == (0, "")
    eventually(lambda: second.run("pool", "status", second.path).stdout.count("mnt") == 2)


@pytest.mark.claim("S12")
def test_a_server_of_another_name_learns_nothing(
    made: Path, ports: dict[str, int], source: Path, mounted: Mounted
) -> None:
    mount = mounted(*options(made, ports["elsewhere"]))
    assert read_all(mount.path) == truth(source)
    assert pool(mount, "files") == pool(mount, "written") == 0
    assert "certificate" in mount.value("pool", "servers")[0]["why"]
    said = mount.run("pool", "status", mount.path)
    assert said.returncode == 1
    assert "certificate" in said.stderr


@pytest.mark.claim("S12")
def test_a_server_of_another_ca_learns_nothing(
    made: Path, ports: dict[str, int], source: Path, mounted: Mounted, tmp_path: Path
) -> None:
    certify(tmp_path / "other", "photos", "localhost")
    given = options(made, ports["localhost"])
    given[given.index("--pool-ca") + 1] = str(tmp_path / "other/ca.pem")
    mount = mounted(*given)
    assert read_all(mount.path) == truth(source)
    assert pool(mount, "files") == pool(mount, "written") == 0


@pytest.mark.claim("S12")
def test_whom_the_system_trusts_is_not_trusted(
    made: Path, ports: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify(tmp_path / "other", "photos", "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(made / "ca.pem"))
    host = made / "localhost"
    address = parse_address(f"valkeys://localhost:{ports['localhost']}/photos")
    for ca, is_theirs in ((made / "ca.pem", True), (tmp_path / "other/ca.pem", False)):
        credentials = Credentials(
            user="photos", password_file=str(host / "photos.password"), ca=str(ca),
            certificate=str(host / "host.pem"), private_key=str(host / "host.key"),
        )  # fmt: skip
        engine = Engine(address, credentials, credentials.password())
        assert engine.answers(address.servers[0]) is is_theirs


def test_two_datasets_of_one_pool(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    certify(folder, "photos", "localhost", "elsewhere")
    before = (folder / "photos.password").read_text(), (folder / "ca.pem").read_text()
    certify(folder, "maps", "localhost")
    assert ((folder / "photos.password").read_text(), (folder / "ca.pem").read_text()) == before
    for host in ("localhost", "elsewhere"):
        names = {path.name for path in (folder / host).iterdir()}
        assert names >= {"photos.password", "maps.password", "users.acl", "host.key", "ca.pem"}
        users = (folder / host / "users.acl").read_text()
        assert "user photos on #" in users
        assert "user maps on #" in users
    refused = subprocess.run(
        [DEPLOY / "certificates", folder, "maps", "x" * 70], capture_output=True, text=True
    )
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


@pytest.mark.claim("S12")
def test_no_password_in_the_clear(made: Path, tmp_path: Path) -> None:
    heard = b""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        address = parse_address(f"valkeys://localhost:{server.getsockname()[1]}/photos")
        host = made / "localhost"
        credentials = Credentials(
            user="photos", password_file=str(host / "photos.password"), ca=str(host / "ca.pem")
        )
        password = credentials.password()
        with pytest.raises(Unreachable):
            Engine(address, credentials, password).figures(address.servers[0])
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10)
            while more := connection.recv(65536):
                heard += more
    assert heard.startswith(b"\x16\x03")  # a handshake
    assert password is not None
    assert password.encode() not in heard


@pytest.mark.claim("S13")
def test_a_password_that_others_may_read(made: Path, mounted: Mounted, tmp_path: Path) -> None:
    file = tmp_path / "password"
    shutil.copy(made / "localhost/photos.password", file)
    given = options(made, 1)
    given[given.index("--pool-password-file") + 1] = str(file)
    file.chmod(0o640)
    with pytest.raises(AssertionError, match="others may read or write it: chmod 600"):
        mounted(*given)
    file.chmod(0o600)
    os.chown(file, 1234, 1234)
    with pytest.raises(AssertionError, match="not a file of yours"):
        mounted(*given)


@pytest.mark.claim("S13")
def test_the_password_stands_nowhere(made: Path, ports: dict[str, int], mounted: Mounted) -> None:
    mount = mounted(*options(made, ports["localhost"]))
    read_all(mount.path)
    password = (made / "localhost/photos.password").read_text().strip()
    for pid in (mount.keeper_pid, mount.server_pid()):
        assert password.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert password.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert password not in mount.log()
    assert password not in mount.run("status", "--json", mount.path).stdout


@pytest.mark.claim("S14")
def test_a_user_has_one_datasets_keys(made: Path, ports: dict[str, int]) -> None:
    host = made / "localhost"
    address = parse_address(f"valkeys://localhost:{ports['localhost']}/photos")
    credentials = Credentials(
        user="photos", password_file=str(host / "photos.password"), ca=str(host / "ca.pem"),
        certificate=str(host / "host.pem"), private_key=str(host / "host.key"),
    )  # fmt: skip
    engine, server = Engine(address, credentials, credentials.password()), address.servers[0]
    for command in (
        ("GET", "fusecache:other:1"), ("SET", "fusecache:other:1", "x"), ("FLUSHALL",),
        ("CONFIG", "SET", "maxmemory", "0"), ("KEYS", "*"), ("SHUTDOWN",), ("ACL", "LIST"),
    ):  # fmt: skip
        with pytest.raises(Unreachable, match=r"(?i)noperm|no permissions"):
            engine._ask(server, *command, read=str)
    assert engine._ask(server, "SET", "fusecache:photos:1", "x", read=bool)


@pytest.mark.claim("F10")
def test_an_engine_that_is_killed(
    made: Path, source: Path, mounted: Mounted, tmp_path: Path
) -> None:
    process, port = begin(made, "localhost", tmp_path)
    try:
        mount = mounted(*options(made, port))
        right = truth(source)
        names = sorted(right)
        for name in names[:6]:
            assert digest(mount.path / name) == right[name]
        eventually(lambda: pool(mount, "written") >= 1)
        process.kill()
        process.wait()
        for name in names[6:]:
            assert digest(mount.path / name) == right[name]
        assert mount.value("origin", "errors") == 0
        assert mount.value("pool", "servers")[0]["is_left_alone"]
    finally:
        process.kill()
        process.wait()

"""An engine on a host: valkey-server or redis-server, a child of this process.

It keeps nothing on disk. Its user, password and certificate are the cluster's own, made for it.
"""

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PORT = 6379
USER, ACL = "fusecache", "~* &* +@all"
OWNER = "cluster"  # whoever made the engine: `Engine.ask`
_START_S = 10.0
_DAYS = 2


@dataclass(frozen=True)
class Access:
    """Who may ask the engines of a cluster, and how."""

    directory: Path
    has_tls: bool
    acl: str  # of USER; "": anybody may do all
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    owner_password: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @property
    def user(self) -> str:
        """Empty: nobody needs a name."""
        return USER if self.acl else ""

    @property
    def password_file(self) -> Path:
        return self.directory / "password"

    def certificate(self, name: str) -> tuple[Path, Path]:
        """Certificate and key: of a host by its address, "client", or "ca"."""
        return self.directory / f"{name}.crt", self.directory / f"{name}.key"


def make_access(directory: Path, addresses: Sequence[str], *, has_tls: bool, acl: str) -> Access:
    """In an empty directory, which is made. RuntimeError: openssl failed."""
    directory.mkdir(mode=0o700)
    access = Access(directory, has_tls, acl)
    access.password_file.touch(0o600)
    access.password_file.write_text(f"{access.password}\n")
    if has_tls:
        _certify(access, "ca", "CN=tools/cluster")
        for address in addresses:
            _certify(access, address, f"CN={address}", f"subjectAltName=IP:{address}")
        _certify(access, "client", "CN=client")
    return access


def _certify(access: Access, name: str, subject: str, more: str = "") -> None:
    certificate, key = access.certificate(name)
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
    command += ["ec_paramgen_curve:prime256v1", "-noenc", "-days", str(_DAYS)]
    command += ["-subj", f"/{subject.replace('/', ' ')}", "-out", str(certificate)]
    command += ["-keyout", str(key)]
    if name == "ca":
        command += ["-addext", "keyUsage=critical,keyCertSign"]  # Python 3.13 wants it
    else:
        signer, signing_key = access.certificate("ca")
        command += ["-CA", str(signer), "-CAkey", str(signing_key)]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    if more:
        command += ["-addext", more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl: {done.stderr.strip()}")


class Engine:
    """Not started yet. What is sent to its port meets `access`; `ask` is for whoever made it."""

    def __init__(
        self,
        directory: Path,
        address: str,
        access: Access,
        memory_bytes: int,
        prefix: Sequence[str],
        options: Sequence[str] = (),
    ) -> None:
        """`prefix`: what it is run by, in its host's network. `options`: of its command line, as
        ("--io-threads", "2"). RuntimeError: there is no engine here.
        """
        self.address = address
        self._server, self._client = _programs()
        self._directory = directory
        self._access = access
        self._prefix = prefix
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(mode=0o700)
        lines = [f"bind {address}", "protected-mode no", "daemonize no"]
        lines += [f"dir {directory}", f"unixsocket {self._socket}", 'save ""', "appendonly no"]
        lines += [f"maxmemory {memory_bytes}", "maxmemory-policy allkeys-lru"]
        if access.has_tls:
            certificate, key = access.certificate(address)
            lines += ["port 0", f"tls-port {PORT}", "tls-auth-clients optional"]
            lines += [f"tls-cert-file {certificate}", f"tls-key-file {key}"]
            lines += [f"tls-ca-cert-file {access.certificate('ca')[0]}"]
        else:
            lines += [f"port {PORT}"]
        if access.acl:
            lines += ["user default off", f"user {USER} on >{access.password} {access.acl}"]
            lines += [f"user {OWNER} on >{access.owner_password} ~* &* +@all"]
        self._config.touch(0o600)
        self._config.write_text("".join(f"{line}\n" for line in lines))

    @property
    def _config(self) -> Path:
        return self._directory / "engine.conf"

    @property
    def _socket(self) -> Path:
        return self._directory / "engine.sock"

    @property
    def log(self) -> Path:
        return self._directory / "engine.log"

    @property
    def is_running(self) -> bool:
        """Stopped or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """RuntimeError: it does not run."""
        if self._process is None or not self.is_running:
            raise RuntimeError(f"the engine at {self.address} does not run (see {self.log})")
        return self._process.pid

    def start(self) -> None:
        """Until it answers; it is empty. RuntimeError: it does not, and what it said last."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, self._server, str(self._config), *self._options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = self.log.read_text(errors="replace").strip().splitlines()
                raise RuntimeError(f"{self._server} did not start: {said[-1] if said else '?'}")
            time.sleep(0.02)

    def answers(self, timeout_s: float = 1.0) -> bool:
        """By its own socket, whatever its link does."""
        try:
            return self.ask("PING", timeout_s=timeout_s) == "PONG"
        except (RuntimeError, subprocess.TimeoutExpired):
            return False

    def ask(self, *words: str, timeout_s: float = 10.0) -> str:
        """The answer to a command, as its client prints it: on this machine, with all rights.
        RuntimeError: it refuses. TimeoutExpired: none came.
        """
        command = [self._client, "-s", str(self._socket)]
        return self._ask(command, OWNER, self._access.owner_password, words, timeout_s)

    def ask_from(self, prefix: Sequence[str], *words: str, timeout_s: float = 10.0) -> str:
        """The same over the network, as `access` has it, from the host that `prefix` enters."""
        command = [*prefix, self._client, "-h", self.address, "-p", str(PORT)]
        if self._access.has_tls:
            command += ["--tls", "--cacert", str(self._access.certificate("ca")[0])]
        return self._ask(command, USER, self._access.password, words, timeout_s)

    def _ask(
        self, command: list[str], user: str, password: str, words: Sequence[str], timeout_s: float
    ) -> str:
        who, environment = [], None
        if self._access.acl:
            who = ["--user", user, "--no-auth-warning"]
            environment = {**os.environ, "REDISCLI_AUTH": password}
        done = subprocess.run(
            [*command, *who, "-e", *words],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{words[0]}: {(done.stdout + done.stderr).strip()}")
        return done.stdout.strip()

    def kill(self) -> None:
        """SIGKILL: it is gone, with all it held."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def restart(self) -> None:
        """As after a crash."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """SIGSTOP: it takes connections, and says nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def _programs() -> tuple[str, str]:
    """Server and client."""
    for name in ("valkey", "redis"):
        server, client = shutil.which(f"{name}-server"), shutil.which(f"{name}-cli")
        if server and client:
            return server, client
    raise RuntimeError("there is neither valkey-server nor redis-server: run tools/setup")

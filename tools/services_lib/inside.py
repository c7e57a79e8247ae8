"""What tools/services runs in the booted system, as root. A line for each thing that holds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusecache.base import processes

PROGRAMS = Path(sys.executable).parent
UNITS = Path("/etc/systemd/system")
PATIENCE_S = 60.0
REAL, ORIGIN, MOUNT = Path("/srv/real"), Path("/srv/origin"), Path("/srv/data")
SETTINGS = Path("/etc/fusecache/data.toml")
UNIT = "fusecache@data.service"
CONFIG = f"""\
source = "{ORIGIN}"
mountpoint = "{MOUNT}"
cache-dir = "/srv/cache"
ssd = "64M"
ram = "64M"
keep-free = 0
allow-other = true
require-mounted = true
"""
GUEST = 65534


def run(*words: str | Path, code: int | None = 0, **how: Any) -> str:
    """What the command printed, stdout and stderr. AssertionError: another exit code."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE_S,
        **how,
    )
    if code is not None:
        assert done.returncode == code, f"{words}: exit code {done.returncode}: {done.stdout}"
    return done.stdout


def fusecache(*words: str | Path, code: int = 0) -> str:
    return run(PROGRAMS / "fusecache", *words, code=code)


def systemctl(*words: str, code: int | None = 0) -> str:
    return run("systemctl", *words, code=code)


def shown(name: str, unit: str = UNIT) -> str:
    """A property of a unit."""
    return systemctl("show", "--value", "-p", name, unit).strip()


def eventually(look: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.1)


def holds(what: str) -> None:
    print(f"ok: {what}")


def status() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(fusecache("status", "--json", MOUNT))
    return found


def answers() -> bool:
    """The mount gives the origin's bytes, to all."""
    name = "a/0.jpg"
    as_guest = run("setpriv", f"--reuid={GUEST}", "--clear-groups", "cat", MOUNT / name, code=None)
    return as_guest == (REAL / name).read_text()


def is_mounted(path: Path) -> bool:
    return f" {path} " in Path("/proc/self/mountinfo").read_text()


def keeper() -> int:
    return int(shown("MainPID"))


def drop_in(text: str) -> Path:
    path = UNITS / f"{UNIT}.d" / "test.conf"
    path.write_text(text)
    systemctl("daemon-reload")
    return path


def remove(path: Path) -> None:
    path.unlink()
    systemctl("daemon-reload")


# ---- the tests, in this order --------------------------------------------------------------------


def prepare() -> None:
    for folder in ("a", "b"):
        (REAL / folder).mkdir(parents=True)
        for number in range(20):
            (REAL / folder / f"{number}.jpg").write_text(f"{folder} {number}\n" * 1000)
    for path in (ORIGIN, MOUNT):
        path.mkdir(parents=True)
    for above in Path.cwd().parents:  # a guest runs our programs, too
        above.chmod(above.stat().st_mode | 0o055)
    mount = f"[Mount]\nWhat={REAL}\nWhere={ORIGIN}\nType=none\nOptions=bind\n"
    (UNITS / "srv-origin.mount").write_text(mount)
    systemctl("daemon-reload")


def installed() -> None:
    given = Path("/srv/data.toml")
    given.write_text(CONFIG)
    said = fusecache("service", "install", "data", "--config", given)
    assert said.count("wrote ") == 5, said
    assert "wrote" not in fusecache("service", "install", "data", "--config", given)
    files = [UNITS / "hintsd.service", UNITS / "hintsd.socket"]
    assert run("systemd-analyze", "verify", UNIT, *files) == ""
    holds("service install: five files, again: none; systemd-analyze verify has nothing to say")


def starts() -> None:
    assert not is_mounted(ORIGIN)
    systemctl("enable", "--now", UNIT)
    assert is_mounted(ORIGIN)
    assert shown("Type") == "notify"
    assert answers()
    holds("start: the origin was mounted first (RequiresMountsFor); another user reads the mount")
    list_ = run("ps", "-A", "-o", "args=")
    for role in ("keeper", "server"):
        assert re.search(rf"^fusecache: {role} {MOUNT}\s*$", list_, re.MULTILINE), list_
    assert "{" not in list_, list_
    holds("ps shows fusecache: keeper, fusecache: server, and no JSON")


def hints() -> None:
    eventually(lambda: shown("ActiveState", "hintsd.service") == "active")
    holds("hintsd was started with the mount")
    hint = [str(PROGRAMS / "hintsd"), "hint", str(MOUNT), "--epochs", "2", "--detach"]
    run(*hint)
    socket = "/run/fusecache-public/hintsd.sock"
    guest = ["setpriv", f"--reuid={GUEST}", "--clear-groups", *hint, "--socket", socket]
    run(*guest)

    def planned() -> list[str]:
        """Names of the jobs whose next samples are known, and in RAM."""
        known = json.loads(run(PROGRAMS / "hintsd", "status", "--json"))
        return sorted(job["name"] for job in known["jobs"] if job["ahead_bytes"])

    eventually(lambda: planned() == ["hint-1", "hint-2"])
    holds("hintsd, hardened: orders by torch, files ahead in RAM, a job of root's and a guest's")
    os.kill(int(shown("MainPID", "hintsd.service")), signal.SIGKILL)
    eventually(lambda: planned() == ["hint-1", "hint-2"])
    holds("kill -9 of hintsd: the next one has both jobs")
    systemctl("stop", "hintsd.service")
    eventually(lambda: len(planned()) == 2)
    assert shown("ActiveState", "hintsd.service") == "active"
    holds("systemctl stop hintsd: the next client starts it again")


def reloads() -> None:
    before, server = keeper(), status()["server_pid"]
    with open(MOUNT / "b/0.jpg") as held:
        held.read(10)
        SETTINGS.write_text(CONFIG.replace('ram = "64M"', 'ram = "32M"'))
        systemctl("reload", UNIT)
        assert held.read() == (REAL / "b/0.jpg").read_text()[10:]
    now = status()
    assert now["server_pid"] != server
    assert now["ram"]["limit_bytes"] == 32 << 20
    assert keeper() == before
    holds("reload: another server, the new --ram, the same keeper, an open file stays readable")


def parts_die() -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        server = status()["server_pid"]
        os.kill(server, number)
        eventually(lambda old=server: status()["server_pid"] != old)  # type: ignore[misc]
        assert answers()
    assert shown("NRestarts") == "0"
    holds("kill -9, kill -STOP of the server: the next one answers, the service went on")
    before = keeper()
    os.kill(before, signal.SIGKILL)
    eventually(lambda: shown("ActiveState") == "active" and keeper() not in (0, before))
    assert answers()
    assert shown("NRestarts") == "1"
    holds("kill -9 of the keeper: the service was started again, the dead mount taken off")


def watchdog() -> None:
    path = drop_in("[Service]\nWatchdogSec=2\n")
    systemctl("restart", UNIT)
    seen = set[str]()

    def pinged() -> bool:
        seen.add(shown("WatchdogTimestampMonotonic"))
        return len(seen) > 3

    eventually(pinged)
    before = keeper()
    os.kill(before, signal.SIGSTOP)
    eventually(lambda: keeper() not in (0, before) and shown("ActiveState") == "active")
    assert "Watchdog timeout" in run("journalctl", "-u", UNIT, "--no-pager")
    assert answers()
    holds("watchdog: pinged while all is well; a keeper that is stopped is replaced")

    slow = Path("/srv/slow")  # an origin that hangs: a FUSE file system whose server is stopped
    slow.mkdir()
    flags = [
        "--cache-dir",
        "/srv/cache of slow",
        "--ssd",
        "64M",
        "--ram",
        "64M",
        "--hintsd",
        "none",
    ]
    fusecache("mount", REAL, slow, "--keep-free", "0", *flags)
    inner = json.loads(fusecache("status", "--json", slow))
    SETTINGS.write_text(CONFIG.replace(str(ORIGIN), str(slow)))
    systemctl("restart", UNIT)
    before = keeper()
    for pid in (inner["keeper_pid"], inner["server_pid"]):
        os.kill(pid, signal.SIGSTOP)
    with subprocess.Popen(["cat", MOUNT / "b/19.jpg"], stdout=subprocess.DEVNULL) as reader:
        seen.clear()
        eventually(pinged)
        assert reader.poll() is None
        for pid in (inner["server_pid"], inner["keeper_pid"]):
            os.kill(pid, signal.SIGCONT)
        assert reader.wait(PATIENCE_S) == 0
    assert keeper() == before
    SETTINGS.write_text(CONFIG)
    remove(path)
    systemctl("restart", UNIT)
    fusecache("umount", slow)
    holds("watchdog: an origin that hangs costs nobody the service")


def mistakes() -> None:
    SETTINGS.write_text(CONFIG.replace('ssd = "64M"', 'ssd = "5X"'))
    systemctl("restart", UNIT, code=1)
    assert shown("ActiveState") == "failed"
    assert (shown("ExecMainStatus"), shown("NRestarts")) == ("2", "0")
    assert "--config /etc/fusecache/data.toml: ssd: '5X'" in run("journalctl", "-u", UNIT)
    grave = run("journalctl", "-u", UNIT, "-p", "err", "-o", "cat")
    assert "\nfusecache: --config /etc/fusecache/data.toml: ssd" in f"\n{grave}"
    assert "fusecache.keeper: mounted" not in grave
    lines = run("journalctl", "-u", UNIT, "-o", "cat").splitlines()
    assert f"fusecache.keeper: mounted {ORIGIN} on {MOUNT}" in lines  # no time, no <6>
    SETTINGS.write_text(CONFIG)
    holds("a bad configuration: exit code 2, one line of level err in the journal, not tried again")
    said = systemctl("start", "fusecache@other.service", code=1)
    assert "Assertion failed" in said, said
    holds("no configuration: AssertPathExists says so")


def origin_away() -> None:
    installed_drop_in = UNITS / f"{UNIT}.d" / "mounts.conf"
    text = installed_drop_in.read_text()
    remove(installed_drop_in)
    systemctl("stop", "srv-origin.mount")
    path = drop_in("[Service]\nRestartSec=1\n[Unit]\nStartLimitBurst=1000\n")
    (ORIGIN / "stub").write_text("not the dataset")
    assert "--require-mounted" in fusecache("mount", "--config", SETTINGS, code=1)
    systemctl("start", UNIT, code=1)
    eventually(lambda: int(shown("NRestarts")) >= 2)
    (ORIGIN / "stub").unlink()
    SETTINGS.write_text(CONFIG.replace("require-mounted = true\n", ""))
    assert "--allow-empty" in fusecache("mount", "--config", SETTINGS, code=1)
    systemctl("start", "srv-origin.mount")
    eventually(lambda: shown("ActiveState") == "active")
    assert answers()
    holds("origin not mounted: refused, tried again, and up when it is there")
    systemctl("stop", UNIT)
    systemctl("stop", "srv-origin.mount")
    drop_in("[Service]\nRestartSec=100ms\n[Unit]\nStartLimitBurst=3\n")
    systemctl("reset-failed", UNIT, code=None)
    systemctl("start", UNIT, code=1)
    eventually(lambda: shown("ActiveState") == "failed")
    assert int(shown("NRestarts")) <= 3
    holds("start limits: after so many failures it is not tried again")
    installed_drop_in.write_text(text)
    remove(path)
    systemctl("reset-failed", UNIT)
    SETTINGS.write_text(CONFIG)


def over_itself() -> None:
    place = Path("/srv/itself")
    place.mkdir()
    mount = f"[Mount]\nWhat={REAL}\nWhere={place}\nType=none\nOptions=bind\n"
    (UNITS / "srv-itself.mount").write_text(mount)
    config = Path("/etc/fusecache/itself.toml")
    config.write_text(CONFIG.replace(str(ORIGIN), str(place)).replace(str(MOUNT), str(place)))
    fusecache("service", "install", "itself")
    unit = "fusecache@itself.service"
    systemctl("start", unit)
    assert "fuse.fusecache" in run("findmnt", "-n", "-o", "FSTYPE", place)
    assert (place / "a/1.jpg").read_text() == (REAL / "a/1.jpg").read_text()
    systemctl("stop", unit)
    assert "fuse.fusecache" not in run("findmnt", "-n", "-o", "FSTYPE", place)
    assert (place / "a/1.jpg").exists()
    fusecache("service", "uninstall", "itself")
    holds("a mount over the source itself: start, stop, and the source is as it was")


def fstab() -> None:
    fusecache("install-helpers")
    place = Path("/srv/fstab")
    place.mkdir()
    options = "cache-dir=/srv/cache,ssd=64M,ram=64M,keep-free=0,require-mounted,_netdev,nofail"
    options += f",x-systemd.requires-mounts-for={ORIGIN}"
    with open("/etc/fstab", "a") as file:
        file.write(f"{ORIGIN} {place} fuse.fusecache {options} 0 0\n")
    systemctl("stop", UNIT)
    systemctl("stop", "srv-origin.mount")
    systemctl("daemon-reload")
    systemctl("start", "srv-fstab.mount")
    assert is_mounted(ORIGIN)
    assert (place / "a/2.jpg").read_text() == (REAL / "a/2.jpg").read_text()
    systemctl("stop", "srv-fstab.mount")
    eventually(lambda: not is_mounted(place))
    holds("fstab: a mount unit, after that of its source")


def pooled() -> None:
    """As docs/POOL.md has it: an engine, and two mounts as two hosts would have them."""
    deploy, place = Path.cwd() / "deploy/pool", Path("/etc/fusecache/pool")
    run(deploy / "certificates", "/srv/pool", "data", "localhost")
    place.mkdir(mode=0o700, exist_ok=True)
    run("tar", "-xf", "/srv/pool/localhost.tar", "-C", place)
    conf = (deploy / "engine.conf").read_text().replace("maxmemory 64gb", "maxmemory 64mb")
    (place / "engine.conf").write_text(conf)
    (UNITS / "fusecache-engine.service").write_bytes(
        (deploy / "fusecache-engine.service").read_bytes()
    )
    systemctl("daemon-reload")
    assert run("systemd-analyze", "verify", "fusecache-engine.service") == ""
    systemctl("start", "fusecache-engine.service")
    told = f"""\
pool = "valkeys://localhost/data"
pool-ca = "{place}/ca.pem"
pool-cert = "{place}/host.pem"
pool-key = "{place}/host.key"
pool-user = "data"
pool-password-file = "{place}/data.password"
pool-min-age = 1
"""
    found = []
    for name in ("one", "two"):
        mountpoint, given = Path(f"/srv/{name}"), Path(f"/srv/{name}.toml")
        mountpoint.mkdir()
        text = CONFIG.replace(f'"{MOUNT}"', f'"{mountpoint}"').replace("srv/cache", f"srv/c-{name}")
        given.write_text(text + told)
        fusecache("service", "install", name, "--config", given)
        systemctl("start", f"fusecache@{name}")
        for number in range(20):
            file = f"a/{number}.jpg"
            assert (mountpoint / file).read_bytes() == (REAL / file).read_bytes()

        def figures(at: Path = mountpoint) -> dict[str, Any]:
            answer: dict[str, Any] = json.loads(fusecache("status", "--json", at))
            return answer

        if name == "one":
            eventually(lambda: figures()["pool"]["written"] == 20)
        found.append(figures())
    assert found[1]["pool"]["files"] == 20, found[1]["pool"]
    assert found[1]["origin"]["files"] == 0, found[1]["origin"]
    fusecache("pool", "status", "/srv/two")
    said = run("systemd-analyze", "security", "--no-pager", "fusecache-engine.service")
    level = re.search(r"exposure level for \S+: ([\d.]+)", said)
    assert level, said
    assert float(level[1]) <= 3.0, said
    for name in ("one", "two"):
        fusecache("service", "uninstall", name)
    systemctl("stop", "fusecache-engine.service")
    (UNITS / "fusecache-engine.service").unlink()
    systemctl("daemon-reload")
    holds(
        f"pool: an engine by its unit (security {level[1]}), what one mount read came to the next"
    )


def cached() -> None:
    """As docs/SHARING.md has it: the service, and two mounts with caches of their own."""
    unit, manifest = "fusecache-cached.service", "/srv/real.manifest"
    install = ("service", "install-cached", "--dir", "/srv/cached", "--ssd", "256M")
    said = fusecache(*install, "--keep-free", "0")
    assert said.count("wrote ") == 3, said
    assert "wrote" not in fusecache("service", "install-cached")
    run("id", "fusecache-cached")
    assert run("systemd-analyze", "verify", unit) == ""
    systemctl("enable", "--now", unit)
    fusecache("digest", REAL, "--digest", "blake3", "-o", manifest)
    options = ["--manifest", manifest, "--cache", "/run/fusecache-cached/socket"]
    options += ["--ssd", "64M", "--ram", "64M", "--keep-free", "0", "--hintsd", "none"]

    def figures(name: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(fusecache("status", "--json", f"/srv/{name}"))
        return answer

    def read(name: str) -> None:
        for number in range(20):
            file = f"a/{number}.jpg"
            assert Path("/srv", name, file).read_bytes() == (REAL / file).read_bytes()

    for name in ("mine", "yours"):
        Path("/srv", name).mkdir()
        fusecache("mount", REAL, f"/srv/{name}", "--cache-dir", f"/srv/cache-{name}", *options)
        eventually(lambda name=name: figures(name)["service"]["used"])  # type: ignore[misc]
    read("mine")
    eventually(lambda: figures("mine")["service"]["put_files"] == 20)
    os.kill(int(shown("MainPID", unit)), signal.SIGKILL)
    eventually(
        lambda: shown("ActiveState", unit) == "active" and figures("yours")["service"]["used"]
    )
    read("yours")
    found = figures("yours")
    assert found["service"]["found_files"] >= 20, found
    assert found["origin"]["files"] == 0, found
    for name in ("mine", "yours"):
        fusecache("umount", f"/srv/{name}")
    said = run("systemd-analyze", "security", "--no-pager", unit)
    level = re.search(r"exposure level for \S+: ([\d.]+)", said)
    assert level, said
    assert float(level[1]) <= 1.0, said
    assert fusecache("service", "uninstall-cached").count("removed ") == 3
    holds(f"cached: its unit (security {level[1]}), killed once; what one mount put, another found")


def ends() -> None:
    systemctl("start", UNIT)
    pid, server = keeper(), status()["server_pid"]
    systemctl("stop", UNIT)
    assert not is_mounted(MOUNT)
    assert {processes.state(pid), processes.state(server)} == {""}
    assert shown("Result") == "success"
    holds("stop: unmounted, no process left")


def hardened() -> None:
    for unit, most in (("hintsd.service", 3.0), (UNIT, 4.2)):
        said = run("systemd-analyze", "security", "--no-pager", unit)
        found = re.search(r"exposure level for \S+: ([\d.]+)", said)
        assert found, said
        assert float(found[1]) <= most, said
        holds(f"systemd-analyze security {unit}: {found[1]}")


def uninstalled() -> None:
    said = fusecache("service", "uninstall", "data")
    assert said.count("removed ") == 4, said
    assert not [path for path in UNITS.iterdir() if re.search("fusecache@|hintsd", path.name)]
    assert SETTINGS.exists()
    assert "no service" in fusecache("service", "uninstall", "data", code=1)
    holds("service uninstall: all is gone but the settings")


TESTS = (
    prepare,
    installed,
    starts,
    hints,
    reloads,
    parts_die,
    watchdog,
    mistakes,
    origin_away,
    over_itself,
    fstab,
    pooled,
    cached,
    ends,
    hardened,
    uninstalled,
)


def main() -> int:
    systemd = run("systemctl", "--version").splitlines()[0]
    print(f"services: {systemd}, Linux {os.uname().release}")
    for test in TESTS:
        try:
            test()
        except Exception:
            traceback.print_exc()
            print(f"FAILED: {test.__name__}")
            print(run(PROGRAMS / "hintsd", "status", "--json", code=None))
            print(run("journalctl", "-n", "60", "--no-pager", code=None))
            return 1
    print("services: all holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())

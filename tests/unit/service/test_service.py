"""`fusecache service`: what is written for systemd. tools/services tries it in a booted one."""

from __future__ import annotations

import configparser
import dataclasses
import errno
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusecache.base import trust
from fusecache.base.errors import EXIT_FAILED, EXIT_USAGE, UserError
from fusecache.cached import client
from fusecache.cli import service_command
from fusecache.service import installing, units
from fusecache.service.installing import (
    CACHED_USER,
    Places,
    install,
    install_cached,
    uninstall,
    uninstall_cached,
)

CONFIG = 'source = "/mnt/nfs/a b%"\nmountpoint = "/data/a"\ncache-dir = ["/ssd1/c", "/ssd2/c"]\n'
# Each of them would give the service a mount namespace of its own, where nobody sees the mount.
NAMESPACE = re.compile(
    r"Protect(?!Clock$)\w+|Private\w+|\w+Paths|Root\w+|Bind\w+|TemporaryFileSystem|MountFlags|"
    r"DynamicUser|ProcSubset"
)


class Unit(configparser.RawConfigParser):
    """A unit file, as far as none of its settings is given twice."""

    def __init__(self, text: str) -> None:
        super().__init__(interpolation=None, comment_prefixes="#", delimiters="=")
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read_string(text)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """A machine with a systemd that does what it is told, and writes that to `calls`."""
    for name in ("bin", "units", "booted"):
        (tmp_path / name).mkdir()
    for name in ("fusecache", "hintsd", "systemctl", "useradd", "setpriv"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(trust, "is_ours", lambda uid: uid in (0, os.getuid()))
    (tmp_path / "a.toml").write_text(CONFIG)
    (tmp_path / "a.toml").chmod(0o644)
    code = (tmp_path / "bin" / "fusecache",)
    return Places(tmp_path / "units", tmp_path / "etc", tmp_path / "booted", tmp_path / "bin", code)


def calls(places: Places) -> list[str]:
    """What systemctl was told since this was last asked."""
    path = places.booted.parent / "calls"
    said = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return said


def line_of(name: str, config: Path | None, places: Places, code: int = EXIT_FAILED) -> str:
    with pytest.raises(UserError) as refused:
        list(install(name, None if config is None else str(config), places))
    assert refused.value.exit_code == code
    assert "\n" not in str(refused.value)
    assert not list(places.units.iterdir())
    return str(refused.value)


def test_installed_and_uninstalled(places: Places) -> None:
    given = places.units.parent / "a.toml"
    written = [
        places.settings / "a.toml",
        *(places.units / name for name in units.NAMES),
        places.units / "fusecache@a.service.d" / "mounts.conf",
    ]
    assert list(install("a", str(given), places)) == [f"wrote {path}" for path in written]
    assert {path.stat().st_mode & 0o777 for path in written} == {0o644}
    assert calls(places) == ["daemon-reload"]
    assert written[-1].read_text().splitlines()[1:] == [
        "[Unit]",
        'RequiresMountsFor="/mnt/nfs/a b%%" /data /ssd1/c /ssd2/c',
    ]
    assert list(install("a", str(given), places)) == []
    assert list(install("a", None, places)) == []
    assert len(list(install("b", str(given), places))) == 2
    calls(places)

    assert list(uninstall("a", places)) == [f"removed {written[-1]}"]
    assert calls(places) == ["disable --now fusecache@a.service", "daemon-reload"]
    assert len(list(uninstall("b", places))) == 4
    assert calls(places) == [
        "disable --now fusecache@b.service",
        "disable --now hintsd.service hintsd.socket",
        "daemon-reload",
    ]
    assert list(places.units.iterdir()) == []
    assert sorted(places.settings.iterdir()) == [
        places.settings / name for name in ("a.toml", "b.toml")
    ]
    with pytest.raises(UserError, match=r"there is no service fusecache@a; installed: none"):
        list(uninstall("a", places))


def test_what_is_there_and_differs_is_not_overwritten(places: Places) -> None:
    places.settings.mkdir()
    (places.settings / "a.toml").write_text('mountpoint = "/mine"\n')
    given = places.units.parent / "a.toml"
    assert "differs from" in line_of("a", given, places)
    assert (places.settings / "a.toml").read_text() == 'mountpoint = "/mine"\n'


@pytest.mark.claim("S11")
def test_settings_that_are_there_are_roots_or_refused(places: Places) -> None:
    """Although the one that is given is alike: the mount obeys the one that is there."""
    there, given = places.settings / "a.toml", places.units.parent / "a.toml"
    places.settings.mkdir()
    there.write_text(CONFIG)
    there.chmod(0o666)
    assert f"{there}: others may write to {there}" in line_of("a", given, places, EXIT_USAGE)
    there.unlink()
    os.mkfifo(there)
    assert "is no plain file" in line_of("a", given, places, EXIT_USAGE)
    there.unlink()
    there.mkdir()
    assert "Is a directory" in line_of("a", given, places, EXIT_USAGE)
    there.rmdir()
    places.settings.chmod(0o777)
    assert f"{there} is no place for root's settings" in line_of("a", given, places)


@pytest.mark.parametrize(
    "line",
    ['source = "s"', 'cache-dir = ["/c", "./d"]', 'manifest = "m/x"', 'log_file = "log"'],
)
def test_a_path_that_depends_on_where_we_are_is_refused(places: Places, line: str) -> None:
    given = places.units.parent / "a.toml"
    given.write_text(f'mountpoint = "/data/a"\n{line}\n')
    assert "is not absolute, as a service needs it" in line_of("a", given, places, EXIT_USAGE)


def test_the_name_of_a_mount_may_look_like_a_units(places: Places) -> None:
    given = str(places.units.parent / "a.toml")
    for name in ("a", "a.service", "a.service.d"):
        list(install(name, given, places))
        assert name in places.instances()
    wants = places.units / "multi-user.target.wants"
    wants.mkdir()
    (wants / "fusecache@b.service.service").symlink_to(places.units / "fusecache@.service")
    assert places.instances() == {"a", "a.service", "a.service.d", "b.service"}
    list(uninstall("a.service", places))
    assert places.instances() == {"a", "a.service.d", "b.service"}


def test_what_cannot_be_written_leaves_nothing(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in line_of("a", places.units.parent / "a.toml", places)
    assert list(places.settings.iterdir()) == []


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "a@b", "ä", "a\n"])
def test_a_name_that_systemd_would_escape_is_refused(places: Places, name: str) -> None:
    assert "is no name for a service" in line_of(name, None, places, EXIT_USAGE)


def test_what_is_missing_is_named(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    given = places.units.parent / "a.toml"
    assert f"{places.settings}/a.toml" in line_of("a", None, places, EXIT_USAGE)
    given.write_text('source = "/s"\n')
    assert "no mountpoint" in line_of("a", given, places, EXIT_USAGE)
    given.write_text("sdd = 1\n")
    assert "sdd: unknown setting" in line_of("a", given, places, EXIT_USAGE)
    given.write_text(CONFIG)
    (places.programs / "systemctl").write_text("#!/bin/sh\necho first >&2\necho why >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"^systemctl daemon-reload: why$"):
        list(install("a", str(given), places))
    for path in [*places.units.glob("*.d/*"), *places.units.glob("*[te]")]:
        path.unlink()
    for path in places.units.iterdir():
        path.rmdir()
    places.booted.rmdir()
    assert "no systemd runs here" in line_of("a", given, places)
    (places.programs / "hintsd").unlink()
    places.booted.mkdir()
    assert f"{places.programs}/hintsd does not exist" in line_of("a", given, places)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "only root may" in line_of("a", given, places)


@pytest.mark.claim("S11")
def test_what_others_may_change_is_nothing_for_root_to_run(places: Places) -> None:
    given = places.units.parent / "a.toml"
    given.chmod(0o666)
    assert "others may write to" in line_of("a", given, places, EXIT_USAGE)
    given.chmod(0o644)
    (places.programs / "hintsd").chmod(0o777)
    line = line_of("a", given, places)
    assert f"{places.programs}/hintsd is no program for root to run: others may write" in line
    (places.programs / "hintsd").chmod(0o755)
    module = places.units.parent / "module.py"
    module.touch(0o666)
    module.chmod(0o666)
    at = dataclasses.replace(places, code=(module,))
    assert f"{module} is no program for root to run" in line_of("a", given, at)
    places.programs.chmod(0o777)
    assert "is no program for root to run" in line_of("a", given, places)
    places.programs.chmod(0o755)


@pytest.mark.parametrize(
    "path", ["/plain/a-b_c.d", '/a "b"\\c', "/100%", "/ümlaut", "/tab\t", "/\udcff"]
)
def test_a_path_is_one_word_of_a_unit(path: str) -> None:
    word = units.quoted(path)
    assert word.isascii()
    assert word.isprintable()
    (read,) = shlex.split(word) if "\\x" not in word else [word.strip('"')]
    data = re.sub(rb"\\x(..)", lambda found: bytes.fromhex(found[1].decode()), os.fsencode(read))
    assert os.fsdecode(data.replace(b"%%", b"%")) == path


def test_the_mount_is_seen_by_all_and_mistakes_are_not_tried_again() -> None:
    names = (*units.NAMES, *units.CACHED)
    made = {name: Unit(text) for name, text in units.rendered("/opt/f", names).items()}
    mount, hints = made["fusecache@.service"], made["hintsd.service"]
    assert not [name for name in mount["Service"] if NAMESPACE.fullmatch(name)]
    for unit in (mount, hints):
        assert unit["Service"]["Type"] == "notify"
        assert unit["Service"]["WatchdogSec"]
        assert unit["Service"]["RestartPreventExitStatus"] == str(EXIT_USAGE)
        assert unit["Unit"]["StartLimitBurst"]
    assert mount["Unit"]["AssertPathExists"] == "/etc/fusecache/%i.toml"
    start = "/opt/f/fusecache mount --foreground --config /etc/fusecache/%i.toml"
    assert mount["Service"]["ExecStart"] == start
    assert hints["Service"]["ExecStart"] == "/opt/f/hintsd serve"
    assert hints["Service"]["MemoryMax"]
    # CAP_SYS_ADMIN mounts, the second reads what others own, the third names who keeps it in use
    held = "CAP_SYS_ADMIN CAP_DAC_READ_SEARCH CAP_SYS_PTRACE"
    assert mount["Service"]["CapabilityBoundingSet"] == held
    assert "CAP_SYS_ADMIN" not in hints["Service"]["CapabilityBoundingSet"]
    assert made["hintsd.socket"]["Socket"]["SocketMode"] == "0600"
    cached = made["fusecache-cached.service"]["Service"]
    assert cached["User"] == cached["Group"] == CACHED_USER == client.SERVICE_USER
    assert cached["ExecStart"] == "/opt/f/fusecache cached --dir ${DIR} $SIZES"
    assert cached["RestartPreventExitStatus"] == str(EXIT_USAGE)
    assert cached["CapabilityBoundingSet"] == ""
    assert "PrivateUsers" not in cached  # it counts by the uids of others
    listening = made["fusecache-cached.socket"]["Socket"]
    assert listening["SocketMode"] == "0666"
    told = {each.name: each.default for each in service_command.cached.params}
    assert cached["Environment"] == f"DIR={told['directory']} SIZES="
    assert listening["ListenStream"] == told["path"]


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="no systemd here; tools/services looks at it, too",
)
def test_systemd_has_nothing_to_say(tmp_path: Path) -> None:
    every = (*units.NAMES, *units.CACHED)
    for name, text in units.rendered(str(Path(sys.executable).parent), every).items():
        (tmp_path / name).write_text(text)
    folder = tmp_path / "fusecache-cached.service.d"
    folder.mkdir()
    sizes = ["--ssd=2T", "--keep-free=5%"]
    (folder / "install.conf").write_text(units.cached_drop_in("/srv/a b%", sizes))
    shutil.copy(tmp_path / "fusecache@.service", tmp_path / "fusecache@a.service")
    names = ["fusecache@a.service", "hintsd.service", "hintsd.socket", *units.CACHED]

    def analyze(*words: str) -> str:
        done = subprocess.run(
            ["systemd-analyze", *words],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.stdout

    assert analyze("verify", *(f"./{name}" for name in names)) == ""
    most_of = {"hintsd.service": 3.0, "fusecache@a.service": 4.2, "fusecache-cached.service": 1.0}
    for name, most in most_of.items():
        said = analyze("security", "--offline=true", "--no-pager", f"./{name}")
        found = re.search(r"exposure level for \S+: ([\d.]+)", said)
        assert found, said
        assert float(found[1]) <= most


# ---- the cache service ---------------------------------------------------------------------------


@pytest.fixture
def made_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ours, as far as the password database says."""
    ours = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(pwd, "getpwnam", lambda _: ours)


def line_of_cached(places: Places, directory: str | None = None, **sizes: str) -> str:
    told = {f"--{name.replace('_', '-')}": text for name, text in sizes.items()}
    with pytest.raises(UserError) as refused:
        list(install_cached(directory, told, places))
    assert "\n" not in str(refused.value)
    assert not list(places.units.iterdir())
    return str(refused.value)


@pytest.mark.usefixtures("made_user")
def test_the_cache_service_is_installed_and_uninstalled(places: Places) -> None:
    written = [f"wrote {places.units / name}" for name in units.CACHED]
    assert list(install_cached(None, {}, places)) == written
    as_user = f"--reuid={CACHED_USER} --regid={CACHED_USER} --clear-groups"
    assert calls(places) == [f"{as_user} {places.programs}/fusecache --version", "daemon-reload"]
    assert list(install_cached(None, {}, places)) == []

    directory, drop_in = places.units.parent / "a b%", places.cached_drop_in()
    told = {"--ssd": "2 T", "--quota": "500G", "--keep-free": "5%"}
    made = [f"made {directory}", f"wrote {drop_in}"]
    assert list(install_cached(str(directory), told, places)) == made
    assert directory.stat().st_mode & 0o777 == 0o700
    path = f"{places.units.parent}/a b%%"
    assert drop_in.read_text().splitlines()[1:] == [
        "[Unit]",
        f'RequiresMountsFor="{path}"',
        "[Service]",
        f'Environment="SIZES=--ssd=2T --quota=500G --keep-free=5%%" "DIR={path}"',
        f'ReadWritePaths="{path}"',
    ]
    assert list(install_cached(str(directory), told, places)) == []
    assert list(install_cached(None, {}, places)) == []
    assert list(install_cached(None, {"--ssd": "1T"}, places)) == [f"wrote {drop_in}"]
    assert drop_in.read_text().splitlines()[1:] == ["[Service]", 'Environment="SIZES=--ssd=1T"']
    assert places.instances() == set()
    calls(places)

    assert len(list(uninstall_cached(places))) == 3
    names = " ".join(units.CACHED)
    assert calls(places) == [f"disable --now {names}", "daemon-reload"]
    assert list(places.units.iterdir()) == []
    assert directory.is_dir()
    with pytest.raises(UserError, match=r"^the cache service is not installed$"):
        list(uninstall_cached(places))


def test_the_user_of_the_cache_service_is_made_once(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", nobody)
    assert next(install_cached(None, {}, places)) == f"made the user {CACHED_USER}"
    (made,) = calls(places)
    assert made.startswith("--system ")
    assert made.endswith(f" {CACHED_USER}")
    (places.programs / "useradd").write_text("#!/bin/sh\necho 'no more uids' >&2\nexit 1\n")
    assert re.match(r"useradd --system .*: no more uids$", line_of_cached(places))


@pytest.mark.usefixtures("made_user")
def test_what_the_cache_service_cannot_use_is_named(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = places.units.parent
    assert "--ssd: '5X'" in line_of_cached(places, ssd="5X")
    assert "--keep-free: " in line_of_cached(places, keep_free="200%")
    missing = f"{above}/none/cached"
    assert line_of_cached(places, missing) == f"--dir {missing}: No such file or directory"
    (above / "file").touch()
    assert f"--dir {above}/file is there, and is no directory" in line_of_cached(
        places, f"{above}/file"
    )
    setpriv = places.programs / "setpriv"
    setpriv.write_text('#!/bin/sh\ncase "$*" in *" test "*) exit 1;; esac\n')
    line = line_of_cached(places, f"{above}/closed")
    assert "a directory above it is closed to others" in line
    setpriv.write_text("#!/bin/sh\necho 'Permission denied' >&2\nexit 1\n")
    line = line_of_cached(places)
    assert "cannot run" in line
    assert "Permission denied" in line
    assert line.endswith("install fusecache where all may read it")
    monkeypatch.setattr(installing, "why_unusable", lambda _: "it needs blake3")
    assert line_of_cached(places) == "it needs blake3"
    places.booted.rmdir()
    assert "no systemd runs here" in line_of_cached(places)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "only root may" in line_of_cached(places)


@pytest.mark.claim("S11")
@pytest.mark.usefixtures("made_user")
def test_what_others_may_change_is_nothing_for_the_cache_service(places: Places) -> None:
    (places.programs / "fusecache").chmod(0o777)
    assert "is no program for root to run" in line_of_cached(places)
    (places.programs / "fusecache").chmod(0o755)
    shared = places.units.parent / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert f"--dir {shared}/cached: others may write" in line_of_cached(places, f"{shared}/cached")


def test_this_installation_is_what_is_installed() -> None:
    assert Places().programs == Path(sys.executable).parent
    assert installing.Places().units == Path("/etc/systemd/system")

"""Commands as a script calls them, against a keeper and a server that a thread plays."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from fusecache.base import command, errors, mounts, wire
from fusecache.base.disk import probe
from fusecache.base.errors import UserError
from fusecache.base.wire import peer_of
from fusecache.cli import files, mount_command
from fusecache.cli import main as cli
from fusecache.config.building import build
from fusecache.config.settings import Config
from fusecache.control import control, control_client
from fusecache.keeper import mounting

Message = dict[str, Any]
STATUS: Message = {
    "mountpoint": "/data/a",
    "source": "/mnt/nfs\udcff",
    "keeper_pid": 10,
    "server_pid": 11,
    "restarts": 2,
    "zero_open": True,
    "uptime_s": 3723.5,
    "counted_s": 65.2,
    "ram": {"bytes": 1 << 30, "limit_bytes": 4 << 30},
    "ssd": {"bytes": 0, "limit_bytes": 0, "blocks": 1234},
    "reads": {"requests": 5, "from_ssd": 3, "from_origin": 2},
    "origin": {"files": 2, "bytes": 99, "errors": 1, "available": False, "last_error": "EIO"},
    "integrity": {"mismatches": 0, "faults": {"checksum": 1}},
}


class Peer:
    """Answers each request of keeper.sock or control.sock with scripted lines, then hangs up."""

    def __init__(self, directory: Path, name: str, script: list[list[Message]]) -> None:
        self.requests: list[Message] = []
        self._script = script
        self._listener = mounts.listen(str(directory), name, 8)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for replies in self._script:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rwb") as stream:
                self.requests.append(json.loads(stream.readline()))
                for reply in replies:
                    stream.write(json.dumps(reply).encode() + b"\n")
                    stream.flush()
        self._listener.close()


Script = Callable[..., Peer]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """play(name, replies of the first request, replies of the second, …) on a mount /data/a."""
    base = tmp_path / "run"
    directory = base / "0:99"
    directory.mkdir(parents=True, mode=0o700)
    base.chmod(0o700)
    mount = mounts.Mount(
        7, "0:99", "/data/a", mounts.FILESYSTEM_TYPE, "/s", {"user_id": str(os.getuid())}
    )
    monkeypatch.setattr(mounts, "mounts", lambda: [mount])
    monkeypatch.setattr(mounts, "runtime_bases", lambda _: [str(base)])
    monkeypatch.setattr(control_client, "RECONNECT_PAUSE_S", 0.001)
    monkeypatch.chdir(tmp_path)  # `umount` leaves it
    return lambda name, *script: Peer(directory, name, list(script))


def run(*arguments: str) -> int:
    """The exit code of one command in this process."""
    with pytest.raises(SystemExit) as caught:
        command.run(
            "fusecache",
            lambda: cli.cli(list(arguments), prog_name="fusecache", standalone_mode=False),
        )
    code = caught.value.code
    assert isinstance(code, int)
    return code


# ---- as a process -----------------------------------------------------------------


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fusecache.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_teaches() -> None:
    done = process("--help")
    assert done.returncode == 0
    for part in ("fusecache mount /data/imagenet", "Exit codes:", "umount", "500G"):
        assert part in done.stdout
    for name, one in cli.cli.all_commands(click.Context(cli.cli)).items():
        assert one.name == name
        assert f"\n  {name} " in done.stdout
        assert run(name, "--help") == 0


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["bogus"], errors.EXIT_USAGE, "No such command"),
        (["mount"], errors.EXIT_USAGE, "no mount point"),
        (["mount", "a", "b", "c"], errors.EXIT_USAGE, "too many places"),
        (["mount", "/none", "/none", "--ssd", "5X"], errors.EXIT_USAGE, "--ssd: '5X'"),
        (["mount", "/none", "--keep-free", "x"], errors.EXIT_USAGE, "--keep-free: 'x'"),
        (["mount", "/none/source", "/none/mnt"], errors.EXIT_FAILED, "does not exist"),
        (["status", "/"], errors.EXIT_NOT_A_MOUNT, "not on a fusecache mount"),
        (
            ["umount", "/"],
            errors.EXIT_NOT_A_MOUNT,
            "fusecache: / is not on a fusecache mount; all mounts: fusecache list\n",
        ),
        (
            ["umount", "/nope"],
            errors.EXIT_NOT_A_MOUNT,
            "fusecache: /nope does not exist; all mounts: fusecache list\n",
        ),
        (["umount"], errors.EXIT_USAGE, "which mount?"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, part: str
) -> None:
    assert run(*arguments) == code
    out, err = capfd.readouterr()
    assert part in err
    assert err.startswith("fusecache: ")
    assert err.count("\n") == 1
    assert out == ""


def test_a_mistake_as_a_process() -> None:
    done = process("bogus")
    assert (done.returncode, done.stdout) == (errors.EXIT_USAGE, "")
    assert done.stderr == "fusecache: No such command 'bogus'. (see fusecache --help)\n"
    assert "'status'" in process("statu").stderr, "what was meant, of commands not imported yet"


def test_keeper_and_server_load_neither_click_nor_rich() -> None:
    code = (
        "import sys, fusecache.keeper.keeper, fusecache.config.settings;"
        "assert not {'click', 'rich', 'trio'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_commands_load_neither_numpy_nor_trio() -> None:
    code = (
        "import sys, fusecache.cli.main as main, fusecache.base.wire;"
        "fusecache.base.wire.Decoder().feed(fusecache.base.wire.encode('hello', {'version': 1}));"
        "assert 'rich' not in sys.modules;"
        "main.cli.all_commands(None);"
        "assert 'rich' in sys.modules;"
        "assert not {'numpy', 'trio', 'pyfuse3'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("words", [["mount", "--help"], ["umount", "/"], ["--version"]])
def test_a_command_is_imported_when_it_is_called(words: list[str]) -> None:
    """Importing rich, and the other commands, takes longer than what these do."""
    code = (
        "import sys, atexit; sys.argv[0] = 'fusecache';"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr));"
        "from fusecache.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    loaded = done.stderr.splitlines()[-1].split()
    assert not {"rich.console", "fusecache.cli.status_command"} & set(loaded)
    assert "click" in loaded


# ---- status -----------------------------------------------------------------


def test_status_as_json_is_what_the_server_said(
    play: Script, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    play(mounts.CONTROL_SOCKET, [{"ok": True, "status": STATUS}])
    assert run("status", "--json", "/data/a/below") == 0
    assert json.loads(capfdbinary.readouterr().out) == {**STATUS, "keeper_stopped": False}


def test_status_for_people(play: Script, capfd: pytest.CaptureFixture[str]) -> None:
    play(mounts.CONTROL_SOCKET, [{"ok": True, "status": STATUS}])
    assert run("status", "/data/a") == 0
    out = capfd.readouterr().out
    for part in ("1 h 2 min 3 s", "1 GiB of 4 GiB (25%)", "1,234 blocks", "THE ORIGIN IS AWAY"):
        assert part in out
    assert "reads to integrity: since the last restart, 1 min 5 s ago" in out
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


LAYOUT: Message = {
    "setting": "auto",
    "packing": 6,
    "log_written_bytes": 3 << 30,
    "log_waiting_bytes": 0,
    "log_segments": 8,
    "logs": 2,
}
PUSHED: Message = {
    **STATUS["reads"],
    "bytes_pushed": 1 << 30,
    "bytes_staged": 1 << 20,
    "bytes_served": 2 << 30,
}
OF_HINTSD: Message = {
    "mounts": [],
    "jobs": [
        {"name": "a-1", "mountpoint": "/data/a"},
        {"name": "b-2", "mountpoint": "/data/b", "layout": "reorder", "layout_why": "elsewhere"},
        {"name": "a-3", "mountpoint": "/data/a", "layout": "static", "layout_why": "a-4 is packed"},
        {"name": "a-4", "mountpoint": "/data/a", "layout": "reorder", "layout_why": "900 MiB/s"},
    ],
}


@pytest.fixture
def hintsd(tmp_path: Path) -> Iterator[Callable[[Message], None]]:
    """A hintsd that the mount /data/a names; it answers once, with this status."""
    threads: list[threading.Thread] = []

    def start(status: Message) -> None:
        listener = mounts.listen(str(tmp_path), "hintsd.sock", 1)
        record = {"config": {"hintsd": str(tmp_path / "hintsd.sock")}}
        (tmp_path / "run" / "0:99" / mounts.KEEPER_FILE).write_text(json.dumps(record))

        def serve() -> None:
            with listener, listener.accept()[0] as connection:
                decoder, asked = wire.Decoder(), list[str]()
                while "status" not in asked:
                    asked += [frame.type for frame in decoder.feed(connection.recv(4096))]
                connection.sendall(wire.encode("status", status))

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(10)


def test_status_says_which_layout_why_and_what_it_wears(
    play: Script,
    hintsd: Callable[[Message], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    play(
        mounts.CONTROL_SOCKET,
        [{"ok": True, "status": STATUS | {"layout": LAYOUT, "reads": PUSHED}}],
    )
    hintsd(OF_HINTSD)
    assert run("status", "/data/a") == 0
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("layout")]
    assert line.split(maxsplit=1)[1] == (
        "reorder (--layout auto, a-4): 900 MiB/s; a log is being written, as far as there is "
        "room on SSD; 3 GiB written in 2 logs, 1.50 bytes for each byte served"
    )


def shown_rows(play: Script, capfd: pytest.CaptureFixture[str], **parts: Message) -> dict[str, str]:
    """What `status` shows of a server that says this besides STATUS."""
    play(mounts.CONTROL_SOCKET, [{"ok": True, "status": STATUS | parts}])
    assert run("status", "/data/a") == 0
    lines = capfd.readouterr().out.splitlines()
    return {line[:12].strip(): line[12:].strip() for line in lines}


def test_status_says_how_far_a_log_is_and_does_not_say_a_reason_twice(
    play: Script, hintsd: Callable[[Message], None], capfd: pytest.CaptureFixture[str]
) -> None:
    layout = {"setting": "reorder", "packing": 1, "log_samples": 400, "log_moved_samples": 100}
    job = {"name": "a-1", "mountpoint": "/data/a", "layout": "reorder"}
    hintsd({"mounts": [], "jobs": [job | {"layout_why": "--layout reorder"}]})
    rows = shown_rows(play, capfd, layout=layout)
    assert rows["layout"] == (
        "reorder (--layout reorder, a-1); the next epoch's log is being written, 25% is there"
    )


def test_status_says_why_auto_cannot_choose(
    play: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    layout = {"setting": "auto", "probe_fault": "/c cannot be measured: it takes no direct I/O"}
    rows = shown_rows(play, capfd, layout=layout)
    assert rows["layout"].endswith("; STATIC, SINCE /c cannot be measured: it takes no direct I/O")


def test_status_says_how_much_room_a_log_takes(
    play: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = {"setting": "reorder", "packing": 2, "ssd_needed_bytes": (123 << 20) - 1}
    said = shown_rows(play, capfd, layout=refused)["layout"]
    assert said.endswith("; NO LOG: no room on SSD, --ssd 123M would be needed")


def test_status_shows_cache_directories_below_the_ssd_tier(
    play: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [{"path": f"/ssd{n}", "why_out": "dead" * (n == 2), "bytes": 0} for n in (1, 2)]
    ssd = {"bytes": 0, "limit_bytes": 100 << 20, "blocks": 0, "directories": parts}
    play(mounts.CONTROL_SOCKET, [{"ok": True, "status": STATUS | {"ssd": ssd}}])
    assert run("status", "/data/a") == 0
    lines = capfd.readouterr().out.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("SSD tier")]
    assert lines[at + 1].split() == ["/ssd1:", "0", "B"]
    assert "/ssd2: OUT OF SERVICE: dead" in lines[at + 2]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({}, "14 MiB of 1 GiB (1%), 3 blocks"),
        ({"reserved_bytes": 20 << 20}, "14 MiB of 1 GiB (1%), 3 blocks"),
        ({"reserved_bytes": 78 << 20}, "14 MiB of 1 GiB (1%), 78 MiB reserved, 3 blocks"),
        (
            {"given_bytes": 2 << 30},
            "14 MiB of 1 GiB (1%) (another mount on the cache directory was given no more, "
            "the smallest wins), 3 blocks",
        ),
    ],
)
def test_status_shows_what_is_stored_and_reserved(
    play: Script, capfd: pytest.CaptureFixture[str], part: dict[str, int], said: str
) -> None:
    ssd = {"bytes": 14 << 20, "limit_bytes": 1 << 30, "given_bytes": 1 << 30, "blocks": 3} | part
    assert shown_rows(play, capfd, ssd=ssd)["SSD tier"] == said


@pytest.mark.parametrize(
    ("free", "kept", "said"),
    [
        (None, 1 << 20, ""),
        (4096, 0, "4 KiB free; the SSD tier gets no larger"),
        (3 << 20, 5 << 20, "3 MiB free, of which --keep-free leaves 5 MiB to others; the SSD tier"),
    ],
)
def test_status_says_that_the_disk_is_full(
    play: Script, capfd: pytest.CaptureFixture[str], free: int | None, kept: int, said: str
) -> None:
    ssd = STATUS["ssd"] | {"full_disk_bytes": free, "keep_free_bytes": kept}
    line = shown_rows(play, capfd, ssd=ssd, origin=STATUS["origin"] | {"available": True}).get(
        "", ""
    )
    assert line.startswith(f"THE DISK OF THE CACHE IS FULL: {said}" if said else "")
    assert bool(line) == bool(said)


@pytest.mark.parametrize("out", ["", "dead"])
def test_probe_measures_each_directory_of_a_mount(
    play: Script, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    parts = [{"path": "/ssd1", "why_out": ""}, {"path": "/ssd2", "why_out": out}]
    answer = {"ok": True, "status": STATUS | {"cache_dir": "/ssd1", "ssd": {"directories": parts}}}
    found = probe.Probe(
        device=1,
        device_bytes=1,
        taken_at=1.0,
        sequential_bytes_per_s=1.0,
        write_bytes_per_s=1.0,
        mixed_bytes_per_s=1.0,
        random=((4096, 1.0), (65536, 1.0)),
    )
    asked: list[str] = []

    def measure(directory: Path) -> probe.Probe:
        asked.append(str(directory))
        return found

    monkeypatch.setattr(probe, "measure", measure)
    expected = ["/ssd1"] if out else ["/ssd1", "/ssd2"]
    play(mounts.CONTROL_SOCKET, [answer], [answer])
    assert run("probe", "/data/a") == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("/ssd")] == (
        [] if out else ["/ssd1:", "/ssd2:"]
    )
    assert run("probe", "/data/a", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert ("/ssd2" in told) == (not out)
    assert asked == expected * 2


def test_status_counts_what_lies_in_the_log_and_what_is_staged_from_ssd(
    play: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    ssd = {"bytes": 90 << 20, "limit_bytes": 100 << 20, "blocks": 0}
    rows = shown_rows(play, capfd, ssd=ssd, layout={"log_files": 5000}, reads=PUSHED)
    assert "5,000 files in the log, 0 blocks elsewhere" in rows["SSD tier"]
    assert rows["prefetch"].endswith("0 files, 0 B from the origin; 1 MiB from SSD into RAM")


def test_status_says_that_prefetched_bytes_may_be_the_pools(
    play: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = {"files": 0, "bytes": 0, "bytes_written": 0, "servers": [], "fault": ""}
    rows = shown_rows(play, capfd, pool=pool)
    assert "0 files, 0 B from the origin or the pool; 0 B from SSD into RAM" in rows["prefetch"]


def test_status_for_machines_has_what_hintsd_says(
    play: Script,
    hintsd: Callable[[Message], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    play(mounts.CONTROL_SOCKET, [{"ok": True, "status": STATUS | {"layout": LAYOUT}}])
    hintsd(OF_HINTSD)
    assert run("status", "--json", "/data/a") == 0
    told = json.loads(capfd.readouterr().out)["layout"]
    assert told == LAYOUT | {"chosen": "reorder", "why": "900 MiB/s", "job": "a-4"}


def test_status_calls_late_only_what_hintsd_calls_so(
    play: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    prefetch = {
        **{"connected": True, "queued_stage": 0, "queued_fetch": 0, "in_flight": 0, "depth": 1},
        **{"files": 0, "bytes": 0, "overtaking_reads": 1234},
    }
    shown = shown_rows(play, capfd, prefetch=prefetch)["prefetch"]
    assert shown.endswith("; 1,234 reads overtook it")
    assert "late" not in shown


def test_status_teaches_its_rows(play: Script, capfd: pytest.CaptureFixture[str]) -> None:
    shown = set(shown_rows(play, capfd)) - {"mount point", "source", "up", "processes"}
    assert run("status", "--help") == 0
    told = capfd.readouterr().out
    assert [row for row in shown | {"cache faults", "counted", "layout"} if row not in told] == []


def test_status_prefers_a_job_that_can_be_packed(
    play: Script, hintsd: Callable[[Message], None], capfd: pytest.CaptureFixture[str]
) -> None:
    here = {"mountpoint": "/data/a", "layout": "static"}
    last = {**here, "name": "one-1", "epoch": 0, "epochs": 1, "layout_why": "no epoch follows"}
    more = {**here, "name": "more-2", "epoch": 0, "epochs": 3, "layout_why": "not decided yet"}
    hintsd({"mounts": [], "jobs": [last, more]})
    layout = shown_rows(play, capfd, layout=LAYOUT)["layout"]
    assert layout.startswith("static (--layout auto, more-2): not decided yet")


def test_status_keeps_what_was_said_of_the_last_job(
    play: Script, hintsd: Callable[[Message], None], capfd: pytest.CaptureFixture[str]
) -> None:
    here = {"mountpoint": "/data/a", "layout": "static", "layout_why": "too slow"}
    ended = [
        {**here, "name": "a-1", "ended_ago_s": 60.0},
        {**here, "name": "a-2", "ended_ago_s": 5.0, "layout_why": "no room"},
        {**here, "name": "b-3", "ended_ago_s": 1.0, "mountpoint": "/data/b"},
    ]
    hintsd({"mounts": [], "jobs": [], "ended": ended})
    assert (
        "no job has hints now; last: static (a-2): no room"
        in shown_rows(play, capfd, layout=LAYOUT)["layout"]
    )


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_job_that_waits_does_not_hide_the_last_one(
    play: Script, hintsd: Callable[[Message], None], capfd: pytest.CaptureFixture[str], state: str
) -> None:
    here = {"mountpoint": "/data/a", "layout": "static", "layout_why": "not decided yet"}
    ended = [{**here, "name": "a-1", "ended_ago_s": 5.0, "layout": "reorder", "layout_why": "fast"}]
    hintsd({"mounts": [], "jobs": [{**here, "name": "b-2", "state": state}], "ended": ended})
    layout = shown_rows(play, capfd, layout=LAYOUT)["layout"]
    assert layout.startswith("static (--layout auto, b-2): not decided yet")
    assert ("; last: reorder (a-1): fast" in layout) == (state == "waiting")


@pytest.mark.parametrize("is_set", [True, False])
def test_status_says_that_no_hintsd_listens(
    play: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str], is_set: bool
) -> None:
    chosen = str(tmp_path / "nobody") if is_set else "none"
    record = tmp_path / "run" / "0:99" / mounts.KEEPER_FILE
    record.write_text(json.dumps({"config": {"hintsd": chosen}}))
    layout = {"layout": {"setting": "auto"}}
    play(mounts.CONTROL_SOCKET, [{"ok": True, "status": STATUS | layout}])
    assert run("status", "/data/a") == 0
    shown = capfd.readouterr().out
    assert (f"NO HINTSD LISTENS at {chosen}" in shown) == is_set
    absent = "no hintsd is connected (hintsd serve starts one)"
    why = absent if is_set else "mounted without hints (--hintsd none)"
    assert f" {why}; until now" in shown
    assert f"--layout auto; nothing is moved: {why}" in shown


@pytest.mark.parametrize(
    ("layout", "shown"),
    [
        ({}, "--layout static"),
        (
            {"setting": "reorder", "packing": 0},
            "--layout reorder; nothing is moved: no job has hints now",
        ),
        (
            {"setting": "reorder", "packing": 4, "ssd_needed_bytes": (5 << 30) - 1},
            "--layout reorder; nothing is moved: no job has hints now; NO LOG: too little room on "
            "SSD, --ssd 5120M would be needed",
        ),
    ],
)
def test_status_without_a_hintsd_says_what_was_set(
    play: Script, capfd: pytest.CaptureFixture[str], layout: Message, shown: str
) -> None:
    play(mounts.CONTROL_SOCKET, [{"ok": True, "status": STATUS | {"layout": layout}}])
    assert run("status", "/data/a") == 0
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("layout")]
    assert line.split(maxsplit=1)[1].strip() == shown


def test_a_server_that_dies_is_asked_again(play: Script) -> None:
    peer = play(mounts.CONTROL_SOCKET, [], [], [{"ok": True, "status": STATUS}])
    assert run("status", "/data/a") == 0
    assert [request["op"] for request in peer.requests] == ["status"] * 3


def test_nobody_there_is_said(play: Script, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("status", "/data/a") == errors.EXIT_FAILED
    assert capfd.readouterr().err == (
        "fusecache: /data/a: neither server nor keeper answers; mount it again (fusecache mount), "
        "or fusecache umount\n"
    )


def test_a_keeper_that_lives_is_not_to_be_replaced(
    play: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    target = control_client.find("/data/a")
    assert target.directory is not None
    with mounts.listen(target.directory, mounts.KEEPER_SOCKET, 1):
        assert run("status", "/data/a") == errors.EXIT_FAILED
    assert capfd.readouterr().err == "fusecache: /data/a: neither server nor keeper answers\n"


def test_list_says_which_keepers_are_gone(
    play: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = control_client.find("/data/a").directory
    assert directory is not None
    Path(directory, mounts.KEEPER_FILE).write_text('{"keeper_pid": 4711}')
    assert run("list") == 0
    assert "4711 (gone)" in capfd.readouterr().out
    with mounts.listen(directory, mounts.KEEPER_SOCKET, 1):
        assert run("list") == 0
    shown = capfd.readouterr().out
    assert "4711" in shown
    assert "gone" not in shown


def test_a_silent_server_is_said(play: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    target = control_client.find("/data/a")
    assert target.directory is not None
    with (
        mounts.listen(target.directory, mounts.CONTROL_SOCKET, 1),
        pytest.raises(UserError, match="does not answer"),
    ):
        list(control_client.converse(target, {"op": "status"}, timeout_s=0.01))


def test_a_mount_of_another_user_is_said(play: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "runtime_directory", lambda _: None)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(UserError, match="belongs to another user"):
        control_client.ask(control_client.find("/data/a"), {"op": "status"})


def test_list(play: Script, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--json") == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert (row["mountpoint"], row["source"]) == ("/data/a", "/s")
    assert run("list") == 0
    assert "/data/a" in capfd.readouterr().out


def test_list_of_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mounts, "mounts", list)
    assert run("list") == 0
    assert capfd.readouterr() == ("no mounts\n", "")
    assert run("list", "--json") == 0
    assert json.loads(capfd.readouterr().out) == []


@pytest.mark.parametrize("arguments", [["probe"], ["gc"], ["gc", "/none"], ["status"], ["verify"]])
def test_a_path_that_is_not_there_has_one_exit_code(arguments: list[str]) -> None:
    assert run(*arguments, "/nope") == errors.EXIT_NOT_A_MOUNT


# ---- warm, verify -----------------------------------------------------------------


def progress(done: int) -> Message:
    figures = {
        "files_done": done,
        "files_total": 9,
        "bytes_done": done << 20,
        "bytes_total": 9 << 20,
    }
    return {"progress": {**figures, "errors": 0}}


def test_where_there_is_no_terminal_progress_is_a_line_now_and_then(
    capfd: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    with files.progress("warming", lambda: now) as show:
        for now in range(0, 70, 5):
            files.show_files(show, progress(now // 5 + 1)["progress"] | {"bytes_total": 40 << 20})
    assert capfd.readouterr().err.splitlines() == [
        "fusecache: warming: 7 MiB of 40 MiB (17%), 205 KiB/s, 2 min 45 s left, 7 of 9 files",
        "fusecache: warming: 13 MiB of 40 MiB (32%), 205 KiB/s, 2 min 15 s left, 13 of 9 files",
    ]


def test_warm_of_an_empty_glob_is_refused(play: Script, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("warm", "/data/a", "") == errors.EXIT_USAGE
    assert capfd.readouterr().err == "fusecache: '' is no glob\n"


def test_warm(play: Script, capfd: pytest.CaptureFixture[str]) -> None:
    result = {"files": 9, "bytes": 9 << 20, "already": 4, "errors": [], "skipped": 0}
    peer = play(mounts.CONTROL_SOCKET, [progress(1), progress(5), {"ok": True, "result": result}])
    assert run("warm", "/data/a", "train/**", "b\udcff") == 0
    assert peer.requests == [{"op": "warm", "globs": ["train/**", "b\udcff"]}]
    assert "9 files, 9 MiB in the cache; 4 were there before" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        (
            {"skipped": 45, "unfitting": 45},
            "45 files (20 MiB) do not fit in --ssd 300 MiB; --ssd 360M would hold all",
        ),
        (
            {"skipped": 1, "unfitting": 0},
            "1 file (5 MiB) could not be stored: the SSD tier is full, has failed, or its room is "
            "a log's; fusecache status /data/a",
        ),
        ({"unmatched": ["no*", "x"]}, "no file matches no* x"),
    ],
)
def test_warm_that_left_something_out_fails(
    play: Script, capfd: pytest.CaptureFixture[str], extra: Message, line: str
) -> None:
    result = {
        **{"files": 1, "bytes": 75 << 20, "already": 0, "errors": [], "limit_bytes": 300 << 20},
        **{"skipped_bytes": 25 << 20, "unfitting_bytes": 20 << 20},
        "needed_bytes": (360 << 20) - 5,
    }
    play(mounts.CONTROL_SOCKET, [{"ok": True, "result": {**result, **extra}}])
    assert run("warm", "/data/a") == errors.EXIT_FAILED
    said = capfd.readouterr()
    assert line in said.err
    assert ("1 files, 75 MiB of 100 MiB (75%) in the cache" in said.out) is ("skipped" in extra)


@pytest.mark.parametrize(
    ("path", "globs", "prefix", "sent"),
    [
        ("/data/a", ["/data/a/x/*", "/y"], None, ["x/*", "/y"]),
        ("/data/a/sub/dir", ["*.jpg", "/data/a/sub/dir/b"], "sub/dir", ["*.jpg", "b"]),
        ("/data/a/sub/", ["/data/a/sub"], "sub", ["**"]),
    ],
)
def test_warm_below_the_mount_point(
    play: Script, path: str, globs: list[str], prefix: str | None, sent: list[str]
) -> None:
    result = {"files": 1, "bytes": 1, "already": 0, "errors": [], "skipped": 0}
    peer = play(mounts.CONTROL_SOCKET, [{"ok": True, "result": result}])
    assert run("warm", path, *globs) == errors.EXIT_OK
    wanted = {"op": "warm", "globs": sent, **({"prefix": prefix} if prefix else {})}
    assert peer.requests == [wanted]


def test_warm_that_met_errors_fails(play: Script, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [f"f{i}: EIO" for i in range(30)]
    result = {"files": 1, "bytes": 1, "already": 0, "errors": lines, "skipped": 0}
    play(mounts.CONTROL_SOCKET, [{"ok": True, "result": result}])
    assert run("warm", "/data/a") == errors.EXIT_FAILED
    assert "f19: EIO\nfusecache: … and 10 more\n" in capfd.readouterr().err


def test_warm_interrupted_says_how_to_go_on(
    play: Script, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def converse(*_: object) -> Iterator[Message]:
        yield progress(3)
        raise KeyboardInterrupt

    monkeypatch.setattr(control_client, "converse", converse)
    assert run("warm", "/data/a") == errors.EXIT_INTERRUPTED
    assert "after 3 files (3 MiB); run it again to go on" in capfd.readouterr().err


def batches_of(data: bytes, path: str = "/data/a") -> tuple[list[list[str]], str]:
    """What is asked for, and what is said of the rest."""
    paths = files.PathList("/data/a", "/mnt/nfs", path)
    batches = list(paths.batches(io.BytesIO(data)))
    return batches, paths.refused.line() if paths.refused.count else ""


@pytest.mark.parametrize(
    ("path", "line", "named"),
    [
        ("/data/a", b"x/y", "x/y"),
        ("/data/a/sub", b"x", "sub/x"),
        ("/data/a/sub", b"../x", "x"),
        ("/data/a/sub", b"/data/a/x", "x"),
        ("/data/a", b"//mnt/nfs//x/./y/", "x/y"),
        ("/data/a", "ü \t語".encode(), "ü \t語"),
        ("/data/a", b" x", " x"),
        ("/data/a", b"..x", "..x"),
        ("/data/a", b"a" * 4096, "a" * 4096),
    ],
)
def test_a_line_of_a_list_names_a_file(path: str, line: bytes, named: str) -> None:
    assert batches_of(line, path) == ([[named]], "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"../x", "../x (not below the mount)"),
        (b"a/../../a/x", "a/../../a/x (not below the mount)"),
        (b"/data/ab", "/data/ab (not below the mount)"),
        (b"/data/a/../x", "/data/a/../x (not below the mount)"),
        (b"/data/a", "/data/a (no file)"),
        (b"\xffx", r"\xffx (not UTF-8)"),
        (b"a\0b", r"'a\x00b' (no path)"),
        (b"a" * 4097, f"'{'a' * 40}' (no path)"),
        (b"a" * 100_000, f"'{'a' * 40}' (no path)"),
    ],
)
def test_a_line_of_a_list_that_names_none_is_told(line: bytes, said: str) -> None:
    assert batches_of(b"x\n" + line + b"\n\ny") == (
        [["x", "y"]],
        f"1 line of the list left out: {said}",
    )


def test_the_first_of_many_lines_are_told() -> None:
    batches, said = batches_of(b"/x\n" * 3000)
    assert batches == []
    shown = ", ".join(["/x (not below the mount)"] * 5)
    assert said == f"3,000 lines of the list left out: {shown}, …"


@pytest.mark.parametrize("name", [b"x", b"\x01" * 255, "語".encode() * 80, b"a/" * 2000])
def test_each_request_of_a_list_is_a_line_that_the_server_takes(name: bytes) -> None:
    lines = [b"%s%d" % (name, number) for number in range(10_000 if len(name) < 9 else 2000)]
    batches, said = batches_of(b"\n".join(lines))
    assert said == ""
    assert [path.encode() for batch in batches for path in batch] == lines
    assert len(batches) > 1
    for batch in batches:
        request = {"op": "warm_paths", "paths": batch, "carried": [1 << 62] * 3}
        assert len(json.dumps(request)) < control.LINE_BYTES_MOST
        assert len(batch) <= 4096


def test_warm_of_a_list_adds_up_its_requests(
    play: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "list"
    file.write_bytes(b"".join(b"%d\n" % number for number in range(5000)) + b"../x\n")
    common = {"limit_bytes": 300 << 20, "missing_names": ["7"], "errors": ["5: EIO"]}
    first = {**common, "files": 4000, "bytes": 1 << 20, "already": 3, "missing": 95,
             "carried": [1, 2, 3], "error_count": 30}  # fmt: skip
    second = {**common, "files": 900, "bytes": 1 << 20, "already": 4, "missing": 1,
              "skipped": 2, "unfitting": 2, "unfitting_bytes": 9, "skipped_bytes": 9,
              "needed_bytes": 360 << 20, "error_count": 1}  # fmt: skip
    peer = play(
        mounts.CONTROL_SOCKET,
        [progress(1), {"ok": True, "result": first}],
        [progress(2), {"ok": True, "result": second}],
    )
    assert run("warm", "/data/a", "--list", str(file)) == errors.EXIT_FAILED
    names = [str(number) for number in range(5000)]
    assert peer.requests == [
        {"op": "warm_paths", "paths": names[:4096]},
        {"op": "warm_paths", "paths": names[4096:], "carried": [1, 2, 3]},
    ]
    said = capfd.readouterr()
    assert (
        said.out
        == "4,900 files, 2 MiB of 2 MiB (99%) in the cache; 7 were there before; 2 skipped\n"
    )
    assert said.err.splitlines() == [
        "fusecache: 97 lines of the list left out: ../x (not below the mount), 7 (no such file), "
        "7 (no such file), …",
        "fusecache: 5: EIO",
        "fusecache: 5: EIO",
        "fusecache: … and 29 more",
        "fusecache: 2 files (9 B) do not fit in --ssd 300 MiB; --ssd 360M would hold all that was "
        "asked for",
    ]


def test_an_empty_list_asks_for_nothing(
    play: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list").touch()
    assert run("warm", "/data/a", "--list", str(tmp_path / "list")) == errors.EXIT_OK
    assert capfd.readouterr().out.startswith("0 files, 0 B in the cache")
    assert run("warm", "/data/a", "--list", str(tmp_path)) == errors.EXIT_USAGE
    assert "Is a directory" in capfd.readouterr().err


# ---- evict, pin ----------------------------------------------------------------------------------

EVICTED = {"files": 2, "bytes": 2 << 20, "evicted_bytes": 1 << 20, "absent": 1, "of_jobs": 0,
           "pinned": 0, "staying": 0, "has_logs": False}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"of_jobs": 3}, "3 files left in the cache, pinned by hinted jobs: end them first (hin"),
        (
            {"pinned": 1},
            "1 file left in the cache, pinned by a user: fusecache pin /data/a --remove GLOB first",
        ),
        (
            {"staying": 4},
            "4 files left in the cache: they share blocks with files that were not named, or",
        ),
        (
            {"staying": 4, "has_logs": True},
            "4 files left in the cache: they lie in a log of hinted jobs",
        ),
        ({"unmatched": ["no*"]}, "warning: no file matches no*"),
        ({"errors": ["b: EIO"], "error_count": 1}, "b: EIO"),
    ],
)
def test_evict_says_what_stays(
    play: Script, capfd: pytest.CaptureFixture[str], changes: Message, line: str
) -> None:
    ok = {"ok": True, "result": EVICTED}
    peer = play(mounts.CONTROL_SOCKET, [progress(1), {**ok, "result": EVICTED | changes}], [ok])
    assert run("evict", "/data/a/sub", "x", "/data/a/sub/y*") == errors.EXIT_FAILED
    said = capfd.readouterr()
    assert said.out == "2 files, 2 MiB evicted, 1 MiB given back on SSD; 1 were not there\n"
    assert said.err.startswith(f"fusecache: {line}")
    assert said.err.count("\n") == 1
    assert run("evict", "/data/a", "**") == errors.EXIT_OK
    assert peer.requests == [
        {"op": "evict", "globs": ["x", "y*"], "prefix": "sub"},
        {"op": "evict", "globs": ["**"]},
    ]


def test_pin_says_what_is_pinned_then(play: Script, capfd: pytest.CaptureFixture[str]) -> None:
    pinned = {"globs": ["a", "sub/x"], "files": 3, "bytes": 5}
    none = {"globs": [], "files": 0, "bytes": 0}
    failed = {**pinned, "errors": ["b: EIO"]}
    script = [[{"ok": True, "result": result}] for result in (pinned, none, failed)]
    peer = play(mounts.CONTROL_SOCKET, *script)
    assert run("pin", "/data/a/sub", "x") == errors.EXIT_OK
    assert capfd.readouterr().out == "pinned: a sub/x (3 files, 5 B)\n"
    assert run("pin", "/data/a", "--remove") == errors.EXIT_OK
    assert capfd.readouterr().out == "no pins\n"
    assert run("pin", "/data/a", "b") == errors.EXIT_FAILED
    assert capfd.readouterr().err == "fusecache: b: EIO\n"
    assert peer.requests == [
        {"op": "pin", "globs": ["x"], "prefix": "sub", "remove": False},
        {"op": "pin", "globs": [], "remove": True},
        {"op": "pin", "globs": ["b"], "remove": False},
    ]


def test_status_shows_pins(play: Script, capfd: pytest.CaptureFixture[str]) -> None:
    pins = {"globs": ["a/**", *"0123456789"], "files": 1204, "bytes": 3 << 30, "known": False}
    script = [[{"ok": True, "status": {**STATUS, "pins": {**pins, "globs": globs}}}]
              for globs in (pins["globs"], [])]  # fmt: skip
    play(mounts.CONTROL_SOCKET, *script)
    assert run("status", "/data/a") == errors.EXIT_OK
    said = capfd.readouterr().out
    assert "1,204 files, 3 GiB, looking for more: a/** 0 1 2 3 4 5 6 …\n" in said
    assert run("status", "/data/a") == errors.EXIT_OK
    assert "1,204 files, 3 GiB, looking for more\n" in capfd.readouterr().out, "as others see it"


@pytest.mark.parametrize(("bad", "code"), [(0, errors.EXIT_OK), (2, errors.EXIT_FAILED)])
def test_verify(play: Script, capfd: pytest.CaptureFixture[str], bad: int, code: int) -> None:
    figures = {"blocks_done": 1, "blocks_total": 5, "bytes_done": 10, "bad": bad}
    result = {"blocks": 5, "bytes": 50, "bad": bad}
    play(mounts.CONTROL_SOCKET, [{"progress": figures}, {"ok": True, "result": result}])
    assert run("verify", "/data/a") == code
    assert f"5 blocks, 50 B checked, {bad} bad" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "result", "code"),
    [
        (
            ["warm", "/data/a"],
            {"files": 9, "bytes": 5, "already": 4, "skipped": 2, "skipped_bytes": 7},
            errors.EXIT_FAILED,
        ),
        (["evict", "/data/a", "x"], EVICTED | {"pinned": 1}, errors.EXIT_FAILED),
        (["pin", "/data/a", "x"], {"globs": ["x"], "files": 3, "bytes": 5}, errors.EXIT_OK),
        (["verify", "/data/a"], {"blocks": 5, "bytes": 50, "bad": 2}, errors.EXIT_FAILED),
    ],
)
def test_as_json_a_command_says_its_result_and_ends_as_ever(
    play: Script, capfd: pytest.CaptureFixture[str], words: list[str], result: Message, code: int
) -> None:
    play(mounts.CONTROL_SOCKET, [{"ok": True, "result": {**result, "carried": {}}}])
    assert run(*words, "--json") == code
    told = json.loads(capfd.readouterr().out)
    assert {**told, **result} == told
    assert ("carried" in told) is (words[0] != "warm")


def test_a_command_with_a_result_has_it_for_machines() -> None:
    def is_without(command: click.Command) -> bool:
        return not any("--json" in option.opts for option in command.params)

    commands = cli.cli.all_commands(click.Context(cli.cli))
    assert {name for name, each in commands.items() if is_without(each)} == {
        "mount", "restart", "install-helpers", "service",  # what is so then, status and list say
        "metrics",  # has a format of its own
        "cached",  # is a service
        "pool",  # a group
    }  # fmt: skip


def test_a_refusal_has_its_exit_code(play: Script, capfd: pytest.CaptureFixture[str]) -> None:
    play(mounts.CONTROL_SOCKET, [{"ok": False, "error": "not now", "exit": 4}])
    assert run("verify", "/data/a") == errors.EXIT_BUSY
    assert capfd.readouterr().err == "fusecache: not now\n"


# ---- restart, umount -----------------------------------------------------------------


def test_restart_sends_the_whole_config(play: Script, tmp_path: Path) -> None:
    current = build(
        {"source": "/s", "mountpoint": "/data/a", "cache_dir": str(tmp_path), "policy": "keep"}
    )
    info = {"ok": True, "info": {"config": json.loads(current.to_json())}}
    peer = play(mounts.KEEPER_SOCKET, [info], [{"ok": True}])
    assert run("restart", "/data/a", "--ram", "64M", "--revalidate", "never") == 0
    wanted = {**json.loads(current.to_json()), "ram_bytes": 64 << 20, "revalidate_s": None}
    assert peer.requests == [{"op": "info"}, {"op": "restart", "config": wanted}]


def test_restart_refuses_a_cache_directory_as_mount_does(
    play: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    current = build({"source": "/s", "mountpoint": "/data/a", "cache_dir": str(tmp_path)})
    info = {"ok": True, "info": {"config": json.loads(current.to_json())}}
    peer = play(mounts.KEEPER_SOCKET, [info])
    file = tmp_path / "file"
    file.write_bytes(b"")
    assert run("restart", "/data/a", "--cache-dir", str(file)) == errors.EXIT_USAGE
    assert f"cache directory {file} is, or lies below, a file" in capfd.readouterr().err
    assert peer.requests == [{"op": "info"}]


def test_restart_names_no_defaults_of_what_stays(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, is_named in (("mount", True), ("restart", False)):
        assert run(name, "--help") == 0
        assert ("[static]" in capfd.readouterr().out) == is_named


def test_restart_finds_its_mount_in_the_file(play: Script, tmp_path: Path) -> None:
    current = build({"source": "/s", "mountpoint": "/data/a", "cache_dir": str(tmp_path)})
    file = tmp_path / "a.toml"
    file.write_text('source = "/other"\nmountpoint = "/data/a"\n')
    info = {"ok": True, "info": {"config": json.loads(current.to_json())}}
    refused = {"ok": False, "error": "--source cannot change while mounted", "exit": 2}
    peer = play(mounts.KEEPER_SOCKET, [info], [refused])
    assert run("restart", "--config", str(file)) == errors.EXIT_USAGE
    assert peer.requests[1]["config"]["source"] == "/other"


@pytest.mark.parametrize("name", ["mount", "restart", "umount"])
def test_an_empty_name_of_a_file_is_no_leave_to_go_without(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(name, "--config", "", "/data/a") == errors.EXIT_USAGE
    assert capfd.readouterr().err == "fusecache: --config '': No such file or directory\n"


def test_umount_says_who_is_in_the_way(play: Script, capfd: pytest.CaptureFixture[str]) -> None:
    busy = {"ok": False, "error": "busy", "exit": 4, "pids": [os.getpid()]}
    peer = play(mounts.KEEPER_SOCKET, [busy], [{"ok": True, "detached": True}])
    assert run("umount", "/data/a") == errors.EXIT_BUSY
    assert f"({os.getpid()}); --lazy detaches" in capfd.readouterr().err
    assert os.getcwd() == "/"  # what a command is in, it would keep busy
    capfd.readouterr()
    assert run("umount", "--lazy", "/data/a", "--json") == 0
    assert json.loads(capfd.readouterr().out) == {"mountpoint": "/data/a", "detached": True}
    assert peer.requests[1] == {"op": "umount", "lazy": True}


def test_umount_names_mounts_and_not_their_processes(
    play: Script, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    me = os.getpid()
    busy = {"ok": False, "error": "busy", "exit": 4, "pids": [me, 1 << 30, 2 << 30]}
    play(mounts.KEEPER_SOCKET)
    (own,) = mounts.mounts()
    others = [dataclasses.replace(own, mountpoint=f"/data/{n}", device=n) for n in ("b", "c")]
    records = {"0:99": (me, me), "b": (1 << 30, 0), "c": (3 << 30, 2 << 30)}
    monkeypatch.setattr(mounts, "runtime_directory", lambda mount: f"/run/{mount.device}")
    monkeypatch.setattr(
        mounts,
        "keeper_record",
        lambda path: dict(zip(("keeper_pid", "server_pid"), records[path[5:]], strict=True)),
    )
    monkeypatch.setattr(control_client, "ask_keeper", lambda *_: busy)
    monkeypatch.setattr(mounts, "mounts", lambda: [own, *others])
    assert run("umount", "/data/a") == errors.EXIT_BUSY
    said = capfd.readouterr().err
    assert said.startswith("fusecache: /data/a is in use by ")
    end = f"({me}), the fusecache mounts /data/c, /data/b: umount those first\n"
    assert said.endswith(end)


def test_umount_of_what_is_inside_a_mount_is_refused(
    play: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    peer = play(mounts.KEEPER_SOCKET, [{"ok": True}])
    for path in ("/data/a/sub", "/data/a/sub/"):
        assert run("umount", path) == errors.EXIT_USAGE
        said = capfd.readouterr().err
        assert said.count("\n") == 1
        assert said.endswith("to end that: fusecache umount /data/a\n")
    assert peer.requests == []
    (tmp_path / "link").symlink_to("/data/a")
    assert run("umount", str(tmp_path / "link")) == 0
    assert [request["op"] for request in peer.requests] == ["umount"]


def test_umount_works_without_a_keeper(play: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(mounting, "unmount", lambda *arguments: called.append(arguments))
    assert run("umount", "/data/a") == 0
    assert called == [("/data/a", False)]


# ---- mount(8) -----------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["{s}", "{m}", "-o", "rw,ssd=1G,cache-dir={c}"],
        ["{s}", "{m}", "-sn", "-o", "ro", "-ossd=1G", "-t", "fuse.fusecache", "-ocache-dir={c}"],
        ["-v", "-w", "-N", "77", "-o", "ssd=1G,cache-dir={c},nosuid", "{s}", "{m}"],
    ],
)
def test_the_helper_understands_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    paths = {"s": tmp_path / "source", "m": tmp_path / "mnt", "c": tmp_path / "cache"}
    paths["s"].mkdir()
    (paths["s"] / "file").touch()
    paths["m"].mkdir()
    mounted: list[Config] = []
    monkeypatch.setattr(mount_command, "start", mounted.append)
    words = [word.format(**paths) for word in arguments]
    cli._help_mount(words)
    (made,) = mounted
    assert (made.source, made.mountpoint) == (str(paths["s"]), str(paths["m"]))
    assert (made.cache_dir, made.ssd_bytes) == (str(paths["c"]), 1 << 30)
    cli._help_mount([*words, "-f"])
    assert len(mounted) == 1


@pytest.mark.parametrize("arguments", [["a"], ["a", "b", "c"], ["a", "b", "-x"], []])
def test_the_helper_refuses_what_it_does_not_know(arguments: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        cli._help_mount(arguments)
    assert caught.value.exit_code == errors.EXIT_USAGE


def test_helpers_are_links_and_foreign_files_stay(tmp_path: Path) -> None:
    assert run("install-helpers", "--directory", str(tmp_path)) == 0
    for name in cli.HELPER_NAMES:
        assert os.access(tmp_path / name, os.X_OK)
        assert (tmp_path / name).is_symlink()
    assert run("install-helpers", "--directory", str(tmp_path)) == 0
    assert run("install-helpers", "--remove", "--directory", str(tmp_path)) == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / cli.HELPER_NAMES[0]).write_text("somebody's")
    assert run("install-helpers", "--directory", str(tmp_path)) == errors.EXIT_FAILED
    assert (tmp_path / cli.HELPER_NAMES[0]).read_text() == "somebody's"


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m fusecache.cli.main mount --help | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert b"Traceback" not in done.stderr


# ---- hintsd --------------------------------------------------------------------------------------


def _listener_of(socket_path: Path) -> int:
    with mounts.connect(str(socket_path.parent), socket_path.name, 10) as connection:
        return peer_of(connection).pid


def test_a_hintsd_is_started_once(tmp_path: Path) -> None:
    path = tmp_path / "hintsd.sock"
    mount_command.start_hintsd(str(path))
    pid = _listener_of(path)
    try:
        assert os.getsid(pid) == pid
        mount_command.start_hintsd(str(path))
        assert _listener_of(path) == pid
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("flags", "setting", "is_started"),
    [
        ((), "auto", True),
        (("--hintsd", "none"), "auto", False),
        (("--foreground",), "auto", False),
        ((), "none", False),
        ((), "/run/some.sock", False),
    ],
)
def test_mounting_again_starts_a_hintsd_that_has_ended(
    play: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    setting: str,
    is_started: bool,
) -> None:
    path = tmp_path / "hintsd.sock"
    monkeypatch.setattr(mounts, "hintsd_socket", lambda _: str(path))
    record = tmp_path / "run" / "0:99" / mounts.KEEPER_FILE
    record.write_text(json.dumps({"config": {"hintsd": setting}}))
    play(mounts.KEEPER_SOCKET, *[[{"ok": True, "info": {}}]] * 2)
    arguments = ("mount", "/data/a", "--cache-dir", str(tmp_path / "cache"), *flags)
    said = "; its hintsd had ended: it was started again"
    for is_dead in (True, False):
        assert run(*arguments) == errors.EXIT_BUSY
        (line,) = capfd.readouterr().err.splitlines()
        assert "/data/a is already a fusecache" in line
        assert (said in line) == (is_started and is_dead)
        assert path.exists() == is_started
    if is_started:
        pid = _listener_of(path)
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def test_a_hintsd_that_does_not_start_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OSError, match="ended at once"):
        mount_command.start_hintsd(str(tmp_path / "hintsd.sock"))
    monkeypatch.setattr(sys, "executable", "/none")
    with pytest.raises(OSError, match="No such file"):
        mount_command.start_hintsd(str(tmp_path / "hintsd.sock"))


def test_names_command_no_terminal() -> None:
    assert command.printable("\x1b]0;x\x07 \udcff\x9b é\n") == "\\x1b]0;x\\x07 \\xff\\x9b é\n"

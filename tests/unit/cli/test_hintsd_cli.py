"""The command `hintsd` against a daemon in a thread, or against none."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from rich.console import Console

from fusecache.base import mounts, processes, terminal, wire
from hintsd import autohint
from hintsd.cli import main as cli
from hintsd.cli import report
from tests.support.hintsd_support import ANSWER_TIMEOUT_S, Client, Daemon

FULL: dict[str, Any] = {
    "version": "0.1.0",
    "pid": 7,
    "uptime_s": 3723.5,
    "connections": 1,
    "mounts": [
        {
            "mountpoint": "/data/\udcff",
            "connected": True,
            "ram_bytes": 1 << 30,
            "ram_limit_bytes": 4 << 30,
            "ssd_bytes": 0,
            "ssd_limit_bytes": 1 << 40,
            "ssd_disk_full": 1,
            "origin_bytes_per_s": 100 << 20,
            "depth": 16,
            "packing": 1,
            "log_written_bytes": 5 << 30,
            "log_segments": 128,
            "queued_stage": 1200,
            "queued_fetch": 3,
        },
        {"mountpoint": "/data/b", "connected": False, "reason": "is an older version"},
    ],
    "jobs": [
        {
            "name": "train-1",
            "state": "wrong",
            "reason": "the reader follows another order",
            "epoch": 3,
            "epochs": 90,
            "index": 12800,
            "samples": 1281167,
            "window_bytes": 1 << 30,
            "not_late": 12345,
            "late": {"queued": 10, "fetching": 2},
            "unplanned": {},
            "predicted_stall_s": 1.25,
            "layout": "reorder",
            "layout_why": "first epoch",
        },
        {"name": "eval-1", "state": "waiting"},
    ],
    "ended": [
        {
            "name": "train-0",
            "state": "done",
            "reason": "",
            "epoch": 1,
            "epochs": 2,
            "index": 500,
            "samples": 500,
            "not_late": 990,
            "late": {"evicted": 10},
            "unplanned": {"not in window": 3},
            "why_ended": "all its epochs are read",
            "ended_ago_s": 62.5,
        },
        {
            "name": "train-2",
            "state": "ended",
            "why_ended": "its process 9 has ended",
            "ended_ago_s": 1,
        },
    ],
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.kill()


@pytest.fixture
def run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """run(arguments) -> exit code, stdout, stderr."""

    def run_hintsd(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hintsd", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capfd.readouterr()
        return int(caught.value.code or 0), output.out, output.err

    return run_hintsd


Run = Callable[..., tuple[int, str, str]]


def test_status_for_machines_and_for_people(
    daemon: Daemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon.server, "status", lambda guest: FULL)
    code, out, err = run("status", "--json", "--socket", daemon.path)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert (answer["jobs"], answer["ended"]) == (FULL["jobs"], FULL["ended"])
    code, out, err = run("status", "--socket", daemon.path)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines == [
        "hintsd 0.1.0, process 7, up 1 h 2 min 3 s",
        "",
        "mount hintsd RAM tier SSD tier origin depth queued",
        r"/data/\udcff connected 1 GiB of 4 GiB 0 B of 1 TiB 100 MiB/s 16 1,200 + 3",
        "/data/b NOT CONNECTED - of - - of - -/s - - + -",
        r"/data/\udcff: log of 128 segments, 5 GiB written",
        r"/data/\udcff: THE DISK OF ITS CACHE IS FULL: the SSD tier gets no larger "
        "(fusecache status tells)",
        "/data/b: is an older version",
        "",
        "job state epoch sample window not late late unplanned stall",
        "train-1 wrong 3 of 90 12,800 / 1,281,167 1 GiB 12,345 12 0 1.2 s",
        "eval-1 waiting - - / - - - 0 0 -",
        "train-1: late: queued 10, fetching 2",
        "train-1: the reader follows another order",
        "train-1: layout reorder: first epoch",
        "",
        "ended state when epoch sample not late late unplanned",
        "train-0 done 1 min 2 s ago 1 of 2 500 / 500 990 10 3",
        "train-2 ended 1 s ago - - / - - 0 0",
        "train-0: late: evicted 10; unplanned: not in window 3",
        "train-0: all its epochs are read",
        "train-2: its process 9 has ended",
    ]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_tables_of_status_fit_a_terminal(width: int) -> None:
    """Figures, names and titles stay whole; only columns of several words are wrapped."""
    large = {"epoch": 89, "epochs": 90, "index": 1281167, "samples": 1281167, "not_late": 123456}
    missed = {"late": {"queued": 1234, "evicted": 1200}, "unplanned": {"not in window": 3456}}
    jobs, ended = ([FULL[part][0] | large | missed] for part in ("jobs", "ended"))
    out = io.StringIO()
    shown = report.tables(FULL | {"jobs": jobs, "ended": ended})
    Console(file=out, width=width, highlight=False, markup=False).print(shown)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert "job state epoch sample window not late late unplanned stall" in lines
    assert "ended state when epoch sample not late late unplanned" in lines
    for begin, end in (("train-1 wrong 89 of 90 ", "1.2 s"), ("train-0 done ", "2,434 3,456")):
        (line,) = (line for line in lines if line.startswith(begin))
        assert line.endswith(end)
        assert "123,456 2,434 3,456" in line


def test_a_reason_that_is_the_flag_is_not_said_twice() -> None:
    job = FULL["jobs"][0] | {"layout_why": "--layout reorder"}
    assert "layout reorder, as --layout says" in report.job_line(job)
    assert "--layout reorder" not in report.job_line(job)


@pytest.mark.parametrize("is_short", [True, False])  # less memory is left than the mount holds
@pytest.mark.parametrize(("evicted", "is_said"), [(100, False), (200, True)])
def test_what_the_kernel_took_away_is_explained(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    evicted: int,
    is_said: bool,
    is_short: bool,
) -> None:
    left_bytes = (1 << 30) - 1 if is_short else 1 << 30
    monkeypatch.setattr(processes, "available_memory_bytes", lambda: left_bytes)
    job = FULL["jobs"][0] | {"late": {"evicted": evicted}}
    terminal.show(report.tables(FULL | {"jobs": [job]}))
    said = " ".join(capfd.readouterr().out.split())
    assert ("train-1: late (evicted): the kernel let go of files" in said) == is_said
    assert ("for the 1 GiB of the RAM tier: give less --ram" in said) == (is_said and is_short)
    assert ("the host pages out" in said) == (is_said and not is_short)


@pytest.mark.parametrize("needed", [None, 62 << 20])
def test_a_ram_tier_that_is_too_small_is_said(
    capfd: pytest.CaptureFixture[str], needed: int | None
) -> None:
    job = FULL["jobs"][0] | {"ram_needed_bytes": needed}
    terminal.show(report.tables(FULL | {"jobs": [job]}))
    said = " ".join(capfd.readouterr().out.split())
    assert ("train-1: the RAM tier takes less than" in said) == (needed is not None)
    assert ("--ram 62 MiB would do" in said) == (needed is not None)


@pytest.mark.parametrize("withheld", [0, 3 << 20])
def test_a_ram_tier_that_the_kernel_does_not_leave_is_said(
    capfd: pytest.CaptureFixture[str], withheld: int
) -> None:
    job = FULL["jobs"][0] | {"reclaimed": 1234, "withheld_bytes": withheld}
    terminal.show(report.tables(FULL | {"jobs": [job]}))
    said = " ".join(capfd.readouterr().out.split())
    assert ("RAM alone held (1,234 in all), so 3 MiB of the RAM tier" in said) == bool(withheld)


@pytest.mark.parametrize(
    ("told", "scores"),
    [
        ({}, ""),
        ({"scores_age_s": 75.2}, ", scores told 1 min 15 s ago"),
        (
            {"scores_age_s": 1.0, "h_list": 1200, "substituted": 0},
            ", scores told 1 s ago, 1,200 on the H-list, 0 reads of the epoch substituted",
        ),
    ],
)
def test_what_spares_the_origin_is_said(
    capfd: pytest.CaptureFixture[str], told: dict[str, Any], scores: str
) -> None:
    job = FULL["jobs"][0] | {"hits": 0.456, "kept_bytes": 3 << 20, **told}
    terminal.show(report.tables(FULL | {"jobs": [job]}))
    lines = capfd.readouterr().out.splitlines()
    assert f"train-1: hits 46%, 3 MiB kept in RAM{scores}" in lines


def test_the_share_of_a_dataset_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    job = FULL["jobs"][0] | {"cached_bytes": 3 << 30, "share_bytes": 5 << 30}
    terminal.show(report.tables(FULL | {"jobs": [job | {"share_why": "it waits for files"}]}))
    line = "train-1: its dataset has 3 GiB of the cache, of 5 GiB: it waits for files"
    assert line in capfd.readouterr().out.splitlines()
    terminal.show(report.tables(FULL | {"jobs": [job | {"share_why": None}]}))
    assert "of the cache" not in capfd.readouterr().out


def test_job_line() -> None:
    assert report.job_line(FULL["jobs"][0]) == (
        "wrong: epoch 3 of 90, sample 12,800 of 1,281,167, 12,345 not late, "
        "12 (queued 10, fetching 2) late, 0 unplanned, predicted stall 1.2 s, "
        "layout reorder: first epoch, the reader follows another order"
    )
    assert report.job_line(FULL["ended"][0]) == (
        "done: epoch 1 of 2, sample 500 of 500, 990 not late, 10 (evicted 10) late, "
        "3 (not in window 3) unplanned, all its epochs are read"
    )


def test_status_again_and_again_in_a_script(daemon: Daemon) -> None:
    arguments = [sys.executable, "-m", "hintsd", "status", "--watch", "--socket", daemon.path]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(6)]
        process.send_signal(signal.SIGINT)
        assert process.wait(ANSWER_TIMEOUT_S) == 0
    head, jobs, blank = lines[:3]
    assert head.startswith("hintsd ")
    assert (jobs, blank) == ("no jobs\n", "\n")
    assert [line.rpartition(", up")[0] for line in lines[3:]] == [
        head.rpartition(", up")[0],
        "",
        "",
    ]
    assert lines[4:] == [jobs, blank]


def test_status_again_and_again_for_machines(daemon: Daemon) -> None:
    arguments = ["status", "--watch", "--json", "--socket", daemon.path]
    with subprocess.Popen(
        [sys.executable, "-m", "hintsd", *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        answers = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(ANSWER_TIMEOUT_S) == 0
    assert [(answer["pid"], answer["jobs"]) for answer in answers] == [(os.getpid(), [])] * 2
    assert answers[0]["uptime_s"] < answers[1]["uptime_s"]


def test_status_teaches_its_columns(run: Run) -> None:
    _, out, _ = run("status", "--help")
    planner = {"queued", "fetching", "failed", "evicted", "not in window", "not in dataset"}
    states = {"waiting", "running", "idle", "wrong", "done", "ended", "refused"}
    titles = {*report.MOUNT_TITLES, *report.JOB_TITLES, *report.ENDED_TITLES} - {"hintsd", "job"}
    assert [word for word in planner | states | titles if word not in out] == []


def test_hint_says_how_one_without_a_process_ends(run: Run) -> None:
    _, out, _ = run("hint", "--help")
    assert "hintsd end NAME" in out


def test_hint_stays_until_the_job_is_done(
    daemon: Daemon, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "STATUS_INTERVAL_S", 0.001)

    def finish() -> None:
        assert daemon.director.asked.wait(ANSWER_TIMEOUT_S)
        daemon.call(daemon.director.on["on_finished"], "hint-1")

    thread = threading.Thread(target=finish)
    thread.start()
    code, out, err = run("hint", str(tmp_path), "--socket", daemon.path)
    thread.join()
    assert (code, err) == (0, "hintsd: warning: old\n")
    first, last = out.splitlines()
    assert first == "hint-1: 100 samples an epoch"
    assert last.startswith("hint-1: done: ")


def test_hint_is_sent_as_told(daemon: Daemon, run: Run, tmp_path: Path) -> None:
    flags = "--sampler distributed --seed 3 --epochs 9 --batch-size 8 --world-size 2 --rank 1"
    flags += " --drop-last --start-epoch 1 --start-batch 2 --extensions .A,.b --detach"
    flags += " --workers 4 --prefetch-factor 3"
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    code, out, _ = run("hint", str(link), *flags.split(), "--socket", daemon.path)
    end = f"hintsd end hint-1 --socket {daemon.path}"
    assert (code, out) == (0, f"hint-1: 100 samples an epoch; to end it: {end}\n")
    code, out, _ = run("hint", str(link), "--detach", "--json", "--socket", daemon.path)
    assert (code, json.loads(out)) == (0, {"job": "hint-2", "samples_per_epoch": 100})
    request = daemon.director.requests["hint-1"]  # it is detached
    spec = request.spec_over(100)
    assert spec is not None
    assert (spec.sampler, spec.length, spec.seed) == ("distributed", 100, 3)
    assert (spec.world_size, spec.rank, spec.drop_last) == (2, 1, True)
    assert (spec.batch_size, spec.batch_drop_last) == (8, False)
    assert (request.epochs, request.start_epoch, request.start_batch) == (9, 1, 2)
    assert (request.workers, request.prefetch_factor) == (4, 3)
    assert (request.path, request.files.extensions) == (os.fsencode(tmp_path), [".a", ".b"])
    assert request.pid is None
    for name in ("hint-1", "hint-2"):
        assert run("end", name, "--socket", daemon.path)[0] == 0
    assert not daemon.director.requests


def test_hint_of_a_random_sampler(daemon: Daemon, run: Run, tmp_path: Path) -> None:
    flags = "--num-samples 50 --replacement --loader-draws never --detach --socket"
    assert run("hint", str(tmp_path), *flags.split(), daemon.path)[0] == 0
    spec = daemon.director.requests["hint-1"].spec_over(100)
    assert spec is not None
    assert (spec.sampler, spec.num_samples, spec.replacement) == ("random", 50, True)
    assert spec.loader_draws == "never"


def test_hint_tells_scores(daemon: Daemon, run: Run, tmp_path: Path) -> None:
    file, command = tmp_path / "uses.npy", ("hint", str(tmp_path), "--socket", daemon.path)
    uses = np.linspace(0, 3, 300_000)  # an array of several frames
    np.save(file, uses)
    assert run(*command, "--detach", "--importance", str(file))[0] == 0
    job, told, *_ = daemon.director.next("scores")
    assert (job, told) == ("hint-1", uses.astype("<f4").tolist())
    np.save(file, uses[:13])  # which the mount refuses
    assert run(*command, "--detach", "--importance", str(file)) == (
        *(2, "", "hintsd: --importance: 13 scores\n"),
    )
    assert list(daemon.director.requests) == ["hint-1"]


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ([1, np.nan], "sample 1 has nan: numbers must be finite, and 0 or more"),
        ([np.inf], "sample 0 has inf: numbers"),
        ([0, 1e39], "sample 1 has 1e+39: numbers"),
        ([0.5, 1, -2], "sample 2 has -2.0: numbers"),
        ([[1, 2]], "must be one row of numbers, one a sample"),
        ([], "must be one row of numbers"),
        (["a"], "must be one row of numbers"),
        ([1j], "must be one row of numbers"),
        (np.array([{}], object), "is no .npy file of numbers"),
        (b"text", "is no .npy file of numbers"),
        (b"", "is no .npy file of numbers"),
        (None, "No such file or directory"),
    ],
)
def test_scores_that_are_none(run: Run, tmp_path: Path, told: Any, line: str) -> None:
    file = tmp_path / "uses.npy"
    if isinstance(told, bytes):
        file.write_bytes(told)
    elif told is not None:
        np.save(file, told)
    code, out, err = run("hint", "/", "--importance", str(file))
    assert (code, out) == (2, "")
    assert err.startswith(f"hintsd: --importance {file}: {line}")
    assert err.count("\n") == 1


def test_hint_refused(daemon: Daemon, run: Run, tmp_path: Path) -> None:
    daemon.director.refusal = "is not in a fusecache mount"
    assert run("hint", str(tmp_path), "--socket", daemon.path) == (
        *(1, "", "hintsd: is not in a fusecache mount\n"),
    )


def test_interrupted_hint_ends_its_job(daemon: Daemon, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "hintsd", "hint", str(tmp_path), "--socket", daemon.path]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hint-1: 100 samples an epoch\n"
        assert daemon.director.requests["hint-1"].pid is None  # it reads nothing itself
        process.send_signal(signal.SIGINT)
        assert process.wait(ANSWER_TIMEOUT_S) == 130
    assert daemon.director.next("closed") == ("hint-1",)


def test_hint_goes_on_with_the_next_daemon(tmp_path: Path) -> None:
    first = Daemon(tmp_path)
    arguments = [sys.executable, "-m", "hintsd", "hint", str(tmp_path), "--socket", first.path]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hint-1: 100 samples an epoch\n"
        first.kill()
        second = Daemon(tmp_path)
        try:
            assert second.director.next("opening") == ("hint-1", (0, 0))
            server = second.server
            while not second.call(lambda: server._client_of(server._jobs.get("hint-1"))):
                os.sched_yield()
            with contextlib.closing(Client(second.path)) as client:
                client.ask("end", job="hint-1")
            assert process.stdout.read().startswith("hint-1: ")
            assert process.wait(ANSWER_TIMEOUT_S) == 0
        finally:
            second.kill()


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["dance"], 2, "No such command 'dance'. (see hintsd --help)"),
        (["end"], 2, "Missing argument 'JOB'. (see hintsd end --help)"),
        (["run"], 2, "Missing argument 'COMMAND...'. (see hintsd run --help)"),
        (["hint", "/", "--rank", "1"], 2, "--rank is for the distributed sampler (see hintsd hint"),
        (["hint", "/", "--sampler", "distributed"], 2, "--world-size must be given for the distri"),
        (
            ["hint", "/", "--sampler", "sequential", "--num-samples", "3"],
            2,
            "--num-samples is for the random sampler",
        ),
        (
            ["hint", "/", "--sampler", "sequential", "--seed", "3"],
            2,
            "--seed is for the random and the distributed sampler",
        ),
        (["hint", "/", "--seed", "x"], 2, "Invalid value for '--seed'"),
        (["hint", "/", "--seed", f"{1 << 65}"], 2, "--seed must lie in"),
        (["hint", "/", "--epochs", "0"], 2, "Invalid value for '--epochs'"),
        (["hint", "/", "--epochs", "2", "--start-epoch", "2"], 2, "--start-epoch must lie below"),
        (
            ["hint", "/", "--sampler", "distributed", "--world-size", "2", "--rank", "2"],
            2,
            "--rank must lie in 0 … 1",
        ),
        (["serve", "--others", "no such group"], 2, "--others: 'no such group' is neither all nor"),
        (["serve", "--ram", "5x"], 2, "Invalid value for '--ram': '5x' is not a size"),
        (["hint", "/proc"], 3, "/proc is not on a fusecache mount\n"),
        (["hint", "."], 3, f"{os.getcwd()} is not on a fusecache mount\n"),
        (["serve", "--socket", "/none/such/sock"], 1, "/none/such is no directory: make one first"),
        (["status", "--socket", "/none/sock"], 1, "no hintsd answers at /none/sock (No such file"),
        (["run", "--", "/none/such"], 127, "/none/such: command not found\n"),
        (["run", "--", "/etc"], 126, "/etc: Permission denied\n"),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(
    run: Run, arguments: list[str], code: int, line: str
) -> None:
    got, out, err = run(*arguments)
    assert (got, out) == (code, "")
    assert err.startswith(f"hintsd: {line}")
    assert err.count("\n") == 1


def test_alone_it_shows_its_help(run: Run) -> None:
    code, out, err = run()
    assert (code, out) == (2, "")
    assert err.startswith("Usage: hintsd [OPTIONS] COMMAND")


def test_what_is_no_hintsd(run: Run, tmp_path: Path) -> None:
    with mounts.listen(str(tmp_path), "sock", 1) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        code, _, err = run("status", "--socket", str(tmp_path / "sock"))
        thread.join()
    assert code == 1
    assert err.startswith("hintsd: what answers is no hintsd: ")


def test_serve_says_when_it_is_ready_and_ends_with_sigterm(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    log = tmp_path / "log"
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as ready:
        ready.bind(str(tmp_path / "ready"))
        ready.settimeout(ANSWER_TIMEOUT_S)
        flags = ["--socket", str(path), "--log-file", str(log), "--log-format", "json"]
        arguments = [sys.executable, "-m", "hintsd", "serve", *flags]
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "ready")}
        with subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE) as process:
            assert ready.recv(100) == b"READY=1"
            Client(str(path)).close()
            second = subprocess.run(arguments, stderr=subprocess.PIPE, text=True, check=False)
            assert second.returncode == 1
            assert second.stderr == (
                f"hintsd: {path.parent}: a hintsd runs here already (process {process.pid})\n"
            )
            process.terminate()
            assert process.communicate(timeout=ANSWER_TIMEOUT_S)[1] == b""
            assert process.returncode == 0
    assert not path.exists()
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert told[-1]["message"] == "ends with SIGTERM"
    assert {line["level"] for line in told} <= {"info", "warning"}


def test_serve_takes_the_socket_that_systemd_has_opened(tmp_path: Path) -> None:
    path, log = tmp_path / "sock", tmp_path / "log"
    script = 'export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@" 3<&0'
    environment = {
        **os.environ,
        "NOTIFY_SOCKET": str(tmp_path / "ready"),
        "WATCHDOG_USEC": "100000",
    }
    flags = ["--socket", str(path), "--log-file", str(log)]
    arguments = ["sh", "-c", script, "sh", sys.executable, "-m", "hintsd", "serve", *flags]
    with (
        socket.socket(socket.AF_UNIX) as opened,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready,
    ):
        opened.bind(str(path))
        opened.listen()
        ready.bind(str(tmp_path / "ready"))
        ready.settimeout(ANSWER_TIMEOUT_S)
        early = socket.socket(socket.AF_UNIX)
        with early, subprocess.Popen(arguments, env=environment, stdin=opened.fileno()) as process:
            early.connect(str(path))  # before anybody listens: it waits
            early.settimeout(ANSWER_TIMEOUT_S)
            try:
                assert [ready.recv(100) for _ in range(3)] == [b"READY=1", *[b"WATCHDOG=1"] * 2]
                early.sendall(wire.encode("hello", {"version": 1}))
                assert b"welcome" in early.recv(1000)
            finally:
                process.terminate()
            assert process.wait(ANSWER_TIMEOUT_S) == 0
        assert path.exists(), "systemd listens on, for the next one"
        arguments[arguments.index(str(path))] = str(tmp_path / "other")
        done = subprocess.run(arguments, stdin=opened.fileno(), stderr=subprocess.PIPE, text=True)
        line = (
            f"hintsd: systemd listens on ['{path}']: ListenStream= is to be {tmp_path}/other alone"
        )
        assert (done.returncode, done.stderr) == (1, f"{line}\n")


def test_serve_says_why_its_log_cannot_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch").chmod(0o1777)
    (tmp_path / "victim").write_text("a victim's")
    link = tmp_path / "scratch/log"
    link.symlink_to(tmp_path / "victim")
    os.chown(link, 65534, 65534, follow_symlinks=False)
    missing = tmp_path / "missing/log"
    for log, why in ((missing, "No such file or directory"), (link, "nobody")):
        code, _, err = run("serve", "--socket", str(tmp_path / "sock"), "--log-file", str(log))
        assert code == 1
        assert err.startswith(f"hintsd: cannot write the log {log}: ")
        assert why in err
        assert err.count("\n") == 1
    assert (tmp_path / "victim").read_text() == "a victim's"


def test_run_sets_the_environment_up_and_is_replaced_by_the_command() -> None:
    code = "import os, sys; print(os.environ['PYTHONPATH'], *sys.argv[1:]); sys.exit(7)"
    arguments = [
        sys.executable,
        "-m",
        "hintsd",
        "run",
        "--",
        sys.executable,
        "-c",
        code,
        "--a",
        "-h",
    ]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=False)
    expected = autohint.environment(os.environ)["PYTHONPATH"]
    assert (done.returncode, done.stdout) == (7, f"{expected} --a -h\n")


def test_help_is_quick() -> None:
    heavy = {"torch", "numpy", "trio", "msgpack"}
    code = f"import sys, hintsd.cli.main; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"set()\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pid", "99999999"], "--pid must lie in 1 … 4194304"),
        (["--epochs", "two"], "'two' is not a whole number"),
        (["--workers", "1.5"], "'1.5' is not a whole number"),
    ],
)
def test_numbers_that_are_none(
    run: Callable[..., tuple[int, str, str]], flags: list[str], message: str
) -> None:
    code, _, complaint = run("hint", "/data", *flags)
    assert (code, message in complaint) == (2, True), complaint


@pytest.mark.parametrize(
    ("given", "socket_path", "mode"),
    [
        (None, None, 0o666),
        (None, mounts.hintsd_socket(0), 0o666),
        (None, "/somewhere/sock", None),
        ("all", "/somewhere/sock", 0o666),
        ("none", None, None),
        ("0", None, 0o660),
    ],
)
def test_whom_root_s_hintsd_serves(
    given: str | None, socket_path: str | None, mode: int | None
) -> None:
    served = cli._others(given, socket_path)
    assert (served and served.mode) == mode


def test_a_user_s_hintsd_serves_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert cli._others(None, None) is cli._others("none", None) is None
    with pytest.raises(click.UsageError, match="only root's hintsd can serve other users"):
        cli._others("all", None)

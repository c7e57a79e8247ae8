"""hintsd's front over a real socket, in this process, with a Director that only takes notes."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
import trio

from fusecache.base import mounts, wire, wire_trio
from hintsd.daemon import jobs, server
from hintsd.daemon.datasets import is_guests
from hintsd.daemon.journal import Journal, JournalBusy
from hintsd.daemon.messages import NotHere
from hintsd.orders.spec import OrderSpec, to_message
from hintsd.plan.status import unknown
from tests.conftest import OrdinaryUser
from tests.support.hintsd_support import (
    ANSWER_TIMEOUT_S,
    JOB,
    Client,
    Daemon,
    NotedDirector,
    resident_bytes,
)
from tests.support.mounted import eventually

Starting = Callable[[], Daemon]
Connecting = Callable[[Daemon], Client]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starting]:
    """Daemons of one directory, one at a time."""
    with contextlib.ExitStack() as stack:

        def begin() -> Daemon:
            daemon = Daemon(tmp_path)
            stack.callback(daemon.kill)
            return daemon

        yield begin


@pytest.fixture
def daemon(start: Starting) -> Daemon:
    return start()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with contextlib.closing(Client(daemon.path)) as client:
        yield client


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


# ---- one job -------------------------------------------------------------------------------------


def test_job_from_its_first_message_to_close(daemon: Daemon, client: Client) -> None:
    assert client.job() == {
        "job": "train.py-1",
        "mountpoint": "/data",
        "samples_per_epoch": 100,
        "warnings": ["old"],
    }
    assert daemon.director.next("opening") == ("train.py-1", None)
    request = daemon.director.requests["train.py-1"]
    assert (request.path, request.epochs, request.pid) == (b"/data/set", 3, os.getpid())
    live = daemon.server._jobs.get("train.py-1")
    assert live is not None
    assert (live.uid, live.pid) == (os.getuid(), os.getpid())
    client.send("step", epoch=0, batch=7)
    assert daemon.director.next("step") == ("train.py-1", 0, 7)
    assert client.ask("order", epoch=1, spec=to_message(OrderSpec("sequential", 5))) == {"epoch": 1}
    assert daemon.director.next("order") == ("train.py-1", 1, "sequential")
    assert [job["name"] for job in client.ask("status")["jobs"]] == ["train.py-1"]
    assert daemon.files() == {"train.py-1.job"}
    assert client.ask("close") == {}
    assert daemon.director.next("closed") == ("train.py-1",)
    assert daemon.files() == set()
    assert client.job()["job"]  # the connection can describe another


def test_names_are_unique_and_safe_as_file_names(daemon: Daemon, client: Client) -> None:
    with contextlib.closing(Client(daemon.path)) as other:
        names = [client.job(name="../../a b")["job"], other.job(name="../../a b")["job"]]
    assert names == ["a-b-1", "a-b-2"]
    assert client.ask("close") == {}
    assert client.job(name="a b")["job"] == "a-b-3"  # not that of the one that has ended
    assert client.ask("close") == {}
    assert client.job(name="")["job"].startswith(Path("/proc/self/comm").read_text().strip()[:6])


def test_arrays_come_in_pieces_and_are_used_once(daemon: Daemon, client: Client) -> None:
    paths = b"\0".join(b"a/%d.jpg" % n for n in range(1000))
    for offset in range(0, len(paths), 999):
        client.send(
            "array", name="p", total=len(paths), offset=offset, data=paths[offset : offset + 999]
        )
    files = {"rule": "paths", "paths": {"array": "p"}}
    assert client.job(files=files)["job"] == "train.py-1"
    assert daemon.director.requests["train.py-1"].files.paths == paths
    client.ask("close")
    assert "'p' was not sent" in client.job(files=files)["message"]


def test_scores(daemon: Daemon, client: Client) -> None:
    uses = np.array([0, 0.5, 2.25], "<f4")
    assert client.ask("scores", uses=uses.tobytes())["message"].startswith(
        "scores: there is no job"
    )
    job = client.job()["job"]
    assert client.ask("scores", uses=uses.tobytes()) == {}
    assert daemon.director.next("scores") == (job, uses.tolist(), None, None)
    data = uses.tobytes()
    for offset in range(0, len(data), 5):
        client.send("array", name="s", total=12, offset=offset, data=data[offset : offset + 5])
    assert client.ask("scores", uses={"array": "s"}, substituted=0, h_list=7) == {}
    assert daemon.director.next("scores") == (job, uses.tolist(), 0, 7)
    for wrong in (-1, np.inf, np.nan):
        refused = client.ask("scores", uses=np.array([1, wrong], "<f4").tobytes())
        assert refused == {"message": "scores: a score is negative, infinite or no number"}
    assert client.ask("scores", uses=bytes(13 * 4)) == {"message": "scores: 13 scores"}
    assert client.ask("scores", uses=uses.tobytes()) == {}


def test_scores_outlive_hintsd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest of a detached job, whose client says nothing any more."""
    monkeypatch.setattr(jobs, "SCORES_EVERY_S", 0.0)
    first = Daemon(tmp_path)
    with contextlib.closing(Client(first.path)) as client:
        job = client.job(detached=True)["job"]
        path = first.jobs / f"{job}.scores"
        for uses in ([1, 2, 3], [0, 0.5, 2]):
            raw = np.array(uses, "<f4").tobytes()
            assert client.ask("scores", uses=raw) == {}
            while not path.exists() or msgpack.unpackb(path.read_bytes()) != raw:
                os.sched_yield()
    first.kill()
    assert first.files() == {f"{job}.job", f"{job}.scores"}
    second = Daemon(tmp_path)
    try:
        assert second.director.next("scores")[:2] == (job, [0, 0.5, 2])
        with contextlib.closing(Client(second.path)) as client:
            assert client.ask("end", job=job) == {}
        assert second.files() == set()
    finally:
        second.kill()


@pytest.mark.parametrize(
    "told",
    [
        np.array([1, np.nan], "<f4").tobytes(),
        np.array([-1], "<f4").tobytes(),
        b"12345",
        bytes(4 * 13),  # the mount refuses them
    ],
    ids=["nan", "negative", "no f4", "of another dataset"],
)
def test_scores_that_cannot_be_used_are_removed(
    tmp_path: Path, told: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = Daemon(tmp_path)
    with contextlib.closing(Client(first.path)) as client:
        job = client.job(detached=True)["job"]
    first.kill()
    (first.jobs / f"{job}.scores").write_bytes(msgpack.packb(told))
    second = Daemon(tmp_path)
    try:
        with contextlib.closing(Client(second.path)) as client:
            assert second.director.next("opening")[0] == job
            while (second.jobs / f"{job}.scores").exists():
                os.sched_yield()
            assert [known["name"] for known in client.ask("status")["jobs"]] == [job]
    finally:
        second.kill()
    assert f"scores of job {job} cannot be used and are removed" in caplog.text


def test_what_is_cached_is_told_in_pieces(daemon: Daemon, client: Client) -> None:
    assert client.ask("cached", number=1)["message"].startswith("cached: there is no job")
    client.job()
    assert client.ask("cached", number=2) == {"message": "cached: no files"}
    piece = server.PIECE_BYTES
    bits = daemon.director.bits = np.random.default_rng(1).bytes(2 * piece + 5)
    first = client.ask("cached", number=3)
    told = [first, client.receive().fields.raw(), client.receive().fields.raw()]
    assert [part["offset"] for part in told] == [0, piece, 2 * piece]
    assert b"".join(part["data"] for part in told) == bits
    assert {(part["number"], part["samples"]) for part in told} == {(3, 8 * len(bits) - 3)}
    told = [client.ask("cached", number=4, staged=True)]
    told += [client.receive().fields.raw(), client.receive().fields.raw()]
    assert b"".join(part["data"] for part in told) == bits[::-1]
    assert client.ask("close") == {}


def test_which_chunk_is_next_is_told(daemon: Daemon, client: Client) -> None:
    question = {"chunks": 4, "unread": [3, 0, 2]}
    answer = client.ask("chunk", number=1, **question)
    assert answer["message"].startswith("chunk: there is no job")
    job = client.job()["job"]
    assert client.ask("chunk", number=2, **question) == {"number": 2, "chunk": 2}
    assert daemon.director.next("chunk") == (job, 4, [3, 0, 2])
    refused = client.ask("chunk", number=3, chunks=13, unread=[1])
    assert refused == {"message": "chunk: no 13 chunks"}
    assert client.ask("close") == {}


def test_refusals_are_told_and_the_connection_goes_on(daemon: Daemon, client: Client) -> None:
    daemon.director.refusal = "/data/set is not in a fusecache mount"
    assert client.job() == {"message": daemon.director.refusal}
    (ended,) = client.ask("status")["ended"]
    assert (ended["state"], ended["why_ended"]) == ("refused", daemon.director.refusal)
    daemon.director.refusal = ""
    assert client.job(path=b"relative") == {"message": "job: path must be absolute"}
    assert "spec: rank" in client.job(spec={"sampler": "random", "rank": 2, "seed": 0})["message"]
    assert "process" in client.job(pid=1 << 22)["message"]
    fault = client.job(path=b"/broken")["message"]
    assert fault.startswith("internal error: see hintsd's log, "), fault
    assert client.ask("order", epoch=0, spec={"sampler": "sequential", "length": 3})["message"]
    assert client.ask("end", job="none") == {
        "message": "there is no job none; hintsd status shows the jobs"
    }
    job = client.job()["job"]
    assert client.ask("order", epoch=13, spec={"sampler": "sequential", "length": 3}) == {
        "message": "no 13th epoch"
    }
    assert daemon.files() == {f"{job}.job"}


def test_job_is_done_when_its_epochs_are_read(daemon: Daemon, client: Client) -> None:
    job = client.job()["job"]
    daemon.call(daemon.director.on["on_finished"], job)
    daemon.director.next("closed")
    client.send("step", epoch=2, batch=9)  # late, and no harm
    status = client.ask("status")
    assert status["jobs"] == []
    (ended,) = status["ended"]
    assert ended.pop("ended_ago_s") >= 0
    assert ended == {
        **unknown(),
        "uid": os.getuid(),
        "pid": os.getpid(),
        "name": job,
        "state": "done",
        "not_late": 7,
        "why_ended": "all its epochs are read",
    }
    assert "has ended" in client.ask("order", epoch=3, spec=JOB["spec"] | {"length": 3})["message"]
    assert daemon.files() == set()
    for _ in range(2 * jobs.ENDED_MOST):
        daemon.call(daemon.director.on["on_finished"], client.job()["job"])
        daemon.director.next("closed")
        client.ask("close")
    assert len(client.ask("status")["ended"]) == jobs.ENDED_MOST


def test_ended_jobs_stay_in_status_and_log(
    daemon: Daemon, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hintsd")
    first = client.job()["job"]
    client.ask("close")
    second = client.job()["job"]
    with contextlib.closing(Client(daemon.path)) as other:
        other.ask("end", job=second)
        daemon.director.refusal = "no"
        other.job()
        ended = other.ask("status")["ended"]
    found = [(job["name"], job["state"], job["why_ended"], job.get("not_late")) for job in ended]
    assert found == [
        (first, "ended", "closed by its trainer", 7),
        (second, "ended", "ended by a user", 7),
        ("train.py-3", "refused", "no", None),
    ]
    lines = [line for line in caplog.messages if "has ended: closed" in line]
    assert lines == [
        f"job {first} has ended: closed by its trainer: epoch -, sample - of -, 7 not late, "
        "0 late, 0 unplanned"
    ]


def test_warnings_reach_the_client(daemon: Daemon, client: Client) -> None:
    job = client.job()["job"]
    daemon.call(daemon.director.on["on_notice"], job, "reads another order")
    daemon.call(daemon.director.on["on_notice"], "none", "of nobody")
    warning = client.receive()
    assert (warning.type, warning.fields.raw()) == ("warning", {"message": "reads another order"})


def test_client_is_told_what_has_become_of_its_job(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STATES_INTERVAL_S", 0.001)
    up = {"mountpoint": "/data", "connected": True}
    away = {"mountpoint": "/data", "connected": False, "reason": "is away"}
    fine = {"name": "train.py-1", "state": "running", "reason": ""}
    wrong = {"name": "train.py-1", "state": "wrong", "reason": "another seed"}
    silent = {"name": "train.py-1", "state": "waiting", "reason": "no order"}
    now: dict[str, Any] = {"mounts": [up], "jobs": [fine]}
    monkeypatch.setattr(daemon.director, "status", lambda: now)
    assert client.job(tell_state=True)["job"] == "train.py-1"
    with contextlib.closing(Client(daemon.path)) as other:
        assert other.job()["job"] == "train.py-2"  # does not want to know
        for mount, job, state, reason in (
            (up, wrong, "wrong", "another seed"),
            (up, fine, "hinted", ""),
            (up, silent, "waiting", "no order"),
            (away, wrong, "waiting", "/data is away"),
            (up, wrong, "wrong", "another seed"),
        ):
            now = {"mounts": [mount], "jobs": [job]}
            frame = client.receive()
            assert frame.type == "state"
            assert frame.fields.raw() == {"state": state, "reason": reason}
        assert other.ask("end", job="train.py-1") == {}
        told = {frame.type: frame for frame in (client.receive(), client.receive())}  # either first
        assert told.keys() == {"warning", "state"}
        assert told["state"].fields.raw() == {"state": "over", "reason": "ended by a user"}
        assert client.job(tell_state=True)["job"] == "train.py-3"
        assert other.ask("close") == {}


def test_names_go_on_after_a_restart(start: Starting) -> None:
    for name, resumed in (("train.py-1", None), ("train.py-2", None), ("train.py-8", "x-7")):
        daemon = start()
        with contextlib.closing(Client(daemon.path)) as client:
            assert client.job(resume=resumed)["job"] == name
            client.ask("close")
        daemon.kill()


# ---- how jobs end --------------------------------------------------------------------------------


@pytest.mark.claim("P12")
def test_job_ends_with_the_trainer_though_its_workers_hold_the_socket(daemon: Daemon) -> None:
    """A fork of the trainer keeps the connection open, as a DataLoader worker does."""
    code = """if True:
        import os, sys, time
        from tests.support.hintsd_support import Client
        client = Client(sys.argv[1])
        client.job()
        if os.fork() == 0:
            os.read(0, 1)
            os._exit(0)
        os._exit(0)
    """
    arguments = [sys.executable, "-c", code, daemon.path]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as process:
        process.wait(ANSWER_TIMEOUT_S)
        assert daemon.director.next("closed") == ("train.py-1",)
        assert daemon.call(lambda: len(daemon.server._connections)) == 1
    assert daemon.files() == set()


def test_job_ends_when_its_connection_does(daemon: Daemon, client: Client) -> None:
    client.job()
    client.close()
    assert daemon.director.next("closed") == ("train.py-1",)


def test_connection_that_comes_back_goes_on_with_its_job(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "GRACE_S", 1000.0)
    job = client.job()["job"]
    client.close()
    with contextlib.closing(Client(daemon.path)) as again:
        assert again.job(start_epoch=1, start_batch=3, resume=job)["job"] == job
        again.send("step", epoch=1, batch=4)
        assert daemon.director.next("step") == (job, 1, 4)
        # It may come back before we know that it was away.
        with contextlib.closing(Client(daemon.path)) as third:
            assert third.job(resume=job)["job"] == job
            again.ask("close")
            third.send("step", epoch=1, batch=5)
            assert daemon.director.next("step") == (job, 1, 5)
    told = list(daemon.director.told.queue)
    assert not [event for event in told if event[0] in ("opening", "closed")]


def test_resumed_job_that_is_another_one_replaces_it(daemon: Daemon, client: Client) -> None:
    job = client.job()["job"]
    with contextlib.closing(Client(daemon.path)) as again:
        other = again.job(epochs=4, resume=job)["job"]
    assert other != job
    told = [event[:2] for event in daemon.director.told.queue]
    assert told[:3] == [("opening", job), ("closed", job), ("opening", other)]


def test_job_of_another_process_cannot_be_taken(
    daemon: Daemon, client: Client, trainer: subprocess.Popen[bytes]
) -> None:
    job = client.job(pid=trainer.pid)["job"]
    with contextlib.closing(Client(daemon.path)) as other:
        assert other.job(resume=job)["job"] != job
    assert job in [entry["name"] for entry in client.ask("status")["jobs"]]


def test_detached_job_lives_until_it_is_ended(daemon: Daemon) -> None:
    with contextlib.closing(Client(daemon.path)) as client:
        job = client.job(detached=True)["job"]
    with contextlib.closing(Client(daemon.path)) as client:
        assert [entry["name"] for entry in client.ask("status")["jobs"]] == [job]
        assert client.ask("end", job=job) == {}
    assert daemon.director.next("closed") == (job,)


def test_detached_job_outlives_a_hintsd_that_has_no_torch(start: Starting) -> None:
    first = start()
    with contextlib.closing(Client(first.path)) as client:
        job = client.job(detached=True)["job"]
    first.kill()
    with mock.patch.object(NotedDirector, "fault", NotHere("no torch")):
        second = start()
        with contextlib.closing(Client(second.path)) as client:
            eventually(
                lambda: [end["why_ended"] for end in client.ask("status")["ended"]] == ["no torch"]
            )
    second.kill()
    third = start()
    assert third.director.next("opening")[0] == job
    assert third.files() >= {f"{job}.job"}


def test_an_internal_error_names_the_log(tmp_path: Path, daemon: Daemon, client: Client) -> None:
    handler = logging.FileHandler(tmp_path / "own log")
    with (
        contextlib.closing(handler),
        mock.patch.object(logging.getLogger(), "handlers", [handler]),
    ):
        fault = client.job(path=b"/broken")["message"]
    assert fault == f"internal error: see hintsd's log, {tmp_path}/own log"


def test_detached_job_ends_with_the_process_it_names(
    daemon: Daemon, trainer: subprocess.Popen[bytes]
) -> None:
    with contextlib.closing(Client(daemon.path)) as client:
        job = client.job(detached=True, pid=trainer.pid)["job"]
    trainer.kill()
    assert daemon.director.next("closed") == (job,)


def test_trainer_that_dies_while_its_job_is_opened(
    daemon: Daemon, client: Client, trainer: subprocess.Popen[bytes]
) -> None:
    daemon.director.is_slow = True
    client.send("job", **{**JOB, "pid": trainer.pid})
    daemon.director.next("opening")
    trainer.kill()
    assert client.receive().fields.raw() == {"message": f"its process {trainer.pid} has ended"}
    assert daemon.files() == set()


# ---- restarts ------------------------------------------------------------------------------------


@pytest.mark.claim("P10")
def test_next_daemon_takes_the_jobs_up_where_they_were(
    start: Starting, trainer: subprocess.Popen[bytes]
) -> None:
    first = start()
    with contextlib.closing(Client(first.path)) as client:
        job = client.job()["job"]
        with contextlib.closing(Client(first.path)) as other:
            gone = other.job(pid=trainer.pid)["job"]
            first.call(first.director.on["on_position"], job, 1, 42)
            first.kill()
    assert first.files() == {f"{job}.job", f"{job}.position", f"{gone}.job"}
    trainer.kill()
    trainer.wait()
    second = start()
    assert second.director.next("opening") == (job, (1, 42))
    assert second.files() == {f"{job}.job", f"{job}.position"}
    with contextlib.closing(Client(second.path)) as client:
        assert client.job(resume=job, start_epoch=1, start_batch=40)["job"] == job
        assert second.director.told.empty()
        assert client.ask("close") == {}
    assert second.files() == set()


def test_job_whose_client_does_not_come_back_after_a_restart(
    start: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "RESTART_GRACE_S", 0.0)
    first = start()
    with contextlib.closing(Client(first.path)) as client:
        job = client.job()["job"]
        first.kill()
    second = start()
    assert second.director.next("closed") == (job,)


def test_journal_that_cannot_be_used_is_removed(start: Starting) -> None:
    first = start()
    with contextlib.closing(Client(first.path)) as client:
        path = first.jobs / f"{client.job()['job']}.job"
        first.kill()
    entry = msgpack.unpackb(path.read_bytes())
    entry["message"]["epochs"] = -1
    path.write_bytes(msgpack.packb(entry))
    second = start()
    assert second.files() == set()
    assert second.director.told.empty()


# ---- the socket ----------------------------------------------------------------------------------


def test_socket_is_private_and_a_dead_one_is_replaced(tmp_path: Path, start: Starting) -> None:
    path = tmp_path / "hintsd.sock"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(path))
    daemon = start()
    assert path.stat().st_mode & 0o777 == 0o600
    assert daemon.jobs.stat().st_mode & 0o777 == 0o700
    Client(daemon.path).close()


def test_live_daemon_is_not_replaced(daemon: Daemon) -> None:
    with pytest.raises(JournalBusy, match=f"runs here already .process {os.getpid()}."):
        Journal(str(daemon.jobs))
    Client(daemon.path).close()


def test_file_in_the_place_of_the_socket_is_left(tmp_path: Path) -> None:
    path = tmp_path / "hintsd.sock"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        server.listen(str(path))
    assert path.read_text() == "precious"


def test_until_unmounted(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice without a mount; a connection does not hold it: what it was for is gone."""
    mine = mounts.Mount(1, "0:9", "/a", mounts.FILESYSTEM_TYPE, "/s", {"user_id": f"{os.getuid()}"})
    other = mounts.Mount(2, "0:8", "/b", mounts.FILESYSTEM_TYPE, "/s", {"user_id": "12345"})
    tables = [[mine], [other], [mine, other], [other], [], [mine]]
    monkeypatch.setattr(server, "UNMOUNTED_INTERVAL_S", 0.001)
    monkeypatch.setattr(mounts, "mounts", lambda: tables.pop(0))
    trio.run(daemon.server.until_unmounted)
    assert tables == [[mine]]
    with contextlib.closing(Client(daemon.path)):
        tables[:] = [[], []]
        trio.run(daemon.server.until_unmounted)
    assert tables == []


# ---- who may ask ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "own", "is_guest"), [(5, 5, False), (0, 5, False), (5, 0, True), (6, 5, True)]
)
def test_is_guests(peer: int, own: int, is_guest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: own)
    assert is_guests(peer) is is_guest


@pytest.mark.claim("P5")
def test_another_user_is_refused(tmp_path: Path, ordinary_user: OrdinaryUser) -> None:
    directory = ordinary_user.directory("hints")
    daemon = Daemon(directory)
    try:
        os.chmod(daemon.path, 0o666)
        code = """if True:
            import sys
            from tests.support.hintsd_support import Client
            client = Client(sys.argv[1], greet=False)
            print(client.receive().fields.raw())
            print("closed", client.rest())
        """
        answer = ordinary_user.run(code, daemon.path)
        assert "permission denied" in answer.stdout, answer
        assert "closed" in answer.stdout
        Client(daemon.path).close()
    finally:
        daemon.kill()


@pytest.mark.claim("P5")
def test_process_of_another_user_cannot_be_named(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, trainer: subprocess.Popen[bytes]
) -> None:
    """Asked by an ordinary user of his own hintsd; here the peer only says that he is one."""
    honest = wire.peer_of
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(wire, "peer_of", lambda s: honest(s)._replace(uid=4711))
    with contextlib.closing(Client(daemon.path)) as client:
        answer = client.job(pid=trainer.pid)
        assert answer == {"message": f"process {trainer.pid} is not yours"}


# ---- clients that misbehave ----------------------------------------------------------------------


def frame(payload: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", len(payload) if length is None else length) + payload


HELLO = wire.encode("hello", {"version": 1})
WRONG = {
    "unknown version": wire.encode("hello", {"version": 2}),
    "no hello": wire.encode("status", {}),
    "length 0": frame(b""),
    "oversized": frame(b"", 1 << 31),
    "a byte more than a client may send": frame(b"", wire.CLIENT_FRAME_BYTES_MOST + 1),
    "no msgpack": frame(b"\xc1"),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "not a pair": frame(msgpack.packb([1, 2, 3])),
    "unknown message": HELLO + wire.encode("dance", {}),
    "answer as a question": HELLO + wire.encode("accepted", {}),
    "missing field": HELLO + wire.encode("step", {"epoch": 1}),
    "wrong type": HELLO + wire.encode("step", {"epoch": 1, "batch": "1"}),
    "scores that are none": HELLO + wire.encode("scores", {"uses": b"12345"}),
    "question without a number": HELLO + wire.encode("cached", {}),
    "no chunks": HELLO + wire.encode("chunk", {"number": 1, "chunks": 4, "unread": []}),
    "a chunk beyond": HELLO + wire.encode("chunk", {"number": 1, "chunks": 4, "unread": [4]}),
    "a chunk twice": HELLO + wire.encode("chunk", {"number": 1, "chunks": 4, "unread": [1, 1]}),
    "many chunks": HELLO + wire.encode("chunk", {"number": 1, "chunks": 101, "unread": [1]}),
    "a share of the samples": HELLO + wire.encode("scores", {"uses": b"", "h_list": 0.7}),
    "negative": HELLO + wire.encode("step", {"epoch": -1, "batch": 1}),
    "job without a path": HELLO + wire.encode("job", {**JOB, "path": None}),
    "array with a gap": HELLO
    + wire.encode("array", {"name": "a", "total": 9, "offset": 4, "data": b"abcde"}),
    "array too long": HELLO
    + wire.encode("array", {"name": "a", "total": 2, "offset": 0, "data": b"abc"}),
    "array too large": HELLO
    + wire.encode("array", {"name": "a", "total": 1 << 32, "offset": 0, "data": b"abc"}),
    "second job": HELLO + 2 * wire.encode("job", JOB),
}


@pytest.mark.parametrize("sent", WRONG.values(), ids=WRONG.keys())
def test_wrong_frames_close_the_connection_after_a_word(daemon: Daemon, sent: bytes) -> None:
    with contextlib.closing(Client(daemon.path, greet=False)) as client:
        client.socket.sendall(sent)
        answers = client.rest()
    assert answers[-1].type == "error"
    assert re.fullmatch(r"[^\n]+", answers[-1].fields.str("message", 1000))
    Client(daemon.path).close()


def test_what_frames_of_all_connections_take() -> None:
    """However many begin a frame and stop."""
    assert wire.CLIENT_FRAME_BYTES_MOST == 1.125 * (1 << 20), "docs/WIRE.md"
    assert server.CONNECTIONS_MOST * wire.CLIENT_FRAME_BYTES_MOST <= 512 << 20


def test_slow_clients_are_cut_off(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAME_TIMEOUT_S", 0.05)
    monkeypatch.setattr(wire_trio, "FRAME_TIMEOUT_S", 0.05)
    for sent in (b"", HELLO[:5], HELLO + b"\x05"):
        with (
            contextlib.closing(Client(daemon.path, greet=False)) as client,
            contextlib.suppress(ConnectionError),  # it was cut off before
        ):
            client.socket.sendall(sent)
            client.rest()


def test_client_that_begins_arrays_and_stops_is_cut_off(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ARRAYS_TIMEOUT_S", 0.05)
    client.send("array", name="a", total=9, offset=0, data=b"abc")
    (told,) = client.rest()
    assert "arrays were begun" in told.fields.str("message", 1000)


def test_client_that_does_not_read_is_cut_off(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_trio, "FRAME_TIMEOUT_S", 0.05)
    with contextlib.closing(Client(daemon.path)) as client, contextlib.suppress(ConnectionError):
        while True:
            client.send("status")


def test_connections_are_limited(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MOST", 2)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(contextlib.closing(Client(daemon.path)))
        third = stack.enter_context(contextlib.closing(Client(daemon.path, greet=False)))
        assert third.receive().fields.raw() == {"message": "there are 2 connections already"}
    while daemon.call(lambda: len(daemon.server._connections)):
        os.sched_yield()
    Client(daemon.path).close()


def test_jobs_are_limited(daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "JOBS_MOST", 1)
    client.job()
    with contextlib.closing(Client(daemon.path)) as other:
        assert other.job() == {"message": "there are 1 jobs already"}


def random_value(draw: random.Random, depth: int = 0) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: draw.choice([None, True, False, -1, 0, 1, 7, 1 << 32, -(1 << 63), (1 << 64) - 1]),
        lambda: draw.random(),
        lambda: draw.randbytes(draw.choice([0, 1, 8, 5056, 70000])),
        lambda: draw.choice(["", "a", "imagefolder", "paths", "random", "\u2028", "x" * 300]),
    ]
    if depth < 3:
        kinds += [
            lambda: [random_value(draw, depth + 1) for _ in range(draw.randrange(4))],
            lambda: {"array": draw.choice(["a", "b", "zz"])},
            lambda: {
                draw.choice(["rule", "paths", "x", "sampler"]): random_value(draw, depth + 1)
                for _ in range(draw.randrange(3))
            },
        ]
    return draw.choice(kinds)()


def random_message(draw: random.Random) -> bytes:
    """Mostly what a client sends, with some of its fields spoilt, sometimes cut or bent."""
    piece = draw.randbytes(draw.choice([0, 3, 5056, 1 << 18]))
    kind, fields = draw.choice(
        [
            ("job", JOB),
            ("job", {**JOB, "files": {"rule": "paths", "paths": {"array": "a"}}}),
            ("job", {**JOB, "tell_state": True}),
            ("array", {"name": "a", "total": len(piece), "offset": 0, "data": piece}),
            ("array", {"name": "b", "total": 1 << 31, "offset": 0, "data": piece}),
            ("order", {"epoch": 0, "spec": {"sampler": "sequential", "length": 9}}),
            ("order", {"epoch": 0, "spec": {"sampler": "indices", "length": 9, "indices": piece}}),
            ("step", {"epoch": 1, "batch": 2}),
            ("status", {}),
            ("end", {"job": "train.py-1"}),
            ("close", {}),
            ("hello", {"version": 1}),
        ]
    )
    fields = dict(fields)
    for name in list(fields):
        if draw.random() < 0.1:
            fields[name] = random_value(draw)
        elif draw.random() < 0.02:
            del fields[name]
    data = bytearray(wire.encode(kind, fields))
    if draw.random() < 0.05:
        data = data[: draw.randrange(len(data))]
    elif draw.random() < 0.05:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def test_fuzz(tmp_path: Path) -> None:
    """Thousands of bent frames: the daemon answers, and has not grown by what it was sent."""
    path = str(tmp_path / "hintsd.sock")
    seed = 20261121
    print(f"seed {seed}")
    draw = random.Random(seed)
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as ready:
        ready.bind(str(tmp_path / "ready"))
        ready.settimeout(ANSWER_TIMEOUT_S)
        process = subprocess.Popen(
            [sys.executable, "-m", "hintsd", "serve", "--socket", path],
            env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "ready")},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert ready.recv(100) == b"READY=1"
    log: list[str] = []
    assert process.stderr is not None
    reading = threading.Thread(target=log.extend, args=(process.stderr,))
    reading.start()
    try:
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not any("draws weighted orders" in line for line in log):
            assert time.monotonic() < deadline, log
            time.sleep(0.05)
        send_random_frames(path, draw, 1000)
        resident_before = resident_bytes(process.pid)
        assert send_random_frames(path, draw, 3000) > 32 << 20
        with contextlib.closing(Client(path)) as client:
            assert client.ask("status")["pid"] == process.pid
        assert resident_bytes(process.pid) < resident_before + (16 << 20)
    finally:
        process.terminate()
        reading.join(ANSWER_TIMEOUT_S)
    assert process.wait(ANSWER_TIMEOUT_S) == 0
    assert not [line for line in log if " INFO " not in line]


def send_random_frames(path: str, draw: random.Random, count: int) -> int:
    """Over as many connections as it takes; how many bytes they were."""
    sent_bytes = 0
    while count > 0:
        with contextlib.closing(Client(path)) as client, contextlib.suppress(ConnectionError):
            for _ in range(draw.randrange(1, 30)):
                data = random_message(draw)
                sent_bytes += len(data)
                count -= 1
                client.socket.sendall(data)
                client.socket.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.socket.recv(1 << 20)
                client.socket.settimeout(ANSWER_TIMEOUT_S)
    return sent_bytes

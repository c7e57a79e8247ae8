"""Users other than hintsd's own, at its public socket, with a Director that only takes notes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusecache.base import wire
from hintsd.daemon import jobs, server
from hintsd.users import quota
from hintsd.users.public import Others
from tests.conftest import OrdinaryUser
from tests.support.hintsd_support import Client, Daemon

ASK = """if True:
    import json, sys
    from tests.support.hintsd_support import Client
    client = Client(sys.argv[1], greet=False)
    for kind, fields in (("hello", {"version": 1}), *json.loads(sys.argv[2])):
        fields = {key: value.encode() if key in ("path", "data") else value
                  for key, value in fields.items()}
        print(json.dumps(client.ask(kind, **fields)), flush=True)
    sys.stdin.read()
"""
JOB: dict[str, Any] = {
    "path": "/data/set", "files": {"rule": "imagefolder", "extensions": [".jpg"],
    "allow_empty": True}, "check": None, "spec": None, "epochs": 3, "start_epoch": 0,
    "start_batch": 0, "workers": 0, "prefetch_factor": 0, "name": "theirs", "detached": True,
    "pid": None,
}  # fmt: skip
OWN = {"files": {"rule": "imagefolder", "extensions": [".jpg"], "allow_empty": True}}


@pytest.fixture
def daemon(ordinary_user: OrdinaryUser) -> Iterator[Daemon]:
    directory = ordinary_user.base / "hints"
    directory.mkdir(mode=0o700)
    daemon = Daemon(directory, Others(0o666))
    yield daemon
    daemon.kill()


def ask(user: OrdinaryUser, path: str, *asked: tuple[str, dict[str, Any]]) -> list[Any]:
    """What that user is answered, one after another."""
    done = user.run(ASK, path, json.dumps(asked))
    assert done.returncode == 0, done
    return [json.loads(line) for line in done.stdout.splitlines()][1:]


@pytest.mark.claim("G2")
def test_a_guest_sees_and_ends_their_own_jobs_alone(
    ordinary_user: OrdinaryUser, daemon: Daemon
) -> None:
    with contextlib.closing(Client(daemon.path)) as client:
        mine = client.job(detached=True)["job"]
        begun, status, denied = ask(
            ordinary_user, daemon.public, ("job", JOB), ("status", {}), ("end", {"job": mine})
        )
        theirs = begun["job"]
        assert [job["name"] for job in status["jobs"]] == [theirs]
        assert [mount["mountpoint"] for mount in status["mounts"]] == ["/data"]
        assert denied["message"] == f"there is no job {mine}; hintsd status shows the jobs"
        assert daemon.director.uids == {mine: os.getuid(), theirs: ordinary_user.uid}
        guest = daemon.director.guests[theirs]
        assert guest is not None
        assert guest.identity == (ordinary_user.uid, ordinary_user.gid, ())
        assert daemon.director.guests[mine] is None
        assert [job["name"] for job in client.ask("status")["jobs"]] == [mine, theirs]
        assert len(client.ask("status")["mounts"]) == 2
        with contextlib.closing(Client(daemon.path)) as other:
            assert other.ask("end", job=mine) == {}
            assert client.receive().type == "warning"  # whose it was
        ended, status = ask(ordinary_user, daemon.public, ("end", {"job": theirs}), ("status", {}))
        assert ended == {}
        assert [job["name"] for job in status["ended"]] == [theirs]
        assert [job["name"] for job in client.ask("status")["ended"]] == [mine, theirs]


@pytest.mark.claim("G2")
def test_a_guest_resumes_no_job_of_another(ordinary_user: OrdinaryUser, daemon: Daemon) -> None:
    """Nor does one of theirs become ours: whose it was, the journal knows."""
    with contextlib.closing(Client(daemon.path)) as client:
        mine = client.job(detached=True)["job"]
        (begun,) = ask(ordinary_user, daemon.public, ("job", JOB | {"resume": mine}))
        assert begun["job"] != mine
        assert mine in daemon.director.requests


def test_a_guest_is_no_guest_at_the_own_socket(ordinary_user: OrdinaryUser, daemon: Daemon) -> None:
    os.chmod(Path(daemon.path).parent, 0o755)
    os.chmod(daemon.path, 0o666)
    only_hears = ASK[: ASK.index("    for kind")] + "    print(client.receive().fields.raw())"
    done = ordinary_user.run(only_hears, daemon.path)
    assert "permission denied: this hintsd serves another user" in done.stdout


@pytest.mark.claim("G2")
def test_a_guest_names_no_process_of_another(ordinary_user: OrdinaryUser, daemon: Daemon) -> None:
    (refused,) = ask(ordinary_user, daemon.public, ("job", JOB | {"pid": os.getpid()}))
    assert refused == {"message": f"process {os.getpid()} is not yours"}


@pytest.mark.claim("G3")
def test_jobs_of_a_guest_are_counted(
    ordinary_user: OrdinaryUser, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "JOBS_MOST", 1)
    ask(ordinary_user, daemon.public, ("job", JOB))
    (second,) = ask(ordinary_user, daemon.public, ("job", JOB))
    assert second == {"message": "you have 1 jobs already"}
    with contextlib.closing(Client(daemon.path)) as client:
        assert "job" in client.job(detached=True)
        assert client.ask("close") == {}
        assert "job" in client.job(detached=True)
    monkeypatch.setattr(quota, "JOBS_MOST", 9)
    monkeypatch.setattr(quota, "SAMPLES_MOST", 199)
    (third,) = ask(ordinary_user, daemon.public, ("job", JOB))
    assert third == {"message": "your jobs have more than 199 samples an epoch"}
    assert sum(uid == ordinary_user.uid for uid in daemon.director.uids.values()) == 2
    assert len(daemon.director.requests) == 2  # one of each user


@pytest.mark.claim("G3")
def test_bytes_of_a_guest_are_counted(
    ordinary_user: OrdinaryUser, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "BYTES_MOST", 1000)
    arrays = [
        {"name": name, "total": total, "offset": 0, "data": ""}
        for name, total in (("a", 600), ("b", 600))
    ]
    code = ASK.replace("client.ask(kind, **fields)", "client.send(kind, **fields)")
    held = subprocess.Popen(
        [*ordinary_user.prefix, ordinary_user.python, "-c", code, daemon.public,
         json.dumps([("array", arrays[0])])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ordinary_user.env, cwd="/",
    )  # fmt: skip
    try:
        assert held.stdout is not None
        assert [held.stdout.readline() for _ in range(2)] == [b"null\n"] * 2
        refused = ordinary_user.run(ASK, daemon.public, json.dumps([("array", arrays[1])]))
        assert "array: field total" in refused.stdout
        with contextlib.closing(Client(daemon.path)) as client:
            client.send("array", name="c", total=2000, offset=0, data=b"")
            assert client.ask("status")["jobs"] == []
    finally:
        held.kill()
        held.wait()
    paths = b"\0".join(b"a/%03d" % n for n in range(100))
    spelled = {"rule": "paths", "paths": {"array": "p"}}
    piece = {"name": "p", "total": len(paths), "offset": 0, "data": paths.decode()}
    told = [("array", piece), ("job", JOB | {"files": spelled})]
    send = ASK.replace(
        "print(json.dumps(client.ask(kind, **fields)), flush=True)",
        "client.send(kind, **fields) if kind == 'array' else "
        "print(json.dumps(client.ask(kind, **fields)), flush=True)",
    )
    answers = [ordinary_user.run(send, daemon.public, json.dumps(told)).stdout for _ in range(2)]
    assert "theirs-" in answers[0]
    assert "the paths and orders of your jobs are more than 1,000 bytes" in answers[1]


@pytest.mark.claim("G3")
def test_arrays_of_one_connection_are_counted_together(
    ordinary_user: OrdinaryUser, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "BYTES_MOST", 1000)
    send = ASK.replace(
        "print(json.dumps(client.ask(kind, **fields)), flush=True)",
        "client.send(kind, **fields)\n    print(client.receive().fields.raw())\n"
        "    print(client.receive().fields.raw())",
    )
    for second in ({"name": "b", "total": 600}, {"name": "a", "total": 599}):
        told = [("array", {"name": "a", "total": 600, "offset": 0, "data": ""})]
        told.append(("array", second | {"offset": 0, "data": ""}))
        refused = ordinary_user.run(send, daemon.public, json.dumps(told)).stdout
        assert "array: field total: more than 1000 bytes in all" in refused


@pytest.mark.claim("G3")
def test_orders_of_a_guest_that_are_told_later_are_counted(
    ordinary_user: OrdinaryUser, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each epoch that is still to come: they are kept until it is read."""
    monkeypatch.setattr(quota, "SAMPLES_MOST", 250)
    monkeypatch.setattr(quota, "BYTES_MOST", 1000)

    def order(epoch: int, **spec: Any) -> tuple[str, dict[str, Any]]:
        return "order", {"epoch": epoch, "spec": {"sampler": "random", "length": 100, **spec}}

    answers = ask(
        ordinary_user, daemon.public, ("job", JOB), order(0, seed=1, num_samples=200),
        order(0, seed=1), order(1, seed=1), order(2, seed=1), order(1, seed=2, num_samples=99),
        order(1, seed=1, num_samples=251), ("status", {}),
    )  # fmt: skip
    much = {"message": "your jobs have more than 250 samples an epoch"}
    planned = [{"epoch": epoch} for epoch in (0, 0, 1)]
    assert answers[1:-1] == [*planned, much, {"epoch": 1}, much]
    (name,) = (job["name"] for job in answers[-1]["jobs"])
    daemon.call(daemon.director.on["on_position"], name, 2, 0)
    assert daemon.call(lambda: daemon.server._jobs.get(name)).samples == 100
    (refused,) = ask(
        ordinary_user, daemon.public,
        ("job", JOB | {"spec": {"sampler": "random", "seed": 1, "num_samples": 1 << 30}}),
    )  # fmt: skip
    assert refused == much
    assert daemon.director.next("opening")[0] == name
    assert daemon.director.told.queue[0][0] == "order"  # the second was not begun


@pytest.mark.claim("G2")
def test_a_guest_s_process_that_is_another_user_s_by_now(
    ordinary_user: OrdinaryUser, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who connected has ended, and its number is given again."""
    monkeypatch.setattr(jobs, "_owners", lambda pid: (0, 0))
    (refused,) = ask(ordinary_user, daemon.public, ("job", JOB | {"detached": False}))
    assert refused["message"].endswith(" is not yours")


@pytest.mark.claim("G3")
def test_connections_of_guests_are_counted(
    ordinary_user: OrdinaryUser, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "CONNECTIONS_MOST", 2)
    monkeypatch.setattr(quota, "CONNECTIONS_OF_ALL", 3)
    real = wire.peer_of
    uids = iter([5, 5, 5, 6, 7, 0])
    monkeypatch.setattr(wire, "peer_of", lambda s: real(s)._replace(uid=next(uids)))
    monkeypatch.setattr(server, "identity_of", lambda s: None)
    with contextlib.ExitStack() as stack:

        def connect() -> str:
            client = stack.enter_context(contextlib.closing(Client(daemon.public, greet=False)))
            with contextlib.suppress(BrokenPipeError):  # it is refused before it speaks
                client.send("hello", version=1)
            return str(client.receive().fields.raw().get("message"))

        assert [connect() for _ in range(6)] == [
            "None", "None", "you have 2 connections already", "None",
            "other users have 3 connections already", "None",
        ]  # fmt: skip


@pytest.mark.claim("G1")
def test_a_job_of_the_journal_is_still_its_user_s(ordinary_user: OrdinaryUser) -> None:
    directory = ordinary_user.base / "hints"
    directory.mkdir(mode=0o700)
    daemon = Daemon(directory, Others(0o666))
    try:
        (begun,) = ask(ordinary_user, daemon.public, ("job", JOB))
    finally:
        daemon.kill()
    daemon = Daemon(directory, Others(0o666))
    try:
        assert daemon.director.next("opening")[0] == begun["job"]
        assert daemon.director.uids == {begun["job"]: ordinary_user.uid}
        guest = daemon.director.guests[begun["job"]]  # who is asked for it anew
        assert guest is not None
        assert guest.identity == (ordinary_user.uid, ordinary_user.gid, ())
        (ended,) = ask(ordinary_user, daemon.public, ("end", {"job": begun["job"]}))
        assert ended == {}
    finally:
        daemon.kill()

"""Jobs described by hand: what hintsd is told, and that nothing it does or fails to do is felt."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import hintsd
from fusecache.base import mounts, wire
from hintsd.client import finding, link, warning
from hintsd.client.client import explicit_order
from hintsd.client.connection import Connection
from hintsd.client.finding import Unhinted
from hintsd.orders.drawing import access_sequence
from hintsd.orders.extensions import IMG_EXTENSIONS
from hintsd.orders.hint import Files, Hint
from tests.conftest import OrdinaryUser
from tests.support import PATIENCE_S
from tests.support.fake_hintsd import FakeHintsd, link_of


@pytest.fixture(autouse=True)
def _nothing_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warning, "_warned", set())


@pytest.fixture
def daemon(fake_hintsd: FakeHintsd) -> FakeHintsd:
    return fake_hintsd


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _message(**changes: Any) -> dict[str, Any]:
    return {
        "path": b"/data/set",
        "files": {
            "rule": "imagefolder",
            "extensions": list(IMG_EXTENSIONS),
            "allow_empty": True,
        },
        "check": None,
        "epochs": None,
        "start_epoch": 0,
        "start_batch": 0,
        "workers": 0,
        "prefetch_factor": 2,
        "name": os.path.basename(sys.argv[0]),
        "detached": False,
        "pid": None,
        "resume": None,
        "tell_state": True,
        **changes,
    }


@pytest.mark.usefixtures("no_warning")
def test_what_shuffle_tells(daemon: FakeHintsd) -> None:
    job = hintsd.connect("/data/set").shuffle(
        seed=5,
        epochs=90,
        batch_size=256,
        sampler="distributed",
        world_size=8,
        rank=3,
        drop_last=True,
        start_epoch=2,
        start_batch=7,
        workers=4,
    )
    daemon.wait(lambda: daemon.jobs)
    told = daemon.jobs[0]
    spec = {
        "sampler": "distributed",
        "seed": 5,
        "world_size": 8,
        "rank": 3,
        "drop_last": True,
        "batch_size": 256,
    }
    assert told.job == _message(spec=spec, epochs=90, start_epoch=2, start_batch=7, workers=4)
    assert told.pid == os.getpid()
    daemon.wait(lambda: job.name == told.name)
    job.close()
    assert told.is_closed
    assert job.is_over
    assert job.name is None
    assert repr(job) == f"<hintsd.Job {told.name} of /data/set: over (closed)>"


def test_random_with_a_generator_is_the_loaders_order(daemon: FakeHintsd) -> None:
    torch = pytest.importorskip("torch")
    job = hintsd.connect("/d").shuffle(seed=11, batch_size=4, drop_last=True)
    daemon.wait(lambda: daemon.jobs)
    generator = torch.Generator()
    generator.manual_seed(11)
    loader = torch.utils.data.DataLoader(
        range(10), batch_size=4, drop_last=True, shuffle=True, generator=generator
    )
    foreseen = daemon.jobs[0].foreseen(10)
    for epoch in range(3):
        read = torch.cat(list(loader)).tolist()
        assert access_sequence(foreseen, epoch).tolist() == read
    job.close()


def test_paths_travel_as_an_array(daemon: FakeHintsd) -> None:
    paths = ["x/1", "/data/set/x/b\udcff", "x//2", "./y/3"]
    with hintsd.connect("/data/set").shuffle(sampler="sequential", paths=paths):
        daemon.wait(lambda: daemon.jobs)
        files = daemon.jobs[0].job["files"]
    assert daemon.jobs[0].job["path"] == b"/data/set"
    assert files == {"rule": "paths", "paths": b"x/1\0x/b\xff\0x/2\0y/3"}
    assert daemon.jobs[0].is_closed


def test_many_paths_travel_in_pieces(daemon: FakeHintsd) -> None:
    paths = [f"/data/set/{'n' * 100}/{i:07}" for i in range(30_000)]
    job = hintsd.connect("/data").shuffle(paths=paths)
    daemon.wait(lambda: daemon.jobs)
    got = daemon.jobs[0].job
    assert [os.path.join(got["path"], p) for p in got["files"]["paths"].split(b"\0")] == [
        path.encode() for path in paths
    ]
    job.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"sampler": "shuffled"},
        {"sampler": "distributed", "world_size": 4, "rank": 4},
        {"sampler": "distributed", "world_size": 4, "rank": -1},
        {"sampler": "distributed"},
        {"sampler": "distributed", "world_size": 4},
        {"rank": 1},
        {"batch_size": 0},
        {"epochs": 0},
        {"epochs": 3, "start_epoch": 3},
        {"start_batch": -1},
        {"seed": 2**64},
        {"sampler": "sequential", "replacement": True},
        {"sampler": "sequential", "seed": 3},
        {"paths": []},
    ],
)
def test_arguments_without_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        hintsd.connect("/").shuffle(**wrong)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"seed": "0"}, "seed must be an integer, not '0'"),
        ({"seed": None}, "seed must be an integer, not None"),
        ({"batch_size": 25.6}, "batch_size must be an integer, not 25.6"),
        ({"epochs": "90"}, "epochs must be an integer, not '90'"),
        ({"workers": True}, "workers must be an integer, not True"),
        ({"drop_last": "no"}, "drop_last must be True or False, not 'no'"),
        ({"sampler": "distributed", "world_size": "8", "rank": 0}, "world_size must be an integer"),
        ({"num_samples": "all"}, "num_samples must be an integer, not 'all'"),
        ({"paths": "/data/a.jpg"}, "paths must be a sequence of paths, not '/data/a.jpg'"),
        ({"paths": ["a", 3]}, r"paths\[1\] must be a path, not 3"),
        ({"paths": iter(["a", 3])}, r"paths\[1\] must be a path, not 3"),
        ({"extensions": [1]}, r"extensions must be strings like '.jpg', not \[1\]"),
    ],
)
def test_arguments_of_the_wrong_type(wrong: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}"):
        hintsd.connect("/").shuffle(**wrong)


def test_wrong_types_elsewhere(daemon: FakeHintsd) -> None:
    wrong: Any = None
    with pytest.raises(ValueError, match="path must be a path, not None"):
        hintsd.connect(wrong)
    with pytest.raises(ValueError, match="arrays must be index arrays, or a function, not None"):
        hintsd.connect("/d").order(wrong)
    with pytest.raises(ValueError, match="batch_size must be an integer, not None"):
        hintsd.connect("/d").order([[1]], batch_size=wrong)
    with pytest.raises(ValueError, match=r"an order must be a row of integers: .*inhomogeneous"):
        hintsd.connect("/d").order([[[1], [1, 2]]])
    with hintsd.connect("/d").shuffle() as job:
        steps: list[tuple[Any, Any]] = [(None, None), ("7", None), (0.5, None), (0, "1"), (-1, 0)]
        for batch, epoch in steps:
            with pytest.raises(ValueError, match=r"(batch_index|epoch) must be"):
                job.step(batch, epoch)
        job.step(np.int64(7), np.int64(1))  # type: ignore[arg-type]  # as a loop may have them
        daemon.wait(lambda: daemon.jobs and daemon.jobs[0].steps == [(1, 7)])


def test_any_integer_and_any_path_will_do(daemon: FakeHintsd) -> None:
    seven: Any = np.int32(7)
    true: Any = np.bool_(True)
    job = hintsd.connect(Path("/d")).shuffle(
        seed=seven, epochs=seven, drop_last=true, extensions=".jpg"
    )
    with job:
        daemon.wait(lambda: daemon.jobs)
    told = daemon.jobs[0].job
    assert (told["spec"]["seed"], told["epochs"]) == (7, 7)
    assert told["files"]["extensions"] == [".jpg"]
    with hintsd.connect("/d").shuffle(paths=[b"x/1", Path("x/2")]):  # type: ignore[list-item]
        daemon.wait(lambda: len(daemon.jobs) == 2)
    assert daemon.jobs[1].job["files"]["paths"] == b"1\x002"


@pytest.mark.parametrize("is_function", [False, True])
def test_orders_go_one_epoch_ahead(daemon: FakeHintsd, is_function: bool) -> None:
    generator = np.random.default_rng(1)
    orders = [generator.permutation(100) for _ in range(4)]
    asked: list[int] = []

    def order_of(epoch: int) -> Any:
        asked.append(epoch)
        return orders[epoch]

    job = hintsd.connect("/d").order(
        order_of if is_function else map(order_of, range(4)), epochs=4, batch_size=10
    )
    assert asked == [0, 1]
    for batch in range(10):
        job.step(batch)
    assert asked == [0, 1]
    job.step(0)
    assert asked == [0, 1, 2]
    job.step(0, epoch=2)
    job.step(5, epoch=3)
    assert asked == [0, 1, 2, 3]
    daemon.wait(lambda: daemon.jobs and daemon.jobs[0].steps[-1:] == [(3, 5)])
    told = daemon.jobs[0]
    # An epoch that was over before it could be told may be missing.
    assert [epoch for epoch, _ in told.orders][-1] == 3
    for epoch, sequence in told.sequences():
        assert sequence.tolist() == orders[epoch].tolist()
    assert all(spec.batch_size == 10 for _, spec in told.orders)


def test_a_large_order(daemon: FakeHintsd) -> None:
    order = np.random.default_rng(2).permutation(500_000)  # 4 MB, in pieces
    job = hintsd.connect("/d").order([order])
    daemon.wait(lambda: daemon.jobs and daemon.jobs[0].orders)
    assert (daemon.jobs[0].sequences()[0][1] == order).all()
    job.close()


@pytest.mark.parametrize("order", [[], [[1, 2]], [0.5], [-1], ["a"]])
def test_an_order_that_is_none(order: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        hintsd.connect("/d").order([order])


def test_steps_are_coalesced_and_the_last_one_arrives(daemon: FakeHintsd) -> None:
    job = hintsd.connect("/d").shuffle()
    daemon.wait(lambda: daemon.jobs)
    begun_s = time.monotonic()
    for batch in range(20_000):
        job.step(batch)
    elapsed_s = time.monotonic() - begun_s
    daemon.wait(lambda: daemon.jobs[0].steps[-1:] == [(0, 19_999)])
    steps = daemon.jobs[0].steps
    assert steps == sorted(steps)
    assert len(steps) <= 2 + elapsed_s / link.STEP_INTERVAL_S


def test_the_last_reference_ends_the_job(daemon: FakeHintsd) -> None:
    job = hintsd.connect("/d").shuffle()
    daemon.wait(lambda: daemon.jobs)
    del job
    gc.collect()
    daemon.wait(lambda: daemon.jobs[0].is_closed)


def test_the_state_of_a_job(daemon: FakeHintsd) -> None:
    let_in = threading.Event()

    def answer(job: dict[str, Any]) -> None:
        assert let_in.wait(20)

    daemon.refuse = answer
    job = hintsd.connect("/d").shuffle()
    assert (job.state, repr(job)) == ("waiting", "<hintsd.Job unnamed of /d: waiting>")
    let_in.set()
    daemon.refuse = lambda job: None
    job.step(1)
    daemon.wait(lambda: daemon.jobs and daemon.jobs[0].steps)
    assert (job.state, repr(job)) == ("hinted", "<hintsd.Job fake-0 of /d: hinted>")

    def lose_it() -> None:
        daemon.stop()
        while job.state == "hinted":
            os.sched_yield()
        assert job.state == "waiting"
        deadline_s = time.monotonic() + 20
        while repr(job) != "<hintsd.Job fake-0 of /d: waiting (no hintsd answers)>":
            assert time.monotonic() < deadline_s, job
            time.sleep(0.001)
        daemon.start()
        daemon.wait(lambda: daemon.jobs[0].resumed)

    with pytest.warns(RuntimeWarning, match="connection was lost"):
        lose_it()
    job.close()
    assert job.state == "over"


def test_a_job_waits_for_its_mount_while_no_hintsd_tells_of_it(
    daemon: FakeHintsd, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hintsd.connect("/d").shuffle()
    daemon.wait(lambda: daemon.jobs)
    _becomes(job, "hinted")

    def no_mount(_: str) -> tuple[str, str]:
        return finding.find_socket("/")  # what it says where there is none

    def unmount() -> None:
        daemon.stop()
        deadline_s = time.monotonic() + 20
        while repr(job) != "<hintsd.Job fake-0 of /d: waiting (/d is not mounted any more)>":
            assert time.monotonic() < deadline_s, job
            time.sleep(0.001)

    with monkeypatch.context() as unmounted:
        unmounted.setattr(link, "find_socket", no_mount)
        with pytest.warns(RuntimeWarning, match="until it is back"):
            unmount()
    daemon.start()
    daemon.wait(lambda: daemon.jobs[0].resumed)
    job.close()


def _becomes(job: hintsd.Job, state: str) -> None:
    deadline_s = time.monotonic() + 20
    while job.state != state:
        assert time.monotonic() < deadline_s, job
        os.sched_yield()


def test_the_state_follows_what_hintsd_says(daemon: FakeHintsd) -> None:
    job = hintsd.connect("/d").shuffle()
    _becomes(job, "hinted")
    daemon.say("state", state="wrong", reason="another seed")
    _becomes(job, "wrong")
    assert repr(job) == "<hintsd.Job fake-0 of /d: wrong (another seed)>"
    daemon.say("state", state="sideways", reason="of the next version")
    daemon.say("state", state="waiting", reason="/d is not mounted any more")
    _becomes(job, "waiting")
    daemon.say("state", state="hinted", reason="")
    _becomes(job, "hinted")
    assert repr(job) == "<hintsd.Job fake-0 of /d: hinted>"
    daemon.say("state", state="over", reason="ended by a user")
    _becomes(job, "over")
    daemon.wait(lambda: daemon.jobs[0].is_closed)
    link_of(job)._thread.join(20)
    assert job.is_over
    assert repr(job) == "<hintsd.Job fake-0 of /d: over (ended by a user)>"


def test_the_last_step_is_told_before_the_end(daemon: FakeHintsd) -> None:
    job = hintsd.connect("/d").shuffle()
    for batch in range(100):
        job.step(batch)
    daemon.wait(lambda: daemon.jobs)
    job.close()
    assert daemon.jobs[0].steps[-1] == (0, 99)


# Without a hintsd


def test_warnings_point_at_the_script(daemon: FakeHintsd) -> None:
    """Those of the job's thread, too: at the line that made the job."""
    daemon.refuse = lambda job: "no class directories"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hintsd.attach([1])  # type: ignore[arg-type]
        job = hintsd.connect("/data/set").shuffle()
        link_of(job)._thread.join(20)
    first, second = caught
    assert str(first.message).startswith("hintsd: attach takes a torch DataLoader, not a list")
    assert "no class directories" in str(second.message)
    with pytest.warns(RuntimeWarning, match="DataLoader, not an int;"):
        hintsd.attach(3)  # type: ignore[arg-type]
    assert first.filename == second.filename == __file__
    lines = Path(__file__).read_text().splitlines()
    assert "hintsd.attach([1])" in lines[first.lineno - 1]
    assert ".shuffle()" in lines[second.lineno - 1]


def _one_warning(pattern: str) -> None:
    """Two jobs: one warning, no exception; nothing does anything."""
    with pytest.warns(RuntimeWarning, match=pattern) as caught:
        _two_jobs()
    assert len(caught) == 1


def _two_jobs() -> None:
    for _ in range(2):
        job = hintsd.connect("/data/set").shuffle(epochs=3)
        job.step(1)
        assert job.name is None
        job.close()
        job.step(2)
        job.close()
        assert job.is_over


@pytest.mark.claim("P2")
def test_a_directory_that_is_not_on_a_mount() -> None:
    _one_warning("/data/set is not on a fusecache mount")


@pytest.mark.claim("P2")
def test_hints_are_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mount = mounts.Mount(1, "0:1", str(tmp_path), mounts.FILESYSTEM_TYPE, "source")
    monkeypatch.setattr(mounts, "find", lambda path: mount)
    _one_warning("hints are off for the mount")


def test_the_server_of_a_mount_knows_only_the_attribute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mount = mounts.Mount(1, "0:1", str(tmp_path), mounts.FILESYSTEM_TYPE, "source")
    monkeypatch.setattr(mounts, "find", lambda path: mount)
    told = {"user.fusecache.hintsd": b"/run/fusecache/hintsd.sock"}
    monkeypatch.setattr(os, "getxattr", lambda fd, name: told[name])
    path = str(tmp_path / "train")
    assert finding.find_socket(path) == ("/run/fusecache/hintsd.sock", path)


@pytest.mark.claim("G4")
def test_another_users_mount_is_not_ours_to_hint(ordinary_user: OrdinaryUser) -> None:
    """Root's may be, where its hintsd serves others."""
    private = ordinary_user.base / "private"  # as the runtime directory of the mount's user
    private.mkdir(mode=0o700)
    shared = ordinary_user.base / "private-public"
    code = """if True:
        import os, sys
        from unittest import mock
        from fusecache.base import mounts
        from hintsd.client import finding
        address, uid = sys.argv[1:]
        mount = mounts.Mount(1, "0:1", "/", mounts.FILESYSTEM_TYPE, "source", {"user_id": uid})
        told = lambda fd, name: os.fsencode(address)
        with mock.patch.object(mounts, "find", lambda path: mount):
            with mock.patch.object(os, "getxattr", told):
                try:
                    print(finding.find_socket("/data/set"))
                except finding.Unhinted as problem:
                    print(problem)
    """
    own = "mount the dataset yourself to have your own; going on without hints\n"

    def found(uid: int, address: Path = private / "sock") -> str:
        done = ordinary_user.run(code, address, str(uid))
        return done.stdout or done.stderr

    anothers = "/ is another user's: only its user, and root, can give it hints; " + own
    nobody = "/ is root's, and its hintsd serves nobody else (hintsd serve --others); " + own
    assert (found(1), found(0)) == (anothers, nobody)
    shared.mkdir(mode=0o755)
    assert found(0) == nobody
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(shared / "sock"))
        os.chmod(shared / "sock", 0o660)
        not_in_group = f"/ is root's, and you are not in the group of {shared / 'sock'}; " + own
        assert found(0) == not_in_group
        os.chmod(shared / "sock", 0o666)
        assert found(1) == anothers
        assert str(shared / "sock") in found(0)
        for path in (shared, shared / "sock"):  # what another user has prepared
            os.chown(path, ordinary_user.uid, ordinary_user.gid)
            assert found(0) == nobody
            os.chown(path, 0, 0)
        assert str(shared / "sock") in found(0)
    absent = ordinary_user.base / "sock"  # one may come there
    assert str(absent) in found(0, absent)
    assert str(absent) in found(1, absent)


@pytest.mark.claim("P2")
@pytest.mark.parametrize("is_file", [False, True])
def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_file: bool) -> None:
    address = tmp_path / "hintsd.sock"
    if is_file:  # left by a dead hintsd
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(address))
    monkeypatch.setattr(link, "find_socket", lambda path: (str(address), path))
    _one_warning("none answers")


@pytest.mark.claim("P2")
def test_a_hintsd_that_comes_later(daemon: FakeHintsd) -> None:
    daemon.stop()
    with pytest.warns(RuntimeWarning, match="none answers"):
        job = hintsd.connect("/d").shuffle()
    job.step(3)
    daemon.start()
    daemon.wait(lambda: daemon.jobs)
    assert daemon.jobs[0].job["start_batch"] == 3
    job.close()


def test_a_hintsd_that_says_nothing(daemon: FakeHintsd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CONNECT_TIMEOUT_S", 3.0)
    daemon.answers_hello = lambda connection: False
    with pytest.warns(RuntimeWarning, match="no answer"):
        job = hintsd.connect("/d").shuffle()
    begin = time.monotonic()
    more = [hintsd.connect("/d").shuffle() for _ in range(5)]
    assert time.monotonic() - begin < 4 * link.CONNECT_TIMEOUT_S, "a process waits once"
    for each in (job, *more):
        each.close()
        assert each.is_over


def test_a_hintsd_that_refuses_the_connection(daemon: FakeHintsd) -> None:
    def refuse(connection: socket.socket) -> bool:
        connection.sendall(wire.encode("error", {"message": "version 1 is too old"}))
        return False

    daemon.answers_hello = refuse
    _one_warning("version 1 is too old")


@pytest.mark.parametrize("answer", [b"\0\0\0\0", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_somebody_else_listens(daemon: FakeHintsd, answer: bytes) -> None:
    def speak(connection: socket.socket) -> bool:
        connection.sendall(answer)
        return False

    daemon.answers_hello = speak
    _one_warning("not understood")


def test_a_job_that_is_refused(daemon: FakeHintsd) -> None:
    daemon.refuse = lambda job: "no class directories in /data/set"

    def run() -> hintsd.Job:
        job = hintsd.connect("/data/set").shuffle()
        link_of(job)._thread.join(10)
        return job

    with pytest.warns(RuntimeWarning, match="no class directories"):
        job = run()
    assert job.is_over
    why = "refused, going on without hints: no class directories in /data/set"
    assert repr(job) == f"<hintsd.Job unnamed of /data/set: over ({why})>"


def test_errors_made_of_warnings_do_not_reach_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_mount(path: str) -> tuple[str, str]:
        raise Unhinted("not a mount")

    monkeypatch.setattr(link, "find_socket", no_mount)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = hintsd.connect("/d").shuffle()
    assert job.is_over


# Deaths


@pytest.mark.parametrize("count", [3, 40_000])
def test_the_latest_scores_are_told_and_told_again_to_another_hintsd(
    daemon: FakeHintsd, count: int
) -> None:
    with hintsd.connect("/d").order([]) as job:
        daemon.wait(lambda: daemon.jobs)
        told = daemon.jobs[0]

        def is_told(uses: bytes) -> bool:
            return bool(told.scores) and told.scores[-1] == uses

        for factor in (1, 2):
            uses = factor * np.arange(count, dtype=np.float32)
            job.score(uses)
            daemon.wait(partial(is_told, uses.tobytes()))
        daemon.stop()
        told.scores.clear()
        daemon.start()
        daemon.wait(lambda: told.scores)
        assert told.scores == [uses.tobytes()]
        wrong = ([np.nan], [[1.0]], [-1.0], [np.inf])
        for scores in wrong:
            job.score(scores)
        job.step(1)
        daemon.wait(lambda: told.steps)
        assert told.scores == [uses.tobytes()]


def test_scores_are_not_told_to_an_older_hintsd(daemon: FakeHintsd) -> None:
    daemon.takes_scores = False
    with hintsd.connect("/d").order([[0, 1]]) as job:
        job.score([1.0, 2.0])
        job.step(1)
        daemon.wait(lambda: daemon.jobs and daemon.jobs[0].steps)
        assert daemon.jobs[0].scores == []
        assert job.state == "hinted"


SAMPLES = 29
CACHED = np.random.default_rng(1).random(SAMPLES) < 0.5
BITS = np.packbits(CACHED, bitorder="little").tobytes()


def _pieces(number: int, bits: bytes = BITS) -> list[dict[str, Any]]:
    told = {"number": number, "samples": SAMPLES}
    return [{**told, "offset": at, "data": bits[at : at + 3]} for at in range(0, len(bits), 3)]


@pytest.fixture
def asking(daemon: FakeHintsd) -> Iterator[hintsd.Job]:
    daemon.stop()  # what it says at first it does not say again
    daemon.tells_cached = _pieces
    daemon.start()
    with hintsd.connect("/d").order([[0, 1]]) as job:
        daemon.wait(lambda: job.state == "hinted")
        yield job


@pytest.mark.usefixtures("no_warning")
def test_what_is_cached_is_asked(daemon: FakeHintsd, asking: hintsd.Job) -> None:
    for _ in range(2):
        np.testing.assert_array_equal(asking.cached(60.0), CACHED)
    daemon.tells_cached = lambda number: [{"message": "cached: its files are not known now"}]
    assert asking.cached(3600.0) is None
    assert asking.state == "hinted"
    asking.close()
    assert asking.cached(3600.0) is None


@pytest.mark.usefixtures("no_warning")
def test_a_late_answer_is_no_answer_to_the_next_question(
    daemon: FakeHintsd, asking: hintsd.Job
) -> None:
    daemon.tells_cached = lambda number: []
    assert asking.cached(0.0) is None
    while not daemon.jobs[0].asked:
        assert asking.cached(0.05) is None
    late = daemon.jobs[0].asked[-1]
    other = bytes(len(BITS))
    daemon.tells_cached = lambda number: [*_pieces(late, other), *_pieces(number)]
    np.testing.assert_array_equal(asking.cached(60.0), CACHED)
    daemon.tells_cached = lambda number: [*_pieces(number)[:1], *_pieces(late, other)]
    assert asking.cached(0.05) is None


@pytest.mark.usefixtures("no_warning")
def test_an_older_hintsd_is_not_asked_what_is_cached(daemon: FakeHintsd) -> None:
    with hintsd.connect("/d").order([[0, 1]]) as job:
        daemon.wait(lambda: job.state == "hinted")
        assert job.cached(3600.0) is None


@pytest.mark.filterwarnings("ignore:hintsd. the connection was lost")
def test_a_hintsd_that_dies_is_not_waited_for(daemon: FakeHintsd, asking: hintsd.Job) -> None:
    daemon.tells_cached = lambda number: []

    def stop() -> None:
        daemon.wait(lambda: daemon.jobs[0].asked)
        daemon.stop()

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert asking.cached(3600.0) is None
    stopping.join()


def _ask_in_vain(daemon: FakeHintsd, asking: hintsd.Job) -> None:
    assert asking.cached(3600.0) is None
    daemon.wait(lambda: asking.is_over)


def test_an_answer_to_another_question_ends_the_job(daemon: FakeHintsd, asking: hintsd.Job) -> None:
    daemon.tells_cached = lambda number: [{"number": number, "chunk": 1, "kind": "chunk"}]
    with pytest.warns(RuntimeWarning, match="going on without hints: chunk: field number"):
        _ask_in_vain(daemon, asking)


def test_an_answer_with_a_gap_ends_the_job(daemon: FakeHintsd, asking: hintsd.Job) -> None:
    daemon.tells_cached = lambda number: _pieces(number)[1:]
    with pytest.warns(RuntimeWarning, match="not understood, going on without hints: cached"):
        _ask_in_vain(daemon, asking)


@pytest.mark.usefixtures("no_warning")
def test_which_chunk_is_next_is_asked(daemon: FakeHintsd) -> None:
    """Not of an older hintsd; and a refusal, or silence, is no answer."""
    with hintsd.connect("/d").order([[0, 1]]) as job:
        daemon.wait(lambda: job.state == "hinted")
        assert job.next_chunk([2, 3], 4, 3600.0) is None
    daemon.stop()
    daemon.chooses = lambda unread: unread[-1]
    daemon.start()
    with hintsd.connect("/d").order([[0, 1]]) as job:
        daemon.wait(lambda: job.state == "hinted")
        assert job.next_chunk([2, 3], 4, 60.0) == 3
        assert job.next_chunk([2, 3, 1], 4, 60.0) == 1
        daemon.chooses = lambda unread: None
        assert job.next_chunk([2], 4, 0.05) is None
        late = daemon.jobs[1].numbers[-1]
        daemon.say("chunk", number=late, chunk=0)
        daemon.chooses = lambda unread: unread[0]
        assert job.next_chunk([2], 4, 60.0) == 2
        daemon.refuses_chunks = True
        assert job.next_chunk([2], 4, 3600.0) is None
        assert job.state == "hinted"
    assert job.next_chunk([2], 4, 3600.0) is None
    assert daemon.jobs[1].walked[:2] == [([2, 3], 4), ([2, 3, 1], 4)]


@pytest.mark.filterwarnings("error")
def test_a_hintsd_that_dies_and_comes_back(daemon: FakeHintsd) -> None:
    orders = [np.random.default_rng(i).permutation(50) for i in range(3)]
    job = hintsd.connect("/d").order(orders, batch_size=5)
    job.step(2, epoch=1)
    daemon.wait(lambda: daemon.jobs and daemon.jobs[0].steps[-1:] == [(1, 2)])
    told = daemon.jobs[0]

    def lose_it() -> None:
        daemon.stop()
        told.orders.clear()
        told.steps.clear()
        job.step(5)
        daemon.start()
        # The step that `resume` has told already may come again, and need not.
        daemon.wait(lambda: told.resumed and len(told.orders) >= 2)

    with pytest.warns(RuntimeWarning, match="connection was lost") as caught:
        lose_it()
    assert len(caught) == 1
    again = told.resumed[0]
    assert (again["resume"], again["start_epoch"], again["start_batch"]) == (told.name, 1, 5)
    assert {epoch for epoch, _ in told.orders} == {1, 2}
    for epoch, sequence in told.sequences():
        assert sequence.tolist() == orders[epoch].tolist()
    assert {*told.steps} <= {(1, 5)}
    lose_it()  # no second warning: it would be an error of the test
    job.close()
    assert told.is_closed


def test_a_forked_child_holds_nothing_and_says_nothing(daemon: FakeHintsd) -> None:
    job = hintsd.connect("/d").shuffle()
    job.step(1)
    daemon.wait(lambda: daemon.jobs and daemon.jobs[0].steps)
    assert job.name == daemon.jobs[0].name
    connection = link_of(job)._connection._socket
    assert connection is not None
    inode = os.readlink(f"/proc/self/fd/{connection.fileno()}")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            held = set()
            for fd in os.listdir("/proc/self/fd"):
                try:
                    held.add(os.readlink(f"/proc/self/fd/{fd}"))
                except OSError:
                    continue  # that of the listing itself
            job.step(9)
            job.close()
            del job
            gc.collect()
            status = 0 if inode not in held else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    job.step(3)
    daemon.wait(lambda: daemon.jobs[0].steps == [(0, 1), (0, 3)])
    assert not daemon.jobs[0].is_closed


def test_leaving_the_interpreter_ends_the_job_at_once(daemon: FakeHintsd) -> None:
    code = f"""
import hintsd, hintsd.client.link
hintsd.client.link.find_socket = lambda path: ({str(daemon.path)!r}, path)
hintsd.client.link.CONNECT_TIMEOUT_S = {PATIENCE_S}
job = hintsd.connect("/d").shuffle()
job.step(1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    daemon.wait(lambda: all(told.is_gone for told in daemon.jobs))


def test_the_interpreter_ends_after_the_last_step_is_told(
    daemon: FakeHintsd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LAST_ANSWER_TIMEOUT_S", 20.0)
    job = hintsd.connect("/d").shuffle()
    job.step(1)
    link._end_all()
    assert (daemon.jobs[0].steps[-1], daemon.jobs[0].is_closed, job.is_over) == ((0, 1), True, True)


def test_a_job_without_an_answer_keeps_no_other_from_its_end(
    daemon: FakeHintsd, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hintsd.connect("/d").shuffle()
    job._link.hear(20.0)

    def hear(*timeout_s: float) -> bool:
        if timeout_s:  # it is waited for: the other one has been told to end
            daemon.wait(lambda: daemon.jobs[0].is_closed)
        return False

    unheard = mock.Mock(hear=hear)
    with monkeypatch.context() as patch:
        patch.setattr(link, "_links", {*link._links, unheard})
        job.step(1)
        link._end_all()
    assert daemon.jobs[0].steps[-1] == (0, 1)
    link_of(job)._thread.join(PATIENCE_S)
    assert job.is_over


@pytest.mark.parametrize("count", [2, 100_000])  # orders that a socket takes at once, or not
def test_what_is_due_is_told_before_the_end(
    daemon: FakeHintsd, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The process may end when the job has just been accepted."""
    converse = link.Link._converse

    def end(of: link.Link) -> None:
        of.stop()
        converse(of)

    monkeypatch.setattr(link.Link, "_converse", end)
    ending = link.Link(Hint(b"/d"), (Files,))
    ending.announce(0, explicit_order(np.arange(count), 0, 1, False))
    ending.score({"uses": b"1234", "substituted": None, "h_list": None})
    ending.step(0, 1)
    ending.start()
    ending._thread.join(PATIENCE_S)
    (told,) = daemon.jobs
    assert ([epoch for epoch, _ in told.orders], told.scores) == ([0], [b"1234"])
    assert (told.steps[-1:], told.is_closed) == ([(0, 1)], True)


def test_a_step_comes_after_its_epochs_order(
    daemon: FakeHintsd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if both are said when the orders have just been told, and the steps have not."""
    told_frames, send, sent = link._told_frames, Connection.send, list[str]()
    is_said = threading.Event()

    def say(*of: Any) -> Iterator[bytes]:
        yield from told_frames(*of)
        if not is_said.is_set():
            is_said.set()
            one.announce(0, explicit_order([0], 0, 1, False))
            one.step(0, 1)

    def note(connection: Connection, data: bytes, *, is_last: bool = False) -> None:
        sent.extend(frame.type for frame in wire.Decoder().feed(data))
        send(connection, data, is_last=is_last)

    monkeypatch.setattr(link, "_told_frames", say)
    monkeypatch.setattr(Connection, "send", note)
    one = link.Link(Hint(b"/d"), (Files,))
    one.start()
    daemon.wait(lambda: daemon.jobs and daemon.jobs[0].orders and daemon.jobs[0].steps)
    assert sent == ["hello", "job", "order", "step"]
    one.stop(PATIENCE_S)


@pytest.mark.parametrize("fails", [False, True])  # whether hintsd has taken the order
def test_an_end_while_something_is_sent(
    daemon: FakeHintsd, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A send that has to wait uses up the wake of what is said meanwhile."""
    send, warnings_ = Connection.send, list[object]()

    def wait(connection: Connection, data: bytes, *, is_last: bool = False) -> None:
        send(connection, data, is_last=is_last)
        if wire.Decoder().feed(data)[0].type == "order":
            one.step(0, 1)
            one.stop()
            connection._wait(0, 0)
            if fails:
                raise TimeoutError("hintsd takes nothing")

    def hear_nothing(connection: Connection, timeout_s: float | None) -> list[wire.Frame]:
        connection._wait(0, timeout_s)
        return []

    monkeypatch.setattr(Connection, "send", wait)
    monkeypatch.setattr(Connection, "hear", hear_nothing)
    one = link.Link(Hint(b"/d"), (Files,))
    monkeypatch.setattr(one, "_warn", lambda *of: warnings_.append(of))
    one.announce(0, explicit_order([0], 0, 1, False))
    one.start()
    one._thread.join(PATIENCE_S)
    assert (one._thread.is_alive(), warnings_) == (False, [])
    assert (daemon.jobs[0].steps[-1:] == [(0, 1)], daemon.jobs[0].is_closed) == (not fails,) * 2


def test_a_script_that_ends_at_once_hears_why_it_has_no_hints(daemon: FakeHintsd) -> None:
    def refuse(job: dict[str, Any]) -> str:
        assert script.stdout is not None
        assert script.stdout.readline() == "the last line\n"
        return "no class directories"

    daemon.refuse = refuse
    code = f"""
import hintsd, hintsd.client.link
hintsd.client.link.find_socket = lambda path: ({str(daemon.path)!r}, path)
hintsd.client.link.LAST_ANSWER_TIMEOUT_S = 20.0
job = hintsd.connect("/d").shuffle()
print("the last line", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as script:
        assert script.stderr is not None
        said = script.stderr.read()
    assert script.returncode == 0
    assert said.count("RuntimeWarning: hintsd: refused, going on without hints: no class") == 1


def test_many_jobs_from_many_threads(daemon: FakeHintsd) -> None:
    def run(number: int) -> None:
        job = hintsd.connect("/d").shuffle(seed=number)
        for batch in range(100):
            job.step(batch)
        daemon.wait(lambda: any(told.steps for told in daemon.jobs))
        job.close()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(told.job["spec"].get("seed", 0) for told in daemon.jobs) == list(range(16))
    assert all(told.is_closed for told in daemon.jobs)


def test_a_thread_that_is_busy_may_be_woken_ever_so_often(daemon: FakeHintsd) -> None:
    goes_on = threading.Event()

    def listed() -> Files:
        goes_on.wait(60)
        return Files(paths=b"a")

    job = hintsd.Job(Hint(b"/d", epochs=2), (listed,))
    order = explicit_order([0], 0, 1, False)
    for _ in range(70_000):  # more than a pipe holds
        job.announce(0, order)
    goes_on.set()
    daemon.wait(lambda: any(told.orders for told in daemon.jobs))
    job.close(60)
    assert job.state == "over"


def test_importing_costs_nothing() -> None:
    code = (
        "import sys, hintsd; print([m for m in ('numpy', 'msgpack', 'torch') if m in sys.modules])"
    )
    code += "\nhintsd.connect('/'); hintsd.attach; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"], done.stderr

"""Other users of root's mount: hints of theirs through the public socket, and what they see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusecache.base import mounts
from tests.conftest import OrdinaryUser
from tests.support.hintsd_support import DaemonProcess
from tests.support.mounted import Mount, eventually
from tests.support.trees import random_bytes

FILES = 60

TRAIN = """if True:
    import os, sys, time
    import hintsd, torch
    from torch.utils.data import DataLoader, Dataset

    class Files(Dataset):
        root = sys.argv[1]
        def __init__(self):
            self.paths = sorted(
                os.path.join(top, name) for top, _, names in os.walk(self.root) for name in names
            )
        def __len__(self):
            return len(self.paths)
        def __getitem__(self, index):
            with open(self.paths[index], "rb") as file:
                return len(file.read())

    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(Files(), batch_size=4, shuffle=True, generator=generator)
    job = hintsd.attach(loader, loader.dataset.paths, epochs=2)
    end = time.monotonic() + 20
    while job.state != "hinted" and time.monotonic() < end:
        time.sleep(0.05)
    print(job.state, flush=True)
    for epoch in range(2):
        print(sum(int(batch.sum()) for batch in loader), flush=True)
"""

PLACE = """if True:
    import sys
    from tests.support.hintsd_support import JOB, Client
    for inside in sys.argv[3:]:
        where = {"path": b"/in/my/box", "device": sys.argv[2], "inside": inside.encode()}
        print(Client(sys.argv[1]).job(**where, detached=True, spec=None)["message"])
"""

HINT = """if True:
    import sys
    from tests.support.hintsd_support import JOB, Client
    for words in sys.argv[2:]:
        client, (where, *names) = Client(sys.argv[1]), words.split("|")
        files = {"rule": "paths", "paths": "\\0".join(names).encode()} if names else JOB["files"]
        told = client.job(path=where.encode(), files=files, detached=True, spec=None)
        print(told.get("message") or told["samples_per_epoch"])
"""


@pytest.fixture
def base(ordinary_user: OrdinaryUser) -> Path:
    """Two classes that all may list, one that is root's."""
    source = ordinary_user.base / "source"
    for n in range(FILES):
        path = source / f"open/{'ab'[n % 2]}/{n:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random_bytes(str(n), 20_000 + n))
        os.utime(path, (1e9, 1e9))
    for name in ("mixed/a", "mixed/secret", "closed/a"):
        (source / name).mkdir(parents=True)
        (source / name / "x.jpg").write_bytes(b"x" * 100)
    (source / "mixed/secret").chmod(0o700)
    (source / "closed").chmod(0o700)
    return ordinary_user.base


@pytest.fixture
def daemon(base: Path) -> Iterator[DaemonProcess]:
    (base / "hints").mkdir(mode=0o700)
    daemon = DaemonProcess(base / "hints", "--others", "all")
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.fixture
def mount(base: Path, daemon: DaemonProcess) -> Iterator[Mount]:
    (base / "shared").mkdir()
    flags = ("--ssd", "64M", "--ram", "16M", "--allow-other", "--hintsd", daemon.path)
    with Mount(base / "source", base / "shared", base / "cache", *flags, zero_open=True) as mount:
        yield mount


def run(user: OrdinaryUser, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*user.prefix, user.python, "-m", *map(str, words)],
        env=user.env, capture_output=True, text=True, timeout=120, cwd="/", check=False,
    )  # fmt: skip


@pytest.mark.claim("G1", "G2", "P5")
def test_another_user_hints(
    ordinary_user: OrdinaryUser, base: Path, daemon: DaemonProcess, mount: Mount
) -> None:
    where = mounts.public_socket(daemon.path)

    def status() -> dict[str, Any]:
        done = run(ordinary_user, "hintsd", "status", "--json", "--socket", where)
        assert done.returncode == 0, done
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    open_, shared = base / "shared/open", base / "shared"
    own = subprocess.run(
        [sys.executable, "-m", "hintsd", "hint", open_, "--detach"],
        capture_output=True, text=True, check=True,
    ).stdout.partition(":")[0]  # fmt: skip
    assert status()["jobs"] == status()["mounts"] == []
    done = run(ordinary_user, "hintsd", "end", own, "--socket", where)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"there is no job {own}" in done.stderr
    for path, named in (
        (shared / "closed", shared / "closed"),
        (shared / "mixed", shared / "mixed/secret"),
        (shared / "nowhere", shared / "nowhere"),
    ):
        done = run(ordinary_user, "hintsd", "hint", path, "--detach")
        assert done.returncode == 1
        assert done.stderr == f"hintsd: {named} is not there, or not yours to read\n"
    device = os.stat(shared).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    done = ordinary_user.run(PLACE, where, number, "/closed", "/closed/a", "/nowhere")
    # not where root has mounted it
    assert done.stdout == 3 * "/in/my/box is not there, or not yours to read\n", done
    trained = ordinary_user.run(TRAIN, open_)
    total = sum(20_000 + n for n in range(FILES))
    assert trained.stdout.splitlines() == ["hinted", str(total), str(total)], trained
    assert trained.stderr == ""
    eventually(lambda: status()["ended"][-1]["state"] == "done", every_s=0.5)
    *refused, ended = status()["ended"]
    assert [job["state"] for job in refused] == ["refused"]  # the others never began
    assert {job["uid"] for job in (*refused, ended)} == {ordinary_user.uid}
    assert daemon.jobs() == [own]
    assert run(ordinary_user, "hintsd", "hint", open_, "--detach").returncode == 0
    (theirs,) = (job["name"] for job in status()["jobs"])
    assert [job["mountpoint"] for job in status()["jobs"]] == [str(shared)]
    daemon.kill()
    daemon.start()
    eventually(lambda: set(daemon.jobs()) == {own, theirs})
    eventually(lambda: [job["name"] for job in status()["jobs"]] == [theirs], every_s=0.5)
    done = run(ordinary_user, "hintsd", "end", theirs, "--socket", where)
    assert done.returncode == 0, done
    assert daemon.jobs() == [own]


@pytest.mark.claim("G1")
def test_links_of_another_user_are_followed_as_they_could(
    ordinary_user: OrdinaryUser, base: Path, daemon: DaemonProcess
) -> None:
    """Whoever makes a link must not learn from us what it leads to, nor have us look into it."""
    secret = base / "closed to all but root"
    (secret / "a").mkdir(parents=True)
    (secret / "a/x.jpg").touch()
    secret.chmod(0o700)
    shared, named = base / "shared", base / "source/named"
    (named / "a").mkdir(parents=True)
    (named / "a/file.jpg").write_bytes(b"x")
    (named / "a/same.jpg").symlink_to("file.jpg")
    for name, target in (
        ("inside", shared / "closed/a/x.jpg"), ("outside", secret / "a/x.jpg"), ("none", "none")
    ):  # fmt: skip
        (named / f"a/{name}.jpg").symlink_to(target)
    for name, target in (("down", secret), ("out", base / "out"), ("within", shared / "open/a")):
        (base / "source" / name).mkdir()
        (base / "source" / name / "class").symlink_to(target)
    (base / "out").mkdir()
    (base / "out/x.jpg").touch()
    (shared).mkdir()
    flags = ("--ssd", "64M", "--ram", "16M", "--allow-other", "--hintsd", daemon.path)
    with Mount(base / "source", shared, base / "cache", *flags, zero_open=True):
        link = ordinary_user.home / "link"
        link.symlink_to(shared / "within")
        dataset = shared / "named"
        answers = {
            **{
                f"{dataset}|a/{name}.jpg": f"{dataset}: sample 0, a/{name}.jpg, is not a file"
                for name in ("inside", "outside", "none")
            },
            f"{dataset}|a/same.jpg": "1",
            f"{dataset}": "5",
            f"{shared}/down": f"{secret} is not there, or not yours to read",
            f"{shared}/out": f"{shared}/out: class leads out of the mount",
            f"{shared}/within": str(FILES // 2),
            str(link): str(FILES // 2),
        }
        done = ordinary_user.run(HINT, mounts.public_socket(daemon.path), *answers)
        assert done.returncode == 0, done
        assert dict(zip(answers, done.stdout.splitlines(), strict=True)) == answers
        held = {job["path"] for job in daemon.status()["jobs"]}
        assert str(link) in held
        daemon.kill()
        link.unlink()
        link.symlink_to(shared / "closed")
        daemon.start()  # and asks anew
        left = held - {str(link)}
        eventually(lambda: {job["path"] for job in daemon.status()["jobs"]} == left)


@pytest.mark.claim("G5")
def test_another_user_sees_the_status(
    ordinary_user: OrdinaryUser, base: Path, mount: Mount
) -> None:
    """Also of the server that comes when one was killed; nothing that root alone is to know."""
    for name in os.listdir(base / "source/open/a"):
        (base / "shared/open/a" / name).read_bytes()

    def status(*flags: str) -> subprocess.CompletedProcess[str]:
        return run(ordinary_user, "fusecache.cli.main", "status", str(base / "shared"), *flags)

    assert mount.run("pin", mount.path, "open/a/*").returncode == 0
    mine = mount.status()
    told = json.loads(status("--json").stdout)
    assert told["origin"]["files"] == mine["origin"]["files"] == FILES // 2
    assert told["mountpoint"] == str(base / "shared")
    for key in ("cache_dir", "last_error", "directories", str(base / "cache"), "open/a/*"):
        assert key in json.dumps(mine)
        assert key not in json.dumps(told), key
    assert "reads" in status().stdout
    mount.kill_server()

    def is_told() -> bool:
        done = status("--json")
        return done.returncode == 0 and json.loads(done.stdout)["restarts"] == 1

    eventually(is_told)
    mounted = mounts.find(str(base / "shared"))
    assert mounted is not None
    there = Path(mounts.status_socket(mounted.device))
    assert there.is_socket()
    mount.umount()
    eventually(lambda: not there.exists())
    done = status()
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1

"""Names swapped for links while a mount lives: in the cache directory, and at the origin.

What lies behind the links is another user's, and so is every second link. None of it may be
changed, moved or served.
"""

import os
import random
import time
from pathlib import Path

from tools.campaign_lib.ground import OTHER_UID, Count, Ground

_FILES = 200
SECRET = b"the victim's secret, which lies outside the source\n"


def _victim(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    """Name -> (bytes, mode, inode) of all below it, the directory itself included."""
    found = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (content, status.st_mode, status.st_ino)
    return found


def _make_victim(directory: Path) -> None:
    directory.mkdir()
    (directory / "letters").mkdir()
    for name in ("letters/one", "00000001.seg", "1.db", "format", "lock", "high"):
        (directory / name).write_bytes(SECRET)
    os.chmod(directory, 0o755)
    for path in [directory, *directory.rglob("*")]:
        os.chown(path, OTHER_UID, OTHER_UID)


def _swap(path: Path, target: Path, aside: Path, owner: int = 0) -> None:
    path.rename(aside)
    path.symlink_to(target)
    os.lchown(path, owner, owner)


def _restore(path: Path, aside: Path) -> None:
    """Back to what it was, unless something was made in the link's place meanwhile."""
    if path.is_symlink():
        path.unlink()
    if not path.exists():
        aside.rename(path)


def run(work: Path, rng: random.Random, until: float, count: Count) -> None:
    """Until the monotonic time `until`; at least one round of each."""
    ground = Ground(work, rng, _FILES, 20_000)
    victim, aside = work / "victim", work / "aside"
    _make_victim(victim)
    before = _victim(victim)
    places = ["segments", "index", ".", "origin"]
    with ground.mounted("--ssd", "64M", "--ram", "32M", "--revalidate", "1") as mount:
        ground.fill(mount)
        while places or time.monotonic() < until:
            place = places.pop() if places else rng.choice(["segments", "index", ".", "origin"])
            if place == "origin":
                _at_the_origin(ground, work, count)
            else:
                name = ground.cache_dir if place == "." else ground.cache_dir / place
                _swap(name, victim, aside, rng.choice([0, OTHER_UID]))
                ground.forget()
                ground.check_all(count, f"{place} of the cache is a link to a victim's")
                if rng.random() < 0.5:
                    os.kill(int(mount.status()["server_pid"]), 9)
                    count.tried["kills"] += 1
                    ground.check_all(count, f"{place} is a link, and the server was killed")
                _restore(name, aside)
                if aside.exists():  # something of ours was made anew meanwhile: that one counts
                    aside.rename(work / f"old{time.monotonic_ns()}")
            count.tried["links swapped"] += 1
            now = _victim(victim)
            if now != before:
                changed = sorted(name for name, _ in now.items() ^ before.items())
                count.failed(f"{place} was a link, and the victim's files were changed", changed)
                before = now


def _at_the_origin(ground: Ground, work: Path, count: Count) -> None:
    """A directory that was listed becomes a link to outside of the source."""
    inside, outside = ground.source / "class0", work / "outside"
    names = [name for name in ground.content if name.startswith("class0/")]
    if not outside.exists():
        outside.mkdir()
        for name in names:
            (outside / Path(name).name).write_bytes(SECRET)
    os.listdir(ground.mountpoint / "class0")
    _swap(inside, outside, work / "inside")
    try:
        ground.forget()
        for name in names:
            count.tried["reads"] += 1
            try:
                # the kernel may follow the link itself, once it is told of it: not through us
                if (ground.mountpoint / "class0").is_symlink():
                    break
                with (ground.mountpoint / name).open("rb") as file:
                    is_ours = os.fstat(file.fileno()).st_dev == ground.mountpoint.stat().st_dev
                    found = file.read()
            except OSError:
                continue  # gone at the origin: right
            if is_ours and found != ground.content[name]:
                where = "outside of the source" if found == SECRET else "nowhere"
                count.wrong_read(f"from {where}, as a directory of it is a link", name)
    finally:
        _restore(inside, work / "inside")
    _wait_until_seen(ground, count)


def _wait_until_seen(ground: Ground, count: Count) -> None:
    """Until the mount shows the directory again: within the period, here 1 s and the sweep."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if not (ground.mountpoint / "class0").is_symlink() and os.listdir(
                ground.mountpoint / "class0"
            ):
                name = next(name for name in ground.content if name.startswith("class0/"))
                if (ground.mountpoint / name).read_bytes() == ground.content[name]:
                    return
        except OSError:
            pass
        time.sleep(0.1)
    count.failed("class0 was not shown again after it had come back")

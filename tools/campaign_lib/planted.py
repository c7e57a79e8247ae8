"""What another user has prepared in a directory where everyone may write: a whole cache with bytes
of that user's choice, and links to files of a victim's. Root mounts there.

A mount is either refused or serves the origin's bytes; the victim's files stay as they were.
"""

import functools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from fusecache.store import Store, StoreSettings, Version
from fusecache.table.namespace import dataset_id
from tools.campaign_lib.ground import OTHER_UID, Count, Ground

SECRET = b"a victim's letters\n"
_LETTERS = ("format", "lock", "log", "00000001.seg", "1.db")
_SETTINGS = StoreSettings(64 << 20, 0, "lrf", "xxh3-128")


def as_other(action: Callable[[], None]) -> None:
    """In a child that is another user. RuntimeError: it failed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(OTHER_UID)
            os.setuid(OTHER_UID)
            action()
            code = 0
        finally:
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError("the other user could not prepare the attack")


def _plant(ground: Ground, directory: Path) -> None:
    """A cache of the dataset as it is, but for its bytes."""
    directory.mkdir(mode=0o777)
    store = Store.open(
        directory, _SETTINGS, on_fault=lambda *_: None, on_segment_gone=lambda _: None
    )
    dataset = dataset_id(str(ground.source))
    for name, content in ground.content.items():
        status = (ground.source / name).stat()
        version = Version(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        store.put(dataset, name.encode(), version, 0, bytes(len(content)))
    store.close()
    directory.chmod(0o777)


def run(work: Path, rng: random.Random, until: float, count: Count) -> None:
    """Each trap once; again until the monotonic time `until`."""
    os.chmod(work.parent, 0o755)  # the other user must be able to look
    work.chmod(0o755)
    ground = Ground(work, rng, 40, 8_000)
    number = 0
    while not number or time.monotonic() < until:
        for trap in _TRAPS:
            number += 1
            victim, scratch = work / f"victim{number}", work / f"scratch{number}"
            victim.mkdir()
            for name in _LETTERS:
                (victim / name).write_bytes(SECRET)
            scratch.mkdir()
            scratch.chmod(0o1777)
            as_other(functools.partial(trap, ground, scratch, victim))
            _mount_there(ground, scratch, count, trap.__name__)
            count.tried["traps"] += 1
            names = sorted(path.name for path in victim.iterdir())
            if names != sorted(_LETTERS) or victim.stat().st_mode & 0o777 != 0o755:
                count.failed(f"{trap.__name__}: the victim's directory was changed")
            elif any((victim / name).read_bytes() != SECRET for name in _LETTERS):
                count.failed(f"{trap.__name__}: the victim's files were changed")


def _mount_there(ground: Ground, scratch: Path, count: Count, trap: str) -> None:
    ground.cache_dir = scratch / "fusecache"
    log = ("--log-file", str(scratch / "log")) if (scratch / "log").is_symlink() else ()
    try:
        with ground.mounted("--ssd", "64M", "--ram", "32M", *log):
            ground.check_all(count, trap)
            count.tried["traps that did no harm"] += 1
    except RuntimeError as error:
        if "Traceback" in str(error):
            count.failed(trap, error)
        count.tried["traps refused"] += 1


def _whole_cache(ground: Ground, scratch: Path, victim: Path) -> None:
    _plant(ground, scratch / "fusecache")


def _link_to_own_cache(ground: Ground, scratch: Path, victim: Path) -> None:
    _plant(ground, scratch / "elsewhere")
    (scratch / "fusecache").symlink_to(scratch / "elsewhere")


def _link_to_victim(ground: Ground, scratch: Path, victim: Path) -> None:
    (scratch / "fusecache").symlink_to(victim)


def _empty_directory(ground: Ground, scratch: Path, victim: Path) -> None:
    (scratch / "fusecache").mkdir(mode=0o777)


def _index_is_a_link(ground: Ground, scratch: Path, victim: Path) -> None:
    _plant(ground, scratch / "fusecache")
    (scratch / "fusecache/index").rename(scratch / "fusecache/old")
    (scratch / "fusecache/index").symlink_to(victim)


def _lock_is_a_link(ground: Ground, scratch: Path, victim: Path) -> None:
    (scratch / "fusecache").mkdir(mode=0o777)
    (scratch / "fusecache/segments").mkdir()
    for name in ("lock", "format", "high"):
        (scratch / "fusecache" / name).symlink_to(victim / "lock")


def _log_is_a_link(ground: Ground, scratch: Path, victim: Path) -> None:
    (scratch / "log").symlink_to(victim / "log")


_TRAPS = (
    _whole_cache,
    _link_to_own_cache,
    _link_to_victim,
    _empty_directory,
    _index_is_a_link,
    _lock_is_a_link,
    _log_is_a_link,
)

"""Staging, dropping and tripwires of the C part on a real mount, called in its server.

That staged pages are there is seen from the count of READs, which no reader can avoid without them.
"""

from __future__ import annotations

import ast
import contextlib
import os
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fusecache import _native
from fusecache.base.errors import UserError
from fusecache.control import control_client
from tests.conftest import Mounting, Place, in_one_mode
from tests.support.mounted import ROOT, Mount, environment, eventually
from tests.support.residency import held, read_without_requests

DOOR = ROOT / "tests/native_door"
SIZES = {"empty": 0, "tiny": 1, "page": 4096, "small": 10_000, "photo": 110_000, "d/block": 4 << 20}
PARTS = [name for name, size in SIZES.items() if size]


def pack(*inos: int) -> bytes:
    return struct.pack(f"<{len(inos)}I", *inos)


class Door:
    """`_native` of the mount's server: see native_door/sitecustomize.py."""

    def __init__(self, mount: Mount) -> None:
        self.mount = mount

    def call(self, name: str, *arguments: object, **named: object) -> Any:
        own = [key for key in ("fuse_fd", "mountpoint") if named.pop(key, False)]
        reply = control_client.ask(
            control_client.find(str(self.mount.path)),
            {
                "op": "native",
                "name": name,
                "arguments": repr({"": list(arguments), **named}),
                "own": own,
            },
        )
        return ast.literal_eval(reply["result"])

    def ino(self, name: str) -> int:
        """Asks the table, so that the kernel learns nothing."""
        ino = 1
        for part in name.split("/"):
            ino = self.call("lookup", ino, os.fsencode(part))
        assert ino > 0, name
        return ino

    def inos(self, *names: str) -> bytes:
        return pack(*[self.ino(name) for name in names])

    def stage(self, *names: str) -> list[int]:
        inos = self.inos(*names)
        return list(self.call("stage", inos=inos, fuse_fd=True, mountpoint=True))

    def drop(self, *names: str) -> None:
        self.call("drop", inos=self.inos(*names), fuse_fd=True, mountpoint=True)

    def arm(self, *names: str) -> int:
        return int(self.call("arm", inos=self.inos(*names), fuse_fd=True))

    def flags(self, name: str) -> int:
        return int(self.call("plan_flags", self.inos(name))[0])

    def seen(self) -> list[tuple[int, int]]:
        inos, kinds, processes, parents, lost = self.call("take_seen", 1000)
        assert lost == 0
        assert processes == pack(os.getpid()) * len(kinds)
        assert parents == pack(os.getppid()) * len(kinds)
        return list(zip(struct.unpack(f"<{len(kinds)}I", inos), kinds, strict=True))

    def looked_up(self) -> list[int]:
        """Of what is seen; a host that takes a page at any moment has READs seen, too."""
        return [ino for ino, kind in self.seen() if kind & 7 == _native.SEEN_LOOKUP]

    def reads(self) -> int:
        return int(self.mount.value("reads", "requests"))

    def counter(self, name: str) -> int:
        return int(self.call("counters")[name])


@pytest.fixture
def start(place: Place, mounting: Mounting) -> Callable[..., Door]:
    """Mounts with a plan begun."""
    path = os.pathsep.join([str(ROOT), str(DOOR)])

    def begin(*flags: str, environ: dict[str, str] | None = None, **changes: Any) -> Door:
        environ = {"PYTHONPATH": path, **(environ or {})}
        door = Door(mounting(*flags, env=environment(**environ), **changes))
        door.call("plan_begin")
        return door

    for name, size in SIZES.items():
        place.write(name, os.urandom(size))
    return begin


@pytest.fixture
def stored(place: Place, start: Callable[..., Door]) -> Door:
    """All is on SSD and nothing in RAM: a new mount that has listed, and looked up nothing."""
    door = start()
    door.mount.read_until_stored(*PARTS, blocks=len(PARTS))
    door.mount.umount()
    door.mount.start()
    door.call("plan_begin")
    eventually(lambda: door.mount.run("warm", door.mount.path).returncode == 0)
    assert door.reads() == 0
    return door


def step_into(directory: int, name: str) -> int:
    """The sub-directory's descriptor; closes the directory's."""
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)
    finally:
        os.close(directory)


def read_all(door: Door, *names: str) -> None:
    for name in names:
        assert (door.mount.path / name).read_bytes() == (door.mount.source / name).read_bytes()


def read_staged(door: Door, *names: str, stage: Callable[[], object] | None = None) -> None:
    """These have been staged: right, and without a request."""
    paths = [door.mount.path / name for name in names]
    read_without_requests(
        paths,
        lambda path: read_all(door, str(path.relative_to(door.mount.path))),
        door.reads,
        stage or (lambda: door.stage(*names)),
    )


def test_staged_files_are_read_without_a_request(stored: Door) -> None:
    assert stored.stage(*SIZES) == [_native.PUSHED] * len(SIZES)
    assert stored.call("ram_bytes") == sum(SIZES.values())
    for name in PARTS:
        assert stored.flags(name) == _native.PLAN_STAGED
    for _ in range(2):
        read_staged(stored, *SIZES)
    assert stored.looked_up() == []
    assert stored.stage(*SIZES) == [_native.PUSHED] * len(SIZES)  # once more does no harm
    read_staged(stored, *SIZES)


@in_one_mode  # in the other one Python would list
def test_files_are_introduced_by_the_hundred(place: Place, start: Callable[..., Door]) -> None:
    """To look up each file of a directory costs more than to stage it. Listing fires no wire."""
    names = [f"many/{number:03}" for number in range(200)]
    for name in names:
        place.write(name, os.urandom(100))
    door = start()
    door.mount.read_until_stored(*names, blocks=len(names))
    door.mount.umount()
    door.mount.start()
    door.call("plan_begin")
    eventually(lambda: door.mount.run("warm", door.mount.path).returncode == 0)
    assert door.arm(names[100]) == 1
    before = door.counter("lookups")
    assert door.stage(*names) == [_native.PUSHED] * len(names)
    assert 0 < door.counter("lookups") - before < len(names) // 2
    assert door.seen() == []
    read_all(door, *names)
    assert door.looked_up() == [door.ino(names[100])]
    read_staged(door, *names)


def test_dropped_files_are_read_anew(stored: Door) -> None:
    stored.stage(*SIZES)
    read_all(stored, *SIZES)
    stored.drop(*SIZES)
    assert stored.call("ram_bytes") == 0
    assert all(stored.flags(name) == 0 for name in SIZES)
    before = stored.reads()
    for number, name in enumerate(PARTS):
        read_all(stored, name)
        assert stored.reads() > before + number
    stored.drop(*SIZES)  # what readers brought is dropped, too
    stored.stage(*SIZES)
    read_staged(stored, *SIZES)


def test_dropping_leaves_other_files_and_open_readers_alone(stored: Door) -> None:
    stored.stage(*SIZES)
    with open(stored.mount.path / "photo", "rb") as file:
        stored.drop("photo", "page")
        assert file.read() == (stored.mount.source / "photo").read_bytes()
    read_staged(stored, "small", "tiny", "d/block")


def test_what_a_reader_was_faster_with_is_left_to_it(stored: Door) -> None:
    """Only a READ that comes while the file waits for its turn counts."""
    names = ["small", "photo"]
    read_all(stored, "small")
    stored.call("plan_mark", stored.inos(*names), _native.PLAN_QUEUED, _native.PLAN_READ)
    read_all(stored, "photo")
    before = stored.counter("bytes_staged")
    assert stored.stage(*names) == [_native.PUSHED, _native.PUSH_READ]
    assert stored.counter("bytes_staged") - before == SIZES["small"]
    assert stored.flags("photo") & _native.PLAN_STAGED
    stored.drop("photo")
    assert stored.stage("photo") == [_native.PUSHED]
    read_staged(stored, *names)


@in_one_mode
def test_what_cannot_be_staged(place: Place, start: Callable[..., Door]) -> None:
    with open(place.write("large", b""), "wb") as file:
        file.truncate((4 << 20) + 1)
    (place.source / "symlink").symlink_to("small")
    place.write("gone", os.urandom(100))
    place.write("changed", os.urandom(100))
    door = start()
    mount = door.mount
    os.listdir(mount.path)
    assert door.stage("small", "large", "symlink", "d", "empty") == [
        _native.PUSH_NO_BYTES,
        _native.PUSH_LARGE,
        _native.PUSH_CHANGED,
        _native.PUSH_CHANGED,
        _native.PUSHED,
    ]
    unknown = door.call("stage", inos=pack(0, 999_999), fuse_fd=True, mountpoint=True)
    assert list(unknown) == [_native.PUSH_CHANGED] * 2
    mount.read_until_stored("gone", "changed", "small", blocks=3)
    gone = door.inos("gone")
    place.write("changed", os.urandom(101))
    (place.source / "gone").unlink()
    control_client.ask(control_client.find(str(mount.path)), {"op": "sweep"})
    assert door.stage("changed", "small") == [_native.PUSH_NO_BYTES, _native.PUSHED]
    assert list(door.call("stage", inos=gone, fuse_fd=True, mountpoint=True)) == [
        _native.PUSH_CHANGED
    ]
    # dropping and arming what is gone does nothing, to nobody
    door.call("drop", inos=gone + pack(0, 999_999), fuse_fd=True, mountpoint=True)
    assert door.call("arm", inos=gone + pack(0, 1, 999_999), fuse_fd=True) == 0


@in_one_mode
def test_pages_from_memory(place: Place, start: Callable[..., Door]) -> None:
    place.write("other", bytes(1000))
    door = start()
    os.listdir(door.mount.path)  # the kernel knows the names; nothing is on SSD
    contents = {name: (place.source / name).read_bytes() for name in (*SIZES, "other")}
    inos = {name: door.ino(name) for name in contents if "/" not in name}
    files = [(ino, door.call("version", ino), contents[name]) for name, ino in inos.items()]

    def push() -> list[int]:
        return list(door.call("push_files", files=files, fuse_fd=True, mountpoint=True))

    assert push() == [_native.PUSHED] * len(files)
    read_staged(door, *inos, stage=push)
    version = door.call("version", inos["other"])
    wrong = [
        (inos["other"], (*version[:3], version[3] + 1), bytes(1000)),
        (inos["other"], version, bytes(999)),
        (999_999, version, bytes(1000)),
        (1, version, bytes(1000)),
    ]
    assert list(door.call("push_files", files=wrong, fuse_fd=True, mountpoint=True)) == [
        _native.PUSH_CHANGED
    ] * len(wrong)


@in_one_mode
def test_one_of_several_names(place: Place, start: Callable[..., Door]) -> None:
    os.link(place.source / "photo", place.source / "d/second")
    door = start()
    door.mount.read_until_stored(*PARTS, blocks=len(PARTS))
    (place.source / "photo").unlink()
    control_client.ask(control_client.find(str(door.mount.path)), {"op": "sweep"})
    door.mount.drop_kernel_caches()
    os.listdir(door.mount.path / "d")

    def staged() -> bool:  # its change time is new: it has to be fetched again
        read_all(door, "d/second")
        return bool(door.stage("d/second") == [_native.PUSHED])

    eventually(staged)
    door.mount.drop_pages()
    door.stage("d/second")
    read_staged(door, "d/second")
    before = door.reads()
    door.drop("d/second")
    read_all(door, "d/second")
    assert door.reads() > before


@in_one_mode
def test_a_path_that_is_too_long_for_one_call(place: Place, start: Callable[..., Door]) -> None:
    """It cannot be opened by name: then it is dropped by an invalidation, and only a file that the
    kernel knows can be staged.
    """
    parts = ["d" * 200] * 22
    above = os.open(place.source, os.O_RDONLY)
    for part in parts:
        os.mkdir(part, dir_fd=above)
        above = step_into(above, part)
    with open(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=above), "wb") as file:
        file.write(os.urandom(10_000))
    os.close(above)
    door = start()

    def read() -> bytes:
        directory = os.open(door.mount.path, os.O_RDONLY)
        for part in parts:
            os.listdir(directory)
            directory = step_into(directory, part)
        os.listdir(directory)
        with open(os.open("bottom", os.O_RDONLY, dir_fd=directory), "rb") as bottom:
            os.close(directory)
            return bottom.read()

    def staged() -> bool:
        content = read()
        return len(content) == 10_000 and door.stage("/".join([*parts, "bottom"])) == [
            _native.PUSHED
        ]

    eventually(staged)
    name = "/".join([*parts, "bottom"])
    before = door.reads()
    door.drop(name)
    content = read()
    assert door.reads() == before + 1
    door.drop(name)
    assert door.stage(name) == [_native.PUSHED]
    assert read() == content
    assert door.reads() == before + 1
    door.mount.drop_kernel_caches()
    assert door.stage(name) == [_native.PUSH_REFUSED]
    assert read() == content


def test_a_server_killed_while_it_stages_and_drops(stored: Door) -> None:
    """Its threads may be looking up, opening, pushing: nothing may be left wrong or locked."""
    stored.mount.allow_log.append("native failed")
    inos = stored.inos(*SIZES)
    stop = threading.Event()
    failed: list[BaseException] = []

    def often(name: str, **own: bool) -> None:
        while not stop.is_set():
            with contextlib.suppress(UserError):
                stored.call(name, inos=inos, fuse_fd=True, **own)

    def read() -> None:
        try:
            while not stop.is_set():
                read_all(stored, *SIZES)
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=often, args=("stage",), kwargs={"mountpoint": True}),
        threading.Thread(target=often, args=("drop",), kwargs={"mountpoint": True}),
        threading.Thread(target=often, args=("arm",)),
        threading.Thread(target=read),
    ]
    for thread in threads:
        thread.start()
    for _ in range(4):
        killed = stored.mount.kill_server()
        eventually(lambda killed=killed: stored.mount.server_pid() != killed)  # type: ignore[misc]
        stored.call("plan_begin")
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not failed
    stored.mount.drop_pages()
    read_all(stored, *SIZES)  # by which the new server opens its segments
    assert stored.stage(*SIZES) == [_native.PUSHED] * len(SIZES)
    read_staged(stored, *SIZES)


# ---- observations --------------------------------------------------------------------------------


def test_reads_are_seen_as_the_plan_stood(stored: Door) -> None:
    photo = stored.ino("photo")
    staged = _native.PLAN_STAGED | _native.PLAN_WANTED
    stored.stage("photo")
    stored.call("plan_mark", pack(photo), _native.PLAN_WANTED, 0)
    stored.mount.drop_pages()  # somebody else takes them away
    read_all(stored, "photo")
    assert stored.seen() == [(photo, _native.SEEN_SSD | staged)]
    stored.drop("photo")
    read_all(stored, "photo")
    assert stored.seen() == [(photo, _native.SEEN_SSD | _native.PLAN_WANTED)]
    stored.call("plan_end")
    stored.drop("photo")
    read_all(stored, "photo")
    assert stored.seen() == []


def test_a_wire_fires_once_and_pages_stay(stored: Door) -> None:
    stored.stage(*SIZES)
    paths = [stored.mount.path / name for name in SIZES]
    with held(paths, lambda: stored.stage(*SIZES)):
        reads = stored.reads()
        stored.seen()  # READs of what was missing when it was locked
        for _ in range(3):
            assert stored.arm("photo", "d/block") == 2
            read_all(stored, *SIZES)
            assert stored.seen() == [
                (stored.ino("photo"), _native.SEEN_LOOKUP | _native.PLAN_STAGED),
                (stored.ino("d/block"), _native.SEEN_LOOKUP | _native.PLAN_STAGED),
            ]
            before = stored.counter("lookups")
            read_all(stored, *SIZES)
            assert stored.seen() == []
            assert stored.counter("lookups") == before
        assert stored.reads() == reads


@in_one_mode
def test_a_wire_of_a_name_that_the_kernel_has_not_seen(stored: Door) -> None:
    assert stored.arm("photo") == 1
    assert stored.flags("photo") == _native.PLAN_ARMED
    read_all(stored, "photo")
    assert stored.seen()[0] == (stored.ino("photo"), _native.SEEN_LOOKUP)
    assert stored.flags("photo") == 0


def test_only_readers_fire_a_wire(stored: Door) -> None:
    """Neither the server's own look-ups nor a listing do, and the wire stands after them."""
    names = ("photo", "d/block")
    stored.arm(*names)
    stored.stage(*names)  # looks them up
    assert stored.seen() == []
    stored.arm(*names)
    stored.drop(*names)  # opens them
    stored.mount.drop_kernel_caches()
    stored.stage(*names)
    os.listdir(stored.mount.path)  # answered with entries
    os.listdir(stored.mount.path / "d")
    assert stored.seen() == []
    for name in names:
        with open(stored.mount.path / name, "rb"):
            pass
    assert stored.seen() == [
        (stored.ino(name), _native.SEEN_LOOKUP | _native.PLAN_STAGED) for name in names
    ]

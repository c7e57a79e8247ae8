"""The cache service of a host, with real mounts (docs/CACHED.md): what one mount has read, no other
one reads at the origin; who may read what; and whatever happens to the service, bytes are right.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusecache.cached.group import BLAKE3
from fusecache.manifest.format import NAME, Entry, Whole, entry_bytes, header
from tests.conftest import Mounting, OrdinaryUser, Place, in_one_mode
from tests.support import PATIENCE_S
from tests.support.cached_service import (
    CachedService,
    Client,
    blocks_of,
    name,
    set_for,
    with_constants,
)
from tests.support.faulty_origin import SETTLED_S, Fault, FaultyOrigin
from tests.support.mounted import Mount, command, drop_file, errno_of, eventually
from tests.support.plan_client import PlanClient
from tests.support.trees import make_files, random_bytes

MIB = 1 << 20
FIRST, SECOND, THIRD = 1, 2, 2_041_003  # fusermount3 wants users with a name: daemon, bin
STORED = 2
SHORT = {"cached__client__AGAIN_S": 0.2, "cached__client__LOOK_S": 0.2}
LONG_S = 2 * PATIENCE_S
READS_ON = r"cache service .* not asked for"
GONE = r"the mount's own cache is used"


Services = Callable[..., CachedService]
Join = Callable[..., Mount]


@pytest.fixture
def services() -> Iterator[Services]:
    with contextlib.ExitStack() as stack:
        yield lambda *flags, **more: stack.enter_context(CachedService(*flags, **more))


@pytest.fixture
def service(services: Services) -> CachedService:
    return services("--ssd", "256M")


@pytest.fixture
def join(place: Place, services: Services, mounting: Mounting) -> Join:
    """Mounts that use a service, each with a cache and a mount point of its own. They end before
    the `services` do.
    """
    count = iter(range(100))

    def begin(service: CachedService, *flags: str, is_used: bool = True, **changes: Any) -> Mount:
        number = next(count)
        mountpoint = place.base / f"mnt {number}"
        mountpoint.mkdir()
        where = {"mountpoint": mountpoint, "cache_dir": place.base / f"cache {number}"}
        mount = mounting("--cache", str(service.socket), *flags, **{**where, **changes})
        if is_used:
            eventually(lambda: mount.value("service", "used"))
        return mount

    return begin


@pytest.fixture
def impatient(place: Place) -> dict[str, str]:
    """For mounts that look for it often."""
    return with_constants(place.base / "impatient", "fusecache.server", **SHORT)


def digested(root: Path) -> None:
    """As `fusecache digest --digest blake3`, which waits for 2 s until the files are old enough."""
    entries, whole = [], Whole(BLAKE3)
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path.name != NAME):
        found = path.stat()
        version = found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        digests = b"".join(map(name, blocks_of(path)))
        entries.append(Entry(os.fsencode(path.relative_to(root)), *version, digests))
        whole.add(entries[-1])
    listed = b"".join(map(entry_bytes, entries))
    (root / NAME).write_bytes(header(BLAKE3) + listed + whole.end())


def dataset(place: Place, count: int = 120, seed: object = 0) -> list[Path]:
    """Small files, and their manifest."""
    files = make_files(place.source, count, lambda index: 1000 + index * 7919 % 29_000, seed)
    digested(place.source)
    return files


def copied(place: Place, to: str, age_s: int = 86400) -> Path:
    """The place's source, elsewhere, with other times; without a manifest."""
    copy = place.base / to
    shutil.copytree(place.source, copy, ignore=shutil.ignore_patterns(NAME))
    for path in copy.rglob("*"):
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    return copy


def assert_read(mount: Mount, files: Sequence[Path]) -> None:
    """By their paths in its source, whose bytes they are."""
    for path in files:
        seen = (mount.path / path.relative_to(mount.source)).read_bytes()
        assert seen == path.read_bytes(), path


def below(root: Path, files: Sequence[Path], source: Path) -> list[Path]:
    return [root / path.relative_to(source) for path in files]


def total(files: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def read_and_put(mount: Mount, files: Sequence[Path]) -> None:
    """At the origin, once; then the service has them all."""
    assert_read(mount, files)
    eventually(lambda: mount.value("service", "put_files") == len(files))
    assert origin(mount) == (len(files), total(files))
    assert mount.value("service", "put_bytes") == total(files)


def origin(mount: Mount) -> tuple[int, int]:
    """Files and bytes that were read there."""
    status = mount.status()["origin"]
    return status["files"], status["bytes"]


@contextlib.contextmanager
def reading(mount: Mount, files: Sequence[Path], readers: int = 2) -> Iterator[None]:
    """Meanwhile threads read these files, each at least once, and not from the kernel's cache."""
    wanted = [(mount.path / path.relative_to(mount.source), path.read_bytes()) for path in files]
    is_over, failures = threading.Event(), list[str]()

    def read(seed: int) -> None:
        draw, rounds = random.Random(seed), 0
        try:
            while not (rounds and is_over.is_set()):
                rounds += 1
                for path, content in draw.sample(wanted, len(wanted)):
                    assert path.read_bytes() == content, path
                    drop_file(path)
        except (AssertionError, OSError) as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(readers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not failures
    assert not any(thread.is_alive() for thread in threads), "a reader hangs"


# ---- once a host ---------------------------------------------------------------------------------


def test_a_second_mount_reads_nothing_at_the_origin(
    place: Place, join: Join, service: CachedService
) -> None:
    """Nor does it keep anything itself. Files of one block and of several."""
    files = dataset(place)
    files.append(place.write("large", random_bytes("large", 9 * MIB + 1)))
    files.append(place.write("full", random_bytes("full", 8 * MIB)))
    place.write("empty", b"")
    done = command("digest", place.source, "--digest", "blake3")
    assert done.returncode == 0, done.stderr
    first = join(service)
    assert_read(first, files)
    eventually(lambda: first.value("service", "put_bytes") == total(files))
    read = origin(first)  # of a large file a piece may be read before its block
    assert read[0] == first.value("service", "put_files") == len(files)
    second = join(service)
    assert_read(second, files)
    assert (second.path / "empty").read_bytes() == b""
    assert origin(second) == (0, 0)
    status = second.status()
    found = status["service"]["found_files"]
    assert found >= len(files)  # two READs of a file may look for it at one time
    assert (status["service"]["put_files"], status["ssd"]["blocks"]) == (0, 0)
    assert status["reads"]["from_origin"] == 0
    for mount in (first, second):
        mount.drop_kernel_caches()
        assert_read(mount, files)
        assert mount.value("ssd", "blocks") == 0
    assert origin(first) == read
    assert origin(second) == (0, 0)
    assert second.value("service", "found_files") == found  # once is enough


@in_one_mode
def test_a_copy_elsewhere_is_the_same_dataset(
    place: Place, join: Join, service: CachedService
) -> None:
    """Other paths, times and inodes; a manifest of its own. The service knows content alone."""
    files = dataset(place)
    read_and_put(join(service), files)
    copy = copied(place, "copy")
    (copy / "class000").rename(copy / "elsewhere")
    digested(copy)
    copies = sorted(path for path in copy.rglob("*.jpg"))
    assert len(copies) == len(files)
    mount = join(service, source=copy)
    assert_read(mount, copies)
    assert origin(mount) == (0, 0)
    assert mount.value("service", "found_files") >= len(files)
    assert len(service.groups) == 1


@in_one_mode
def test_of_another_copy_what_has_changed_is_read(
    place: Place, join: Join, service: CachedService
) -> None:
    """That is another group: what the two have in common is copied, as it is read."""
    files = dataset(place)
    read_and_put(join(service), files)
    copy = copied(place, "copy")
    changed, *_ = copies = below(copy, files, place.source)
    changed.write_bytes(random_bytes("changed", 5000))
    digested(copy)
    mount = join(service, source=copy)
    assert_read(mount, copies)
    assert origin(mount) == (1, 5000)
    eventually(lambda: mount.value("service", "put_files") == 1)
    assert mount.value("service", "found_files") >= len(files) - 1
    assert len(service.groups) == 2
    last = join(service, source=copy)
    assert_read(last, copies)
    assert origin(last) == (0, 0)


@in_one_mode
def test_a_file_that_changed_after_its_digest_is_read_at_the_origin(
    place: Place, join: Join, service: CachedService
) -> None:
    """The manifest says nothing of it then: no mount is given the bytes of before."""
    files = dataset(place, 30)
    read_and_put(join(service), files)
    before = files[3].stat()
    files[3].write_bytes(random_bytes("changed", before.st_size))
    os.utime(files[3], ns=(before.st_atime_ns, before.st_mtime_ns))
    mount = join(service)
    assert_read(mount, files)
    assert origin(mount) == (1, before.st_size)
    eventually(lambda: mount.value("ssd", "blocks") == 1)
    assert mount.value("service", "put_files") == 0


@in_one_mode
def test_what_the_manifest_does_not_list_is_kept_by_the_mount(
    place: Place, join: Join, service: CachedService
) -> None:
    listed = dataset(place, 40)
    others = make_files(place.source / "later", 25, lambda index: 2000 + index, "later")
    first, second = join(service), join(service)
    for mount, count in ((first, 40), (second, 0)):
        assert_read(mount, listed + others)
        eventually(lambda: mount.value("ssd", "blocks") == 25)  # noqa: B023
        eventually(lambda: mount.value("service", "put_files") == count)  # noqa: B023
        assert origin(mount)[0] == count + 25
        mount.drop_kernel_caches()
        assert_read(mount, listed + others)
        assert origin(mount)[0] == count + 25


@in_one_mode
def test_warm_and_hints_find_it_too(place: Place, join: Join, service: CachedService) -> None:
    files = dataset(place)
    first = join(service)
    assert first.run("warm", first.path, "class*/**").returncode == 0
    eventually(lambda: first.value("service", "put_files") == len(files))
    second, third = join(service), join(service)
    assert second.run("warm", second.path, "class*/**").returncode == 0
    with PlanClient(third.path) as client:
        for directory in (b"class000", b"class001", b"class002"):
            inos = [entry[0] for entry in client.listing(directory).values()]
            assert client.fetch_all(inos) == {STORED: len(inos)}
    for mount in (second, third):
        assert mount.value("service", "found_files") >= len(files)
        assert_read(mount, files)
        assert origin(mount) == (0, 0)
        assert mount.value("ssd", "blocks") == 0


# ---- who may read what ---------------------------------------------------------------------------

READ_ALL = """if True:
    import hashlib, os, sys
    whole = hashlib.sha256()
    for top, directories, names in os.walk(sys.argv[1]):
        directories.sort()
        for name in sorted(names):
            if name.endswith(".jpg"):
                with open(os.path.join(top, name), "rb") as file:
                    whole.update(file.read())
    print(whole.hexdigest())
"""


class User(OrdinaryUser):
    """Another one, with the same checkout."""

    def __init__(self, of: OrdinaryUser, uid: int) -> None:
        self.uid = self.gid = uid
        super().__init__(of.base)
        self.home = self.directory(f"home of {uid}")
        self.env["HOME"] = str(self.home)

    def join(self, service: CachedService, source: Path) -> Mount:
        return Mount(
            source,
            self.directory(f"mnt of {self.uid}"),
            self.home / "cache",
            *("--ssd", "64M", "--cache", str(service.socket)),
            prefix=self.prefix,
            program=self.program,
            env=self.env,
            log_file=self.directory(f"logs of {self.uid}") / "log",
        )

    def read(self, mount: Mount) -> str:
        done = self.run(READ_ALL, mount.path)
        assert done.returncode == 0, done.stderr
        return done.stdout


def shared_dataset(user: OrdinaryUser) -> tuple[Path, list[Path]]:
    """That all may read, as its manifest."""
    source = user.base / "source"
    files = make_files(source, 100, lambda index: 1000 + 250 * index)
    digested(source)
    (source / NAME).chmod(0o644)
    return source, files


def whole(user: OrdinaryUser, source: Path) -> str:
    done = user.run(READ_ALL, source)
    assert done.returncode == 0, done.stderr
    return done.stdout


def own_user(place: Path) -> dict[str, str]:
    """The environment of a process for which THIRD is the user `fusecache-cached`."""
    place.mkdir()
    place.chmod(0o755)
    (place / "sitecustomize.py").write_text(
        "import pwd\nfind = pwd.getpwuid\npwd.getpwuid = lambda uid: pwd.struct_passwd("
        f"('fusecache-cached', 'x', uid, uid, '', '/', '')) if uid == {THIRD} else find(uid)\n"
    )
    return {"PYTHONPATH": str(place)}


@in_one_mode
def test_two_users_read_a_dataset_once(ordinary_user: OrdinaryUser, zero_open: bool) -> None:
    """Neither may look at what the service has; a copy of one's own is the same dataset. The
    service is that of a user of its own.
    """
    first, second = User(ordinary_user, FIRST), User(ordinary_user, SECOND)
    source, files = shared_dataset(ordinary_user)
    expected = whole(first, source)
    extra = own_user(ordinary_user.base / "users")["PYTHONPATH"]
    for user in (first, second):
        user.env["PYTHONPATH"] += os.pathsep + extra
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(
            CachedService("--ssd", "256M", uid=THIRD, program=first.program, env=first.env)
        )
        one = stack.enter_context(first.join(service, source))
        eventually(lambda: one.value("service", "used"))
        assert first.read(one) == expected
        eventually(lambda: one.value("service", "put_files") == len(files), every_s=0.2)
        assert origin(one) == (len(files), total(files))
        (group,) = service.groups
        assert (group / "owner").read_text() == f"{FIRST}\n"

        own = second.home / "dataset"
        subprocess.run(["cp", "-r", source, own], check=True)
        subprocess.run(["chown", "-R", f"{SECOND}:{SECOND}", own], check=True)
        own.chmod(0o700)
        (own / NAME).unlink()
        done = subprocess.run(
            [*second.prefix, *second.program, "digest", str(own), "--digest", "blake3"],
            env=second.env, capture_output=True, text=True, check=False, cwd="/",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        two = stack.enter_context(second.join(service, own))
        eventually(lambda: two.value("service", "used"))
        assert second.read(two) == expected
        status = two.status()
        assert (status["origin"]["files"], status["origin"]["bytes"]) == (0, 0)
        assert status["service"]["found_files"] >= len(files)
        assert status["ssd"]["blocks"] == 0
        assert service.groups == [group]

        look = "import os, sys\nfor path in sys.argv[1:]: os.listdir(path)"
        opens = "import sys\nfor path in sys.argv[1:]: open(path, 'rb')"
        (segment,) = service.segments
        assert service.root.stat().st_mode & 0o777 == 0o700
        for user in (first, second):
            for code, path in (
                (look, service.root),
                (look, group),
                (look, segment.parent),
                (opens, group / "digests"),
                (opens, segment),
            ):
                done = user.run(code, path)
                assert "PermissionError" in done.stderr, (code, path, done)


@in_one_mode
def test_a_service_of_some_other_user_is_not_used(
    place: Place, join: Join, ordinary_user: OrdinaryUser
) -> None:
    """By root as little as by an ordinary user: it would see who reads what, and give bytes."""
    source, files = shared_dataset(ordinary_user)
    user = User(ordinary_user, FIRST)
    why = "bin serves it: not root, fusecache-cached or you"
    of_other = User(ordinary_user, SECOND)
    with CachedService(
        "--ssd", "256M", uid=SECOND, program=of_other.program, env=of_other.env
    ) as service:
        roots = join(service, source=source, is_used=False, allow_log=[GONE])
        theirs = user.join(service, source)
        theirs.allow_log.append(GONE)
        with theirs:
            assert user.read(theirs) == whole(user, source)
            assert_read(roots, files)
            for mount in (roots, theirs):
                status = mount.status()
                assert status["service"]["used"] is False
                assert why in status["service"]["why_not"]
                assert status["origin"]["files"] == len(files)
        assert service.groups == []
        own = of_other.join(service, source)  # his own he may use
        with own:
            eventually(lambda: own.value("service", "used"))
        assert len(service.groups) == 1


@in_one_mode
def test_who_does_not_know_the_set_gets_nothing(
    place: Place, join: Join, service: CachedService
) -> None:
    """The rows of docs/CACHED.md, by a client that says what it likes."""
    files = dataset(place, 60)
    read_and_put(join(service), files)
    digests = set_for(files)
    (group,) = service.groups
    blocks = [path.read_bytes() for path in files]
    names = [name(block) for block in blocks]
    lengths = [len(block) for block in blocks]
    foreign = random_bytes("foreign", 5000)
    knows = service.client(FIRST)
    assert knows.join(bytes.fromhex(group.name))  # it is the name: known to who has the set
    assert all(found.at for found in knows.find(names, lengths))

    stranger = service.client(SECOND)
    guesses = [bytes(32), bytes([255]) * 32, names[0], random_bytes(1, 32)]
    guesses += [bytes.fromhex(group.name)[:-1] + b"\x00", bytes.fromhex(group.name)[::-1]]
    assert [stranger.join(guess) for guess in guesses] == [False] * len(guesses)
    other = random_bytes("other", 3 * 32)
    assert "not the set of that name" in stranger.make(other, bytes.fromhex(group.name)[::-1])
    # The set that he claims to be the group's.
    assert "not the set of that name" in stranger.make(other, random_bytes(2, 32))
    unsorted = b"".join(reversed([digests[at : at + 32] for at in range(0, len(digests), 32)]))
    assert "not the set of that name" in stranger.make(unsorted)
    assert "not the set of that name" in stranger.make(digests[:32] * 2)
    assert service.groups == [group]
    requests: tuple[tuple[str, dict[str, Any]], ...] = (
        ("find", {"digests": names[0], "lengths": b"\0" * 4, "promise": True}),
        ("segment", {"segno": knows.find(names[:1], lengths[:1])[0].at}),
        ("put", {"digests": names[0], "lengths": b"\1\0\0\0"}),
        ("bad", {"segno": 1, "offset": 0}),
        ("list", {}),
        ("groups", {}),
    )
    for request, fields in requests:
        with service.client(SECOND) as asks:  # and of no group
            fields = {k: v.segno if hasattr(v, "segno") else v for k, v in fields.items()}
            asks.channel.send(request, b"x" if request == "put" else b"", **fields)
            assert asks.is_closed(), request

    # One digest that is known: its block, by a group of his own, and no other.
    assert stranger.make(names[7]) == ""
    everything = stranger.find(names, lengths, promise=True)
    assert [number for number, found in enumerate(everything) if found.at] == [7]
    assert not any(found.is_promised for found in everything)
    at = everything[7].at
    assert at is not None
    assert stranger.read(at) == blocks[7]
    held = whole_segment(stranger, at.segno)
    assert [number for number, block in enumerate(blocks) if block in held] == [7]
    theirs = knows.find(names[:1], lengths[:1])[0].at
    assert theirs is not None
    assert theirs.segno != at.segno
    assert stranger.segment(theirs.segno) == -1  # by its number: of another group
    assert not stranger.put(foreign)  # not of his group
    assert not stranger.put(blocks[0])
    assert stranger.put(blocks[7])

    # Poison: what is wrong is not taken, and nobody is given it.
    assert not knows.put(foreign, under=names[0])
    assert not knows.put(foreign)
    mount = join(service)
    assert_read(mount, files)
    assert origin(mount) == (0, 0)


def whole_segment(client: Client, segno: int) -> bytes:
    descriptor = client.segment(segno)
    assert descriptor >= 0
    with open(descriptor, "rb", buffering=0) as file:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return file.read()


@in_one_mode
def test_a_block_that_nobody_has_is_not_taken_under_its_name(
    place: Place, join: Join, service: CachedService
) -> None:
    """Poison before anybody has read the file: then the mount's own is taken."""
    files = dataset(place, 20)
    with service.client(FIRST) as hostile:
        assert hostile.make(set_for(files)) == ""
        for path in files:
            wrong = random_bytes("wrong", path.stat().st_size)
            assert not hostile.put(wrong, under=name(path.read_bytes()))
        assert not hostile.put(random_bytes("foreign", 5000))
        assert (service.groups[0] / "owner").read_text() == f"{FIRST}\n"
        read_and_put(join(service), files)


@in_one_mode
def test_a_descriptor_of_a_segment_gives_no_more_than_its_bytes(
    place: Place, join: Join, ordinary_user: OrdinaryUser, service: CachedService
) -> None:
    files = dataset(place, 10)
    read_and_put(join(service), files)
    block = files[0].read_bytes()
    with service.client(FIRST) as client:
        assert client.make(set_for(files)) == ""
        at = client.find([name(block)], [len(block)])[0].at
        assert at is not None
        descriptor = client.segment(at.segno)
        try:
            assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            assert errno_of(os.pwrite, descriptor, b"x" * 4096, 0) == "EBADF"
            assert errno_of(os.ftruncate, descriptor, 0) == "EINVAL"
            done = subprocess.run(
                [*User(ordinary_user, FIRST).prefix, ordinary_user.python, "-c", TRIES],
                env=ordinary_user.env, stdin=descriptor, capture_output=True, text=True,
                check=False, cwd="/",
            )  # fmt: skip
            assert done.stdout.split() == ["EACCES"] * 4 + ["EPERM"] * 2, done
        finally:
            os.close(descriptor)
        assert client.read(at) == block


TRIES = """if True:
    import errno, os
    path = os.readlink("/proc/self/fd/0")
    for call, *arguments in (
        (os.open, "/proc/self/fd/0", os.O_RDWR),
        (os.truncate, "/proc/self/fd/0", 0),
        (os.open, path, os.O_RDONLY),
        (os.listdir, os.path.dirname(path)),
        (os.chmod, 0, 0o666),
        (os.chown, 0, os.getuid(), -1),
    ):
        try:
            call(*arguments)
            print("done")
        except OSError as error:
            print(errno.errorcode[error.errno])
"""


@in_one_mode
def test_bounds_of_connections(place: Place, join: Join, service: CachedService) -> None:
    """Descriptors that are not received, connections without end: they cost no other user."""
    files = dataset(place, 10)
    read_and_put(join(service), files)
    block = files[0].read_bytes()
    with service.client(FIRST) as client:
        assert client.make(set_for(files)) == ""
        at = client.find([name(block)], [len(block)])[0].at
        assert at is not None
        os.close(client.segment(at.segno))
        for _ in range(3):
            client.channel.send("segment", segno=at.segno)
        ended = select.poll()
        ended.register(client.connection, select.POLLRDHUP)
        assert ended.poll(PATIENCE_S * 1000), "the connection goes on"
    service.allow_log.append("a connection is refused: too many connections")
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(service.client(FIRST)) for _ in range(64)]
        eventually(lambda: kept[-1].join(bytes(32)) is False)
        assert stack.enter_context(service.client(FIRST)).is_closed()
        assert stack.enter_context(service.client(SECOND)).join(bytes(32)) is False
    mount = join(service)
    assert_read(mount, files)
    assert origin(mount) == (0, 0)


def test_who_breaks_promises_is_promised_nothing(service: CachedService) -> None:
    """So nobody waits for him, time and again; and his neighbours have theirs."""
    names = [name(b"%d" % number) for number in range(200)]
    digests = b"".join(sorted(names))

    def promised(uid: int, some: Sequence[bytes]) -> int:
        """Of these, how many are another one's."""
        with service.client(uid) as client:
            assert client.make(digests) == ""
            return sum(one.is_promised for one in client.find(some, [1] * len(some), True))

    with service.client(FIRST) as honest, service.client(SECOND) as breaks:
        assert honest.make(digests) == breaks.make(digests) == ""
        for client, some in ((honest, names[:5]), (breaks, names[5:68])):
            assert not any(one.is_promised for one in client.find(some, [1] * len(some), True))
        assert promised(THIRD, names[:68]) == 68
    # All connections have ended: of these promises none is left, and SECOND has broken 63.
    eventually(lambda: promised(THIRD, names[:5]) == 0)
    with service.client(SECOND) as breaks:
        assert breaks.make(digests) == ""
        breaks.find(names[100:101], [1], True)
        assert promised(THIRD, names[100:101]) == 1  # not yet too many

    def is_over() -> bool:
        with service.client(SECOND) as breaks:
            assert breaks.make(digests) == ""
            breaks.find(names[101:102], [1], True)
            return promised(THIRD, names[101:102]) == 0

    eventually(is_over)
    with service.client(FIRST) as honest:
        assert honest.make(digests) == ""
        honest.find(names[102:103], [1], True)
        assert promised(THIRD, names[102:103]) == 1


# ---- damage, crashes, hangs ----------------------------------------------------------------------


@in_one_mode
def test_a_damaged_record_is_a_miss_and_forgotten(
    place: Place, join: Join, service: CachedService
) -> None:
    """Found by a reader's checksum; whoever comes next gets it from the service again."""
    files = dataset(place, 40)
    first = join(service)
    read_and_put(first, files)
    bad = files[17]
    block = bad.read_bytes()
    (segment,) = service.segments
    with segment.open("r+b") as file:
        place_of = file.read().index(block)
        file.seek(place_of + 100)
        file.write(bytes([block[100] ^ 1]))
        os.fsync(file.fileno())
    client = service.client()
    assert client.join(bytes.fromhex(service.groups[0].name))
    before = client.find([name(block)], [len(block)])[0].at
    assert before is not None
    service.allow_log.append("bad|damage|checksum|digest")
    second = join(service, allow_log=["is bad"])
    assert_read(second, files)
    assert origin(second) == (1, len(block))

    def is_forgotten() -> bool:
        return client.find([name(block)], [len(block)])[0].at != before

    eventually(is_forgotten)
    first.allow_log.append("is bad")
    first.drop_kernel_caches()
    assert_read(first, files)  # it knows but the old place
    third = join(service)
    assert_read(third, files)
    eventually(lambda: client.find([name(block)], [len(block)])[0].at is not None)
    at = client.find([name(block)], [len(block)])[0].at
    assert at is not None
    assert client.read(at) == block
    last = join(service)
    assert_read(last, files)
    assert origin(last) == (0, 0)
    client.channel.close()


@in_one_mode
def test_the_service_is_killed_while_files_are_read(
    place: Place, join: Join, service: CachedService, impatient: dict[str, str]
) -> None:
    """First while they come, then while they are read from its segments. What was stored is found
    again, by a mount that was there all the time.
    """
    files = dataset(place, 200)
    first = join(service, env=impatient, allow_log=[READS_ON, GONE])
    with reading(first, files):
        eventually(lambda: first.value("service", "put_files") > 20, every_s=0.005)
        service.kill()
    assert_read(first, files)
    service.start()
    eventually(lambda: first.value("service", "used"))
    with service.client() as client:
        assert client.join(bytes.fromhex(service.groups[0].name))
        names = [name(path.read_bytes()) for path in files]
        sizes = [path.stat().st_size for path in files]
        found = [one.at for one in client.find(names, sizes)]
        stored = sum(at is not None for at in found)
        assert stored >= 20
        for at, path in zip(found, files, strict=True):
            assert at is None or client.read(at) == path.read_bytes()
    second = join(service, env=impatient, allow_log=[READS_ON, GONE])
    half = files[: len(files) // 2]
    with reading(second, half):
        eventually(lambda: second.value("reads", "from_ssd") > 2 * len(half))
        service.kill()
        before = second.value("reads", "from_ssd")
        eventually(lambda: second.value("reads", "from_ssd") > before + len(half))
        eventually(lambda: not second.value("service", "used"))
        service.start()
        eventually(lambda: second.value("service", "used"))
    before = origin(second)[0]
    assert_read(second, files)
    assert origin(second)[0] - before <= len(files) - max(stored, len(half))

    def absent() -> int:
        with service.client() as client:
            assert client.join(bytes.fromhex(service.groups[0].name))
            return sum(one.at is None for one in client.find(names, sizes))

    eventually(lambda: absent() <= len(half))  # those that came while it was away
    third, missing = join(service), absent()
    assert_read(third, files)
    assert origin(third)[0] == missing


@in_one_mode
def test_who_holds_a_lock_on_a_segment_does_not_stop_the_service(
    place: Place, join: Join, service: CachedService
) -> None:
    files = dataset(place, 30)
    read_and_put(join(service, allow_log=[READS_ON, GONE]), files)
    block = files[0].read_bytes()
    with service.client(FIRST) as client:
        assert client.make(set_for(files)) == ""
        at = client.find([name(block)], [len(block)])[0].at
        assert at is not None
        descriptor = client.segment(at.segno)
        try:
            service.kill()
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            service.start()
            # What that segment has is out of use meanwhile; it is read, and put, again.
            mount, last = join(service), join(service)
            assert_read(mount, files)
            eventually(lambda: mount.value("service", "put_files") == origin(mount)[0])
            assert_read(last, files)
            assert origin(last) == (0, 0)
        finally:
            os.close(descriptor)


@in_one_mode
def test_the_server_of_a_mount_is_killed_while_it_reads(
    place: Place, join: Join, service: CachedService
) -> None:
    """The next one knows where its blocks lie; and its promises are gone with it."""
    files = dataset(place)
    read_and_put(join(service), files)
    mount = join(service)
    with reading(mount, files):
        eventually(lambda: mount.value("reads", "from_ssd") > len(files))
        mount.kill_server()
        eventually(lambda: mount.value("restarts") == 1)
        eventually(lambda: mount.value("service", "used"))
        before = mount.value("reads", "from_ssd")
        eventually(lambda: mount.value("reads", "from_ssd") > before + len(files))
    # What was read until it was used again came from the origin.
    known = origin(mount)
    mount.drop_kernel_caches()
    assert_read(mount, files)
    assert origin(mount) == known


@in_one_mode
def test_the_server_of_a_mount_is_killed_while_it_puts(
    place: Place, join: Join, service: CachedService
) -> None:
    files = dataset(place, 200)
    first = join(service)
    with reading(first, files):
        eventually(lambda: first.value("service", "put_files") > 5, every_s=0.005)
        first.kill_server()
        eventually(lambda: first.value("restarts") == 1)
        eventually(lambda: first.value("service", "used"))
    second, third = join(service), join(service)
    assert_read(second, files)
    files_put = origin(second)[0]
    eventually(lambda: second.value("service", "put_files") == files_put)
    assert_read(third, files)
    assert origin(third) == (0, 0)


@in_one_mode
def test_restart_of_a_mount(place: Place, join: Join, service: CachedService) -> None:
    """It knows where its blocks lie, once it has joined again."""
    files = dataset(place)
    read_and_put(join(service), files)
    mount = join(service)
    assert_read(mount, files[:60])
    with reading(mount, files[:60]):
        mount.restart()
        eventually(lambda: mount.value("service", "used"))
    known = origin(mount)  # until it was used again
    mount.drop_kernel_caches()
    assert_read(mount, files)
    assert origin(mount) == known
    assert known[0] <= 60
    mount.restart()  # while nobody reads
    eventually(lambda: mount.value("service", "used"))
    mount.drop_kernel_caches()
    assert_read(mount, files)
    assert origin(mount) == (0, 0)
    assert mount.value("service", "put_files") == 0


@in_one_mode
def test_the_service_hangs(
    place: Place, join: Join, service: CachedService, impatient: dict[str, str]
) -> None:
    """A mount reads on, from the origin or from segments that it has, and comes back to it."""
    files = dataset(place)
    half = len(files) // 2
    first = join(service)
    read_and_put(first, files)
    second = join(service, env=impatient, allow_log=[READS_ON, GONE])
    service.hang()
    try:
        first.drop_kernel_caches()
        assert_read(first, files)
        assert_read(second, files[:half])
        assert origin(first)[0] == len(files)
        assert origin(second)[0] == half
        eventually(lambda: second.value("ssd", "blocks") == half)
        assert "not asked for" in second.log()
    finally:
        service.go_on()
    eventually(lambda: second.value("service", "used"))
    assert_read(second, files)
    assert origin(second)[0] == half
    assert second.value("service", "found_files") >= len(files) - half


@in_one_mode
def test_no_service_is_there(
    place: Place, join: Join, service: CachedService, impatient: dict[str, str]
) -> None:
    """The mount says so in one line, and goes on; the service comes later, and is used."""
    files = dataset(place, 40)
    service.kill()
    os.unlink(service.socket)
    mount = join(service, env=impatient, is_used=False, allow_log=[GONE])
    why = f"--cache {service.socket}: No such file or directory: the mount's own cache is used"
    status = mount.value("service")
    assert (status["used"], status["why_not"]) == (False, why)
    assert status["socket"] == str(service.socket)
    assert_read(mount, files[:20])
    eventually(lambda: mount.value("ssd", "blocks") == 20)
    assert mount.value("service", "put_files") == 0
    assert sum(str(service.socket) in line for line in mount.log().splitlines()) == 1
    mount.umount()
    done = mount.run(*mount.mount_arguments())
    mount.keeper_pid = int(mount.value("keeper_pid"))
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done
    assert why in done.stderr
    service.start()
    eventually(lambda: mount.value("service", "used"))
    assert mount.value("service", "why_not") == ""
    assert_read(mount, files)
    eventually(lambda: mount.value("service", "put_files") == 20)
    assert origin(mount)[0] == 20


@in_one_mode
def test_no_manifest(place: Place, join: Join, service: CachedService) -> None:
    """Or one with other digests: a line says it."""
    files = make_files(place.source, 10, lambda _: 3000)
    mount = join(service, is_used=False)
    assert_read(mount, files)
    assert "the dataset has no manifest" in mount.value("service", "why_not")
    assert origin(mount)[0] == 10
    assert command("digest", place.source).returncode == 0
    mount = join(service, is_used=False, allow_log=["the manifest is not used"])
    assert_read(mount, files)
    assert mount.value("service", "used") is False
    assert service.groups == []


# ---- single flight -------------------------------------------------------------------------------


@pytest.fixture
def patient(place: Place, services: Services) -> CachedService:
    """A promise holds as long as the test may take."""
    constants = {"cached__promises__PROMISE_S": LONG_S}
    env = with_constants(place.base / "promises", "cached", **constants)
    return services("--ssd", "256M", env=env)


@pytest.fixture
def waits(place: Place) -> dict[str, str]:
    """For mounts that wait so long for what another one has promised."""
    constants = {"cached__shared__WAIT_S": LONG_S}
    return with_constants(place.base / "waits", "fusecache.server", **constants)


def settle(made_s: float) -> None:
    """What is younger no mount keeps of an origin in user space."""
    time.sleep(max(0.0, made_s + SETTLED_S - time.time()))


@in_one_mode
@pytest.mark.parametrize("size", [20_000, 6 * MIB], ids=["small", "large"])
def test_two_mounts_that_miss_the_same_read_it_once(
    place: Place,
    join: Join,
    patient: CachedService,
    waits: dict[str, str],
    faulty: FaultyOrigin,
    size: int,
) -> None:
    """The origin is slow, and both read all at one time, in the same order."""
    files = make_files(place.source, 40 if size < MIB else 4, lambda index: size + index)
    digested(place.source)
    settle(time.time())
    faulty.add(Fault("read", "class*", delay_s=0.05))
    mounts = [join(patient, source=faulty.mountpoint, env=waits) for _ in range(2)]
    faulty.reset_counts()

    def read(path: Path, mount: Mount) -> bool:
        seen = mount.path / path.relative_to(place.source)
        return seen.read_bytes() == path.read_bytes()

    with ThreadPoolExecutor(8) as pool:
        right = [pool.submit(read, path, mount) for path in files for mount in mounts]
        assert all(one.result() for one in right)
    if size < MIB:  # of a large file a piece may be read before its block
        assert sum(origin(mount)[0] for mount in mounts) == len(files)
    assert faulty.count("bytes", "class*") < 1.5 * total(files)
    assert all(mount.value("ssd", "blocks") == 0 for mount in mounts)


@in_one_mode
@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_who_has_promised_does_not_bring_it(
    place: Place, join: Join, request: pytest.FixtureRequest, faulty: FaultyOrigin, how: str
) -> None:
    """Killed: its promise ends with its connections, at once. It hangs: after 2 s nobody waits."""
    content = random_bytes("awaited", 20_000)
    place.write("awaited", content)
    digested(place.source)
    settle(time.time())
    service = request.getfixturevalue("patient" if how == "killed" else "service")
    env = request.getfixturevalue("waits") if how == "killed" else None
    holder = join(service, source=faulty.mountpoint, allow_log=["killed|hang|answer"])
    waits = join(service, source=faulty.mountpoint, env=env)
    faulty.add(Fault("read", "awaited", hang=True, times=1))
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        stack.callback(faulty.clear)
        held = pool.submit((holder.path / "awaited").read_bytes)
        eventually(lambda: faulty.hanging() == 1)
        waited = pool.submit((waits.path / "awaited").read_bytes)
        if how == "killed":
            holder.kill_server()
            faulty.release()  # a thread that is in the kernel keeps its connections open
        assert waited.result(PATIENCE_S / 4) == content
        faulty.release()
        assert held.result(PATIENCE_S / 4) == content
    # The holder's next server may have been the first to ask again.
    mounts = holder, waits
    eventually(lambda: sum(mount.value("service", "put_files") for mount in mounts) >= 1)
    assert 1 <= sum(origin(mount)[0] for mount in mounts) <= 2


# ---- room ----------------------------------------------------------------------------------------


@in_one_mode
def test_a_service_that_is_too_small(place: Place, join: Join, services: Services) -> None:
    """Bytes are right in each pass; it keeps its limit, and two mounts use it at one time."""
    for number in range(50):
        place.write(f"class{number % 5}/{number}.jpg", random_bytes(number, 2 * MIB + number))
    files = sorted(place.source.rglob("*.jpg"))
    digested(place.source)
    service = services("--ssd", "64M")
    mounts = [join(service, "--ssd", "64M") for _ in range(2)]
    for _ in range(2):
        for mount in mounts:
            mount.drop_kernel_caches()
            assert_read(mount, files)
            assert service.held_bytes() <= 65 * MIB
    assert mounts[0].value("service", "put_files") > 0


@in_one_mode
def test_an_owner_within_the_quota_loses_nothing(
    place: Place, join: Join, services: Services
) -> None:
    """To whoever fills the rest, under however many uids."""
    for number in range(10):
        place.write(f"{number}.jpg", random_bytes(number, 2 * MIB + number))
    files = sorted(place.source.rglob("*.jpg"))
    digested(place.source)
    service = services("--ssd", "192M", "--quota", "64M")
    mount = join(service)
    read_and_put(mount, files)
    mount.umount()
    held: dict[int, int] = {}
    for uid in (FIRST, SECOND, THIRD):
        blocks = [random_bytes((uid, number), 4 * MIB) for number in range(26)]
        names = [name(block) for block in blocks]
        with service.client(uid) as client:
            why = client.make(b"".join(sorted(names)))
            if why:
                assert "room" in why
                continue
            for block in blocks:
                client.put(block)
                assert service.held_bytes() <= 193 * MIB
            found = client.find(names, [len(block) for block in blocks])
            held[uid] = sum(one.at is not None for one in found)
    assert held[FIRST] * 4 >= 56  # it had what was free
    last = join(service)
    assert_read(last, files)
    assert origin(last) == (0, 0)

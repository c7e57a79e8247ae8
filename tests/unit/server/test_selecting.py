"""Which files a list names: looked up in a table that a test plays."""

from __future__ import annotations

import errno
import stat
from typing import Any

import pytest
import trio

from fusecache import _native
from fusecache.base.errors import OriginError
from fusecache.control.control import Message, RequestError
from fusecache.server.selecting import Asked, Failures, find, select, telling
from tests.support import PATIENCE_S
from tests.unit.server.test_maintenance import LongestStep

TREE: dict[bytes, tuple[int, int]] = {  # path -> inode, mode
    b"": (1, stat.S_IFDIR),
    b"a": (2, stat.S_IFDIR),
    b"a/f": (3, stat.S_IFREG),
    b"a/b": (4, stat.S_IFDIR),
    b"a/b/f": (5, stat.S_IFREG),
    b"bad": (6, stat.S_IFDIR),
    b"bad/f": (7, stat.S_IFREG),
    b"link": (8, stat.S_IFLNK),
}


class Tree:
    """As inode table and Operations; below `bad` the origin fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths = {ino: path for path, (ino, _) in TREE.items()}
        self.listed: list[int] = []
        for name, function in {
            "lookup": self.lookup,
            "attributes": lambda ino: (TREE[self.paths[ino]][1],),
            "path": lambda ino: self.paths[ino],
            "children": self.children,
        }.items():
            monkeypatch.setattr(_native, name, function)

    def lookup(self, parent: int, name: bytes) -> int:
        if parent not in self.listed:
            return -1
        above = self.paths[parent]
        return TREE.get(above + b"/" + name if above else name, (0, 0))[0]

    def children(self, ino: int, after: int, most: int) -> list[tuple[bytes, int, int]]:
        above = self.paths[ino]
        found = [p for p in TREE if p and p.rpartition(b"/")[0] == above]
        return [] if after else [(p.rpartition(b"/")[2], TREE[p][0], 1) for p in found]

    async def list_checked(self, directory: int) -> None:
        self.listed.append(directory)
        await trio.lowlevel.checkpoint()
        if self.paths[directory] == b"bad":
            raise OriginError(errno.EIO)


def run_find(tree: Any, paths: list[str]) -> tuple[list[int], list[str], list[str]]:
    failures = Failures()

    async def run() -> tuple[Any, list[str]]:
        return await find(paths, tree, lambda ino, path: None, failures)

    files, missing = trio.run(run)
    return list(files), missing, failures.lines


def test_a_list_names_files_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(monkeypatch)
    paths = ["a/b/f", "a/f", "a/b", "a/no", "no/f", "a/f/x", "link", "link/f", "a/b/f", "", "a//f"]
    files, missing, errors = run_find(tree, paths)
    assert files == [5, 3, 5]
    assert missing == ["a/b", "a/no", "no/f", "a/f/x", "link", "link/f", "", "a//f"]
    assert errors == []
    assert sorted(tree.listed) == [1, 2, 4], "each directory once, and no file"


def test_what_the_origin_does_not_list_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(monkeypatch)
    files, missing, errors = run_find(tree, ["bad/f", "a/f", "bad/g", "bad/x/y"])
    assert (files, missing) == ([3], [])
    assert errors == [f"{path}: Input/output error" for path in ("bad/f", "bad/g", "bad/x/y")]
    assert tree.listed.count(6) == 1


def test_a_list_of_many_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tree: Any = Tree(monkeypatch)
    step, paths = LongestStep(), ["a/b/f", "a/no"] * 50_000

    async def run() -> int:
        return len((await find(paths, tree, lambda ino, path: None, Failures()))[0])

    assert trio.run(run, instruments=[step]) == 50_000
    assert step.seconds < 0.05


def test_globs_leave_out_what_the_origin_does_not_list(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(monkeypatch)
    failures, chosen = Failures(), dict[int, bytes]()

    async def run() -> tuple[Any, list[str]]:
        asked = Asked(["**/f", "x"], b"")
        return await select(asked, tree.list_checked, chosen.__setitem__, failures)

    files, unmatched = trio.run(run)
    assert (set(files), unmatched) == ({3, 5}, ["x"])
    assert chosen == {3: b"a/f", 5: b"a/b/f"}
    assert (failures.count, failures.lines) == (1, ["bad: Input/output error"])


@pytest.mark.parametrize("request_", [{"globs": "a"}, {"globs": [1]}, {"prefix": 1}])
def test_a_malformed_request_is_refused(request_: Message) -> None:
    with pytest.raises(RequestError):
        Asked.of(request_)


def test_a_refusal_is_told_as_one() -> None:
    sent, told = list[Message](), trio.Event()

    async def send(message: Message) -> None:
        sent.append(message)
        told.set()

    async def refuse() -> Message:
        with trio.fail_after(PATIENCE_S):
            await told.wait()
        raise RequestError("no")

    with pytest.raises(RequestError, match="no"):
        trio.run(telling, refuse, lambda: {"done": 1}, send)
    assert {"progress": {"done": 1}} in sent

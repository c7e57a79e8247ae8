"""Index to file, against torchvision's own ImageFolder over random directory trees."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hintsd.orders import folders
from hintsd.orders.folders import (
    DIRECTORY,
    FILE,
    IMG_EXTENSIONS,
    DatasetError,
    Listing,
    OsTree,
    Samples,
    Target,
    explicit_files,
    sample_files,
)
from tools.torchvision_cpu import import_torchvision

import_torchvision()

from torchvision.datasets import DatasetFolder, ImageFolder  # type: ignore[import-untyped]  # noqa: E402
from torchvision.datasets import folder as torchvision_folder  # noqa: E402

WORDS = [
    b"a", b"b", b"B", b"a-b", b"a b", b"a.b", b"aa", b"0", b"10", b"9", b"n01440764_10026",
    "é".encode(), "e\u0301".encode(), "\u212a".encode(), "\u0130".encode(), "\uffee".encode(),
    "😀".encode(), b"\xff", b"\xc3", b"\xa9", b"\xed\xa0\x80", b"\x80x", b"line\nbreak", b".hidden",
]  # fmt: skip
SUFFIXES = [
    b".jpg", b".JPG", b".JpEg", b".jpeg", b".png", b".webp", b".txt", b"", b"jpg", b".jpg.gz",
    ".\u212apg".encode(), b".pn\xe9", b".jp\xc7",
]  # fmt: skip


def write(path: bytes, size_bytes: int = 0) -> None:
    with open(path, "wb") as file:
        file.write(bytes(size_bytes))


def grow(source: random.Random, directory: bytes, depth: int) -> None:
    """Files, links to files (some broken), pipes and directories, with names that sort badly."""
    for _ in range(source.choice([0, 1, 3, 8, 20])):
        name = b"".join(source.choices(WORDS, k=source.choice([1, 1, 2])))
        path = directory + b"/" + name + source.choice(SUFFIXES)
        if os.path.lexists(path):
            continue
        match source.randrange(12):
            case 0 | 1 if depth:
                os.mkdir(path)
                grow(source, path, depth - 1)
            case 2:
                os.symlink(source.choice([b"/nowhere", b"gone.jpg"]), path)
            case 3:
                os.symlink(b"../outside/" + source.choice([b"one.jpg", b"more"]), path)
            case 4:
                os.mkfifo(path)
            case _:
                write(path, source.randrange(3000))


def random_tree(source: random.Random, base: Path) -> bytes:
    root, outside = os.fsencode(base / "data"), os.fsencode(base / "outside")
    for directory in (root, outside, outside + b"/more", outside + b"/more/b"):
        os.mkdir(directory)
    write(outside + b"/one.jpg", 77)
    write(outside + b"/more/two.jpg", 78)
    write(outside + b"/more/b/three.PNG", 79)
    write(outside + b"/more/b-.png", 80)
    for _ in range(source.randint(1, 6)):
        path = root + b"/" + b"".join(source.choices(WORDS, k=source.choice([1, 2])))
        if not os.path.lexists(path):
            os.mkdir(path)
            grow(source, path, 3)
    for name in (b"top.jpg", b"README"):
        write(root + b"/" + name)
    for name, target in ((b"linked", b"../outside/more"), (b"dead", b"nowhere")):
        if source.random() < 0.5 and not os.path.lexists(root + b"/" + name):
            os.symlink(target, root + b"/" + name)
    return root


def as_torchvision(paths: list[str]) -> tuple[list[int], list[int]]:
    """Inode numbers and sizes of its samples, zero for what is no file."""
    found = []
    for path in paths:
        if os.path.isfile(path):
            status = os.stat(path)
            found.append((status.st_ino, status.st_size))
        else:
            found.append((0, 0))
    return [ino for ino, _ in found], [size for _, size in found]


def pairs(samples: Samples) -> tuple[list[int], list[int]]:
    assert samples.inos.dtype == np.uint32
    assert samples.sizes.dtype == np.uint64
    return samples.inos.tolist(), samples.sizes.tolist()


@pytest.mark.claim("P4")
@pytest.mark.parametrize("python_sorts", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_samples_are_those_of_image_folder(
    seed: int, python_sorts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if python_sorts:  # as for names that need too much memory side by side
        monkeypatch.setattr(folders, "SORT_BYTES_MOST", 0)
    root = random_tree(random.Random(seed), tmp_path)
    stock = ImageFolder(os.fsdecode(root), allow_empty=True)
    expected = as_torchvision([path for path, _ in stock.samples])
    assert pairs(sample_files(OsTree(root), allow_empty=True)) == expected
    below = sample_files(OsTree(tmp_path), root=b"data", allow_empty=True)
    assert pairs(below) == expected
    try:
        ImageFolder(os.fsdecode(root))
    except FileNotFoundError:
        with pytest.raises(DatasetError, match="no file of the classes") as caught:
            sample_files(OsTree(root))
        assert "\n" not in str(caught.value)
    else:
        assert pairs(sample_files(OsTree(root))) == expected


@pytest.mark.parametrize(
    "extensions",
    [
        ".jpg",
        ".JPG",
        "",
        (),
        ("g",),
        (".txt", ".jpg"),
        (".jpg.gz",),
        ("jpg", ".png"),
        (".kpg",),
        ("i\u0307.png",),
        ("é.jpg", "\u0301"),
        ("a-much-longer-extension-than-any-of-the-names-is",),
    ],
)
def test_other_extensions(extensions: str | tuple[str, ...], tmp_path: Path) -> None:
    for seed in range(6):
        base = tmp_path / str(seed)
        base.mkdir()
        root = random_tree(random.Random(seed), base)
        stock = DatasetFolder(os.fsdecode(root), os.stat, extensions, allow_empty=True)
        expected = as_torchvision([path for path, _ in stock.samples])
        assert pairs(sample_files(OsTree(root), extensions, allow_empty=True)) == expected


def test_the_extensions_of_image_folder_are_torchvisions() -> None:
    assert IMG_EXTENSIONS == torchvision_folder.IMG_EXTENSIONS


class OneClass:
    """A tree of one class, its files listed in this order; each file's size is its place."""

    def __init__(self, names: Sequence[bytes]) -> None:
        self._names = names

    def listing(self, path: bytes) -> Listing:
        names = self._names if path else [b"class"]
        count = len(names)
        return Listing(
            path,
            np.ones(count, np.uint32),
            np.arange(count, dtype=np.uint64),
            np.full(count, FILE if path else DIRECTORY, np.uint8),
            np.array([len(name) for name in names], np.uint16),
            b"".join(names),
        )

    def resolve(self, path: bytes) -> Target:
        raise AssertionError("there is no symlink")


@pytest.mark.parametrize(
    "names",
    [
        [b"\xf0\x9f", b"\x98\x80", "\uffee".encode()],  # valid when written together
        ["\uffee".encode(), b"\xff", "😀".encode(), b"z"],  # U+DCFF sorts between the others
        [b"a", b"a\x01", b"aa", b"a b"],
        [b"x-abcdefgh2", b"x-abcdefgh10", b"x-abcdefgh1", b"x-b"],  # alike in eight bytes
        [b"1", b"10", b"1.", b"2", b"11"],
    ],
)
def test_names_sort_as_strings_however_they_are_listed(names: list[bytes]) -> None:
    for listed in permutations(names):
        samples = sample_files(OneClass(listed), "")
        found = [os.fsdecode(listed[place]) for place in samples.sizes.tolist()]
        assert found == sorted(map(os.fsdecode, names))


def test_an_extension_does_not_begin_in_the_name_before() -> None:
    for listed in permutations([b"x.", b"jpg", b"y.jpg", b"g"]):
        samples = sample_files(OneClass(listed))
        assert [listed[place] for place in samples.sizes.tolist()] == [b"y.jpg"]


def test_a_link_in_a_loop_is_followed_as_far_as_torchvision_does(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.jpg").write_bytes(b"1")
    (tmp_path / "c" / "loop.jpg").symlink_to(".")
    # Linux counts links twice, to 40, if a mount elsewhere makes it begin a look-up anew: the
    # longest of several walks is the one that was left alone.
    stock = max((ImageFolder(tmp_path).samples for _ in range(10)), key=len)
    walks = list[Any]()
    for _ in range(10):
        with contextlib.suppress(DatasetError):  # a link that was counted twice looks like a loop
            walks.append(sample_files(OsTree(tmp_path)))
    samples = max(walks, key=len)
    assert len(samples) == len(stock) > 40
    assert pairs(samples) == as_torchvision([path for path, _ in stock])


def test_too_many_directories_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "DIRECTORIES_MOST", 1000)
    (tmp_path / "c").mkdir()
    for name in ("loop", "again"):
        (tmp_path / "c" / name).symlink_to(".")
    with pytest.raises(DatasetError, match="too many directories"):
        sample_files(OsTree(tmp_path))


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (["train/cat/1.jpg", "train/dog/1.jpg", "val/cat/1.jpg"], [b"train", b"val"]),
        (["test/cat/1.jpg", "Train/cat/1.jpg", "notes/1.txt"], [b"Train", b"test"]),
        (["train/cat/1.jpg", "test/1.jpg"], [b"train"]),
        (["photo/cat/1.jpg", "photo/dog/1.jpg", "sketch/cat/9.jpg", "sketch/dog/1.jpg"], None),
        (["images/cat/1.jpg", "images/dog/1.jpg"], [b"images"]),
        (["cat/1.jpg", "dog/1.jpg"], []),
        (["train/1.jpg", "boat/1.jpg"], []),  # the class of trains
        (["train/1.jpg", "train/old/1.jpg", "boat/1.jpg"], []),
        (["cat/black/1.jpg", "cat/white/1.jpg", "dog/brown/1.jpg"], []),
        (["run/video1/1.jpg", "run/video2/1.jpg", "jump/video1/1.jpg"], []),
        (["images/cat/1.jpg", "cat/1.jpg"], []),
    ],
)
def test_a_directory_above_the_dataset_is_suspected(
    tmp_path: Path, files: list[str], splits: list[bytes] | None
) -> None:
    for name in files:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    for tree, root in ((OsTree(tmp_path / "data"), b""), (OsTree(tmp_path), b"data")):
        found = sample_files(tree, root=root, allow_empty=True).splits
        assert list(found) == ([b"photo", b"sketch"] if splits is None else splits)


class Elsewhere:
    """A tree of which every symlink leads outside."""

    def __init__(self, root: Path) -> None:
        self._tree = OsTree(root)

    def listing(self, path: bytes) -> Listing:
        return self._tree.listing(path)

    def resolve(self, path: bytes) -> Target:
        return self._tree.resolve(path)._replace(ino=0)


def test_a_file_outside_keeps_its_index(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for name in ("1.jpg", "3.jpg"):
        (tmp_path / "c" / name).write_bytes(b"12")
    (tmp_path / "c" / "2.jpg").symlink_to("3.jpg")
    inos = [os.stat(tmp_path / "c" / name).st_ino for name in ("1.jpg", "3.jpg")]
    expected = ([inos[0], 0, inos[1]], [2, 2, 2])
    assert pairs(sample_files(Elsewhere(tmp_path))) == expected
    paths = [b"c/1.jpg", b"c/2.jpg", b"c/3.jpg"]
    assert pairs(explicit_files(Elsewhere(tmp_path), paths)) == expected


def no_class(base: Path) -> None:
    (base / "x.jpg").touch()


def broken_class(base: Path) -> None:
    (base / "c").symlink_to("nowhere")


def empty_class(base: Path) -> None:
    for name in ("a", "b"):
        (base / name).mkdir()
    (base / "b" / "x.jpg").touch()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (no_class, "there is no class directory"),
        (broken_class, "there is no class directory"),
        (empty_class, "no file of the classes a has a valid extension: .jpg"),
    ],
)
def test_what_is_no_dataset_is_refused_as_by_torchvision(
    make: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(FileNotFoundError):
        ImageFolder(tmp_path)
    with pytest.raises(DatasetError, match=reason):
        sample_files(OsTree(tmp_path))


@pytest.mark.parametrize("root", [b"file", b"nowhere", b"file/below"])
def test_what_is_no_directory_is_refused(root: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DatasetError, match=f"{root.decode()} is not a directory"):
        sample_files(OsTree(tmp_path), root=root)


def test_an_extension_with_a_slash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="slash"):
        sample_files(OsTree(tmp_path), ("a/b",))


class Counting(Elsewhere):
    """Counts what is asked of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.listed: list[bytes] = []
        self.resolved: list[bytes] = []

    def listing(self, path: bytes) -> Listing:
        self.listed.append(path)
        return super().listing(path)

    def resolve(self, path: bytes) -> Target:
        self.resolved.append(path)
        return super().resolve(path)


@pytest.mark.parametrize("seed", range(20))
def test_explicit_paths(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    root = random_tree(source, tmp_path)
    every = [
        os.path.relpath(os.path.join(directory, name), root)
        for directory, _, names in os.walk(root, followlinks=True)
        for name in names
        if os.path.isfile(os.path.join(directory, name))
    ]
    paths = source.choices(every, k=100)
    expected = as_torchvision([os.fsdecode(os.path.join(root, path)) for path in paths])
    assert pairs(explicit_files(OsTree(root), paths)) == expected
    assert pairs(explicit_files(OsTree(tmp_path), paths, root=b"data")) == expected
    counting = Counting(Path(os.fsdecode(root)))
    explicit_files(counting, paths)
    assert sorted(counting.listed) == sorted({os.path.dirname(path) for path in paths})
    links = {path for path in paths if os.path.islink(os.path.join(root, path))}
    assert sorted(counting.resolved) == sorted(links)


@pytest.mark.parametrize(
    "wrong",
    [b"a/gone", b"gone/x", b"a", b"b/dead", b"a/x/y", b"/a/x", b"a//x", b"./a/x", b"b/../a/x", b""],
)
def test_the_first_path_that_is_no_file_is_named(wrong: bytes, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    (tmp_path / "b" / "dead").symlink_to("nowhere")
    (tmp_path / "top").touch()
    paths = [b"a/x", b"top", b"b/x", wrong, b"b/x", b"a/missing", b"missing"]
    assert len(explicit_files(OsTree(tmp_path), paths[:3])) == 3
    with pytest.raises(DatasetError, match=r"^sample 3, ") as caught:
        explicit_files(OsTree(tmp_path), paths)
    assert (wrong.decode() or ".") in str(caught.value)


def test_no_paths_are_no_samples(tmp_path: Path) -> None:
    assert len(explicit_files(OsTree(tmp_path), [])) == 0


def test_os_tree_tells_what_stat_tells(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"123")
    listing = OsTree(tmp_path).listing(b"")
    assert (listing.names, listing.name_lengths.tolist()) == (b"x", [1])
    assert (listing.kinds.tolist(), listing.sizes.tolist()) == ([FILE], [3])
    assert listing.inos.tolist() == [os.stat(tmp_path / "x").st_ino]
    assert OsTree("/").resolve(b"proc/self/stat").ino == 0
    with pytest.raises(NotADirectoryError):
        OsTree(tmp_path).listing(b"x")

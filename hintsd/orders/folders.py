"""Folders: which file is sample number i of a dataset, as torchvision's ImageFolder counts.

The rules are those of torchvision/datasets/folder.py (`find_classes`, `make_dataset`) and of
`os.walk` below it: classes are the directories of the root (symlinks to directories, too), sorted;
of each class all directories below it (through symlinks), sorted by their whole path; of each
directory every name that is not a directory and ends, in lower case, in one of the extensions,
sorted. Python sorts names as strings: by code point, bytes that are no UTF-8 as U+DC80 … U+DCFF.

It reads bulk listings of a `Tree`, one directory at a time, and keeps 12 bytes of a sample.
What cannot be listed is an error: an order that is unknown does less harm than a wrong one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hintsd.orders.extensions import IMG_EXTENSIONS as IMG_EXTENSIONS

OTHER: Final = 0
FILE: Final = 1
DIRECTORY: Final = 2
SYMLINK: Final = 3
"""Kinds of directory entries, and of what a symlink leads to (never SYMLINK)."""

DIRECTORIES_MOST: Final = 1 << 20  # of one class: two symlinks in a loop make 2^40 of them
SORT_BYTES_MOST: Final = 128 << 20  # names of equal width; beyond that Python sorts, in less memory
INO_MOST: Final = 2**32 - 1
NAMED_MOST: Final = 10  # classes in an error message
SPLIT_NAMES: Final = ("train", "training", "val", "valid", "validation", "test", "testing", "dev")

_KINDS: Final = {stat.S_IFREG: FILE, stat.S_IFDIR: DIRECTORY, stat.S_IFLNK: SYMLINK}
_NOWHERE: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES}
)
_LOWER: Final = np.frombuffer(bytes(range(256)).lower(), np.uint8)

Rows = npt.NDArray[np.intp]


class DatasetError(ValueError):
    """The directory is no dataset of this kind; one line that says why."""


@dataclass(slots=True)
class Listing:
    """One directory's entries, in any order, without `.` and `..`. All arrays are of one length.

    `path`: relative to the tree's root (b"" is the root). `names`: the names one after another
    without separators, cut by `name_lengths`. `inos` and `sizes` (bytes) of a symlink are its own.
    """

    path: bytes
    inos: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.uint64]
    kinds: npt.NDArray[np.uint8]
    name_lengths: npt.NDArray[np.uint16]
    names: bytes


class Target(NamedTuple):
    """What a path leads to. `ino` is 0 when it lies outside the tree's file system."""

    kind: int
    ino: int
    size_bytes: int


class Tree(Protocol):
    """A directory tree. Paths are relative to its root, and may lead through symlinks."""

    def listing(self, path: bytes) -> Listing:
        """OSError: it is no directory, or cannot be listed."""

    def resolve(self, path: bytes) -> Target:
        """Follow all symlinks. A path that leads nowhere is OTHER."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Sample i is the file `inos[i]` of `sizes[i]` bytes; ino 0: not a regular file of the tree's
    file system (a broken symlink, one that leads elsewhere), so it cannot be prefetched."""

    inos: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.uint64]
    splits: tuple[bytes, ...] = ()
    """Of an ImageFolder: classes that look like an ImageFolder each, `train` first, if there is
    one; the root is probably the directory above the one that was meant."""

    def __len__(self) -> int:
        return len(self.inos)


def sample_files(
    tree: Tree,
    extensions: str | Sequence[str] = IMG_EXTENSIONS,
    *,
    root: bytes = b"",
    allow_empty: bool = False,
) -> Samples:
    """The samples of `DatasetFolder(root, extensions=extensions, allow_empty=allow_empty)`.

    Extensions are compared as they are (one in upper case matches nothing), as in torchvision.
    DatasetError: `root` is not a directory, holds no class, or has a class without a file.
    OSError: a directory could not be listed.
    """
    extensions = (extensions,) if isinstance(extensions, str) else tuple(extensions)
    if any("/" in extension for extension in extensions):
        raise DatasetError("a file name's extension cannot hold a slash")
    try:
        top = _followed(tree, tree.listing(root))
    except (FileNotFoundError, NotADirectoryError) as error:
        which = _shown(root) if root else "it"
        raise DatasetError(f"{which} is not a directory") from error
    classes = _names(top, np.flatnonzero(top.kinds == DIRECTORY))
    if not classes:
        where = f" in {_shown(root)}" if root else ""
        raise DatasetError(f"there is no class directory{where}; name the ImageFolder's root")
    found = _Growing()
    empty: list[bytes] = []
    below: dict[bytes, frozenset[str]] = {}
    for name in sorted(classes, key=_decoded):
        path = _join(root, name)
        parts = _class_files(tree, path, extensions)
        for _, part in parts:
            found.append(part)
        if parts:
            start = len(_decoded(path)) + 1
            below[name] = frozenset(found_in[start:].partition("/")[0] for found_in, _ in parts)
        else:
            empty.append(name)
    if empty and not allow_empty:
        few = ", ".join(_shown(name) for name in empty[:NAMED_MOST])
        more = f" and {len(empty) - NAMED_MOST} more" if len(empty) > NAMED_MOST else ""
        taken = ", ".join(extensions) or "none"
        raise DatasetError(f"no file of the classes {few}{more} has a valid extension: {taken}")
    return found.samples(_splits(below))


def _splits(below: dict[bytes, frozenset[str]]) -> tuple[bytes, ...]:
    """`Samples.splits`, from the directories right below each class that hold samples ("": it
    holds some itself). A class with directories only is no split by that alone: think of videos
    and their frames. Its name tells, or that all classes have the same directories.
    """
    nested = [name for name, directories in below.items() if "" not in directories]
    named = [name for name in nested if _decoded(name).lower() in SPLIT_NAMES]
    if not named and nested and len(nested) == len(below) and len(set(below.values())) == 1:
        named = nested
    return tuple(sorted(named, key=lambda name: not name.lower().startswith(b"train")))


class _Growing:
    """Samples one after another, in arrays that grow in place: parts to be joined in the end would
    take twice the memory."""

    def __init__(self) -> None:
        self._count = 0
        self._inos = np.zeros(0, np.uint32)
        self._sizes = np.zeros(0, np.uint64)

    def append(self, part: Samples) -> None:
        end = self._count + len(part)
        if end > len(self._inos):
            self._resize(end + end // 4)
        self._inos[self._count : end] = part.inos
        self._sizes[self._count : end] = part.sizes
        self._count = end

    def samples(self, splits: tuple[bytes, ...]) -> Samples:
        self._resize(self._count)
        return Samples(self._inos, self._sizes, splits)

    def _resize(self, count: int) -> None:
        for array in (self._inos, self._sizes):
            array.resize(count, refcheck=False)  # no view of them is alive


def explicit_files(tree: Tree, paths: Sequence[bytes], *, root: bytes = b"") -> Samples:
    """Sample i is `paths[i]`, relative to `root`, without empty, `.` and `..` components.

    Lists each directory once. DatasetError: a path leads to no file; the first such is named.
    OSError: a directory could not be listed.
    """
    groups: dict[bytes, list[int]] = {}
    for index, path in enumerate(paths):
        groups.setdefault(path.rpartition(b"/")[0], []).append(index)
    inos = np.zeros(len(paths), np.uint32)
    sizes = np.zeros(len(paths), np.uint64)
    wrong = len(paths)
    for directory, group in groups.items():
        indices = np.array(group, np.intp)
        listing = _list_plain(tree, root, directory)
        row_of = {name: row for row, name in enumerate(_names(listing))}
        leaves = (paths[index].rpartition(b"/")[2] for index in group)
        rows = np.fromiter((row_of.get(leaf, -1) for leaf in leaves), np.intp, len(group))
        listing = _followed(tree, listing, rows[rows >= 0])
        is_file = rows >= 0
        is_file[is_file] = listing.kinds[rows[is_file]] == FILE
        if not is_file.all():
            wrong = min(wrong, int(indices[~is_file][0]))
        inos[indices[is_file]] = listing.inos[rows[is_file]]
        sizes[indices[is_file]] = listing.sizes[rows[is_file]]
    if wrong < len(paths):
        raise DatasetError(f"sample {wrong}, {_shown(paths[wrong])}, is not a file")
    return Samples(inos, sizes)


def _list_plain(tree: Tree, root: bytes, directory: bytes) -> Listing:
    """The listing of a directory below `root`, an empty one when there is no such directory."""
    components = directory.split(b"/") if directory else []
    if not {b"", b".", b".."} & set(components):
        try:
            return tree.listing(_join(root, directory))
        except (FileNotFoundError, NotADirectoryError):
            pass
    return _listing(directory, [])


def _class_files(tree: Tree, top: bytes, extensions: tuple[str, ...]) -> list[tuple[str, Samples]]:
    """The samples of one class, cut by directory (none is empty): `os.walk`, sorted by path."""
    found: list[tuple[str, Samples]] = []
    pending = [top]
    listed = 0
    while pending:
        path = pending.pop()
        listed += 1
        try:
            if listed > DIRECTORIES_MOST:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            listing = _followed(tree, tree.listing(path))
        except OSError as error:
            if error.errno != errno.ELOOP:  # the kernel follows 40 links, and now and then fewer
                raise
            line = f"{_shown(top)} has too many directories: symlinks in a loop?"
            raise DatasetError(line) from None
        is_directory = listing.kinds == DIRECTORY
        for name in _names(listing, np.flatnonzero(is_directory)):
            pending.append(_join(path, name))
        rows = np.flatnonzero(_match(listing, extensions) & ~is_directory)
        if len(rows):
            rows = rows[_sorting(*_cut(listing, rows))]
            is_file = listing.kinds[rows] == FILE
            samples = Samples(listing.inos[rows] * is_file, listing.sizes[rows] * is_file)
            found.append((_decoded(path), samples))
    found.sort(key=lambda pair: pair[0])
    return found


def _followed(tree: Tree, listing: Listing, rows: Rows | None = None) -> Listing:
    """The listing with what its symlinks (those among `rows`) lead to in their place."""
    links = np.flatnonzero(listing.kinds == SYMLINK)
    if rows is not None:
        links = np.intersect1d(links, rows)
    if not len(links):
        return listing
    inos, sizes, kinds = listing.inos.copy(), listing.sizes.copy(), listing.kinds.copy()
    for row, name in zip(links, _names(listing, links), strict=True):
        target = tree.resolve(_join(listing.path, name))
        kinds[row], inos[row], sizes[row] = target
    return Listing(listing.path, inos, sizes, kinds, listing.name_lengths, listing.names)


def _match(listing: Listing, extensions: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Which names end in an extension once they are in lower case (torchvision's
    `has_file_allowed_extension`)."""
    lengths = listing.name_lengths
    matched = np.zeros(len(lengths), np.bool_)
    if not len(lengths):
        return matched
    wanted = [extension.encode("utf-8", "surrogatepass") for extension in extensions]
    names = np.frombuffer(listing.names, np.uint8)
    last = np.cumsum(lengths, dtype=np.int64) - 1
    tails: list[npt.NDArray[np.uint8]] = []  # the last byte of each name, the one before, …
    for back in range(max((len(suffix) for suffix in wanted), default=0)):
        column = _LOWER[names[np.maximum(last - back, 0)]]
        column[lengths <= back] = 0
        tails.append(column)
    for suffix in wanted:
        fits = np.ones(len(lengths), np.bool_)
        for column, byte in zip(tails, reversed(suffix), strict=False):
            fits &= column == byte
        matched |= fits
    # str.lower() changes more than A-Z, and may change lengths (Kelvin sign, dotted I): only where
    # the tail itself is ASCII is the comparison above the same.
    foreign = np.zeros(len(lengths), np.bool_)
    for column in tails:
        foreign |= column >= 0x80
    rows = np.flatnonzero(foreign)
    for row, name in zip(rows, _names(listing, rows), strict=True):
        matched[row] = _decoded(name).lower().endswith(extensions)
    return matched


def _cut(listing: Listing, rows: Rows) -> tuple[bytes, npt.NDArray[np.uint16]]:
    """The names of these rows (ascending) and their lengths."""
    if len(rows) == len(listing.name_lengths):
        return listing.names, listing.name_lengths
    chosen = np.zeros(len(listing.name_lengths), np.bool_)
    chosen[rows] = True
    names = np.frombuffer(listing.names, np.uint8)
    return names[np.repeat(chosen, listing.name_lengths)].tobytes(), listing.name_lengths[rows]


def _sorting(names: bytes, lengths: npt.NDArray[np.uint16]) -> Rows:
    """The permutation that sorts names as Python sorts the strings they decode to.

    For valid UTF-8 that is the order of the bytes, and numpy sorts bytes that are padded with
    NUL (no name holds one) as Python sorts them.
    """
    width = int(lengths.max())
    if _is_utf8(names, lengths) and width * len(lengths) <= SORT_BYTES_MOST:
        padded = np.zeros((len(lengths), width), np.uint8)
        padded[np.arange(width) < lengths[:, np.newaxis]] = np.frombuffer(names, np.uint8)
        return _bytes_sorting(padded)
    decoded = [_decoded(name) for name in _pieces(names, lengths)]
    return np.array(sorted(range(len(decoded)), key=decoded.__getitem__), np.intp)


def _bytes_sorting(padded: npt.NDArray[np.uint8]) -> Rows:
    """The permutation that sorts rows of bytes. Eight bytes behind what all rows begin with tell
    most names of a directory apart, and integers sort five times as fast."""
    count, width = padded.shape
    differs = (padded != padded[0]).any(axis=0)
    shared = int(differs.argmax())
    head = padded[:, shared : shared + 8]
    keys = np.zeros((count, 8), np.uint8)
    keys[:, : head.shape[1]] = head
    numbers = keys.view(">u8").ravel().astype(np.uint64)
    order = np.argsort(numbers)
    numbers = numbers[order]
    if (numbers[1:] == numbers[:-1]).any():
        return np.argsort(padded.view(f"S{width}").ravel())
    return order


def _is_utf8(names: bytes, lengths: npt.NDArray[np.uint16]) -> bool:
    """Whether each name is: all together are, and no name begins in the middle of a character."""
    if names.isascii():
        return True
    try:
        names.decode()
    except UnicodeDecodeError:
        return False
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    return bool((np.frombuffer(names, np.uint8)[starts] & 0xC0 != 0x80).all())


def _names(listing: Listing, rows: Rows | None = None) -> list[bytes]:
    """The names of these rows (ascending; None: of all)."""
    if rows is None:
        return _pieces(listing.names, listing.name_lengths)
    return _pieces(*_cut(listing, rows)) if len(rows) else []


def _pieces(names: bytes, lengths: npt.NDArray[np.uint16]) -> list[bytes]:
    ends = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    return [names[begin:end] for begin, end in pairwise(ends)]


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory and name else directory or name


def _decoded(name: bytes) -> str:
    """As Python gives names of files."""
    return name.decode("utf-8", "surrogateescape")


def _shown(path: bytes) -> str:
    """For messages: printable, one line."""
    text = path.decode("utf-8", "backslashreplace") or "."
    return text if text.isprintable() else repr(text)


class Status(Protocol):
    """Of a file, as os.stat gives it."""

    @property
    def st_mode(self) -> int: ...
    @property
    def st_dev(self) -> int: ...
    @property
    def st_ino(self) -> int: ...
    @property
    def st_size(self) -> int: ...


class OsTree:
    """The Tree of a real directory. Inode numbers of another file system, and such as do not fit
    into 32 bits, are 0."""

    def __init__(
        self,
        root: str | bytes | os.PathLike[str],
        look: Callable[[bytes], Status] = os.stat,
    ) -> None:
        """`look`: how paths, with their links, are looked up."""
        self._root, self._look = os.fsencode(root), look
        self._device = look(self._root).st_dev

    def listing(self, path: bytes) -> Listing:
        entries: list[tuple[bytes, Target]] = []
        with os.scandir(self._path(path)) as directory:
            for entry in directory:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # gone since
                entries.append((entry.name, self._target(status)))
        return _listing(path, entries)

    def resolve(self, path: bytes) -> Target:
        try:
            return self._target(self._look(self._path(path)))
        except OSError as error:
            if error.errno in _NOWHERE:
                return Target(OTHER, 0, 0)
            raise

    def _path(self, path: bytes) -> bytes:
        return os.path.join(self._root, path)

    def _target(self, status: Status) -> Target:
        inside = status.st_dev == self._device and status.st_ino <= INO_MOST
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), OTHER)
        return Target(kind, status.st_ino if inside else 0, status.st_size)


def _listing(path: bytes, entries: list[tuple[bytes, Target]]) -> Listing:
    count = len(entries)
    return Listing(
        path,
        np.fromiter((target.ino for _, target in entries), np.uint32, count),
        np.fromiter((target.size_bytes for _, target in entries), np.uint64, count),
        np.fromiter((target.kind for _, target in entries), np.uint8, count),
        np.fromiter((len(name) for name, _ in entries), np.uint16, count),
        b"".join(name for name, _ in entries),
    )

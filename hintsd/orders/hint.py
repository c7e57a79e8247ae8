"""A hint: what is told of a job before it begins, by a trainer or by `hintsd hint`.

Who tells it makes a `Hint`; its message is what goes over the hints channel and into the journal
(docs/WIRE.md); hintsd reads the same `Hint` from that.

INVARIANT: a `Hint` that comes out of `read_hint` is valid; no later step checks its fields
again, except against the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fusecache.base.wire import Fields, WireError
from hintsd.orders.spec import (
    ALL,
    EPOCH_MOST,
    LENGTH_MOST,
    OrderSpec,
    from_message,
    to_message,
)

BATCH_MOST: Final = LENGTH_MOST
CHECK_SAMPLES_MOST: Final = 64
EXTENSIONS_MOST: Final = 256
EXTENSION_LENGTH_MOST: Final = 64
NAME_LENGTH_MOST: Final = 256
PATH_BYTES_MOST: Final = 4096  # PATH_MAX
PATHS_BYTES_MOST: Final = 2 << 30
PATHS_PIECE_BYTES: Final = 1 << 20  # a millisecond
PID_MOST: Final = 1 << 22
WORKERS_MOST: Final = 1 << 16

_UNTIDY: Final = (
    *(b"\0\0", b"\0/", b"//", b"/\0"),
    *(b"\0.\0", b"\0./", b"/.\0", b"/./"),
    *(b"\0..\0", b"\0../", b"/..\0", b"/../"),
)


@dataclass(frozen=True)
class Check:
    """What is known of the dataset: how many samples, and the files of some of them."""

    count: int
    samples: Sequence[tuple[int, bytes]]
    """(index, path relative to the dataset's directory)."""


@dataclass(frozen=True)
class Files:
    """Which file an index means: by `paths`, or else by the rule of torchvision's ImageFolder."""

    extensions: Sequence[str] = ()
    allow_empty: bool = True
    paths: bytes | None = None
    """Relative and tidy, index by index, a NUL between them."""
    check: Check | None = None

    @property
    def count(self) -> int:
        """Of `paths`; 0: there are none."""
        return 0 if self.paths is None else self.paths.count(b"\0") + 1

    def split_paths(self) -> list[bytes]:
        return [path for piece in _pieces(self.paths or b"") for path in piece.split(b"\0")]


@dataclass(frozen=True, eq=False)
class Hint:
    """See the module. The fields are those of a `job` message (docs/WIRE.md)."""

    path: bytes
    """Of the dataset's directory; absolute."""
    files: Files = Files()
    spec: OrderSpec | None = None
    """Of all epochs; None: each is announced."""
    epochs: int | None = None
    start_epoch: int = 0
    start_batch: int = 0
    workers: int = 0
    prefetch_factor: int = 0
    name: str = ""
    """For status; "": the program's."""
    detached: bool = False
    pid: int | None = None
    """Of the trainer, whose end ends the job; None: the sender's, if that is it."""

    def to_message(self) -> dict[str, Any]:
        """A map for msgpack. The byte strings in `files` and `spec` may be long."""
        files, check = self.files, self.files.check
        rule: dict[str, Any] = {"rule": "paths", "paths": files.paths}
        if files.paths is None:
            rule = {"rule": "imagefolder", "extensions": [*files.extensions]}
            rule["allow_empty"] = files.allow_empty
        pairs = [[*pair] for pair in check.samples] if check else []
        return {
            "path": self.path,
            "files": rule,
            "check": check and {"count": check.count, "samples": pairs},
            **vars(self),
            **{"files": rule, "spec": self.spec and to_message(self.spec)},
        }

    @property
    def array_bytes(self) -> int:
        """Of its arrays."""
        spec_bytes = 0 if self.spec is None else self.spec.array_bytes
        return len(self.files.paths or b"") + spec_bytes

    @property
    def samples_told(self) -> int:
        """Of the dataset or an epoch of it, as far as the hint alone tells."""
        if (spec := self.spec) is None:
            return self.files.count
        chosen = 0 if spec.indices is None else len(spec.indices)
        return max(self.files.count, spec.num_samples or 0, chosen)

    def spec_over(self, sample_count: int) -> OrderSpec | None:
        """`spec`; one of all files chooses among `sample_count`."""
        spec = self.spec
        return spec if spec is None or spec.length != ALL else replace(spec, length=sample_count)

    def is_same_job(self, other: Hint) -> bool:
        """Whether the two differ at most in where they begin."""
        mine, others = (replace(hint, start_epoch=0, start_batch=0) for hint in (self, other))
        return mine.to_message() == others.to_message()


def read_hint(message: dict[str, Any]) -> Hint:
    """The inverse of `Hint.to_message`; what is not a hint's in `message` is passed over.

    WireError: a field is missing, of the wrong type or out of bounds. ValueError: it is well-formed
    and cannot be used. Both are one line that names the field.
    """
    fields = Fields(message, "job")
    path = fields.bytes("path", PATH_BYTES_MOST)
    if not path.startswith(b"/") or b"\0" in path:
        raise ValueError("path must be absolute")
    files = _files(fields.map("files"), _check(fields.optional_map("check")))
    epochs = fields.optional_int("epochs", 1, EPOCH_MOST)
    start_epoch = fields.int("start_epoch", 0, EPOCH_MOST)
    if epochs is not None and start_epoch >= epochs:
        raise ValueError("start_epoch must lie below epochs")
    spec = fields.optional_map("spec")
    return Hint(
        path=path,
        files=files,
        spec=None if spec is None else read_spec({"length": ALL, **spec.raw()}),
        epochs=epochs,
        start_epoch=start_epoch,
        start_batch=fields.int("start_batch", 0, BATCH_MOST),
        workers=fields.int("workers", 0, WORKERS_MOST),
        prefetch_factor=fields.int("prefetch_factor", 0, WORKERS_MOST),
        name=fields.optional_str("name", NAME_LENGTH_MOST) or "",
        detached=fields.bool("detached"),
        pid=fields.optional_int("pid", 1, PID_MOST),
    )


def read_spec(message: dict[str, Any]) -> OrderSpec:
    """Of a `job` or `order` message. ValueError: one line."""
    try:
        return from_message(message)
    except ValueError as error:
        raise ValueError(f"spec: {error}") from None


def _files(fields: Fields, check: Check | None) -> Files:
    rule = fields.str("rule", 32)
    if rule == "imagefolder":
        extensions = fields.strings("extensions", EXTENSIONS_MOST, EXTENSION_LENGTH_MOST)
        return Files(extensions, fields.bool("allow_empty"), check=check)
    if rule != "paths":
        raise ValueError("files: rule must be imagefolder or paths")
    paths = fields.bytes("paths", PATHS_BYTES_MOST)
    for piece in _pieces(paths):
        framed = b"\0%b\0" % piece
        if any(pattern in framed for pattern in _UNTIDY):
            raise ValueError("paths must be relative, without empty, `.` or `..` components")
    return Files(paths=paths, check=check)


def _pieces(paths: bytes) -> Iterator[bytes]:
    """Of NUL-separated paths: what looks through one lets no other thread run."""
    begin = 0
    while begin <= len(paths):
        end = paths.find(b"\0", begin + PATHS_PIECE_BYTES)
        end = len(paths) if end < 0 else end
        yield paths[begin:end]
        begin = end + 1


def _check(fields: Fields | None) -> Check | None:
    if fields is None:
        return None
    count = fields.int("count", 0, LENGTH_MOST)
    samples = []
    for pair in fields.list("samples", CHECK_SAMPLES_MOST):
        if type(pair) is not list or [type(value) for value in pair] != [int, bytes]:
            raise WireError("job: check: field samples has an element that is not [index, path]")
        index, path = pair
        if not 0 <= index < count or len(path) > PATH_BYTES_MOST:
            raise WireError("job: check: field samples has an element out of bounds")
        samples.append((index, path))
    return Check(count, samples)

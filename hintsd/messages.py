"""Messages of the hints channel, checked: from the fields of a frame to a `JobRequest`.

A field that is missing, of the wrong type or out of bounds is a WireError: such a client does not
speak our language, its connection ends. What is well-formed and cannot be used is a ValueError,
which is told to the client. Both are one line that names the field.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgpack  # type: ignore[import-untyped]

from fusecache.wire import Fields, WireError
from hintsd.arrays import ARRAY_BYTES_MOST, Arrays
from hintsd.orders import EPOCH_MOST, LENGTH_MOST, OrderSpec, from_message

BATCH_MOST: Final = LENGTH_MOST
CHECK_SAMPLES_MOST: Final = 64
EXTENSIONS_MOST: Final = 256
EXTENSION_LENGTH_MOST: Final = 64
NAME_LENGTH_MOST: Final = 256
PATH_BYTES_MOST: Final = 4096  # PATH_MAX
PATHS_PIECE_BYTES: Final = 1 << 20  # a millisecond
PID_MOST: Final = 1 << 22
WORKERS_MOST: Final = 1 << 16

_JOB_FIELDS: Final = (
    "path",
    "files",
    "check",
    "spec",
    "epochs",
    "start_epoch",
    "start_batch",
    "workers",
    "prefetch_factor",
    "name",
    "detached",
    "pid",
)
_START_FIELDS: Final = ("start_epoch", "start_batch")
_UNTIDY: Final = (
    *(b"\0\0", b"\0/", b"//", b"/\0"),
    *(b"\0.\0", b"\0./", b"/.\0", b"/./"),
    *(b"\0..\0", b"\0../", b"/..\0", b"/../"),
)


@dataclass(frozen=True, slots=True)
class Check:
    """What the client knows of its dataset: how many samples, and the files of some of them."""

    count: int
    samples: tuple[tuple[int, bytes], ...]
    """(index, path relative to the dataset's directory)."""


@dataclass(frozen=True, slots=True, eq=False)
class JobRequest:
    """A `job` message (docs/WIRE.md) whose fields have been checked."""

    path: bytes
    """Of the dataset's directory; absolute."""
    rule: Literal["imagefolder", "paths"]
    extensions: tuple[str, ...]
    allow_empty: bool
    paths: list[bytes] | None
    """Of rule `paths`: relative and tidy, index by index."""
    check: Check | None
    spec: OrderSpec | None
    """Of all epochs. Its length counts only if `has_length`: see `spec_over`."""
    has_length: bool
    epochs: int | None
    start_epoch: int
    start_batch: int
    workers: int
    prefetch_factor: int
    name: str
    """For status; "": the program's."""
    detached: bool
    uid: int
    """Of the client."""
    pid: int | None
    """Of the trainer, whose end ends the job; None: no process does."""

    def spec_over(self, sample_count: int) -> OrderSpec | None:
        """`spec`; one that came without a length chooses among `sample_count` samples."""
        if self.spec is None or self.has_length:
            return self.spec
        return replace(self.spec, length=sample_count)


def _with_arrays(fields: Fields, arrays: Arrays, where: str) -> dict[str, Any]:
    """The map with its {"array": name} values replaced by the arrays."""
    found = dict(fields.raw())
    for name, value in found.items():
        if type(value) is dict:
            found[name] = arrays.take(f"{where}: field {name}", fields.map(name))
    return found


def job_message(fields: Fields, arrays: Arrays) -> dict[str, Any]:
    """A `job` message that stands alone, its arrays in their places, for `job_request` and the
    journal. WireError.
    """
    message = {name: fields.raw().get(name) for name in _JOB_FIELDS}
    message["files"] = _with_arrays(fields.map("files"), arrays, "job: files")
    spec = fields.optional_map("spec")
    message["spec"] = None if spec is None else _with_arrays(spec, arrays, "job: spec")
    return message


def job_request(message: Mapping[str, Any], uid: int, pid: int | None) -> JobRequest:
    """Check every field of a `job_message`. WireError, ValueError: see the module.

    `uid`: the client's, `pid`: the trainer's.
    """
    fields = Fields(dict(message), "job")
    path = fields.bytes("path", PATH_BYTES_MOST)
    if not path.startswith(b"/") or b"\0" in path:
        raise ValueError("path must be absolute")
    files = fields.map("files")
    rule = files.str("rule", 32)
    extensions: tuple[str, ...] = ()
    paths, allow_empty = None, False
    if rule == "imagefolder":
        extensions = tuple(files.strings("extensions", EXTENSIONS_MOST, EXTENSION_LENGTH_MOST))
        allow_empty = files.bool("allow_empty")
    elif rule == "paths":
        paths = _split_paths(files.bytes("paths", ARRAY_BYTES_MOST))
    else:
        raise ValueError("files: rule must be imagefolder or paths")
    epochs = fields.optional_int("epochs", 1, EPOCH_MOST)
    start_epoch = fields.int("start_epoch", 0, EPOCH_MOST)
    if epochs is not None and start_epoch >= epochs:
        raise ValueError("start_epoch must lie below epochs")
    spec = fields.optional_map("spec")
    return JobRequest(
        path=path,
        rule="paths" if rule == "paths" else "imagefolder",
        extensions=extensions,
        allow_empty=allow_empty,
        paths=paths,
        check=_check(fields.optional_map("check")),
        spec=None if spec is None else _spec({"length": LENGTH_MOST, **spec.raw()}),
        has_length=spec is not None and "length" in spec,
        epochs=epochs,
        start_epoch=start_epoch,
        start_batch=fields.int("start_batch", 0, BATCH_MOST),
        workers=fields.int("workers", 0, WORKERS_MOST),
        prefetch_factor=fields.int("prefetch_factor", 0, WORKERS_MOST),
        name=fields.optional_str("name", NAME_LENGTH_MOST) or "",
        detached=fields.bool("detached"),
        uid=uid,
        pid=pid,
    )


def is_of_others(fields: Fields) -> bool:
    """Field `of_others` of a `job` message. WireError."""
    return fields.raw().get("of_others") is not None and fields.bool("of_others")


def trainer_pid(fields: Fields) -> int | None:
    """Field `pid` of a `job` message. WireError."""
    return fields.optional_int("pid", 1, PID_MOST)


def resumed_job(fields: Fields) -> str | None:
    """Field `resume` of a `job` message. WireError."""
    return fields.optional_str("resume", NAME_LENGTH_MOST)


def wants_state(fields: Fields) -> bool:
    """Field `tell_state` of a `job` message. WireError."""
    return "tell_state" in fields and fields.bool("tell_state")


def identity(message: Mapping[str, Any]) -> bytes:
    """A digest that is the same for job messages that differ at most in where they begin."""
    digest = hashlib.blake2b(digest_size=16)

    def add(value: object) -> None:
        if isinstance(value, dict):
            add(len(value))
            for name, part in value.items():
                add(name)
                add(part)
        elif isinstance(value, bytes):
            add(len(value))
            digest.update(value)  # of an array no copy is made
        else:
            digest.update(msgpack.packb(value))

    for name in _JOB_FIELDS:
        if name not in _START_FIELDS:
            add(message[name])
    return digest.digest()


def order_spec(fields: Fields, arrays: Arrays) -> tuple[int, OrderSpec]:
    """The epoch and the spec of an `order` message. WireError, ValueError: see the module."""
    epoch = fields.int("epoch", 0, EPOCH_MOST)
    return epoch, _spec(_with_arrays(fields.map("spec"), arrays, "order: spec"))


def step(fields: Fields) -> tuple[int, int]:
    """The epoch and the batch of a `step` message. WireError."""
    return fields.int("epoch", 0, EPOCH_MOST), fields.int("batch", 0, BATCH_MOST)


def _spec(message: dict[str, Any]) -> OrderSpec:
    try:
        return from_message(message)
    except ValueError as error:
        raise ValueError(f"spec: {error}") from None


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
    return Check(count, tuple(samples))


def _split_paths(blob: bytes) -> list[bytes]:
    """NUL-separated paths; one of them that is not relative and tidy is a ValueError."""
    paths: list[bytes] = []
    begin = 0
    while begin <= len(blob):  # in pieces: what looks through one lets no other thread run
        end = blob.find(b"\0", begin + PATHS_PIECE_BYTES)
        end = len(blob) if end < 0 else end
        framed = b"\0%b\0" % blob[begin:end]
        if any(pattern in framed for pattern in _UNTIDY):
            raise ValueError("paths must be relative, without empty, `.` or `..` components")
        paths += framed[1:-1].split(b"\0")
        begin = end + 1
    return paths

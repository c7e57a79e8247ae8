"""Messages of the hints channel: what is taken, what is refused, and by which name."""

from __future__ import annotations

import os
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusecache.base.wire import Fields, WireError
from hintsd.daemon import messages
from hintsd.daemon.messages import ARRAY_BYTES_MOST, ARRAYS_MOST, Arrays
from hintsd.orders.hint import Check, Files, Hint, read_hint

FOLDER: dict[str, Any] = {"rule": "imagefolder", "extensions": [".jpg"], "allow_empty": True}
JOB: dict[str, Any] = {
    "path": b"/data/set",
    "files": FOLDER,
    "check": None,
    "spec": None,
    "epochs": None,
    "start_epoch": 0,
    "start_batch": 0,
    "workers": 4,
    "prefetch_factor": 2,
    "name": None,
    "detached": False,
    "pid": None,
    "resume": None,
}


def request(**changes: Any) -> Hint:
    return messages.hint(Fields({**JOB, **changes}, "job"), Arrays())


def array(name: str, data: bytes, *, total: int | None = None, offset: int = 0) -> Fields:
    total = len(data) if total is None else total
    return Fields({"name": name, "total": total, "offset": offset, "data": data}, "array")


def test_job_as_a_trainer_sends_it() -> None:
    changes = {
        "check": {"count": 3, "samples": [[2, b"a/b.jpg"]]},
        "spec": {"sampler": "distributed", "seed": 3, "world_size": 2, "rank": 1, "batch_size": 8},
        "epochs": 90,
        "start_epoch": 7,
        "start_batch": 2,
        "name": "train.py",
        "pid": 77,
    }
    told = request(**changes)
    assert told.path == b"/data/set"
    assert told.files == Files([".jpg"], allow_empty=True, check=Check(3, [(2, b"a/b.jpg")]))
    assert (told.epochs, told.start_epoch, told.start_batch) == (90, 7, 2)
    assert (told.workers, told.prefetch_factor, told.name) == (4, 2, "train.py")
    assert (told.detached, told.pid) == (False, 77)
    again = {**told.to_message(), "resume": None}
    assert list(again.items()) == list({**JOB, **changes}.items())


def test_spec_without_a_length_gets_that_of_the_dataset() -> None:
    told = request(spec={"sampler": "random", "seed": 3})
    spec = told.spec_over(1000)
    assert spec is not None
    assert (spec.length, spec.seed) == (1000, 3)
    told = request(spec={"sampler": "random", "seed": 3, "length": 10})
    spec = told.spec_over(1000)
    assert spec is not None
    assert spec.length == 10
    assert request().spec_over(1000) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": None}, "path"),
        ({"path": "/data"}, "path"),
        ({"path": b"/" * 5000}, "path"),
        ({"files": None}, "files"),
        ({"files": {"rule": 3}}, "rule"),
        ({"files": {"rule": "imagefolder", "extensions": ".jpg"}}, "extensions"),
        ({"files": {**FOLDER, "extensions": [1]}}, "extensions"),
        ({"files": {**FOLDER, "allow_empty": 1}}, "allow_empty"),
        ({"files": {"rule": "paths"}}, "paths"),
        ({"files": {"rule": "paths", "paths": {"array": "none"}}}, "'none' was not sent"),
        ({"files": {"rule": "paths", "paths": {"array": 3}}}, "array"),
        ({"check": {"count": -1, "samples": []}}, "count"),
        ({"check": {"count": 9, "samples": [[0, b"a"]] * 65}}, "samples"),
        ({"check": {"count": 9, "samples": [[9, b"a"]]}}, "samples"),
        ({"check": {"count": 9, "samples": [[True, b"a"]]}}, "samples"),
        ({"check": {"count": 9, "samples": [b"ab"]}}, "samples"),
        ({"spec": []}, "spec"),
        ({"epochs": 0}, "epochs"),
        ({"start_epoch": -1}, "start_epoch"),
        ({"start_batch": 1 << 40}, "start_batch"),
        ({"workers": None}, "workers"),
        ({"prefetch_factor": 1.5}, "prefetch_factor"),
        ({"name": "x" * 300}, "name"),
        ({"pid": 0}, "pid"),
        ({"detached": None}, "detached"),
    ],
)
def test_malformed_jobs_are_wire_errors_that_name_the_field(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(WireError, match=said):
        request(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": b"data"}, "path must be absolute"),
        ({"path": b"/da\0ta"}, "path must be absolute"),
        ({"files": {"rule": "guess"}}, "rule"),
        ({"epochs": 3, "start_epoch": 3}, "start_epoch must lie below epochs"),
        ({"spec": {"sampler": "guess"}}, "spec: sampler"),
        ({"spec": {"sampler": "random", "seed": 0, "length": 0}}, "spec: length"),
        ({"spec": {"sampler": "indices"}}, "spec: indices"),
    ],
)
def test_jobs_that_cannot_be_used_are_value_errors(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        request(**changes)


@pytest.mark.parametrize(
    "paths", [b"", b"/a", b"a\0", b"a\0\0b", b"a/", b"a//b", b".", b"a/./b", b"a\0..", b"../a"]
)
def test_paths_that_are_not_relative_and_tidy(paths: bytes) -> None:
    with pytest.raises(ValueError, match="paths must be relative"):
        request(files={"rule": "paths", "paths": paths})


def test_paths_with_odd_names() -> None:
    paths = [b"a", b"a/..b", b"...", b".a/b.", b"\xff\n/ "]
    assert request(files={"rule": "paths", "paths": b"\0".join(paths)}).files.split_paths() == paths


def test_arrays_take_the_place_of_their_names() -> None:
    arrays = Arrays()
    for offset in range(0, 16, 4):
        arrays.add(array("i", bytes(range(offset, offset + 4)), total=16, offset=offset))
    message = {"epoch": 4, "spec": {"sampler": "indices", "length": 1 << 32, "indices": b""}}
    message["spec"]["indices"] = {"array": "i"}  # type: ignore[index]
    with pytest.raises(ValueError, match="spec: length"):
        messages.order_spec(Fields(message, "order"), arrays)
    arrays.add(array("i", b"\2\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0"))  # sent again: from its beginning
    message["spec"]["length"] = 3  # type: ignore[index]
    epoch, spec = messages.order_spec(Fields(message, "order"), arrays)
    assert spec.indices is not None
    assert (epoch, spec.indices.tolist()) == (4, [2, 1])
    arrays.clear()
    with pytest.raises(WireError, match="'i' was not sent"):
        messages.order_spec(Fields(message, "order"), arrays)


def test_arrays_are_bounded() -> None:
    arrays = Arrays()
    for n in range(ARRAYS_MOST):
        arrays.add(array(f"{n}", b"", total=1 << 24))
    with pytest.raises(WireError, match="more than 64 arrays"):
        arrays.add(array("another", b""))
    arrays.add(array("0", b"", total=(1 << 24) + (1 << 30)))
    with pytest.raises(WireError, match="bytes in all"):
        arrays.add(array("0", b"", total=(1 << 24) + (1 << 30) + 1))
    with pytest.raises(WireError, match="'1' was not sent, or not to its end"):
        arrays.take("job", Fields({"array": "1"}))


def test_the_largest_array_can_be_read() -> None:
    """2 GiB, more than a system call reads. Here of zeros, which take no disk."""
    arrays = Arrays()
    arrays.add(array("a", b"begin", total=ARRAY_BYTES_MOST))
    assert arrays._file is not None
    with open("/dev/zero", "rb") as zeros:
        os.dup2(zeros.fileno(), arrays._file.fileno())
    arrays._arrays["a"].received = ARRAY_BYTES_MOST
    assert len(arrays.take("job", Fields({"array": "a"}))) == ARRAY_BYTES_MOST
    arrays.clear()


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (array("a", b"c", total=5, offset=1), "offset"),
        (array("a", b"c", total=5, offset=3), "offset"),
        (array("b", b"c", total=5, offset=2), "offset"),
        (array("a", b"c", total=6, offset=2), "total"),
        (array("a", b"cdef", total=5, offset=2), "data"),
        (array("a", bytes((1 << 20) + 1)), "data"),
        (array("a" * 65, b"c"), "name"),
        (array("a", b"", total=(2 << 30) + 1), "total"),
    ],
)
def test_pieces_that_do_not_fit(piece: Fields, said: str) -> None:
    arrays = Arrays()
    arrays.add(array("a", b"ab", total=5))
    with pytest.raises(WireError, match=f"field {said}"):
        arrays.add(piece)


def test_job_is_the_same_wherever_it_begins() -> None:
    assert request(start_epoch=3, start_batch=9, resume="a-1").is_same_job(request())
    others: list[dict[str, Any]] = [
        {"path": b"/b"},
        {"epochs": 3},
        {"spec": {"sampler": "sequential"}},
        {"files": {"rule": "paths", "paths": b"a"}},
        {"check": {"count": 3, "samples": []}},
        {"pid": 3},
    ]
    for other in others:
        assert not request(**other).is_same_job(request())
        assert request(**other).is_same_job(request(**other))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["rule", "array", "count", "sampler", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


# A busy machine takes seconds for the first text, whose alphabet is made then.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(JOB)), values), st.booleans())
def test_any_job_is_taken_or_refused_in_one_line(changes: dict[str, Any], alone: bool) -> None:
    fields = Fields(changes if alone else {**JOB, **changes}, "job")
    try:
        messages.resumed_job(fields)
        told = messages.hint(fields, Arrays())
    except (WireError, ValueError) as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        message = told.to_message()
        again = read_hint(msgpack.unpackb(msgpack.packb(message)))  # as it is in the journal
        assert again.to_message() == message
        assert again.is_same_job(told)

"""Scenarios as TOML: the built-in ones (`scenarios/*.toml`) and a user's file, same format.

Every key is checked; the first that cannot be is named in one line, with the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Final

from hintsd.simulator.system import (
    Dataset,
    Scenario,
    ScenarioError,
    StorageClass,
    System,
    Throughput,
)

BUILT_IN: Final = (
    "fits-ram",
    "fits-worker",
    "fits-cluster",
    "imagenet-1k",
    "openimages",
    "places",
    "imagenet-22k",
    "cosmoflow",
)

Reader = Callable[[str, Any], Any]


def load(name: str) -> Scenario:
    """A built-in scenario by its name, or a file by its path.

    Raises ScenarioError, which names the file or key.
    """
    if name in BUILT_IN:
        return parse(name, text_of(name), f"{name}.toml")
    if not name.endswith(".toml"):
        known = ", ".join(BUILT_IN)
        raise ScenarioError(name, f"no such scenario; there are {known}, or name a .toml file")
    try:
        text = Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ScenarioError(name, "is not UTF-8 text") from None
    except OSError as error:
        raise ScenarioError(name, error.strerror or str(error)) from None
    stem = Path(name).stem
    # Not called as a built-in one: nothing was published of it.
    return parse(Path(name).name if stem in BUILT_IN else stem, text, name)


def text_of(name: str) -> str:
    """The TOML of a built-in scenario. Raises ScenarioError."""
    if name not in BUILT_IN:
        raise ScenarioError(name, f"no built-in scenario; there are {', '.join(BUILT_IN)}")
    path = resources.files(__package__) / "scenarios" / f"{name}.toml"
    return path.read_text(encoding="utf-8")


def parse(name: str, text: str, source: str) -> Scenario:
    """Raises ScenarioError, which names `source` and the key or line."""
    try:
        keys = tomllib.loads(text)
    except ValueError as error:  # tomllib.TOMLDecodeError, or a number of too many digits
        raise ScenarioError(source, f"not TOML: {error}") from None
    except RecursionError:
        raise ScenarioError(source, "not TOML: nested too deep") from None
    try:
        scenario = _scenario(name, keys)
        scenario.check()
    except ScenarioError as error:
        raise ScenarioError(f"{source}: {error.key}", error.fault) from None
    return scenario


def _scenario(name: str, keys: dict[str, Any]) -> Scenario:
    fields = _table("", keys, {"title": _text, "system": _system, "dataset": _dataset}, {"title"})
    return Scenario(
        name, fields.get("title", name), system=fields["system"], dataset=fields["dataset"]
    )


def _system(key: str, value: Any) -> System:
    readers: dict[str, Reader] = {
        "workers": _whole,
        "compute_mb_per_s": _number,
        "preprocess_mb_per_s": _number,
        "network_mb_per_s": _number,
        "pfs_network_mb_per_s": _number,
        "pfs_mb_per_s": _throughput,
        "staging": _staging,
        "storage": _classes,
    }
    fields = _table(key, value, readers, {"storage", "pfs_network_mb_per_s"})
    fields["pfs"] = fields.pop("pfs_mb_per_s")
    return System(**fields)


def _dataset(key: str, value: Any) -> Dataset:
    readers: dict[str, Reader] = {
        "samples": _whole,
        "mean_mb": _number,
        "deviation_mb": _number,
        "batch_size": _whole,
        "epochs": _whole,
        "drop_last": _truth,
    }
    return Dataset(**_table(key, value, readers, {"drop_last"}))


_CLASS: Final[dict[str, Reader]] = {
    "name": lambda key, value: _text(key, value),
    "capacity_mb": lambda key, value: _number(key, value),
    "threads": lambda key, value: _whole(key, value),
    "read_mb_per_s": lambda key, value: _throughput(key, value),
    "write_mb_per_s": lambda key, value: _throughput(key, value),
}


def _class(key: str, value: Any, optional: set[str]) -> StorageClass:
    fields = _table(key, value, _CLASS, optional | {"write_mb_per_s"})
    return StorageClass(
        fields.get("name", "staging buffer"),
        fields["capacity_mb"],
        fields["threads"],
        fields["read_mb_per_s"],
        fields.get("write_mb_per_s"),
    )


def _staging(key: str, value: Any) -> StorageClass:
    return _class(key, value, {"name"})


def _classes(key: str, value: Any) -> tuple[StorageClass, ...]:
    if not isinstance(value, list):
        raise ScenarioError(key, f"must be a list of tables: [[{key}]]")
    return tuple(_class(f"{key}[{number}]", item, set()) for number, item in enumerate(value))


def _table(key: str, value: Any, readers: dict[str, Reader], optional: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ScenarioError(key, f"must be a table: [{key}]")
    prefix = f"{key}." if key else ""
    for name in value:
        if name not in readers:
            shown = name if name.isprintable() else repr(name)
            raise ScenarioError(prefix + shown, f"unknown key; there are {', '.join(readers)}")
    for name in readers:
        if name not in value and name not in optional:
            raise ScenarioError(prefix + name, "is missing")
    return {name: readers[name](prefix + name, item) for name, item in value.items()}


def _throughput(key: str, value: Any) -> Throughput:
    """A number: whatever the clients; or a table of points."""
    if not isinstance(value, dict):
        return Throughput((1.0,), (_number(key, value),))
    points = []
    for clients, speed in value.items():
        if not clients.isdecimal():
            raise ScenarioError(
                f"{key}.{clients if clients.isprintable() else repr(clients)}",
                "must be a whole number of clients or threads",
            )
        points.append((float(clients), _number(f"{key}.{clients}", speed)))
    points.sort()
    return Throughput(tuple(a for a, _ in points), tuple(b for _, b in points))


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ScenarioError(key, f"must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ScenarioError(key, "is too large a number") from None


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ScenarioError(key, f"must be a whole number, not {value!r}")
    _number(key, value)
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ScenarioError(key, f"must be text, not {value!r}")
    return value


def _truth(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ScenarioError(key, f"must be true or false, not {value!r}")
    return value

"""What the callbacks for Lightning and transformers do, on stand-ins for both; tools/loaders runs
them in the real ones.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hintsd import autohint
from hintsd.client import loaders
from hintsd.client.figures import flat


@pytest.fixture(params=[True, False], ids=["figures", "no figures"])
def figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What `stats` gives."""
    found = {"hintsd/0/late": 3.0} if request.param else {}
    monkeypatch.setattr(loaders, "stats", lambda: found)
    return found


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each call of `autohint.install`."""
    calls: list[str] = []
    monkeypatch.setattr(autohint, "install", lambda: calls.append("install"))
    return calls


def imported(name: str, monkeypatch: pytest.MonkeyPatch, **stand_ins: dict[str, type]) -> Any:
    """Module `name` of ours, beside stand-ins for the libraries that it imports."""
    for library, names in stand_ins.items():
        dotted = library.replace("_", ".")
        module = ModuleType(dotted)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, dotted, module)
        monkeypatch.setitem(sys.modules, dotted.partition(".")[0], module)
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return found


def test_transformers(
    figures: dict[str, float], installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = {"TrainerCallback": type("TrainerCallback", (), {})}
    module = imported("hintsd.hf", monkeypatch, transformers=library)
    callback: Any = module.HintsCallback()
    assert isinstance(callback, library["TrainerCallback"])
    assert installed == ["install"]
    logs = {"loss": 0.5}
    callback.on_log(None, None, None, logs=logs)
    assert logs == {"loss": 0.5, **figures}
    callback.on_log(None, None, None)


def test_lightning(
    figures: dict[str, float], installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = {"Callback": type("Callback", (), {})}
    module = imported("hintsd.lightning", monkeypatch, lightning_pytorch=library)
    callback: Any = module.HintsCallback()
    assert isinstance(callback, library["Callback"])
    callback.setup(None, None, "fit")
    assert installed == ["install"]
    said: list[tuple[dict[str, float], int]] = []
    logger = SimpleNamespace(log_metrics=lambda told, step: said.append((told, step)))
    trainer = SimpleNamespace(loggers=[logger], global_step=7)
    callback.on_train_epoch_end(trainer, None)
    assert said == ([(figures, 7)] if figures else [])


def test_figures_are_numbers() -> None:
    job = {
        "name": "a", "epoch": 2, "index": 5, "not_late": 9, "late": {"queued": 2, "evicted": 1},
        "unplanned": {}, "samples_per_s": 1.5, "predicted_stall_s": None, "state": "running",
    }  # fmt: skip
    assert flat(job) == {
        **{"epoch": 2, "index": 5, "not_late": 9, "late": 3, "unplanned": 0},
        "samples_per_s": 1.5,
    }

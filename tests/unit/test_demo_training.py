"""The demo's training ends its hints by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import hintsd
from tools.demo_lib import training


@pytest.fixture
def torchs_settings() -> Iterator[None]:
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(exact)


@pytest.mark.usefixtures("torchs_settings")
def test_the_hint_is_closed_behind_the_last_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    for kind in ("a", "b"):
        (tmp_path / kind).mkdir()
        for number in range(2):
            Image.new("RGB", (60, 60), (number, 9, 9)).save(tmp_path / kind / f"{number}.png")
    told = mock.Mock()
    monkeypatch.setattr(hintsd, "attach", told.attach)
    training.train(
        tmp_path,
        most=4,
        epochs=2,
        seed=0,
        hints=True,
        before_epoch=lambda _: None,
        after_epoch=lambda number, _: told.read(number),
    )
    assert [name for name, *_ in told.mock_calls] == ["attach", "read", "read", "attach().close"]

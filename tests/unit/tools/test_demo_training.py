"""The demo's training: its hints end by themselves, its accelerator has a rhythm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image

import hintsd
from tools.demo_lib import training

pytestmark = pytest.mark.usefixtures("torchs_settings")
_IMAGES = 12


@pytest.fixture
def torchs_settings() -> Iterator[None]:
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(exact)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(_IMAGES):
        folder = tmp_path / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (60, 60), (number, 9, 9)).save(folder / f"{number}.png")
    return tmp_path


def _train(root: Path, hints: bool, told: mock.Mock) -> list[training.Epoch]:
    return training.train(
        root,
        most=_IMAGES,
        epochs=2,
        seed=0,
        hints=hints,
        before_epoch=lambda _: None,
        after_epoch=lambda number, _: told.read(number),
    )


def test_the_hint_is_closed_behind_the_last_epoch(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = mock.Mock()
    monkeypatch.setattr(hintsd, "attach", told.attach)
    _train(images, True, told)
    assert [name for name, *_ in told.mock_calls] == ["attach", "read", "read", "attach().close"]


def test_an_epoch_lasts_as_long_as_the_accelerator_computes_and_waits(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "IMAGES_PER_S", 40)
    for epoch in _train(images, False, mock.Mock()):
        assert epoch.samples == _IMAGES
        assert epoch.seconds - epoch.waiting_s >= _IMAGES / 40 - 1e-6
        assert 0 < epoch.busy < 1


def test_one_other_byte_is_seen(images: Path) -> None:
    before = _train(images, False, mock.Mock())
    assert [e.delivered for e in _train(images, False, mock.Mock())] == [
        e.delivered for e in before
    ]
    with (images / "a" / "4.png").open("ab") as file:
        file.write(b"\0")  # behind the image: the same pixels
    after = _train(images, False, mock.Mock())
    assert [e.losses for e in after] == [e.losses for e in before]
    assert all(x.delivered != y.delivered for x, y in zip(before, after, strict=True))

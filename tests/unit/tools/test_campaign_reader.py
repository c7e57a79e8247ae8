"""The reader of tools/campaign: what it takes for right, and what it notices."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tools.campaign_lib import reader
from tools.campaign_lib.reader import Plan, Reader

CONTENT = {"a/one": b"1" * 300_000, "a/two": b"2" * 9, "b/three": b"3" * 131_072}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(5, 7))
    return tmp_path


def plan() -> Plan:
    return {
        name: (len(content), 7, hashlib.sha256(content).hexdigest())
        for name, content in CONTENT.items()
    }


@pytest.mark.parametrize("way", reader.WAYS)
def test_what_is_as_at_the_origin_is_right(root: Path, way: str) -> None:
    one = Reader(str(root), plan(), random.Random(1))
    for name in CONTENT:
        one.step(way, name)
    assert (one.found.wrong, one.found.errors, one.found.surprises) == (0, 0, [])
    assert one.found.tried == {way: 3}
    assert one.found.worst_s > 0


def spoil(root: Path, way: str) -> None:
    if way == "listings":
        (root / "a/more").touch()
    elif way == "stats":
        os.utime(root / "a/one", ns=(5, 8))
    else:
        with open(root / "a/one", "r+b") as file:
            file.seek(200_000)
            file.write(b"x")


@pytest.mark.parametrize("way", reader.WAYS)
def test_what_is_not_is_noticed(root: Path, way: str) -> None:
    spoil(root, way)
    one = Reader(str(root), plan(), random.Random(1))
    one.step(way, "a/one")
    one.step(way, "b/three")
    assert (one.found.wrong, one.found.errors, len(one.found.surprises)) == (1, 0, 1)


@pytest.mark.parametrize("way", ["reads", "mapped reads", "stats"])
def test_an_error_is_no_wrong_byte(root: Path, way: str) -> None:
    (root / "a/two").unlink()
    one = Reader(str(root), plan(), random.Random(1))
    one.step(way, "a/two")
    assert (one.found.wrong, one.found.errors, len(one.found.surprises)) == (0, 1, 1)


@pytest.mark.parametrize("size", [0, 1, 400_000])
def test_a_map_of_another_size_is_noticed(root: Path, size: int) -> None:
    os.truncate(root / "a/one", size)
    one = Reader(str(root), plan(), random.Random(1))
    one.step("mapped reads", "a/one")
    assert (one.found.wrong, one.found.errors) == (1, 0)


def test_it_goes_on_until_its_input_ends(root: Path, tmp_path: Path) -> None:
    (tmp_path / "plan").write_text(json.dumps(plan()))
    with subprocess.Popen(
        [sys.executable, reader.__file__, root, tmp_path / "plan", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None
        found = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 0
    assert set(found["tried"]) <= set(reader.WAYS)
    assert (found["wrong"], found["errors"]) == (0, 0)

"""One round of each attack of tools/campaign (docs/CAMPAIGN.md): they run, and find nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.mounted import eventually
from tests.support.tool_commands import fork_commands
from tools.campaign_lib import flips, fuzz, kills, links
from tools.campaign_lib.__main__ import ATTACKS, main
from tools.campaign_lib.ground import Count, Ground
from tools.hintsd_command import HintsdCommand

AT_LEAST = {
    "planted": {"traps": 7, "traps refused": 7},
    "links": {"links swapped": 4, "reads": 160},
    "flips": {"bits flipped": 300, "damaged blocks noticed": 1, "reads": 80},
    "fuzz": {"frames decoded": 1000, "frames to hintsd": 12, "frames to the mount": 12},
    "kills": {"kills": 2, "reads": 1, "mapped reads": 1, "listings": 1, "stats": 1},
}


@pytest.fixture
def work() -> Iterator[Path]:
    """A directory that other users can get to, as pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="fusecache-test-") as directory:
        work = Path(directory) / "work"
        work.mkdir()
        yield work


@pytest.mark.parametrize("name", ATTACKS)
def test_a_round_of_each_attack(work: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one: the machine is busy with other tests already."""
    fork_commands(monkeypatch)
    for module, files in {links: 50, flips: 80, fuzz: 40, kills: 100}.items():
        monkeypatch.setattr(module, "_FILES", files)
    monkeypatch.setattr(flips, "FLIPS_A_ROUND", 300)
    monkeypatch.setattr(flips, "_INDEX_SHARE", 0)  # no damage would be noticed in a segment then
    monkeypatch.setattr(fuzz, "DECODED_A_ROUND", 1000)
    monkeypatch.setattr(fuzz, "CONNECTIONS_A_ROUND", 12)
    monkeypatch.setattr(kills, "_BUSY", 0)
    monkeypatch.setattr(kills, "_LARGE_FILES", 3)  # all of it is still more than is kept on SSD
    monkeypatch.setattr(kills, "_READERS", 2)
    monkeypatch.setattr(kills, "_ROUND_LEAST_S", 0.8)
    attack, _ = ATTACKS[name]
    count = Count()
    attack(work, random.Random(7), time.monotonic(), count)
    assert (count.wrong, count.errors) == (0, 0), count.surprises
    assert {what: count.tried[what] >= least for what, least in AT_LEAST[name].items()} == (
        dict.fromkeys(AT_LEAST[name], True)
    ), count.tried


ENDS = {
    "a command fails": RuntimeError("fusecache umount: exit code 1"),
    "a file cannot be read": OSError("no such thing"),
    "a command hangs": subprocess.TimeoutExpired("umount", 30),
    "Ctrl-C": KeyboardInterrupt(),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_an_attack_counted_is_told_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    def attack(work: Path, rng: random.Random, until: float, count: Count) -> None:
        count.tried["reads"] += 7
        count.wrong_read("while nobody looked", "a.jpg")
        raise ENDS[end]

    def next_one(work: Path, rng: random.Random, until: float, count: Count) -> None:
        count.tried["kills"] += 1

    for name in list(ATTACKS):
        monkeypatch.delitem(ATTACKS, name)
    monkeypatch.setitem(ATTACKS, "odd", (attack, 0.5))
    monkeypatch.setitem(ATTACKS, "next", (next_one, 0.5))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        done = CliRunner().invoke(main, ["--minutes", "0", "--work-dir", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert done.exit_code == 1
    assert "while nobody looked: a.jpg: wrong bytes" in done.output
    assert str(ENDS[end]) in done.output
    verdict = done.output.splitlines()[-1]
    is_ended = end == "Ctrl-C"
    assert verdict == (
        f"campaign: FAILED: {'' if is_ended else '1 kills, '}7 reads; "
        f"1 wrong reads, {0 if is_ended else 1} errors"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_hintsd_that_dies_is_told(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if of a frame: the first connection kills it."""

    def kill(self: HintsdCommand) -> HintsdCommand:
        begun = enter(self)
        daemons.append(begun)
        return begun

    def to_hintsd(*_: object) -> int:
        os.kill(daemons[0].pid, signal.SIGKILL)
        eventually(lambda: not daemons[0].is_running)
        return 1

    fork_commands(monkeypatch)
    enter, daemons = HintsdCommand.__enter__, list[HintsdCommand]()
    monkeypatch.setattr(HintsdCommand, "__enter__", kill)
    monkeypatch.setattr(fuzz, "_to_hintsd", to_hintsd)
    monkeypatch.setattr(fuzz, "_FILES", 8)
    monkeypatch.setattr(fuzz, "DECODED_A_ROUND", 1)
    monkeypatch.setattr(fuzz, "CONNECTIONS_A_ROUND", 1)
    count = Count()
    fuzz.run(work, random.Random(7), time.monotonic(), count)
    assert list(count.surprises) == ["hintsd died of a frame"]


@pytest.mark.parametrize("shown", [links.SECRET, b"of no file"])
def test_a_directory_that_is_a_link_gives_no_bytes_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: bytes
) -> None:
    """Without a mount: what one would show is in a directory."""
    ground = Ground(tmp_path, random.Random(7), 9, 100)
    for name, content in ground.content.items():
        path = ground.mountpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(shown if name == "class0/00000.jpg" else content)
    monkeypatch.setattr(Ground, "forget", lambda _: None)
    monkeypatch.setattr(links, "_wait_until_seen", lambda *_: None)
    count = Count()
    links._at_the_origin(ground, tmp_path, count)
    assert (count.tried["reads"], count.wrong, count.errors) == (2, 1, 0)

"""The command `hintsd lab`: what it prints and writes, and one line for each mistake."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusecache.traces import traces
from fusecache.traces.traces import Importance, Trace
from hintsd.cli import main as cli
from hintsd.lab import command, grid, papers
from hintsd.lab.papers import SETTINGS
from hintsd.lab.sampler import SAMPLERS
from hintsd.lab.tables import MEASURES
from hintsd.policies.catalogue import CATALOGUE

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """run(arguments) -> exit code, stdout, stderr of `hintsd lab`, in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def run_lab(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hintsd", "lab", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capfd.readouterr()
        return int(caught.value.code or 0), output.out, output.err

    return run_lab


@pytest.fixture
def small(run: Run) -> str:
    """A trace of 50 items in 3 epochs."""
    assert run("record", "shuffle", "-o", "small.trace", "--items", "50", "--epochs", "3")[0] == 0
    return "small.trace"


def written(
    path: str,
    items: list[int],
    importances: tuple[Importance, ...] = (),
    source: str = "by hand",
    readers: list[int] | None = None,
) -> None:
    trace = Trace(
        items=np.array(items, np.int64),
        sizes=np.ones(2, np.int64),
        epoch_starts=np.zeros(1, np.int64),
        times_s=None,
        importances=importances,
        readers=None if readers is None else np.array(readers, np.int32),
        seen=None,
        names=None,
        source=source,
    )
    traces.write(path, trace)


def test_record_digits_learns_and_replays(run: Run) -> None:
    code, out, err = run("record", "digits", "-o", "a.trace", "--sampler", "loss", "--epochs", "4")
    assert (code, err) == (0, "")
    learned, recorded = out.splitlines()
    assert learned.startswith("held-out images right: ")
    assert recorded.startswith("a.trace: 6,000 reads of 1,500 items, ")
    code, out, err = run("replay", "a.trace", "--policy", "lru", "--policy", "shade", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    (trace,) = answer["traces"]
    assert (trace["name"], trace["reads"], trace["epochs"]) == ("a.trace", 6000, 4)
    assert (trace["warm_up_epochs"], trace["complete"], answer["seed"]) == (1, True, 0)
    ratios = {
        (outcome["policy"], round(outcome["capacity_share"], 2)): outcome["hit_ratio"]
        for outcome in trace["outcomes"]
    }
    assert len(ratios) == 20
    assert all(ratios["shade", share] > ratios["lru", share] for share in (0.05, 0.2, 0.5))
    assert all(outcome["accesses"] == 4500 for outcome in trace["outcomes"])


def test_shade_that_repeats_what_its_cache_holds(run: Run) -> None:
    flags = ["-o", "a.trace", "--sampler", "shade", "--cache", "20%", "--epochs", "4"]
    assert run("record", "digits", *flags)[0] == 0
    _, out, _ = run("replay", "a.trace", "--policy", "shade", "--cache", "20%", "--json")
    (outcome,) = json.loads(out)["traces"][0]["outcomes"]
    assert outcome["hit_ratio"] > 0.5
    assert "always repeating" in traces.read("a.trace").source


def test_table_of_hits_by_capacity(run: Run, small: str) -> None:
    flags = "--policy minio --policy quiver --cache 20%,2500K --measure hits --measure origin"
    code, out, err = run("replay", small, *flags.split())
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][0] == "small.trace:"
    assert " ".join(lines[1]) == (
        "150 reads of 50 items (4.88 MiB), 3 epochs, the first 1 not counted"
    )
    assert lines[4] == ["policy", "20", "%", "50", "%"]
    assert lines[5] == ["minio", "20.0", "50.0"]
    assert lines[6][0] == "quiver"
    assert lines[6].count("+") == 2  # it substitutes, and that is not among the hits
    assert lines[10] == ["minio", "7.81", "MiB", "4.88", "MiB"]


def test_table_of_one_capacity_has_all_measures(run: Run, small: str) -> None:
    _, out, _ = run("replay", small, "--cache", "10%")
    assert "cache 500 KiB, 10 % of the bytes" in out
    assert all(title in out for title, _ in MEASURES.values())
    names = {line.split(" ")[0] for line in out.splitlines() if line}
    assert CATALOGUE.keys() <= names


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_plots(run: Run, small: str, name: str, magic: bytes) -> None:
    code, _, err = run("replay", small, "--cache", "20%,60%", "--plot", name)
    assert (code, err) == (0, "")
    assert Path(name).read_bytes().startswith(magic)


def test_dollars_are_no_formula(run: Run, small: str) -> None:
    os.rename(small, name := r"a$\frac$.trace")
    words = ("--policy", "lru", "--cache", "50%", "--plot", "a.svg")
    assert run("replay", name, *words)[0] == 0


def test_an_epoch_of_no_reads_is_none(run: Run) -> None:
    words = ("--items", "1", "--sampler", "icache", "--epochs", "40", "-o", "a")
    assert run("record", "generated", *words)[0] == 0
    trace = traces.read("a")
    assert len(trace.epoch_starts) == len(trace.items) < 40


def test_a_cut_off_recording_says_so(run: Run, small: str) -> None:
    data = Path(small).read_bytes()
    Path("cut.trace").write_bytes(data[:-1])
    _, out, _ = run("replay", "cut.trace", "--policy", "lru")
    assert "the recording was cut off" in out
    _, out, _ = run("replay", "cut.trace", "--policy", "lru", "--json")
    assert json.loads(out)["traces"][0]["complete"] is False


def test_a_trace_that_knows_no_epochs_is_told_them(run: Run) -> None:
    written("mount.trace", [0, 1, 1, 0, 0, 1])
    arguments = ("replay", "mount.trace", "--policy", "lru", "--cache", "1B", "--json")
    (whole,) = json.loads(run(*arguments)[1])["traces"]
    assert (whole["epochs"], whole["outcomes"][0]["accesses"]) == (1, 6)
    (split,) = json.loads(run(*arguments, "--epoch-reads", "2")[1])["traces"]
    assert (split["epochs"], split["outcomes"][0]["accesses"]) == (3, 4)
    assert split["outcomes"][0]["hits"] == 2


# ---- paper, all ----------------------------------------------------------------------------------


def test_all_makes_every_table_and_the_papers_relations_hold(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.SHARES.count("%") == 10
    monkeypatch.setattr(command, "SHARES", "10%,50%")
    code, out, err = run("all", "-o", "made", "--quick")
    assert (code, err) == (0, "")
    files = set(os.listdir("made"))
    assert {"replay.txt", "replay.json", "replay.svg", "papers.txt", "papers.json"} < files
    assert all(name in out for name in files)
    replays = json.loads(Path("made/replay.json").read_text())["traces"]
    assert {trace["name"] for trace in replays} == {name for name in files if "trace" in name}
    assert all(len(trace["outcomes"]) == 2 * len(CATALOGUE) for trace in replays)
    text = Path("made/papers.txt").read_text()
    assert all(setting.title in text for setting in SETTINGS.values())
    figures = json.loads(Path("made/papers.json").read_text())["figures"]
    _check_shade_7(_hits(figures, "shade-7"))
    _check_shade_12(_hits(figures, "shade-12"))
    _check_icache_16(_hits(figures, "icache-16"))


def _hits(figures: list[Any], name: str) -> dict[tuple[str, float], tuple[float, float]]:
    """(row, share) -> hits, substituted."""
    (figure,) = (figure for figure in figures if figure["name"] == name)
    return {
        (row["label"], cell["cache_share"]): (cell["hit_ratio"], cell["substituted_ratio"])
        for row in figure["rows"]
        for cell in row["cells"]
    }


def _check_shade_7(hits: dict[tuple[str, float], tuple[float, float]]) -> None:
    """SHADE, 6.2: at 10 % 4.5 times LRU, 2.67 times by APP alone; above MIN at 50 and 75 %."""
    at_10 = {row: ratio for (row, share), (ratio, _) in hits.items() if share == 0.1}
    assert at_10["SHADE, always repeating"] > 4.5 * at_10["LRU, random order (baseline)"]
    assert at_10["sh_app"] > 2.67 * at_10["LRU, random order (baseline)"]
    assert at_10["SHADE, always repeating"] > 2 * at_10["sh_app"]
    assert at_10["SHADE, always repeating"] < at_10["MIN, order of SHADE's draw"]
    for share in (0.5, 0.75):
        assert hits["SHADE, always repeating", share] > hits["MIN, random order", share]


def _check_shade_12(hits: dict[tuple[str, float], tuple[float, float]]) -> None:
    assert hits["SHADE, always repeating", 0.2][0] == pytest.approx(0.725, abs=0.05)
    assert hits["CoorDL (MinIO)", 0.2][0] == pytest.approx(0.2, abs=0.02)


def _check_icache_16(hits: dict[tuple[str, float], tuple[float, float]]) -> None:
    """What iCACHE counts as hits are its hits and what it substitutes, together."""
    for share, lru, icache in ((0.2, 0.02, 0.37), (0.4, 0.09, 0.55), (0.6, 0.23, 0.69)):
        assert hits["LRU, random order (Default)", share][0] == pytest.approx(lru, abs=0.015)
        assert sum(hits["iCACHE", share]) == pytest.approx(icache, abs=0.1)


def test_paper_as_a_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "QUICK_EPOCHS", 2)
    code, out, err = run("paper", "shade-12", "--quick")
    assert (code, err) == (0, "")
    lines = {line[:15].strip(): line.split() for line in out.splitlines()}
    assert lines["SHADE, always r"][-2] == "72.5"
    assert "LRU over uniform shuffles, in theory: 2.1" in out


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("replay missing.trace", "missing.trace: No such file or directory"),
        ("replay .", "Is a directory"),
        ("replay no.trace", "no.trace is no access trace"),
        ("replay empty.trace", "empty.trace is an empty trace"),
        ("replay nan.trace", "nan.trace: the importance of item 1, told before access 1, is nan"),
        ("replay small.trace --policy clock", "--policy clock is unknown; there are fifo, lru"),
        ("replay small.trace --cache 0%", "--cache 0%: a share lies above 0%"),
        ("replay small.trace --cache 10%,101%", "--cache 101%: a share"),
        ("replay small.trace --cache=-5", "--cache '-5' is no capacity"),
        ("replay small.trace --cache 0", "a cache of no bytes"),
        ("replay small.trace --cache nan%", "--cache nan%"),
        ("replay small.trace --cache 1G", "--cache 1 GiB is more than all items of small.trace"),
        ("replay small.trace --warm-up 3", "small.trace: --warm-up 3 leaves nothing"),
        ("replay small.trace --epoch-reads 9", "small.trace knows its 3 epochs"),
        ("replay small.trace --plot a.pdf", "--plot a.pdf: the name must end in .png or .svg"),
        ("replay small.trace --plot folder.png", "--plot folder.png: it cannot be written"),
        ("replay small.trace --plot no/a.png", "--plot no/a.png: there is no such folder"),
        ("record shuffle -o small.trace", "small.trace exists; --force replaces it"),
        ("record shuffle -o no/a.trace", "no/a.trace: there is no such folder"),
        ("record shuffle -o a --sampler loss", "are for trainings, not for shuffle"),
        ("record shuffle -o a --items 1000000 --epochs 1000", "at most 500,000,000"),
        ("record shuffle -o a --item-bytes much", "'much' is not a size"),
        ("record shuffle -o a --item-bytes 0", "it must be more than 0"),
        ("record shuffle -o a --item-bytes 9000P", "bytes read: --item-bytes; at most 4,611,"),
        ("record shuffle -o a --seed 9223372036854775808", "'--seed': 9223372036854775808"),
        ("record digits -o a --items 9", "--items is for generated and shuffle"),
        ("record digits -o a --item-bytes 9", "--item-bytes is for shuffle"),
        ("record digits -o a --cache 20%", "--cache is for --sampler shade"),
        ("record digits -o a --sampler shade --cache 0%", "--cache 0%"),
        ("record generated -o a --items 9000000", "at most 2,000,000"),
        ("paper shade-8", "'shade-8' is not one of 'shade-7', 'shade-12', 'icache-16'"),
        ("all --quick -o small.trace", "small.trace is no folder"),
    ],
)
def test_a_mistake_is_one_line(run: Run, small: str, arguments: str, message: str) -> None:
    Path("no.trace").write_text("nothing of the kind, and long enough for a header")
    Path("folder.png").mkdir()
    written("empty.trace", [])
    nan = Importance(1, np.array([1]), np.array([math.nan], np.float32))
    written("nan.trace", [0, 1], (nan,))
    code, out, err = run(*arguments.split())
    assert code in (1, 2)
    assert out == ""
    assert err.startswith("hintsd: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_trace_of_misses_is_warned_of(run: Run) -> None:
    written("misses.trace", [0, 1, 0], source=f"fusecache trace /data: {traces.MISSES_ONLY}")
    code, out, err = run("replay", "misses.trace", "--policy", "lru")
    assert code == 0
    assert "lru" in out
    assert err.startswith("hintsd: warning: misses.trace holds what reached the mount")
    assert "--every-open" in err


def test_misses_that_hints_complete_are_not_warned_of(run: Run) -> None:
    source = f"fusecache trace /data: {traces.MISSES_ONLY}"
    for readers, is_warned in (([-1] * 9 + [7], False), ([-1] * 8 + [7, 7], True)):
        written("t.trace", [0] * 10, source=source, readers=readers)
        assert bool(run("replay", "t.trace", "--policy", "lru")[2]) is is_warned


def test_a_forgotten_percent_sign_is_asked_for(run: Run, small: str) -> None:
    code, _, err = run("replay", small, "--cache", "10,20%")
    assert (code, err) == (2, "hintsd: --cache 10: of what? write 10% or 10B\n")


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ("record digits -o a", "sklearn.datasets"),
        ("record digits -o a", "torch"),
        ("replay small.trace --plot a.png", "matplotlib"),
        ("all --quick -o made", "matplotlib"),
    ],
)
def test_what_is_not_installed_is_named(
    run: Run, small: str, monkeypatch: pytest.MonkeyPatch, arguments: str, missing: str
) -> None:
    importlib.import_module("sklearn.datasets")  # scipy fails where torch is None as it comes
    monkeypatch.setitem(sys.modules, missing, None)
    code, out, err = run(*arguments.split())
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    package = {"sklearn.datasets": "scikit-learn"}.get(missing, missing)
    assert err.endswith(f"pip install {package}\n")


def killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_replaying_process_that_is_killed_is_no_hang(
    run: Run, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "PROCESSES_WORTH_READS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(grid, "_replay", killed)
    code, _, err = run("replay", small, "--policy", "lru")
    assert (code, err.splitlines()[-1]) == (
        1,
        "hintsd: a replaying process was killed; is there memory enough?",
    )


def test_help_names_what_there_is(run: Run) -> None:
    _, out, _ = run("record", "--help")
    assert set(command.SAMPLERS) == set(SAMPLERS)
    assert all(name in out for name in SAMPLERS)
    assert tuple(SETTINGS) == command.PAPERS
    _, out, _ = run("replay", "--help")
    assert all(measure in out for measure in MEASURES)
    assert all(name in out.split("Policies:")[1] for name in CATALOGUE)

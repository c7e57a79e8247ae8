"""Peers of the rows budgets where none is installed: options, budgets, what is left out."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from fusecache.config.settings import RAM_BYTES_MIN
from tests.support.commands import SUBPROCESS_WITH_TORCH
from tools.bench import budgets, hints, peers
from tools.bench.__main__ import _columns, main
from tools.bench.budgets import Budgets, Origin
from tools.bench.hints import loader_work, run_module
from tools.bench.loader_reader import bytes_read
from tools.bench.nopfs_reader import configuration
from tools.bench.peers import JuicefsVolume
from tools.bench.readers import Readers
from tools.bench.results import Results
from tools.bench.rows import Bench

_PROGRAM = """#!/bin/sh
echo "$@" >>{log}
[ "$1" = format ] || exit 1
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    work = tmp_path / "work"
    work.mkdir()
    said: list[str] = []
    return Bench(work, Readers(work), (), False, Results(), said.append)


def _runs(bench: Bench, count: int = 10, size: int = 1000) -> Budgets:
    origin = Origin(bench.work / "behind", bench.work / "seen", Path("/proc/self/io"))
    (origin.behind / "data").mkdir(parents=True)
    origin.seen.symlink_to(origin.behind)
    names = [f"{index}.bin" for index in range(count)]
    for name in names:
        (origin.behind / "data" / name).write_bytes(bytes(size))
    return Budgets(bench, "budgets", bench.work, origin, names, size)


def test_the_smallest_ram_is_one_that_a_mount_takes(bench: Bench) -> None:
    counts = budgets._counts(bench, budgets.COUNTS)
    least = min(ram for ram, _ in budgets.BUDGETS.values())
    assert all(size * count * least >= RAM_BYTES_MIN for size, count in counts.items())
    assert sorted(counts) == [10_000, 100_000, 500_000]
    bench.quick = True
    assert budgets._counts(bench, budgets.COUNTS) == {100_000: 768}
    bench.files = {10_000: 5}
    assert budgets._counts(bench, budgets.COUNTS) == {10_000: 5}


def test_each_peer_has_budgets_and_each_loader_can_be_chosen(bench: Bench) -> None:
    assert set(budgets.TAKES) == {"juicefs", "rclone", *budgets.LOADERS}
    assert all(set(taken) <= set(budgets.BUDGETS) for taken in budgets.TAKES.values())
    assert set(budgets.QUICK_BUDGETS) <= set(budgets.BUDGETS)
    shown = CliRunner().invoke(main, ["--rows", "budgets-local", "--peers", "nobody"])
    assert shown.exit_code == 2
    assert "known: " in shown.output
    assert all(loader in shown.output for loader in budgets.LOADERS)


def test_every_peer_of_the_rows_has_one_column() -> None:
    columns = _columns(("rclone",))
    assert len(columns) == len(set(columns))
    assert {"fusecache", "rclone", "stock", "copied", "keep", *budgets.LOADERS} <= set(columns)


def test_the_budget_without_ssd_gives_nopfs_no_such_class() -> None:
    text = configuration(1 << 20, 17 << 20, 0, Path("/ssd"))
    assert "filesystem" not in text
    assert text.count("capacity") == 2


def test_juicefs_lies_on_the_origin_and_caches_elsewhere(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "asked"
    program = tmp_path / "bin" / "juicefs"
    program.parent.mkdir()
    program.write_text(_PROGRAM.format(log=log))
    program.chmod(0o755)
    monkeypatch.setattr(peers, "_tool", lambda name: str(program))
    runs = _runs(bench)
    volume = JuicefsVolume(bench.work, runs.origin.behind / "juicefs")
    for budget in ("ram", "half"):
        with pytest.raises(RuntimeError, match="juicefs did not mount"):
            runs.juicefs(volume, 0, budget)
    in_ram, on_ssd = log.read_text().splitlines()
    assert "--cache-dir memory --cache-size 1M" in in_ram
    assert f"--cache-dir {bench.work}/cache --cache-size 1M" in on_ssd
    assert f"--bucket {bench.work}/seen/juicefs/" in on_ssd
    assert "--read-only" in on_ssd
    assert not (bench.work / "cache").exists()


def test_rclone_is_given_the_budget(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_tool", lambda name: "/bin/false")
    mount = peers.make("rclone", bench.work, bench.work, ["--vfs-cache-max-size", "40B"])
    assert isinstance(mount, peers._Foreground)
    assert list(mount._command)[-2:] == ["--vfs-cache-max-size", "40B"]


def test_a_peer_that_fails_is_left_out_with_one_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.names, bench.loaders = ("rclone", "juicefs"), ("litdata", "mosaicml")
    monkeypatch.setattr(peers, "_tool", lambda name: None)
    monkeypatch.setattr(Bench, "drop", lambda self: None)
    monkeypatch.setattr(budgets, "built_streaming", lambda bench: sys.executable)
    monkeypatch.setattr(hints, "subprocess", SUBPROCESS_WITH_TORCH)
    runs = _runs(bench)
    assert sorted(budgets.prepared(runs)) == ["rclone"]
    why = [note for note in bench.results.notes if "was left out: " in note]
    assert [note.split(" was ")[0] for note in why] == [
        f"budgets, 1 KB, {peer}" for peer in ("juicefs", "mosaicml", "litdata")
    ]
    assert "juicefs is not installed" in why[0]
    assert "No module named" in why[1]


def test_without_the_streaming_libraries_it_is_said(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "streaming"
    script.write_text("#!/bin/sh\necho not here >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(budgets, "STREAMING_BUILD", script)
    bench.loaders = ("mosaicml",)
    assert budgets.prepared(_runs(bench)) == {}
    said = "webdataset, mosaicml, litdata was left out: not here"
    assert bench.results.notes == [said]


def test_help_installs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = subprocess.run([budgets.STREAMING_BUILD, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: tools/bench/streaming" in done.stdout
    assert not list(tmp_path.iterdir())


def test_an_earlier_build_stays_where_the_source_cannot_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NOPFS_SOURCE", str(tmp_path / "nowhere"))
    place = tmp_path / "fusecache-bench" / "nopfs"
    place.mkdir(parents=True)
    for name in ("built", "libhdmlp.so"):
        (place / name).write_text("earlier")
    done = subprocess.run([budgets.NOPFS_BUILD], capture_output=True, text=True)
    assert done.returncode == 1
    assert (place / "built").read_text() == (place / "libhdmlp.so").read_text() == "earlier"


def test_each_epoch_has_its_figures_and_all_files(bench: Bench) -> None:
    runs = _runs(bench)
    done = {"samples": 10, "bytes": 10_000, "seconds": 2.0, "stall_s": 1.5}
    done |= {"cpu_s": 0.001, "device_bytes": 5000}
    runs._add("stock", ("half", "all"), [done, done])
    for what, value in (("", 2.0), (": waiting", 1.5), (": origin", 0.5), (": CPU", 100)):
        series = bench.results.get("budgets", f"1 KB, all, later epochs{what}", "stock")
        assert series is not None
        assert series.values == [pytest.approx(value)]
    with pytest.raises(RuntimeError, match="stock did not read each of 10 files once"):
        runs._add("stock", ("half",), [done | {"samples": 9}])


def test_the_loop_tells_how_long_it_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "subprocess", SUBPROCESS_WITH_TORCH)
    names = [f"{index}" for index in range(4)]
    for name in names:
        (tmp_path / name).write_bytes(bytes(100))
    work = loader_work(tmp_path, names, batch=2, workers=1, epochs=2, device="/proc/self/io")
    for epoch in json.loads(run_module("tools.bench.loader_reader", told=json.dumps(work)).stdout):
        assert (epoch["samples"], epoch["bytes"]) == (4, 400)
        assert 0 < epoch["stall_s"] <= epoch["seconds"]


def test_bytes_of_a_device_and_of_a_server(tmp_path: Path) -> None:
    stat, io = tmp_path / "stat", tmp_path / "io"
    stat.write_text("  11 0 3 4 5 6 7\n")
    io.write_text("rchar: 4096\nwchar: 1\n")
    assert bytes_read(str(stat)) == 3 * 512
    assert bytes_read(str(io)) == 4096
    assert bytes_read("") == 0


def test_what_a_process_has_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starter.py").write_text(
        "import subprocess\n"
        "print(subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL,"
        " stderr=subprocess.DEVNULL).pid)\n"
        "raise SystemExit(0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pid = int(run_module("starter").stdout)
    deadline = time.monotonic() + 10
    while _runs_still(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs_still(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")

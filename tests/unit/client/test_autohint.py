"""`hintsd run` in the trainer: DataLoaders announce their order, and nothing else changes."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from hintsd.autohint import DIRECTORY, environment
from tests.support.fake_hintsd import FakeHintsd
from tests.support.mounted import ROOT

torch = pytest.importorskip("torch")

_FIND = """
import hintsd.client.link
hintsd.client.link.find_socket = lambda path: ({socket!r}, path)
hintsd.client.link.CONNECT_TIMEOUT_S = hintsd.client.link.LAST_ANSWER_TIMEOUT_S = 60.0
"""

_TRAIN = """
import torch
from torch.utils.data import DataLoader

from tools.torchvision_cpu import import_torchvision
import_torchvision()
from torchvision.datasets import ImageFolder


class Indices(ImageFolder):
    def __getitem__(self, index):
        return index


class Inner(Indices):
    def __getitem__(self, index):
        if index == 0:
            list(DataLoader(Indices(self.root), shuffle=True))  # a loader within a worker
        return index


def main(epochs=2, workers=2):
    torch.manual_seed(7)
    train = DataLoader(Inner({root!r}), batch_size=2, shuffle=True, num_workers=workers)
    check = DataLoader(Indices({root!r}), batch_size=3)
    for epoch in range(epochs):
        for loader in (train, check):
            print(torch.cat(list(loader)).tolist())


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeHintsd]:
    fake = FakeHintsd(tmp_path / "hintsd.sock")
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("set")
    for i in range(12):
        path = root / f"class {i % 3}" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return str(root)


@pytest.fixture(scope="module")
def train(root: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script, in a directory of its own."""
    script = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(_TRAIN.format(root=root))
    return script


@pytest.fixture(scope="module")
def printed(train: Path) -> str:
    """What it prints without hints."""
    return _plain(train)


def _plain(script: Path) -> str:
    """What a script prints without hints. It runs here, where torch is imported."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        torch.random.fork_rng(),
        warnings.catch_warnings(),
    ):
        runpy.run_path(str(script), run_name="__main__")
    return out.getvalue()


def _python(
    *arguments: str, hinted: bool = True, path: tuple[str | Path, ...] = (ROOT,), **variables: str
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(environ) if hinted else environ,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_environment() -> None:
    assert environment({"A": "b"}) == {"A": "b", "PYTHONPATH": DIRECTORY}
    once = environment({"PYTHONPATH": "/x::/y"})
    assert once["PYTHONPATH"].split(":") == [DIRECTORY, "/x", "", "/y"]
    assert environment(once) == once
    assert sorted(name for name in os.listdir(DIRECTORY) if name.endswith(".py")) == [
        "__init__.py",  # anything else would hide a script's own module of that name
        "sitecustomize.py",
    ]


@pytest.mark.claim("P3")
def test_a_script_is_hinted_and_prints_the_same(
    daemon: FakeHintsd, root: str, train: Path, printed: str, tmp_path: Path
) -> None:
    script = tmp_path / "hinted.py"
    script.write_text(_FIND.format(socket=str(daemon.path)) + train.read_text())
    hinted = _python(str(script))
    assert (hinted.returncode, hinted.stdout, hinted.stderr) == (0, printed, "")
    daemon.wait(lambda: len(daemon.jobs) == 2 and all(told.is_gone for told in daemon.jobs))
    assert [told.job["workers"] for told in daemon.jobs] == [2, 1]  # or the trainer itself
    assert len({told.pid for told in daemon.jobs}) == 1  # none comes from a worker
    assert all(told.job["path"] == root.encode() for told in daemon.jobs)
    read = [eval(line) for line in printed.splitlines()]
    for told, epochs in zip(daemon.jobs, (read[::2], read[1::2]), strict=True):
        for epoch, sequence in told.sequences():
            assert sequence.tolist() == epochs[epoch]
    assert daemon.jobs[0].orders


@pytest.mark.claim("P2")
def test_without_a_mount_a_script_gets_one_warning(train: Path, printed: str) -> None:
    hinted = _python(str(train))
    assert (hinted.returncode, hinted.stdout) == (0, printed)
    assert hinted.stderr.count("RuntimeWarning") == 1
    assert "not on a fusecache mount" in hinted.stderr


def test_a_spawned_trainer_is_hinted(
    daemon: FakeHintsd, train: Path, printed: str, tmp_path: Path
) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(
        _FIND.format(socket=str(daemon.path))
        + f"""
import multiprocessing, sys
sys.path.append({str(train.parent)!r})

def run():
    import train
    train.main(epochs=1, workers=1)  # its worker is spawned, too, and imports torch

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=run)
    child.start(), child.join(), exit(child.exitcode)
"""
    )
    done = _python(str(script))
    first = "".join(printed.splitlines(keepends=True)[:2])
    assert (done.returncode, done.stdout, done.stderr) == (0, first, "")
    assert len(daemon.jobs) == 2


def test_the_hidden_sitecustomize_runs(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.own = __file__")
    code = "import sys, sitecustomize; print(sys.own, sitecustomize.__file__, sys.path)"
    done = _python("-c", code, path=(own, ROOT))
    plain = _python("-c", code, path=(own, ROOT), hinted=False)
    assert done.stdout == plain.stdout != ""
    assert done.stderr == ""


def test_an_interpreter_without_hintsd_runs_on(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "hintsd").mkdir(parents=True)
    (broken / "hintsd" / "__init__.py").write_text("raise ImportError('not for this Python')")
    done = _python("-c", "print('ran')", path=(broken,))
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "-m pip install ./client); going on without hints" in done.stderr
    # It has torch, so it may be meant.
    assert "has no hintsd (from fusecache's checkout: " in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = _python("-c", "print('trained')", path=(broken,), HINTSD_EXPLAIN="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("-m pip install ./client); not going on\n")


def test_torch_is_not_imported_for_it() -> None:
    done = _python("-c", "import sys; print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert done.stdout == "False False\n"


def test_the_import_looks_as_ever() -> None:
    code = (
        "import torch.utils.data.dataloader as d, inspect, sys\n"
        "print(type(d.__loader__).__name__, d.__spec__.origin == d.__file__,"
        " inspect.getsource(d.DataLoader)[:16], d.DataLoader.__iter__.__name__,"
        " [each for each in sys.meta_path if 'hintsd' in str(each)])"
    )
    with contextlib.redirect_stdout(io.StringIO()) as plain:
        exec(code, {})
    assert plain.getvalue().endswith("DataLoader __iter__ []\n")
    assert _python("-c", code).stdout == plain.getvalue()


_STATEFUL = """
import torch, warnings
warnings.simplefilter("ignore", UserWarning)
from torchdata.stateful_dataloader import StatefulDataLoader
from tools.torchvision_cpu import import_torchvision
import_torchvision()
from torchvision.datasets import ImageFolder

class Indices(ImageFolder):
    def __getitem__(self, index):
        return index

torch.manual_seed(7)
loader = StatefulDataLoader(Indices({root!r}), batch_size=5, shuffle=True)
assert loader.state_dict()["_num_yielded"] == 0
for epoch in range(2):
    print(torch.cat(list(loader)).tolist())
"""


def test_a_stateful_loader_is_hinted(daemon: FakeHintsd, root: str, tmp_path: Path) -> None:
    script = tmp_path / "stateful.py"
    plain = tmp_path / "plain.py"
    plain.write_text(_STATEFUL.format(root=root))
    script.write_text(_FIND.format(socket=str(daemon.path)) + plain.read_text())
    hinted = _python(str(script))
    assert (hinted.returncode, hinted.stderr) == (0, "")
    assert hinted.stdout == _plain(plain)
    read = [eval(line) for line in hinted.stdout.splitlines()]
    (told,) = daemon.jobs
    assert told.sequences()
    for epoch, sequence in told.sequences():
        assert sequence.tolist() == read[epoch]


def test_datasets_in_memory_are_no_fault(tmp_path: Path) -> None:
    script = tmp_path / "memory.py"
    script.write_text(
        """
import numpy, torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

class Digits(Dataset):  # as torchvision's MNIST
    data = numpy.arange(12, dtype=numpy.uint8).reshape(6, 2)
    def __len__(self):
        return len(self.data)
    def __getitem__(self, index):
        return self.data[index]

class Paths(Digits):
    data = numpy.array([["/a"], ["/b"]])

rows = TensorDataset(torch.arange(4))
for dataset in (rows, Digits(), Subset(ConcatDataset([Digits(), Digits()]), [0, 7])):
    print(len(list(DataLoader(dataset))))
iter(DataLoader(Paths()))
"""
    )
    done = _python(str(script))
    assert (done.returncode, done.stdout) == (0, "4\n6\n2\n")
    assert done.stderr.count("RuntimeWarning") == 1
    assert "which files a Paths reads is not known" in done.stderr


_SEVERAL = """
import random, torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

class Files(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return index

class Telling(Files):
    def __hintsd_paths__(self):
        return [f"{root}/{{i}}" for i in range(6)]

class Own(Sampler):
    def __len__(self):
        return 6
    def __iter__(self):
        return iter(random.sample(range(6), 6))

list(DataLoader(TensorDataset(torch.arange(4))))
told = DataLoader(Telling(), sampler=Own())
for _ in range(2):
    print(torch.cat(list(told)).tolist())
list(DataLoader(Files()))
print("done")
"""


def _run(*words: str, name: str = "run") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hintsd", name, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)


def test_the_last_line_of_hintsd_run(daemon: FakeHintsd, root: str, tmp_path: Path) -> None:
    script = tmp_path / "several.py"
    script.write_text(_FIND.format(socket=str(daemon.path)) + _SEVERAL.format(root=root))
    python = ("--", sys.executable, "-W", "ignore", str(script))
    done = _run("--copy-samplers", *python)
    assert done.returncode == 0
    read = [eval(line) for line in done.stdout.splitlines()[:2]]
    assert [sequence.tolist() for _, sequence in daemon.jobs[0].sequences()] == read
    assert done.stderr == (
        "hintsd: run: 1 loader hinted, 1 not: which files a Files reads is not known: give "
        "hintsd.attach their paths, or the dataset a method __hintsd_paths__\n"
    )
    done = _run("--require", *python)
    assert (done.returncode, done.stdout) == (1, "")
    *_, error, line = done.stderr.splitlines()
    assert "NotHinted: hintsd run --require: a DataLoader is not hinted: the order of Own" in error
    assert line.startswith("hintsd: run: 0 loaders hinted, 1 not: the order of Own cannot be told")


_EXPLAINED = """
import atexit, random, sys, torch, warnings
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
warnings.simplefilter("ignore", UserWarning)

class Files(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        print("read")
        return index

class Telling(Files):
    def __hintsd_paths__(self):
        return [f"{root}/{{i}}" for i in range(6)]

class Own(Sampler):
    def __len__(self):
        return 6
    def __iter__(self):
        print("drawn")
        return iter(random.sample(range(6), 6))

def refused():
    try:
        DataLoader(Files(), batch_size=2, batch_sampler=[[0]])
    except ValueError:
        pass

atexit.register(print, "at exit")
refused()
DataLoader(Files())  # gone
"""

_TRAINED = """
print("begun")
try:
    for batch in train:
        print("a batch")
finally:
    print("finally")
late = DataLoader(Files())
"""


def _explain(script: Path, code: str, root: str, *words: str) -> tuple[int, list[str], str]:
    """The exit status; what was printed, the lines of the script as `L` and their end; stderr."""
    script.write_text(code.format(root=root))
    done = _run(*words, sys.executable, str(script), name="explain")
    lines = script.read_text().splitlines()
    printed = []
    for line in done.stdout.splitlines():
        place, made, rest = line.partition(": ")
        number = place.removeprefix(f"{script}:")
        named = lines[int(number) - 1].rpartition("# ")[2] if number.isdecimal() else place
        printed.append(f"{named}{made}{rest}")
    return done.returncode, printed, done.stderr


def test_explain_says_which_loaders_would_be_hinted(
    daemon: FakeHintsd, root: str, tmp_path: Path
) -> None:
    begin = _FIND.format(socket=str(daemon.path)) + _EXPLAINED
    hinted = """
train = DataLoader(Telling(), batch_size=2, shuffle=True)  # train
check = DataLoader(Telling(), batch_size=5)  # check
"""
    unknown = "other = DataLoader(Files(), batch_size=3)  # other\n"
    script = tmp_path / "train.py"
    would = [
        f"train: DataLoader(Telling in {root}, RandomSampler, batch size 2): would be hinted: the "
        "order of RandomSampler, as each epoch begins; hintsd answers",
        f"check: DataLoader(Telling in {root}, SequentialSampler, batch size 5): would be hinted: "
        "the order of SequentialSampler, all epochs ahead; hintsd answers",
    ]
    whole = _explain(script, begin + hinted + _TRAINED, root)
    assert whole == (0, ["begun", *would], "")
    would_not = (
        "other: DataLoader(Files, SequentialSampler, batch size 3): would not be hinted: which "
        "files a Files reads is not known: give hintsd.attach their paths, or the dataset a "
        "method __hintsd_paths__; see docs/LOADERS.md"
    )
    partly = _explain(script, begin + hinted + unknown + _TRAINED, root)
    assert partly == (1, ["begun", *would, would_not], "")
    assert daemon.jobs == []  # nothing is announced
    daemon.stop()
    code, printed, _ = _explain(script, begin + hinted + _TRAINED, root)
    assert code == 1
    assert f"would not be hinted: none answers for {root} (No such file" in printed[1] or (
        f"would not be hinted: none answers for {root} (Connection refused" in printed[1]
    )


def test_explain_needs_no_mount_to_tell_what_is_known(root: str, tmp_path: Path) -> None:
    loaders = """
from torchdata.stateful_dataloader import StatefulDataLoader
train = StatefulDataLoader(Telling(), sampler=Own())  # train
class Stream(IterableDataset):
    def __iter__(self):
        return iter([])
stream = DataLoader(Stream(), batch_size=None)  # stream
memory = DataLoader(TensorDataset(torch.arange(4)))  # memory
batches = DataLoader(Telling(), batch_sampler=[[0, 1], [5]])  # batches
class Wrong(Own):
    def __iter__(self):
        raise OSError("no order")
wrong = DataLoader(Telling(), sampler=Wrong())  # wrong
"""
    script = tmp_path / "train.py"
    run = ("--", sys.executable, "-m", "hintsd", "run", "--copy-samplers")  # as in a user's script
    told = _explain(script, _EXPLAINED + loaders + _TRAINED, root, *run)
    why = f"would not be hinted: {root} is not on a fusecache mount (its order is known: the order"
    do = "; fusecache mount its directory, and let the script read it there"
    assert told == (
        1,
        [
            "begun",
            "drawn",  # by the copy
            f"train: StatefulDataLoader(Telling in {root}, Own, batch size 1): {why} of a copy of "
            f"Own, as each epoch begins){do}",
            "stream: DataLoader(Stream, no sampler, no batches): would not be hinted: an "
            "IterableDataset has no indices that could be announced; see docs/LOADERS.md",
            "memory: DataLoader(TensorDataset, SequentialSampler, batch size 1): would not be "
            "hinted: a dataset in memory reads no files; nothing is to be done",
            f"batches: DataLoader(Telling in {root}, list, batches of its own): {why} of list, as "
            f"each epoch begins){do}",
            f"wrong: DataLoader(Telling in {root}, Wrong, batch size 1): would not be hinted: the "
            "order of Wrong cannot be told (OSError('no order')); see docs/LOADERS.md",
        ],
        "",
    )


def test_explain_of_a_script_that_reads_no_loader(root: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    code = _EXPLAINED + "loader = DataLoader(Telling())\nprint('ended')\nsys.exit({status})\n"
    for status, said in ((0, 1), (4, 4)):
        told = _explain(script, code.replace("{status}", str(status)), root)
        line = f"hintsd: explain: no DataLoader was read: the command has ended, with {status}\n"
        assert told == (said, ["ended", "at exit"], line)

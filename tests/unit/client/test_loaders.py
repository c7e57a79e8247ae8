"""attach: what is announced is what the loader reads, and the loader is as it would be without."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402  (it may be missing)
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import hintsd  # noqa: E402
from hintsd.client import warning  # noqa: E402
from hintsd.orders.drawing import access_sequence  # noqa: E402
from tests.support.fake_hintsd import FakeHintsd, Told, link_of  # noqa: E402
from tools.torchvision_cpu import import_torchvision  # noqa: E402

import_torchvision()

from torchvision.datasets import (  # type: ignore[import-untyped]  # noqa: E402  (no types)
    DatasetFolder,
    ImageFolder,
)

LENGTH = 103
EPOCHS = 2


@pytest.fixture(autouse=True)
def daemon(fake_hintsd: FakeHintsd) -> FakeHintsd:
    return fake_hintsd


class Numbers(Dataset[int]):
    """Sample i is i, so a batch shows its indices. Reading one may draw random numbers."""

    def __init__(self, length: int = LENGTH, *, draws: bool = False) -> None:
        self.length, self.draws = length, draws
        self.paths = [f"/data/set/{i}" for i in range(length)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if self.draws:
            torch.rand(1), np.random.random(), random.random()
        return index if isinstance(index, list) else int(index)

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a dataset may be large")


class Lazy(Sampler[int]):
    """Draws from all global generators, and keeps count, as it goes."""

    def __init__(self, data: Numbers) -> None:
        self.data, self.passes = data, 0

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        for _ in range(50):
            drawn = int(torch.randint(40, (1,))) + int(np.random.randint(40)) + random.randrange(20)
            yield drawn + self.passes


class Eager(Lazy):
    """Draws when `iter` is called, and yields tensors."""

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(len(self.data))[:50] - self.passes)


class Buckets(Sampler[list[int]]):
    """Batches of several lengths, drawn as it goes."""

    def __init__(self, data: Numbers) -> None:
        self.data = data

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(12):
            yield random.choices(range(LENGTH), k=random.randint(1, 9))


Kind = Callable[[Numbers], dict[str, Any]]


def _seeded(seed: int = 4) -> Any:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


_WEIGHTS = np.random.default_rng(3).random(LENGTH)

KINDS: dict[str, Kind] = {
    "sequential": lambda data: {"batch_size": 7},
    "shuffle": lambda data: {"batch_size": 7, "shuffle": True},
    "shuffle, drop last": lambda data: {"batch_size": 7, "shuffle": True, "drop_last": True},
    "shuffle, generator": lambda data: {"shuffle": True, "generator": _seeded(), "batch_size": 7},
    "sampler's generator": lambda data: {"sampler": RandomSampler(data, generator=_seeded())},
    "replacement": lambda data: {
        "sampler": RandomSampler(data, replacement=True, num_samples=77),
        "batch_size": 5,
    },
    "distributed": lambda data: {
        "sampler": DistributedSampler(data, num_replicas=3, rank=1, seed=9),
        "batch_size": 4,
    },
    "subset": lambda data: {"sampler": SubsetRandomSampler(range(5, 60, 2)), "batch_size": 4},
    "weighted": lambda data: {
        "sampler": WeightedRandomSampler(list(_WEIGHTS), 40),
        "batch_size": 4,
    },
    "weighted, generator": lambda data: {
        "sampler": WeightedRandomSampler(list(_WEIGHTS), 40, generator=_seeded()),
    },
    "no batches": lambda data: {"batch_size": None, "shuffle": True},
    "no batches, distributed": lambda data: {
        "batch_size": None,
        "sampler": DistributedSampler(data, num_replicas=2, rank=1),
    },
    "a batch sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 6, False)},
    "batches by a sampler": lambda data: {
        "batch_size": None,
        "sampler": BatchSampler(RandomSampler(data), 6, True),
    },
    "lazy": lambda data: {"sampler": Lazy(data), "batch_size": 8},
    "lazy, no batches": lambda data: {"sampler": Lazy(data), "batch_size": None},
    "eager": lambda data: {"sampler": Eager(data), "batch_size": 8, "drop_last": True},
    "eager, no batches": lambda data: {"sampler": Eager(data), "batch_size": None},
    "buckets": lambda data: {"batch_sampler": Buckets(data)},
    "a list": lambda data: {"sampler": [5, 3, 9, 3, 88], "batch_size": 2},
}


def _as_list(batch: Any) -> list[int]:
    indices: list[int] = torch.as_tensor(batch).reshape(-1).tolist()
    return indices


def _inner_sampler(loader: Any) -> Any:
    return loader.batch_sampler.sampler


# What these read depends on what the dataset draws, without workers. Nobody can tell it.
_MIXED = ("lazy", "lazy, no batches", "buckets")

# The base seed of persistent workers is drawn once, from the same generator as the order, or not.
_PERSISTENT = ("shuffle", "shuffle, generator", "sampler's generator", "no batches", "eager")


def _run(
    kind: Kind, daemon: FakeHintsd | None, draws: bool, **settings: Any
) -> tuple[list[list[int]], list[Any]]:
    """What three epochs read, and how all generators stand after each."""
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    data = Numbers(draws=draws)
    arguments = kind(data)
    loader: DataLoader[Any] = DataLoader(data, **arguments, **settings)
    if daemon is not None:
        hintsd.attach(loader, paths=data.paths, epochs=EPOCHS, copy_sampler=True)
    read, states = [], []
    for epoch in range(EPOCHS):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        read.append([index for batch in loader for index in _as_list(batch)])
        states.append(torch.get_rng_state().tolist())
        states.append([str(np.random.get_state()), random.getstate()])
        for generator in (arguments.get("generator"), getattr(loader.sampler, "generator", None)):
            states.append(None if generator is None else generator.get_state().tolist())
        states.append(getattr(loader.sampler, "passes", 0))
    if daemon is not None:
        daemon.wait(lambda: daemon.jobs and EPOCHS - 1 in [e for e, _ in daemon.jobs[0].orders])
    return read, states


@pytest.mark.claim("P3")
@pytest.mark.filterwarnings("error:hintsd:RuntimeWarning")
@pytest.mark.parametrize(
    ("key", "settings"),
    [
        *((key, {}) for key in KINDS),
        *((key, {"num_workers": 2}) for key in KINDS),
        *((key, {"num_workers": 1, "persistent_workers": True}) for key in _PERSISTENT),
    ],
)
def test_what_is_announced_is_read_and_nothing_is_changed(
    daemon: FakeHintsd, key: str, settings: dict[str, Any]
) -> None:
    kind, draws = KINDS[key], bool(settings) or key not in _MIXED
    expected = _run(kind, None, draws, **settings)
    read, states = _run(kind, daemon, draws, **settings)
    assert read == expected[0]
    assert states == expected[1]
    gc.collect()
    daemon.wait(lambda: daemon.jobs and daemon.jobs[0].is_closed)
    told = daemon.jobs[0]
    _check_announced(told, read)
    assert told.job["epochs"] == EPOCHS
    assert told.job["workers"] == settings.get("num_workers", 1)
    if told.job["spec"] is not None:
        foreseen = told.foreseen(LENGTH)
        for epoch in range(EPOCHS):
            assert access_sequence(foreseen, epoch).tolist() == read[epoch]


def _check_announced(told: Told, read: list[list[int]]) -> None:
    announced = {epoch: sequence.tolist() for epoch, sequence in told.sequences()}
    assert sorted(announced)[-1] == len(read) - 1
    for epoch, sequence in announced.items():
        # Negative indices count from the end; hintsd is told the index itself.
        assert sequence == [index % LENGTH for index in read[epoch]]


@pytest.mark.parametrize("key", ["shuffle, generator", "sampler's generator", "distributed"])
def test_later_epochs_are_foreseen(daemon: FakeHintsd, key: str) -> None:
    data = Numbers()
    job = hintsd.attach(DataLoader(data, **KINDS[key](data)), paths=data.paths)
    daemon.wait(lambda: daemon.jobs)
    assert daemon.jobs[0].job["spec"] is not None
    job.close()


@pytest.mark.parametrize(("workers", "told"), [(0, 1), (1, 1), (3, 3)])
def test_a_loader_without_workers_has_one_reader(
    daemon: FakeHintsd, workers: int, told: int
) -> None:
    """0 is told where nobody knows: hintsd has to take sixteen for possible then."""
    data = Numbers()
    with hintsd.attach(DataLoader(data, 8, num_workers=workers), data.paths):
        daemon.wait(lambda: daemon.jobs)
        assert daemon.jobs[0].job["workers"] == told


def test_steps_follow_the_reader(daemon: FakeHintsd) -> None:
    data = Numbers()
    loader = DataLoader(data, batch_size=10, num_workers=2, prefetch_factor=2)
    hintsd.attach(loader, paths=data.paths)
    iterator = iter(loader)
    daemon.wait(lambda: daemon.jobs and daemon.jobs[0].steps)
    assert daemon.jobs[0].steps[-1] == (0, 0)  # four batches are drawn, none is handed out
    for _ in range(7):
        next(iterator)
    daemon.wait(lambda: daemon.jobs[0].steps[-1] == (0, 6))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [10, 7, 1])
def test_the_last_step_of_an_epoch(daemon: FakeHintsd, batch_size: int, drop_last: bool) -> None:
    """Without workers the sampler's end is that of all whole batches; the job's, that of all."""
    data = Numbers()
    loader = DataLoader(data, batch_size=batch_size, drop_last=drop_last)
    job = hintsd.attach(loader, paths=data.paths)
    for _ in loader:
        pass
    daemon.wait(lambda: daemon.jobs and (0, LENGTH // batch_size) in daemon.jobs[0].steps)
    job.close()
    assert daemon.jobs[0].steps[-1] == (0, len(loader))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [103, 50, 10, 1])
def test_the_last_step_of_who_counts_the_batches(
    daemon: FakeHintsd, batch_size: int, drop_last: bool
) -> None:
    """So nobody asks whether there is another one."""
    data = Numbers()
    loader = DataLoader(data, batch_size=batch_size, drop_last=drop_last)
    job = hintsd.attach(loader, paths=data.paths, epochs=1)
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    daemon.wait(lambda: daemon.jobs and (0, max(0, len(loader) - 1)) in daemon.jobs[0].steps)
    job.close()
    assert daemon.jobs[0].steps[-1] == (0, len(loader))


def test_the_last_step_with_workers(daemon: FakeHintsd) -> None:
    data = Numbers()
    loader = DataLoader(data, batch_size=10, num_workers=2, prefetch_factor=2)
    job = hintsd.attach(loader, paths=data.paths, epochs=2)
    assert sum(1 for _ in loader) == 11
    daemon.wait(lambda: daemon.jobs and (0, 6) in daemon.jobs[0].steps)  # 4 may be with workers
    iterator = iter(loader)
    next(iterator)
    daemon.wait(lambda: (1, 0) in daemon.jobs[0].steps)
    del iterator
    job.close()
    assert daemon.jobs[0].steps[-1] == (1, 0), "an epoch that was left early is not all read"


def test_a_job_whose_workers_have_all_is_read_when_it_ends(daemon: FakeHintsd) -> None:
    data = Numbers()
    loader = DataLoader(data, batch_size=10, num_workers=2, prefetch_factor=2)
    job = hintsd.attach(loader, paths=data.paths, epochs=2)
    for _ in range(2):
        assert sum(1 for _ in loader) == 11
    daemon.wait(lambda: daemon.jobs and (1, 6) in daemon.jobs[0].steps)
    assert daemon.jobs[0].steps[-1] == (1, 6)
    job.close()
    assert daemon.jobs[0].steps[-1] == (1, 11)


def test_steps_of_uneven_batches_are_samples(daemon: FakeHintsd) -> None:
    data = Numbers()
    random.seed(5)
    loader = DataLoader(data, batch_sampler=Buckets(data))
    hintsd.attach(loader, paths=data.paths, copy_sampler=True)
    sizes = [len(batch) for batch in loader]
    last = (0, sum(sizes))
    daemon.wait(lambda: daemon.jobs and daemon.jobs[0].steps[-1:] == [last])
    assert daemon.jobs[0].orders[0][1].batch_size == 1


def test_a_resumed_distributed_run_keeps_its_epoch_numbers(daemon: FakeHintsd) -> None:
    data = Numbers()
    sampler: DistributedSampler[int] = DistributedSampler(data, num_replicas=2, rank=0)
    loader = DataLoader(data, sampler=sampler)
    hintsd.attach(loader, paths=data.paths)
    sampler.set_epoch(30)
    read = [index for batch in loader for index in _as_list(batch)]
    daemon.wait(lambda: daemon.jobs and daemon.jobs[0].orders)
    epoch, sequence = daemon.jobs[0].sequences()[0]
    assert (epoch, sequence.tolist()) == (30, read)


def test_a_shared_order_when_set_epoch_is_forgotten(daemon: FakeHintsd) -> None:
    data = Numbers()
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    job = hintsd.attach(loader, paths=data.paths)
    with pytest.warns(RuntimeWarning, match="set_epoch .* was not called") as caught:
        read = [[index for batch in loader for index in _as_list(batch)] for _ in range(2)]
    assert len(caught) == 1
    assert read[0] == read[1]
    daemon.wait(lambda: daemon.jobs and (1 in dict(daemon.jobs[0].sequences())))
    assert dict(daemon.jobs[0].sequences())[1].tolist() == read[1]
    job.close()


def test_an_epoch_that_is_left_early(daemon: FakeHintsd) -> None:
    data = Numbers()
    loader = DataLoader(data, shuffle=True, batch_size=5, generator=_seeded())
    hintsd.attach(loader, paths=data.paths)
    next(iter(loader))
    read = [index for batch in loader for index in _as_list(batch)]
    daemon.wait(lambda: daemon.jobs and (1 in dict(daemon.jobs[0].sequences())))
    assert dict(daemon.jobs[0].sequences())[1].tolist() == read


# The loader


def test_the_loader_keeps_its_looks(daemon: FakeHintsd) -> None:
    data = Numbers()
    sampler = Lazy(data)
    loader = DataLoader(data, sampler=sampler, batch_size=8)
    hintsd.attach(loader, paths=data.paths)
    assert loader.sampler is sampler
    assert type(loader.batch_sampler) is BatchSampler
    stand_in = _inner_sampler(loader)
    assert isinstance(stand_in, Lazy)
    stand_in.passes = 5
    assert sampler.passes == 5
    assert stand_in.data is data
    assert (len(loader), len(stand_in), repr(stand_in)) == (7, 50, repr(sampler))
    assert not hasattr(stand_in, "set_epoch")


def test_copies_of_the_loader_are_plain(daemon: FakeHintsd) -> None:
    data = range(20)
    loader: DataLoader[int] = DataLoader(data, shuffle=True, batch_size=8)  # type: ignore[arg-type]  # it will do
    hintsd.attach(loader, paths=[f"/data/{i}" for i in data])
    for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(_inner_sampler(twin)) is RandomSampler
        assert len(torch.cat(list(twin))) == 20


def test_attaching_again(daemon: FakeHintsd) -> None:
    data = Numbers()
    loader = DataLoader(data, shuffle=True)
    job = hintsd.attach(loader, paths=data.paths)
    assert hintsd.attach(loader, paths=data.paths) is job
    outer: Any = loader.batch_sampler
    outer.sampler = SequentialSampler(data)  # as frameworks do
    again = hintsd.attach(loader, paths=data.paths)
    assert again is not job
    assert job.is_over
    again.close()
    third = hintsd.attach(loader, paths=data.paths)
    assert not third.is_over
    assert torch.cat(list(loader)).tolist() == list(range(LENGTH))
    daemon.wait(lambda: daemon.jobs[-1].orders)
    assert [len(told.orders) for told in daemon.jobs] == [0, 0, 1]


def test_a_closed_job_leaves_the_loader_alone(daemon: FakeHintsd) -> None:
    data = Numbers()
    loader = DataLoader(data, shuffle=True)
    hintsd.attach(loader, paths=data.paths).close()
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(LENGTH))
    assert not daemon.jobs[0].orders


def test_the_loaders_end_is_the_jobs(daemon: FakeHintsd) -> None:
    data = Numbers()
    loader = DataLoader(data, batch_size=None, sampler=Lazy(data))  # the loader holds the stand-in
    hintsd.attach(loader, paths=data.paths, copy_sampler=True)
    daemon.wait(lambda: daemon.jobs)
    del loader
    gc.collect()
    daemon.wait(lambda: daemon.jobs[0].is_closed)


def test_a_hintsd_killed_within_an_epoch(daemon: FakeHintsd) -> None:
    data = Numbers()
    loader = DataLoader(data, shuffle=True, batch_size=5, num_workers=2)
    hintsd.attach(loader, paths=data.paths)
    iterator = iter(loader)
    read = _as_list(next(iterator))
    daemon.wait(lambda: daemon.jobs and daemon.jobs[0].orders)
    told = daemon.jobs[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        daemon.stop()
        told.orders.clear()
        for _ in range(4):
            read += _as_list(next(iterator))
        daemon.start()
        daemon.wait(lambda: told.resumed and told.orders)
    for batch in iterator:
        read += _as_list(batch)
    assert [(epoch, order.tolist()) for epoch, order in told.sequences()] == [(0, read)]


# What cannot be hinted


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class _Uncopyable(Lazy):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


class _Endless(Sampler[int]):
    def __init__(self, data: Numbers) -> None:
        self.data = data

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


class _Collective(Lazy):
    def __iter__(self) -> Iterator[int]:
        torch.distributed.broadcast(torch.zeros(1), 0)
        return iter(range(4))


def _only_warning(loader: DataLoader[Any], pattern: str, **arguments: Any) -> None:
    """Attached and read, there is one warning, and then no job."""
    jobs = []
    with pytest.warns(RuntimeWarning, match=pattern) as caught:
        jobs.append(_attach_and_read(loader, **arguments))
    assert len(caught) == 1
    thread = link_of(jobs[0])._thread
    thread.join(10) if thread.ident else None
    assert jobs[0].is_over


def _attach_and_read(loader: DataLoader[Any], **arguments: Any) -> hintsd.Job:
    job = hintsd.attach(loader, **arguments)
    iterator = iter(loader)
    next(iterator), next(iterator)
    return job


def test_an_unknown_dataset_leaves_the_loader_untouched() -> None:
    data = Numbers()
    loader = DataLoader(data, shuffle=True)
    _only_warning(loader, "which files a Numbers reads is not known")
    assert type(_inner_sampler(loader)) is RandomSampler


@pytest.mark.claim("P2")
def test_a_directory_that_is_no_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(warning, "_warned", set())
    data = Numbers()
    loader = DataLoader(data, shuffle=True)
    _only_warning(loader, "is not on a fusecache mount", paths=data.paths)
    assert type(_inner_sampler(loader)) is RandomSampler


@pytest.mark.claim("P2")
def test_two_directories_that_are_no_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(warning, "_warned", set())
    for name in ("one", "two"):
        paths = [f"/data/{name}/{i}" for i in range(LENGTH)]
        loader = DataLoader(Numbers(), shuffle=True)
        _only_warning(loader, f"/data/{name} is not on a fusecache mount", paths=paths)


def test_an_iterable_dataset() -> None:
    _only_warning(DataLoader(_Stream()), "IterableDataset")


@pytest.mark.parametrize("sampler", [_Uncopyable, _Endless])
def test_a_sampler_that_cannot_be_read(sampler: Any) -> None:
    data = Numbers()
    loader = DataLoader(data, sampler=sampler(data))
    _only_warning(loader, f"the order of {sampler.__name__}", paths=data.paths)


def test_a_sampler_that_communicates(tmp_path: Path) -> None:
    data = Numbers()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        loader = DataLoader(data, sampler=_Collective(data))
        _only_warning(
            loader, "communicates with other processes", paths=data.paths, copy_sampler=True
        )
    finally:
        torch.distributed.destroy_process_group()


class _Outside(Sampler[int]):
    """Its order depends on what no copy of it has: how often anybody has iterated it."""

    passes = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        _Outside.passes += 1
        return iter(np.random.default_rng(_Outside.passes).permutation(LENGTH).tolist())


@pytest.mark.claim("P3")
def test_a_sampler_of_unknown_code_is_not_run_unasked(daemon: FakeHintsd) -> None:
    data = Numbers()
    _Outside.passes = 0
    loader = DataLoader(data, sampler=_Outside())
    _only_warning(loader, "cannot be told without reading it", paths=data.paths)
    assert _Outside.passes == 1
    assert not daemon.jobs


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"epochs": "3"}, {"paths": ["/a"]}, {"paths": "/a"}, {"paths": [0]}]
)
def test_arguments_without_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        hintsd.attach(DataLoader(Numbers()), **wrong)


# Files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    for name in ("cat/1.jpg", "cat/2.PNG", "dog/a/3.jpg", "dog/4.jpg", "dog/notes.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def _told(daemon: FakeHintsd, dataset: Any) -> dict[str, Any]:
    hintsd.attach(DataLoader(dataset)).close()
    return daemon.jobs[-1].job


def _no_loading(path: str) -> None:
    raise AssertionError(path)


def test_an_image_folder(daemon: FakeHintsd, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree.parent)
    for root in (tree, f"{tree}/", "./set", "set/../set"):
        job = _told(daemon, ImageFolder(root))
        assert job["path"] == bytes(tree)
        assert job["files"]["rule"] == "imagefolder"
        assert ".webp" in job["files"]["extensions"]
        assert job["check"] == {
            "count": 4,
            "samples": [
                [0, b"cat/1.jpg"],
                [1, b"cat/2.PNG"],
                [2, b"dog/4.jpg"],
                [3, b"dog/a/3.jpg"],
            ],
        }


def test_a_dataset_folder_with_one_extension(daemon: FakeHintsd, tree: Path) -> None:
    dataset = DatasetFolder(str(tree), _no_loading, extensions=".txt", allow_empty=True)
    job = _told(daemon, dataset)
    assert job["files"] == {"rule": "imagefolder", "extensions": [".txt"], "allow_empty": True}
    assert job["check"] == {"count": 1, "samples": [[0, b"dog/notes.txt"]]}


def test_samples_that_the_rule_does_not_find_are_listed(daemon: FakeHintsd, tree: Path) -> None:
    chosen = ImageFolder(tree, is_valid_file=lambda path: path.endswith("3.jpg") or "cat" in path)
    assert _told(daemon, chosen)["files"]["paths"] == b"cat/1.jpg\0cat/2.PNG\0dog/a/3.jpg"

    class Own(ImageFolder):  # type: ignore[misc]  # torchvision has no types
        def find_classes(self, directory: Any) -> Any:
            return ["dog"], {"dog": 0}

    assert _told(daemon, Own(tree))["files"]["paths"] == b"dog/4.jpg\0dog/a/3.jpg"


def test_a_changed_folder_is_listed_when_the_rule_is_refused(
    daemon: FakeHintsd, tree: Path
) -> None:
    dataset = ImageFolder(tree)
    dataset.samples = dataset.samples[1:3]
    daemon.refuse = lambda job: "4 files" if job["files"]["rule"] == "imagefolder" else None
    job = hintsd.attach(DataLoader(dataset))
    daemon.wait(lambda: daemon.jobs)
    job.close()
    assert daemon.jobs[0].job["files"]["paths"] == b"cat/2.PNG\0dog/4.jpg"


def test_subsets_and_concatenations(daemon: FakeHintsd, tree: Path) -> None:
    whole = ImageFolder(tree)
    inner = Subset(Subset(whole, [3, 1, 0]), [2, 0])
    assert _told(daemon, inner)["files"]["paths"] == b"cat/1.jpg\0dog/a/3.jpg"
    other = ImageFolder(tree / "dog")
    job = _told(daemon, ConcatDataset([other, inner]))
    assert job["path"] == bytes(tree)
    assert job["files"]["paths"] == b"dog/a/3.jpg\0cat/1.jpg\0dog/a/3.jpg"


def test_a_concatenation_with_an_unknown_part(tree: Path) -> None:
    with pytest.warns(RuntimeWarning, match="Numbers"):
        assert hintsd.attach(DataLoader(ConcatDataset([ImageFolder(tree), Numbers()]))).is_over


@pytest.mark.parametrize(("replacement", "most"), [(True, 10.0), (False, 1.0)])
def test_the_weights_of_a_sampler_are_scores_told_once(
    daemon: FakeHintsd, replacement: bool, most: float
) -> None:
    data = Numbers(7)  # the last two of which it never draws
    weights = [1.0, 0.0, 4.0, 3.0, 2.0]
    sampler = WeightedRandomSampler(weights, 4 if not replacement else 25, replacement=replacement)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    with hintsd.attach(loader, paths=data.paths):
        for _ in range(2):
            list(loader)
        daemon.wait(lambda: daemon.jobs and daemon.jobs[0].scores)
        daemon.wait(lambda: len(daemon.jobs[0].orders) >= 2)
        (scores,) = daemon.jobs[0].scores
    uses = np.array([*weights, 0, 0]) * (25 if replacement else 4) / 10
    assert np.frombuffer(scores, "<f4").tolist() == np.minimum(uses, most).astype("f4").tolist()

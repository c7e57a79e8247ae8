"""attach and the loaders of other libraries: what is announced is what they read, and what they
save is what they would without us. The libraries themselves are used, not stand-ins for them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402  (it may be missing)
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate.data_loader import (  # type: ignore[import-untyped]  # no types
        prepare_data_loader,
        skip_first_batches,
    )
    from torchdata.stateful_dataloader import (  # type: ignore[import-untyped]  # no types
        StatefulDataLoader,
    )
    from torchdata.stateful_dataloader.sampler import (  # type: ignore[import-untyped]  # the same
        StatefulDistributedSampler,
    )

import hintsd  # noqa: E402
from tests.support.fake_hintsd import FakeHintsd  # noqa: E402

LENGTH = 103
EPOCHS = 3

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


@pytest.fixture(autouse=True)
def daemon(fake_hintsd: FakeHintsd) -> FakeHintsd:
    return fake_hintsd


class Numbers(Dataset[int]):
    """Sample i is i, so a batch shows its indices."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: Any) -> int:
        return int(index)


PATHS = [f"/data/set/{i}" for i in range(LENGTH)]


def _seeded(seed: int = 4) -> Any:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def _indices(batch: Any) -> list[int]:
    found: list[int] = torch.as_tensor(batch).reshape(-1).tolist()
    return found


# torchdata


class _Steps(Iterator[int]):
    def __init__(self) -> None:
        self.at, self.step = 0, int(torch.randint(1, 50, (1,)))

    def __next__(self) -> int:
        if self.at == 60:
            raise StopIteration
        self.at += 1
        return self.at * self.step % LENGTH

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.step = state["at"], state["step"]


class _Walk(Sampler[int]):
    """A sampler of unknown code, whose iterator tells and takes a state."""

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[int]:
        return _Steps()


STATEFUL: dict[str, Callable[[Numbers], dict[str, Any]]] = {
    "shuffle": lambda data: {"batch_size": 7, "shuffle": True},
    "shuffle, drop last": lambda data: {"batch_size": 7, "shuffle": True, "drop_last": True},
    "shuffle, generator": lambda data: {"batch_size": 7, "shuffle": True, "generator": _seeded()},
    "no batches": lambda data: {"batch_size": None, "shuffle": True},
    "sequential": lambda data: {"batch_size": 7},
    "distributed": lambda data: {
        "batch_size": 7,
        "sampler": StatefulDistributedSampler(data, num_replicas=2, rank=1),
    },
    "torch's sampler": lambda data: {
        "batch_size": 7,
        "sampler": RandomSampler(data, generator=_seeded()),
    },
    "unknown code": lambda data: {"batch_size": 7, "sampler": _Walk()},
}


def _stateful(
    kind: str, workers: int, daemon: FakeHintsd | None, copies: bool = False
) -> tuple[Any, hintsd.Job | None]:
    data = Numbers()
    loader: Any = StatefulDataLoader(data, num_workers=workers, **STATEFUL[kind](data))
    if daemon is None:
        return loader, None
    job = hintsd.attach(loader, paths=PATHS, copy_sampler=copies or kind == "unknown code")
    assert not job.is_over
    return loader, job


@pytest.mark.claim("P3")
@pytest.mark.filterwarnings("error:hintsd:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "workers", "copies"),
    [
        *((kind, 0, False) for kind in STATEFUL),
        *((kind, 2, False) for kind in ("shuffle, generator", "distributed", "unknown code")),
        *((kind, 0, True) for kind in STATEFUL),
    ],
)
def test_checkpoints_of_a_stateful_loader(
    daemon: FakeHintsd, kind: str, workers: int, copies: bool
) -> None:
    """What is read, saved, and read after a resume, is what it is without us; `copies`: also where
    copies of samplers are allowed that need none.
    """
    results: list[Any] = []
    for told in (None, daemon):
        torch.manual_seed(1)
        loader, job = _stateful(kind, workers, told, copies)
        read: list[list[list[int]]] = []
        states = [loader.state_dict()]
        for epoch in range(EPOCHS):
            if isinstance(loader.sampler, StatefulDistributedSampler):
                loader.sampler.set_epoch(epoch)
            read.append([])
            for place, batch in enumerate(loader):
                read[-1].append(_indices(batch))
                if place == 4 and epoch < 2:
                    states.append(loader.state_dict())
        states.append(loader.state_dict())
        if job is not None:
            _check_announced(daemon, job, read)
        for state in [states[0], states[2], states[-1]]:
            resumed, job = _stateful(kind, workers, told, copies)
            resumed.load_state_dict(copy.deepcopy(state))
            ahead = []
            for _ in range(2):
                ahead.append([_indices(batch) for batch in resumed])
                states.append(resumed.state_dict())
            if job is not None:
                _check_announced(daemon, job, ahead)
            read += ahead
        results.append((read, _plain(states), torch.get_rng_state().tolist()))
    plain, hinted = results
    assert hinted[0] == plain[0]
    assert pickle.dumps(hinted[1]) == pickle.dumps(plain[1])
    assert hinted[2] == plain[2]


def _plain(state: Any) -> Any:
    """`==` does not compare the states of generators."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_plain(value) for value in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state


def _check_announced(daemon: FakeHintsd, job: hintsd.Job, read: list[list[list[int]]]) -> None:
    """Each epoch's order ends with what was read of it. (One that is over soon may be left out.)"""
    orders = [[index for batch in batches for index in batch] for batches in read if batches]

    def told() -> Any:
        return next((told for told in daemon.jobs if told.name == job.name), None)

    def is_all_told() -> bool:
        if told() is None or told().orders[-1:] == [] or told().orders[-1][0] < len(orders) - 1:
            return False
        return bool(told().sequences()[-1][1].tolist()[-len(orders[-1]) :] == orders[-1])

    daemon.wait(is_all_told)
    last = told().orders[-1][0]
    before = last + 1 - len(orders)  # an epoch that was over when its state was saved
    assert 0 <= before <= 1
    for epoch, sequence in told().sequences():
        if epoch >= before:
            order, whole = orders[epoch - before], sequence.tolist()
            assert whole[len(whole) - len(order) :] == order


@pytest.mark.parametrize("kind", ["shuffle", "distributed"])
def test_the_place_of_a_resumed_reader(daemon: FakeHintsd, kind: str) -> None:
    loader, _ = _stateful(kind, 0, None)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    resumed, _ = _stateful(kind, 0, daemon)
    resumed.load_state_dict(state)
    next(iter(resumed))
    daemon.wait(lambda: daemon.jobs and daemon.jobs[0].steps)
    assert daemon.jobs[0].steps[0] == (0, 5)
    epoch, order = daemon.jobs[0].sequences()[0]
    assert (epoch, order[35:42].tolist()) == (0, _indices(next(iterator)))


# accelerate


def _prepared(loader: Any, rank: int, **settings: Any) -> Any:
    """As `accelerator.prepare(loader)` in one of two processes. (These would have agreed on the
    state of the sampler's generator.)"""
    return prepare_data_loader(loader, num_processes=2, process_index=rank, **settings)


def _loader(**settings: Any) -> Any:
    return DataLoader(Numbers(), batch_size=8, shuffle=True, **settings)


def _read(loader: Any, epochs: int = 2) -> list[list[list[int]]]:
    return [[_indices(batch) for batch in loader] for _ in range(epochs)]


PREPARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "even": ({}, {}),
    "uneven": ({}, {"even_batches": False}),
    "drop last": ({"drop_last": True}, {}),
    "split": ({}, {"split_batches": True}),
    "seedable": ({}, {"use_seedable_sampler": True}),
    "workers": ({"num_workers": 2}, {}),
}


@pytest.mark.claim("P4")
@pytest.mark.filterwarnings("error:hintsd:RuntimeWarning")
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", PREPARED)
def test_what_accelerate_gives_each_process(
    daemon: FakeHintsd, kind: str, rank: int, copies: bool
) -> None:
    of_loader, of_prepare = PREPARED[kind]
    torch.manual_seed(2)
    plain = _read(_prepared(_loader(**of_loader), rank, **of_prepare))
    torch.manual_seed(2)
    prepared = _prepared(_loader(**of_loader), rank, **of_prepare)
    job = hintsd.attach(prepared, paths=PATHS, copy_sampler=copies)
    read = _read(prepared)
    assert read == plain
    _check_announced(daemon, job, read)
    daemon.wait(lambda: daemon.jobs[0].steps)
    assert max(daemon.jobs[0].steps) <= (1, len(read[1]))


@pytest.mark.claim("P4")
@pytest.mark.filterwarnings("error:hintsd:RuntimeWarning")
def test_an_epoch_whose_first_batches_accelerate_skips(daemon: FakeHintsd) -> None:
    prepared = _prepared(_loader(), 1)
    job = hintsd.attach(prepared, paths=PATHS)
    _check_announced(daemon, job, _read(skip_first_batches(prepared, 3), epochs=1))
    other = _prepared(_loader(), 1)
    shorter = skip_first_batches(other, 3)
    job = hintsd.attach(shorter, paths=PATHS)
    read = _read(shorter, epochs=1)
    _check_announced(daemon, job, read)
    assert len(daemon.jobs[-1].sequences()[0][1]) == len([i for batch in read[0] for i in batch])


@pytest.mark.claim("P9")
def test_a_loader_that_is_attached_before_it_is_prepared_for_two(daemon: FakeHintsd) -> None:
    """What it would announce is the order of all processes."""
    loader = _loader()
    job = hintsd.attach(loader, paths=PATHS)
    daemon.wait(lambda: daemon.jobs)  # else there would be none to end
    prepared = _prepared(loader, 0)
    with pytest.warns(RuntimeWarning, match="what accelerator.prepare returned") as caught:
        read = _read(prepared, epochs=1)
    assert caught[0].filename == __file__
    daemon.wait(lambda: daemon.jobs[0].is_closed)
    daemon.wait(lambda: "what accelerator.prepare returned" in str(job))
    assert not daemon.jobs[0].orders
    again = hintsd.attach(prepared, paths=PATHS)
    assert not again.is_over
    read = _read(prepared, epochs=1)
    _check_announced(daemon, again, read)


@pytest.mark.claim("P4")
@pytest.mark.filterwarnings("error:hintsd:RuntimeWarning")
def test_a_loader_that_is_attached_before_it_is_prepared_for_one(daemon: FakeHintsd) -> None:
    loader = _loader()
    job = hintsd.attach(loader, paths=PATHS)
    prepared = prepare_data_loader(loader, num_processes=1, process_index=0)
    read = _read(prepared)
    _check_announced(daemon, job, read)
    assert hintsd.attach(prepared, paths=PATHS) is not job
    daemon.wait(lambda: job.is_over)
    assert [len(epoch) for epoch in _read(prepared)] == [13, 13]

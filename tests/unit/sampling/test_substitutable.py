"""hintsd.SubstitutableSampler, with DataLoaders and without: epochs, states, ranks, hints, bad
input."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import time
import warnings
from itertools import islice
from typing import Any

import numpy as np
import pytest

import hintsd
from hintsd import SubstitutableSampler
from tests.support.fake_hintsd import FakeHintsd

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402  (it may be missing)

from tests.unit.sampling.test_with_torch import (  # noqa: E402
    LENGTH,
    SETTINGS,
    Numbers,
    orders_of,
    tell_cached,
)

Heard = list[warnings.WarningMessage]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

BATCH = 4
WHOLE = list(range(LENGTH))


class Cache:
    """Other samples are cached at each question."""

    def __init__(self, seed: int = 0, length: int = LENGTH) -> None:
        self.rng, self.length, self.asked = np.random.default_rng(seed), length, 0

    def __call__(self) -> Any:
        self.asked += 1
        return self.rng.random(self.length) < 0.4


def make(cache: Any = None, **settings: Any) -> SubstitutableSampler:
    sampler = SubstitutableSampler(Numbers(), BATCH, **{"look_ahead": 3, **settings})
    if cache is not None:
        sampler.set_cached(cache)
    return sampler


def loaded(sampler: Any, settings: dict[str, Any], **more: Any) -> Any:
    return DataLoader(Numbers(), BATCH, sampler=sampler, **settings, **more)


def wait_for_order(daemon: FakeHintsd, epoch: int, order: list[int]) -> None:
    """It was told last, of this epoch."""
    daemon.wait(lambda: orders_of(daemon).get(epoch) == order)


def read(loader: Any) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


# ---- epochs --------------------------------------------------------------------------------------


def test_without_a_cache_it_is_a_seeded_shuffle(heard: Heard) -> None:
    """Nothing was asked for, so nothing is missing: no warning."""
    first, second = make(), make(look_ahead=0)
    epochs = [list(first), list(first)]
    assert [sorted(epoch) for epoch in epochs] == [WHOLE, WHOLE]
    assert epochs[0] != epochs[1]
    assert [list(second), list(second)] == epochs
    other = make(seed=1)
    other.set_epoch(1)
    assert (other.epoch, list(other) in epochs) == (1, False)
    assert (other.epoch, heard) == (2, [])


def test_what_is_cached_comes_earlier_and_each_once(heard: Heard) -> None:
    """And none is further from its place in the shuffle than the look-ahead."""
    plain, sampler, cached = list(make()), make(), np.arange(LENGTH) % 3 == 0
    sampler.set_cached(lambda: cached)
    order = list(sampler)
    assert sorted(order) == WHOLE
    place = {index: at for at, index in enumerate(plain)}
    drift = [at - place[index] for at, index in enumerate(order)]
    assert max(map(abs, drift)) < 3 * BATCH
    assert np.mean([drift[order.index(index)] for index in np.flatnonzero(cached).tolist()]) < -1
    expected = sorted((index for index in plain[:12] if cached[index]), key=place.__getitem__)
    assert order[: min(4, len(expected))] == expected[:4]
    assert heard == []


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_it_asks_a_bounded_number_of_times(batch: int) -> None:
    """Once in two batches of a short epoch, 65 times in any."""
    cache = Cache(length=2000)
    sampler = SubstitutableSampler(2000, batch)
    sampler.set_cached(cache)
    assert sorted(sampler) == list(range(2000))
    assert cache.asked == {1: 63, 4: 63, 64: 16}[batch]


def test_where_an_answer_comes_late_some_questions_are_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    asked = []

    def hangs() -> None:
        asked.append(now[0])
        now[0] += 0.5

    sampler = make(hangs)
    assert sorted(sampler) == WHOLE
    assert len(asked) == 1
    sampler = SubstitutableSampler(2000, BATCH)
    sampler.set_cached(hangs)
    list(sampler)
    assert len(asked) == 1 + 7  # of 63


# ---- in a DataLoader -----------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("settings", [*SETTINGS, {"num_workers": 2, "prefetch_factor": 4}])
def test_a_state_within_an_epoch_leaves_exactly_what_was_not_read(
    heard: Heard, settings: dict[str, Any], drop_last: bool
) -> None:
    """Another cache then; what workers held is read. The epochs behind it are the same sets."""
    for batches in (1, 5, 13, 14):
        sampler = make(Cache(1))
        head, epoch = list[int](), iter(loaded(sampler, settings, drop_last=drop_last))
        for batch in islice(epoch, batches):
            head += batch.tolist()
            state = copy.deepcopy(sampler.state_dict())
        del epoch
        resumed = make(Cache(2))
        resumed.load_state_dict(state)
        tail = read(loaded(resumed, settings if batches == 5 else {}))  # processes, once
        if len(head) < LENGTH - (drop_last and LENGTH % BATCH):
            assert sorted(head + tail) == WHOLE, batches
        else:  # the epoch was over
            assert sorted(tail) == WHOLE
            assert resumed.epoch == 2
    assert not [each for each in heard if "hintsd" in str(each.message)]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_state_of_an_epoch_that_was_left_or_is_over(settings: dict[str, Any]) -> None:
    sampler = make(Cache(1))
    loader = loaded(sampler, settings)
    head = list[int]()
    for batch in loader:
        head += batch.tolist()
        if len(head) == 3 * BATCH:
            break
    del batch
    state = sampler.state_dict()
    resumed = make(Cache(2))
    resumed.load_state_dict(state)
    assert sorted(head + list(resumed)) == WHOLE
    assert sorted(read(loader)) == WHOLE  # this one begins the next epoch
    assert sampler.epoch == 2
    state = sampler.state_dict()
    assert (state["epoch"], state["first"], state["beyond"]) == (2, 0, [])


def test_a_state_of_so_many_batches_or_of_what_was_given_out() -> None:
    """Of a loader that cannot be looked at; and without any."""
    sampler, resumed = make(Cache(1)), make()
    head = list(islice(iter(sampler), 10))
    resumed.load_state_dict(sampler.state_dict())
    assert sorted(head + list(resumed)) == WHOLE
    sampler, resumed = make(Cache(1)), make()
    batches = iter(loaded(sampler, {"num_workers": 2}))
    head = next(batches).tolist() + next(batches).tolist()
    next(batches)
    resumed.load_state_dict(sampler.state_dict(batches=2))
    assert sorted(head + list(resumed)) == WHOLE


def test_a_state_is_saved_twice_and_by_torch(tmp_path: Any) -> None:
    """A resumed epoch is left again; `len` is what is left."""
    sampler, head = make(Cache(1)), list[int]()
    for _ in range(3):
        batches = iter(loaded(sampler, {"num_workers": 1}))
        for batch in islice(batches, 3):
            head += batch.tolist()
        torch.save(sampler.state_dict(), tmp_path / "state")
        sampler = make(Cache(len(head)))
        sampler.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        assert len(sampler) == LENGTH - len(head)
    head += read(loaded(sampler, {}))
    assert sorted(head) == WHOLE
    assert len(sampler) == LENGTH


def test_set_epoch_keeps_a_resumed_epoch_of_that_number() -> None:
    sampler, resumed = make(Cache(1)), make()
    sampler.set_epoch(3)
    head = list(islice(iter(sampler), 8))
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(3)
    assert sorted(head + list(resumed)) == WHOLE
    resumed.set_epoch(3)
    assert sorted(resumed) == WHOLE


# ---- ranks ---------------------------------------------------------------------------------------


def test_ranks_read_each_sample_once_together_whatever_each_has_cached() -> None:
    ranks = [
        SubstitutableSampler(60, BATCH, look_ahead=3, num_replicas=2, rank=rank)
        for rank in range(2)
    ]
    for rank, sampler in enumerate(ranks):
        sampler.set_cached(Cache(rank, 60))
    for _ in range(2):
        shares = [list(sampler) for sampler in ranks]
        assert [len(share) for share in shares] == [30, 30]
        assert sorted(sum(shares, [])) == list(range(60))  # noqa: RUF017  (they are short)


def test_a_state_of_another_rank_is_taken_between_epochs_only(heard: Heard) -> None:
    first, second = (make(Cache(1), num_replicas=2, rank=rank) for rank in range(2))
    list(first)
    second.load_state_dict(first.state_dict())
    assert (second.epoch, heard) == (1, [])
    list(islice(iter(first), 5))
    second.load_state_dict(first.state_dict())
    assert second.epoch == 1
    assert "its rank is 0, not 1" in str(heard[0].message)


# ---- with hintsd ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error:hintsd:RuntimeWarning")
@pytest.mark.parametrize("settings", SETTINGS)
def test_attach_tells_the_order_that_is_read(
    fake_hintsd: FakeHintsd, settings: dict[str, Any]
) -> None:
    """What was told last of an epoch is what was read; each time all of it is told."""
    cached = np.arange(LENGTH) % 3 == 0
    tell_cached(fake_hintsd, cached)
    sampler = make()
    loader = loaded(sampler, settings)
    plain = [list(epoch) for epoch in [make()] * 2]
    with hintsd.attach(loader, paths=Numbers().paths) as job:
        fake_hintsd.wait(lambda: job.state == "hinted")
        for epoch in range(2):
            order = read(loader)
            assert order != plain[epoch]
            wait_for_order(fake_hintsd, epoch, order)
    (told,) = fake_hintsd.jobs
    assert {tuple(sorted(order)) for _, order in told.sequences()} == {tuple(WHOLE)}
    assert len(told.orders) > 2
    assert told.asked_staged == [True] * len(told.asked)


@pytest.mark.filterwarnings("error:hintsd:RuntimeWarning")
@pytest.mark.parametrize("is_old", [True, False])
def test_with_an_old_hintsd_each_epoch_is_told_once(fake_hintsd: FakeHintsd, is_old: bool) -> None:
    """It would begin a plan anew for each order. So it is where nothing is cached."""
    tell_cached(fake_hintsd, np.zeros(LENGTH, np.bool_) | is_old)
    fake_hintsd.tells_staged = not is_old
    sampler = make()
    loader = loaded(sampler, {})
    with hintsd.attach(loader, paths=Numbers().paths) as job:
        fake_hintsd.wait(lambda: job.state == "hinted")
        for epoch in range(2):
            order = read(loader)
            wait_for_order(fake_hintsd, epoch, order)
    assert [epoch for epoch, _ in fake_hintsd.jobs[0].orders] == [0, 1]
    assert (fake_hintsd.jobs[0].asked == []) == is_old


def test_a_hintsd_that_dies_leaves_the_rest_a_shuffle(
    fake_hintsd: FakeHintsd, heard: Heard
) -> None:
    """With one line; and each sample is read."""
    tell_cached(fake_hintsd, np.arange(LENGTH) % 3 == 0)
    loader = loaded(make(), {"num_workers": 1})
    order = list[int]()
    with hintsd.attach(loader, paths=Numbers().paths) as job:
        fake_hintsd.wait(lambda: job.state == "hinted")
        for batch in loader:
            order += batch.tolist()
            if len(order) == 2 * BATCH:
                fake_hintsd.stop()
                fake_hintsd.wait(lambda: job.state == "waiting")
        assert sorted(read(loader)) == WHOLE
    assert sorted(order) == WHOLE
    assert [str(each.message) for each in heard] == [
        "hintsd: the connection was lost; going on without hints until it is back"
    ]


def test_a_resumed_epoch_is_told_as_what_is_left(fake_hintsd: FakeHintsd) -> None:
    stopped, sampler = make(Cache(1)), make()
    head = list(islice(iter(stopped), 20))
    loader = loaded(sampler, {})
    with hintsd.attach(loader, paths=Numbers().paths):
        sampler.load_state_dict(stopped.state_dict())
        rest = read(loader)
        fake_hintsd.wait(lambda: fake_hintsd.jobs and orders_of(fake_hintsd) == {0: rest})
    assert sorted(head + rest) == WHOLE


def test_what_the_user_says_is_cached_wins(fake_hintsd: FakeHintsd) -> None:
    tell_cached(fake_hintsd, np.ones(LENGTH, np.bool_))
    cache = Cache()
    loader = loaded(make(cache), {})
    with hintsd.attach(loader, paths=Numbers().paths) as job:
        fake_hintsd.wait(lambda: job.state == "hinted")
        read(loader)
        assert fake_hintsd.jobs[0].asked == []
    assert cache.asked > 1


def test_an_attached_sampler_keeps_no_job_and_is_copied(fake_hintsd: FakeHintsd) -> None:
    sampler = make()
    loader = loaded(sampler, {})
    hintsd.attach(loader, paths=Numbers().paths)
    fake_hintsd.wait(lambda: fake_hintsd.jobs)
    batches = iter(loader)
    next(batches)
    assert sorted(pickle.loads(pickle.dumps(sampler))) == WHOLE
    del loader, batches
    gc.collect()
    fake_hintsd.wait(lambda: fake_hintsd.jobs[0].is_closed)


def test_an_older_hintsd_is_not_asked_what_is_staged(fake_hintsd: FakeHintsd) -> None:
    tell_cached(fake_hintsd, np.ones(LENGTH, np.bool_))
    fake_hintsd.tells_staged = False
    job = hintsd.connect("/data/set").order([WHOLE], paths=Numbers().paths)
    with job:
        fake_hintsd.wait(lambda: job.state == "hinted")
        assert job.cached(60.0) is not None
        assert job.cached(60.0, staged=True) is None
    assert fake_hintsd.jobs[0].asked_staged == [False]


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"batch_size": math.nan}, "batch_size must be an integer, not nan"),
        ({"batch_size": True}, "batch_size must be an integer, not True"),
        ({"look_ahead": -1}, "look_ahead must be at least 0, not -1"),
        ({"look_ahead": 2.5}, r"look_ahead must be an integer, not 2\.5"),
        ({"look_ahead": None}, "look_ahead must be an integer, not None"),
        ({"seed": "a"}, "seed must be an integer, not 'a'"),
        ({"num_replicas": 0}, "num_replicas must be at least 1, not 0"),
        ({"num_replicas": 2, "rank": 2}, "rank must be at most 1, not 2"),
        ({"dataset": 0}, "dataset must have 1 to 4294967294 samples, not 0"),
        ({"dataset": object()}, "dataset must be one with a length, or its length, not object"),
    ],
)
def test_what_makes_no_sense_is_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}$"):
        SubstitutableSampler(**{"dataset": 10, "batch_size": 2, **settings})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"version": 2}, "its version is 2, not 1"),
        ({"samples": 9}, "its samples is 9, not 53"),
        ({"seed": 9}, "its seed is 9, not 0"),
        ({"batch_size": 9}, "its batch_size is 9, not 4"),
        ({"look_ahead": 9}, "its look_ahead is 9, not 3"),
        ({"first": 99}, "its places are not those of such an epoch"),
        ({"beyond": [50]}, "its places are not those of such an epoch"),
        ({"epoch": -1}, "its epoch is -1"),
        ({"epoch": "x"}, "ValueError"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    heard: Heard, change: dict[str, Any], line: str
) -> None:
    stopped, sampler = make(Cache(1)), make()
    list(islice(iter(stopped), 9))
    sampler.load_state_dict({**stopped.state_dict(), **change})
    (said,) = heard
    assert str(said.message).startswith("hintsd: SubstitutableSampler: this state is not taken (")
    assert line in str(said.message)
    assert (sampler.epoch, list(sampler)) == (0, list(make()))


def test_a_dataset_of_another_length_is_one_line(heard: Heard) -> None:
    data = Numbers()
    sampler = SubstitutableSampler(data, BATCH)
    sampler.set_cached(Cache(1))
    list(sampler)
    data.length = 30
    sampler.set_cached(Cache(1, 30))
    assert sorted(sampler) == list(range(30))
    assert [str(each.message) for each in heard] == [
        "hintsd: SubstitutableSampler: the dataset has 30 samples now, and had 53; training goes on"
    ]


@pytest.mark.parametrize("cached", [lambda: 1 / 0, lambda: np.ones(9, np.bool_), lambda: [99]])
def test_what_is_cached_may_be_told_wrong(heard: Heard, cached: Any) -> None:
    """It is a shuffle then, with one line."""
    sampler = make(cached)
    assert list(sampler) == list(make())
    (said,) = heard
    assert "what is cached cannot be told" in str(said.message)


def test_a_hook_and_set_epoch_that_go_wrong_are_one_line_each(heard: Heard) -> None:
    sampler, told = make(Cache(1)), list[int]()
    remove = sampler.on_arranged(lambda epoch, indices: 1 / 0)
    sampler.on_arranged(lambda epoch, indices: told.append(epoch))
    sampler.set_epoch(-1)
    assert sorted(sampler) == WHOLE
    assert len(heard) == 2
    assert set(told) == {0}
    remove()
    list(sampler)
    assert (len(heard), set(told)) == (2, {0, 1})

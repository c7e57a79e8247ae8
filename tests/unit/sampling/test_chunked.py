"""hintsd.ChunkedSampler, with DataLoaders and without: chunks, states, ranks, hints, bad input."""

from __future__ import annotations

import copy
import gc
import pickle
from itertools import islice
from typing import Any

import numpy as np
import pytest

import hintsd
from hintsd import ChunkedSampler
from hintsd.sampling.chunks import Ring
from tests.support.fake_hintsd import FakeHintsd

torch = pytest.importorskip("torch")

from tests.unit.sampling.test_substitutable import (  # noqa: E402  (torch may be missing)
    BATCH,
    WHOLE,
    Heard,
    loaded,
    read,
    wait_for_order,
)
from tests.unit.sampling.test_with_torch import (  # noqa: E402
    LENGTH,
    SETTINGS,
    Numbers,
    orders_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

CHUNKS = 5
LONG = 300  # samples, of which half a chunk is more than four batches


class Choosing:
    """Takes any of the unread ones."""

    def __init__(self, seed: int = 0) -> None:
        self.rng, self.asked = np.random.default_rng(seed), list[list[int]]()

    def __call__(self, unread: list[int], chunks: int) -> int:
        self.asked.append(unread)
        return int(unread[self.rng.integers(len(unread))])


def make(choose: Any = None, samples: Any = None, **settings: Any) -> ChunkedSampler:
    data = Numbers() if samples is None else samples
    sampler = ChunkedSampler(data, BATCH, **{"chunks": CHUNKS, **settings})
    if choose is not None:
        sampler.set_next_chunk(choose)
    return sampler


def chunks_of(order: list[int], samples: int = LENGTH) -> list[int]:
    """The chunks in which these samples lie, each as often as it is begun."""
    ring = Ring(samples, CHUNKS, 0, 1, 0)
    place = {index: chunk for chunk in range(CHUNKS) for index in ring.share(chunk, 0).tolist()}
    walked = [place[index] for index in order]
    return [chunk for at, chunk in enumerate(walked) if at == 0 or walked[at - 1] != chunk]


# ---- epochs --------------------------------------------------------------------------------------


def test_without_hintsd_it_walks_the_ring_and_shuffles_each_chunk_anew(heard: Heard) -> None:
    """All jobs have the same chunks; nothing was asked for, so nothing is missing."""
    first, other = make(), make(seed=1)
    epochs = [list(first), list(first), list(other)]
    assert [sorted(epoch) for epoch in epochs] == [WHOLE] * 3
    assert [chunks_of(epoch) for epoch in epochs] == [[0, 1, 2, 3, 4]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [list(each) for each in [make()] * 2] == epochs[:2]
    skipping = make()
    skipping.set_epoch(1)
    assert (list(skipping), skipping.epoch) == (epochs[1], 2)
    assert heard == []


def test_what_is_chosen_is_read_next_and_an_epoch_goes_on_where_the_last_one_ended() -> None:
    asked = list[list[int]]()

    def choose(unread: list[int], chunks: int) -> int | None:
        asked.append(unread)
        assert chunks == CHUNKS
        return {1: 2, 3: 1}.get(len(asked))

    sampler = make(choose)
    assert chunks_of(list(sampler)) == [2, 3, 1, 4, 0]
    assert asked[:5] == [[0, 1, 2, 3, 4], [3, 4, 0, 1], [4, 0, 1], [4, 0], [0]]
    assert asked[5] == [1, 2, 3, 4, 0]
    assert chunks_of(list(sampler))[:3] == [1, 2, 3]


def test_the_next_chunk_is_chosen_when_half_of_one_is_left_and_the_next_epoch_is_no_other() -> None:
    """So it is where chunks are short, four batches ahead."""
    for samples, ahead in ((LONG, LONG // CHUNKS // 2), (LENGTH, 4 * BATCH)):
        choosing = Choosing()
        sampler = make(choosing, samples)
        drawn = 0
        for number, _ in enumerate(sampler):
            drawn = number + 1
            decided = len(choosing.asked) * samples / CHUNKS
            assert decided >= drawn + ahead - BATCH - 1
            assert decided <= drawn + ahead + samples / CHUNKS + 1
        assert drawn == samples


def test_what_changes_is_told_and_the_epoch_behind_it_too() -> None:
    told = dict[int, list[int]]()
    count = [0]

    def hear(epoch: int, indices: Any) -> None:
        told[epoch] = indices.tolist()
        count[0] += 1

    sampler = make(Choosing(3), LONG)
    sampler.on_arranged(hear)
    for epoch in range(4):
        told[epoch] = sampler.order_of_next_epoch().tolist()
        order = iter(sampler)
        first = next(order)
        told[epoch + 1] = sampler.order_of_epoch_behind().tolist()
        assert [first, *order] == told[epoch]
        assert sampler.order_of_next_epoch().tolist() == told[epoch + 1]
    assert [sorted(indices) for indices in told.values()] == [list(range(LONG))] * 5
    assert CHUNKS < count[0] <= 4 * 2 * CHUNKS


# ---- in a DataLoader -----------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("settings", [*SETTINGS, {"num_workers": 2, "prefetch_factor": 8}])
def test_a_state_within_an_epoch_leaves_exactly_what_was_not_read(
    heard: Heard, settings: dict[str, Any], drop_last: bool
) -> None:
    """Other chunks are chosen then; what workers held is read."""
    for batches in (1, 5, 13, 14):
        sampler = make(Choosing(1))
        head, epoch = list[int](), iter(loaded(sampler, settings, drop_last=drop_last))
        for batch in islice(epoch, batches):
            head += batch.tolist()
            state = copy.deepcopy(sampler.state_dict())
        del epoch
        resumed = make(Choosing(2))
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
    sampler = make(Choosing(1))
    loader = loaded(sampler, settings)
    head = list[int]()
    for batch in loader:
        head += batch.tolist()
        if len(head) == 3 * BATCH:
            break
    del batch
    resumed = make(Choosing(2))
    resumed.load_state_dict(sampler.state_dict())
    assert sorted(head + list(resumed)) == WHOLE
    last = chunks_of(read(loader))[-1]  # this one begins the next epoch
    assert sampler.epoch == 2
    state = sampler.state_dict()
    assert (state["epoch"], state["last"], state["begun"]) == (2, last, [])
    resumed = make()
    resumed.load_state_dict(state)
    order = list(resumed)
    assert (sorted(order), chunks_of(order)[0]) == (WHOLE, (last + 1) % CHUNKS)


def test_a_state_is_saved_twice_and_by_torch(tmp_path: Any) -> None:
    """A resumed epoch is left again; `len` is what is left."""
    sampler, head = make(Choosing(1)), list[int]()
    for _ in range(3):
        batches = iter(loaded(sampler, {"num_workers": 1}))
        for batch in islice(batches, 3):
            head += batch.tolist()
        torch.save(sampler.state_dict(), tmp_path / "state")
        sampler = make(Choosing(len(head)))
        sampler.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        assert len(sampler) == LENGTH - len(head)
    head += read(loaded(sampler, {}))
    assert sorted(head) == WHOLE
    assert len(sampler) == LENGTH


# ---- ranks ---------------------------------------------------------------------------------------


def test_ranks_read_each_sample_once_together_whatever_each_chooses() -> None:
    ranks = [make(Choosing(rank), 60, num_replicas=2, rank=rank) for rank in range(2)]
    for _ in range(3):
        shares = [list(sampler) for sampler in ranks]
        assert [len(share) for share in shares] == [30, 30]
        assert sorted(sum(shares, [])) == list(range(60))  # noqa: RUF017  (they are short)


def test_a_state_of_another_rank_is_taken_between_epochs_only(heard: Heard) -> None:
    first, second = (make(num_replicas=2, rank=rank) for rank in range(2))
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
    fake_hintsd.chooses = lambda unread: unread[len(unread) // 2]
    sampler = make()
    loader = loaded(sampler, settings)
    with hintsd.attach(loader, paths=Numbers().paths) as job:
        fake_hintsd.wait(lambda: job.state == "hinted")
        for epoch in range(3):
            order = read(loader)
            wait_for_order(fake_hintsd, epoch, order)
            behind = sampler.order_of_epoch_behind().tolist()
            wait_for_order(fake_hintsd, epoch + 1, behind)
    (told,) = fake_hintsd.jobs
    assert {tuple(sorted(order)) for _, order in told.sequences()} == {tuple(WHOLE)}
    assert told.walked[0] == ([0, 1, 2, 3, 4], CHUNKS)
    assert [len(unread) for unread, _ in told.walked[:10]] == [5, 4, 3, 2, 1] * 2


@pytest.mark.filterwarnings("error:hintsd:RuntimeWarning")
def test_an_older_hintsd_is_not_asked_and_told_one_order_of_each_epoch(
    fake_hintsd: FakeHintsd,
) -> None:
    loader = loaded(make(), {})
    with hintsd.attach(loader, paths=Numbers().paths) as job:
        fake_hintsd.wait(lambda: job.state == "hinted")
        for epoch in range(2):
            order = read(loader)
            assert chunks_of(order) == [0, 1, 2, 3, 4]
            wait_for_order(fake_hintsd, epoch, order)
        fake_hintsd.wait(lambda: 2 in orders_of(fake_hintsd))
    (told,) = fake_hintsd.jobs
    assert len({(epoch, tuple(order)) for epoch, order in told.sequences()}) == 3
    assert told.walked == []


def test_a_hintsd_that_dies_leaves_the_rest_to_the_ring(
    fake_hintsd: FakeHintsd, heard: Heard
) -> None:
    """With one line; and each sample is read."""
    fake_hintsd.chooses = lambda unread: unread[-1]
    loader = loaded(make(None, None), {"num_workers": 1, "prefetch_factor": 1})
    order = list[int]()
    with hintsd.attach(loader, paths=Numbers().paths) as job:
        fake_hintsd.wait(lambda: job.state == "hinted")
        for batch in loader:
            order += batch.tolist()
            if len(order) == 2 * BATCH:
                fake_hintsd.stop()
                fake_hintsd.wait(lambda: job.state == "waiting")
        assert chunks_of(order)[0] == 4
        assert sorted(read(loader)) == WHOLE
    assert sorted(order) == WHOLE
    assert [str(each.message) for each in heard] == [
        "hintsd: the connection was lost; going on without hints until it is back"
    ]


def test_a_resumed_epoch_is_told_as_what_is_left(fake_hintsd: FakeHintsd) -> None:
    stopped, sampler = make(Choosing(1)), make()
    head = list(islice(iter(stopped), 20))
    loader = loaded(sampler, {})
    with hintsd.attach(loader, paths=Numbers().paths):
        sampler.load_state_dict(stopped.state_dict())
        rest = read(loader)
        fake_hintsd.wait(lambda: fake_hintsd.jobs and orders_of(fake_hintsd).get(0) == rest)
    assert sorted(head + rest) == WHOLE


def test_what_the_user_chooses_wins(fake_hintsd: FakeHintsd) -> None:
    fake_hintsd.chooses = lambda unread: unread[0]
    choosing = Choosing()
    loader = loaded(make(choosing), {})
    with hintsd.attach(loader, paths=Numbers().paths) as job:
        fake_hintsd.wait(lambda: job.state == "hinted")
        read(loader)
        assert fake_hintsd.jobs[0].walked == []
    assert len(choosing.asked) >= CHUNKS


def test_an_attached_sampler_keeps_no_job_and_is_copied(fake_hintsd: FakeHintsd) -> None:
    fake_hintsd.chooses = lambda unread: unread[0]
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


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"chunks": 0}, "chunks must be at least 1, not 0"),
        ({"chunks": 101}, "chunks must be at most 100, not 101"),
        ({"chunks": 2.5}, r"chunks must be an integer, not 2\.5"),
        ({"seed": "a"}, "seed must be an integer, not 'a'"),
        ({"num_replicas": 2, "rank": 2}, "rank must be at most 1, not 2"),
        ({"dataset": 0}, "dataset must have 1 to 4294967294 samples, not 0"),
    ],
)
def test_what_makes_no_sense_is_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}$"):
        ChunkedSampler(**{"dataset": 10, "batch_size": 2, **settings})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"version": 2}, "its version is 2, not 1"),
        ({"samples": 9}, "its samples is 9, not 53"),
        ({"seed": 9}, "its seed is 9, not 0"),
        ({"chunks": 9}, "its chunks is 9, not 5"),
        ({"last": 5}, "its last chunk is 5"),
        ({"begun": [7]}, "its chunks are not those of such an epoch"),
        ({"begun": [1, 1]}, "its chunks are not those of such an epoch"),
        ({"read": 99}, "its reads are not those of such a chunk"),
        ({"epoch": -1}, "its epoch is -1"),
        ({"begun": None}, "TypeError"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    heard: Heard, change: dict[str, Any], line: str
) -> None:
    stopped, sampler = make(Choosing(1)), make()
    list(islice(iter(stopped), 9))
    sampler.load_state_dict({**stopped.state_dict(), **change})
    (said,) = heard
    assert str(said.message).startswith("hintsd: ChunkedSampler: this state is not taken (")
    assert line in str(said.message)
    assert (sampler.epoch, list(sampler)) == (0, list(make()))


def test_a_dataset_of_another_length_is_one_line(heard: Heard) -> None:
    """Even where it has fewer samples than chunks."""
    data = Numbers()
    sampler = make(Choosing(1), data)
    list(sampler)
    data.length = 3
    assert sorted(sampler) == [0, 1, 2]
    assert sorted(sampler) == [0, 1, 2]
    assert [str(each.message) for each in heard] == [
        "hintsd: ChunkedSampler: the dataset has 3 samples now, and had 53; training goes on"
    ]


@pytest.mark.parametrize("choose", [lambda unread, chunks: 1 / 0, lambda unread, chunks: 99])
def test_what_is_next_may_be_told_wrong(heard: Heard, choose: Any) -> None:
    """It is the ring's next one then, with one line."""
    assert list(make(choose)) == list(make())
    (said,) = heard
    assert "which chunk is next cannot be told" in str(said.message)

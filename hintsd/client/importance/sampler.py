"""ImportanceSampler: a sampler for a torch DataLoader, which draws an epoch before it is read.

    sampler = hintsd.ImportanceSampler(dataset, scheme="shade")
    loader = DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=4)
    for images, labels in loader:
        losses = F.cross_entropy(net(images), labels, reduction="none")
        sampler.weigh(losses).mean().backward()
        sampler.learn(losses)
    sampler.judge(accuracy)

It works with hintsd and without, with a mount and without. docs/IMPORTANCE.md says what to use
when.

INVARIANT: only the constructor raises; in a training all that is wrong is one warning.
INVARIANT: no generator but its own is drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hintsd.client.importance import ranks
from hintsd.client.importance.learning import Learning, OnScores, say
from hintsd.client.importance.losses import count_of, weighed
from hintsd.client.importance.report import Report, report_of
from hintsd.client.importance.shared import (
    added,
    as_arrays,
    as_tensors,
    length_now,
    length_of,
    number_of_epoch,
)
from hintsd.client.importance.upcoming import OnDrawn, Upcoming
from hintsd.client.iterators import drawing_iterator
from hintsd.orders import samplers
from hintsd.sampling.epochs import Drawing, Epoch
from hintsd.sampling.scores import Scores
from hintsd.sampling.settings import Settings

AT_ONCE: Final = 8192  # indices that become Python integers
VERSION: Final = 1


class ImportanceSampler:
    """Gives out the indices of an epoch, drawn by the losses of those before."""

    def __init__(
        self,
        dataset: Any,
        scheme: str = "shade",
        *,
        seed: int = 0,
        fraction: float = 0.7,
        h_share: float = 0.7,
        replacement: bool = True,
        repeat: float = 1.0,
        substitute: str = "none",
        coverage: int | None = None,
        compute_only: bool = False,
        unbiased: bool = False,
        draw_ahead: int = 0,
        warm_up: int = 1,
        batch_size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """`dataset`: what the loader reads, or its length.

        `scheme`: "shade" (ranks within a batch, drawn in proportion), "icache" (the part `fraction`
        of the samples, chosen by the loss), "loss" (drawn in proportion to the smoothed loss).
        `replacement=False`: shade and loss read `fraction` of the samples, each at most once.
        `warm_up`: epochs at the beginning that read every sample once.
        `repeat`: how often shade and loss read what is cached, while `judge` hears of progress.
        `substitute="low"`: icache reads, in place of samples that are neither on the H-list
        (`h_share`) nor cached, others that are cached. Both need attach with a hintsd, or
        `set_cached`.
        `coverage`: each sample is read at least once in so many epochs (icache, or
        `replacement=False`); at least 1 / fraction.
        `compute_only`: icache reads all, and `selected()` says what is to be computed (CIS).
        `unbiased`: `weigh` multiplies by 1 / (N p).
        `draw_ahead=1`: the epoch after is drawn when one begins, by scores one epoch older.
        `batch_size`: the loader's; None: found out. `num_replicas`, `rank`: of a distributed
        training; None: torch.distributed's, if it is initialised by now.

        8 bytes a sample, and 4 for each read of an epoch that is drawn. ValueError: an argument,
        which the line begins with.
        """
        told = ranks.replicas_and_rank()
        settings = Settings(
            scheme=scheme,
            seed=seed,
            fraction=fraction,
            h_share=h_share,
            replacement=replacement,
            repeat=repeat,
            substitute=substitute,
            coverage=coverage,
            compute_only=compute_only,
            unbiased=unbiased,
            draw_ahead=draw_ahead,
            warm_up=warm_up,
            batch_size=batch_size,
            num_replicas=told[0] if num_replicas is None else num_replicas,
            rank=told[1] if rank is None else rank,
        )
        self._settings = settings
        self._dataset = dataset
        self._drawing = Drawing(settings)
        self._learning = Learning(Scores(length_of(dataset)), self._drawing, settings.batch_size)
        self._upcoming = Upcoming(settings, self._drawing, self._learning)
        self._begun: Epoch | None = None
        """Of all ranks: the epoch that was begun last."""
        self._mine: Epoch | None = None
        """What this rank reads of it."""
        self._is_read = False

    # ---- a sampler -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """The epoch begins with the first index that is asked for."""
        mine = self._begin()
        order, pairing = mine.order, self._learning.pairing
        try:
            for start in range(mine.read, len(order), AT_ONCE):
                for index in order[start : start + AT_ONCE].tolist():
                    pairing.hand_out(order)
                    yield index
        finally:
            if pairing.order is order:
                self._is_read = False

    def __len__(self) -> int:
        """Indices of the epoch while they are given out; then those of the next one."""
        if self._is_read and self._mine is not None:
            return len(self._mine.order) - self._mine.read
        return self._upcoming.reads()

    @property
    def settings(self) -> Settings:
        """The constructor's arguments, as they hold."""
        return self._settings

    @property
    def epoch(self) -> int:
        """The number of the epoch that begins next."""
        return self._upcoming.number

    def set_epoch(self, epoch: int) -> None:
        """The epoch that begins next has this number: as of a DistributedSampler. Not needed."""
        if (number := number_of_epoch(epoch, say)) is not None:
            self._upcoming.begin_at(number)

    def order_of_next_epoch(self) -> npt.NDArray[Any]:
        """The indices that this rank reads in the epoch that begins next, drawn now if they are not
        yet: losses that come later count for the epoch after. Shape (reads,), read-only. In a
        distributed training every rank has to call it."""
        self._watch_length()
        mine = self._upcoming.share(self._upcoming.first())
        return mine.order[mine.read :]

    def drawn(self) -> list[tuple[int, npt.NDArray[Any]]]:
        """Number and indices, of this rank, of each epoch that is drawn and not begun."""
        mine = [self._upcoming.share(epoch) for epoch in self._upcoming.drawn]
        return [(epoch.number, epoch.order[epoch.read :]) for epoch in mine]

    # ---- in the training -------------------------------------------------------------------------

    def learn(self, losses: Any, indices: Any = None) -> None:
        """The losses of a batch, one a sample: a tensor on any device, or an array.

        Of the next batch, in the order in which the loader gives them out, if no `indices` say
        which samples they are of: so `learn` is called once for each batch. Waits for no GPU.
        """
        self._learning.learn(losses, indices)

    def weigh(self, losses: Any) -> Any:
        """`losses` of the batch that `learn` takes next, times 1 / (N p) if `unbiased`; of one that
        `compute_only` computes in part and that is handed over whole, times 0 for the others, and
        more for these, so that the mean is theirs. Else `losses` itself."""
        mine = self._mine
        if mine is None or (mine.weights is None and mine.computed is None):
            return losses
        try:
            turn = self._learning.pairing.turn(count_of(losses))
            factors = np.ones(turn.stop - turn.start, np.float32)
            if mine.weights is not None:
                factors = mine.weights[turn].copy()
            if mine.computed is not None:
                computed = mine.computed[turn]
                count = int(np.count_nonzero(computed))
                if count_of(losses) == count < len(computed):
                    factors = factors[computed]
                else:
                    share = np.float32(len(computed) / max(1, count))
                    factors *= computed.astype(np.float32) * share
            return weighed(losses, factors)
        except Exception as error:
            say(f"losses cannot be weighed ({error})")
            return losses

    def selected(self) -> npt.NDArray[np.bool_]:
        """Which samples of the batch whose losses come next are to be computed, shape (batch,):
        all, but for `compute_only`."""
        try:
            return self._learning.pairing.computed().copy()
        except Exception as error:
            say(f"no batch is there to be computed ({error})")
            return np.ones(0, np.bool_)

    def judge(self, accuracy: Any) -> None:
        """The accuracy on held-out samples, after an epoch: where it does not rise, nothing is
        repeated; after two judgements without a new best, or a fall by a tenth, one epoch is a
        plain shuffle (SHADE, 4.2.1). In a distributed training that of rank 0 counts.
        """
        try:
            is_taken = self._upcoming.fallback.judge(float(accuracy))
        except Exception:
            is_taken = False
        if not is_taken:
            say("judge was given no accuracy")

    def gather(self) -> None:
        """What all ranks have learned, for each of them; every rank has to call it. Each draw does:
        it is for a state that one rank saves for all."""
        self._upcoming.gather()

    def report(self) -> Report:
        """How often each sample was trained, and how old the scores are."""
        learning, begun = self._learning, self._begun
        learning.flush()
        return report_of(
            learning.scores,
            -1 if begun is None else begun.number,
            refused=learning.refused,
            h_list=self._drawing.h_count(learning.scores),
            shuffled=begun is not None and begun.is_shuffled,
            repeats=0 if begun is None else begun.repeats,
            substituted=0 if begun is None else begun.substituted,
        )

    # ---- for what keeps files --------------------------------------------------------------------

    def set_cached(self, cached: Callable[[], Any], *, is_offer: bool = False) -> None:
        """`cached()` tells which samples are cached, a mask of shape (samples,) or indices, or
        None; it is called at each draw. Of a distributed training all ranks' counts together, as
        far as they can exchange it. `is_offer`: attach's, which is asked where no other was set,
        and the draw needs it.
        """
        self._upcoming.ask(cached, is_offer=is_offer)

    def expected_reads(self) -> npt.NDArray[np.float64]:
        """Of each sample in an epoch that is drawn by the scores that there are now, of all ranks:
        shape (samples,)."""
        self._learning.flush()
        number = max(self.epoch + len(self._upcoming.drawn), self._settings.warm_up)
        return self._drawing.expected(self._learning.scores, number)

    def h_list(self) -> npt.NDArray[np.int64]:
        """iCACHE's H-list: of the samples with a score the `h_share` most important, ascending."""
        self._learning.flush()
        return self._drawing.h_list(self._learning.scores)

    def on_drawn(self, hook: OnDrawn) -> Callable[[], None]:
        """`hook(epoch, indices)` is called when an epoch is drawn, with what this rank reads. Call
        what is returned to end that."""
        return added(self._upcoming.hooks, hook)

    def on_scores(self, hook: OnScores) -> Callable[[], None]:
        """`hook(epoch, indices, values)` is called with the new scores of each batch, and at an
        epoch's end with those of other ranks. Call what is returned to end that."""
        return added(self._learning.hooks, hook)

    # ---- saved and resumed -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed training needs to draw what this one would have drawn, and to read
        what is not trained of this epoch (where `learn` is called): tensors, if torch is there."""
        learning = self._learning
        learning.flush()
        begun = self._begun
        if begun is not None:
            pairing = learning.pairing
            if pairing.left == 0:
                begun = None
            else:
                begun = replace(begun, read=pairing.paired * self._settings.num_replicas)
        state = {
            "version": VERSION,
            "rank": self._settings.rank,
            "scheme": self._settings.scheme,
            "scores": learning.scores.state(),
            "upcoming": self._upcoming.state(begun),
        }
        return as_tensors(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave, of a sampler with the same arguments."""
        try:
            told = as_arrays(state)
            if told["version"] != VERSION:
                raise ValueError(f"it is of version {told['version']}")
            if told["scheme"] != self._settings.scheme:
                raise ValueError(f"its scheme is {told['scheme']}")
            scores = Scores(0)
            scores.load(told["scores"], is_own=False)  # raises before anything is changed
            if len(scores) != len(self._learning.scores):
                raise ValueError(f"it has {len(scores)} samples")
            self._upcoming.load(told["upcoming"])
            self._learning.end()
            self._learning.scores.load(told["scores"], is_own=told["rank"] == self._settings.rank)
            self._begun, self._mine, self._is_read = None, None, False
        except Exception as error:
            say(f"this state is not taken ({type(error).__name__}: {error})")

    # ---- within ----------------------------------------------------------------------------------

    def _begin(self) -> Epoch:
        """What this rank reads of the epoch that begins now."""
        self._watch_length()
        self._look_for_missing()
        self._begun = self._upcoming.take()
        self._upcoming.draw_ahead()
        mine = self._mine = self._upcoming.share(self._begun)
        self._is_read = True
        self._learning.begin(mine.number)
        self._learning.pairing.begin(mine.order, mine.computed, mine.read)
        self._look_at_loader()
        return mine

    def _look_at_loader(self) -> None:
        """Whether losses will come in the order of the draw, in which batches."""
        reader = drawing_iterator()
        batching: Any = getattr(reader, "_index_sampler", None)
        if getattr(reader, "_num_workers", 0) and not getattr(reader, "_in_order", True):
            self._learning.refuse_pairing("in_order=False gives out batches in any order")
        elif batching is not None and samplers.is_rebatching(batching):
            self._learning.refuse_pairing("each process gets a part of the batches")
        elif batching is not None and samplers.is_plain_batching(batching):
            self._learning.pairing.batch(batching.batch_size, batching.drop_last)

    def _look_for_missing(self) -> None:
        """A warning where the epoch before was read and its losses did not come."""
        if self._begun is None or self._mine is None:
            return
        pairing, number = self._learning.pairing, self._begun.number
        if pairing.handed < len(pairing.order) or not self._learning.pairs:
            return  # it was left early; or that was said
        if pairing.paired == self._mine.read:
            say(f"no losses of epoch {number} came: learn was not called")
        elif pairing.left >= (pairing.batch_size or 1):
            say(
                f"the losses of {pairing.left} samples of epoch {number} did not come: unless it "
                "was left early, learn was not called for each batch, and some scores are other "
                "samples' (learn(losses, indices=…) pairs them in any case)"
            )

    def _watch_length(self) -> None:
        scores = self._learning.scores
        length = length_now(self._dataset, len(scores), say)
        if length != len(scores):
            self._learning.flush()
            scores.resize(length)
            self._upcoming.forget()

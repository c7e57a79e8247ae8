"""Jobs: how a training script says by hand which order it reads a dataset in.

    job = hintsd.connect("/data/imagenet").shuffle(seed=0, epochs=90, batch_size=256,
              sampler="distributed", world_size=8, rank=3, drop_last=True)

`hintsd.attach(loader)` (loaders.py) reads the same from a DataLoader. A script without a hintsd, or
with a directory that is not on a mount, goes on unharmed: one RuntimeWarning, at most a second
once, no exception. Only arguments that make no sense, or are of the wrong type, are ValueErrors,
hintsd or not: one line that begins with the argument's name.
"""

from __future__ import annotations

import itertools
import operator
import os
import reprlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, Optional, Union

import numpy as np
import numpy.typing as npt

from hintsd.client.figures import Number, ask_figures
from hintsd.client.finding import Unhinted
from hintsd.client.link import Link, Listener, State, Teller, Ways
from hintsd.client.warning import warn_once
from hintsd.orders.extensions import IMG_EXTENSIONS
from hintsd.orders.hint import Check, Files, Hint
from hintsd.orders.spec import LoaderDraws, OrderSpec

CLOSE_TIMEOUT_S: Final = 1.0
ASKED_TIMEOUT_S: Final = 0.5

Path = Union[str, "os.PathLike[str]"]
Ahead = Callable[[int], Optional[OrderSpec]]
Orders = Union[Iterable[npt.ArrayLike], Callable[[int], npt.ArrayLike]]


class Job:
    """A running hint. Ends with `close`, the `with` block, its last reference, or the process.

    In a forked child (a DataLoader worker) every method does nothing.
    """

    def __init__(
        self,
        hint: Hint | None,
        ways: Ways = (),
        ahead: Ahead | None = None,
        *,
        why: str = "see the warning",
        teller: Teller | None = None,
    ) -> None:
        """`hint` None: a job without, and `why`; else `ways` to say its files. `ahead` gives the
        order of an epoch; it is called once for each, in turn, when the epoch before it begins;
        None from it: no more. `teller`: what is spoken to instead of hintsd.
        """
        told = hint or Hint(b"")
        self._link: Teller = teller or Link(told, ways)
        self._path = os.fsdecode(told.path)
        self._epoch = self._next_epoch = told.start_epoch
        self._batch = told.start_batch
        self._ahead = ahead
        if hint is None:
            self._link.leave(why)
            return
        self._look_ahead()
        weakref.finalize(self, self._link.stop).atexit = False  # link.py sees to that
        self._link.start()

    @property
    def name(self) -> str | None:
        """What hintsd calls it (`hintsd status`); None while no hintsd has accepted it."""
        return self._link.job

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or will never be hinted (see the warning)."""
        return self._link.is_over

    @property
    def state(self) -> State:
        """`waiting`: no hintsd has it now, or hintsd has no mount (unmounted, its server gone):
        looked for again; or no epoch's order is announced yet (of `attach`: until it is read),
        or it was refused; `hinted`: it is planned for; `wrong`: hintsd has seen the reader follow
        another order, or read what was never announced, and plans nothing until it follows this
        one; `over`: see `is_over`. A second old at most. Printing the job gives the reason, too.
        Costs nothing, from any thread.
        """
        return self._link.state.shown[0]

    @property
    def why(self) -> str:
        """Why it is in its state, in one line; "": there is nothing to say."""
        return self._link.state.shown[1]

    def watch(self, listener: Listener) -> None:
        """Have `listener` told the state and why, now and when it changes; also `failed`: the job
        was given up. Called in another thread; it must not refer to the job."""
        self._link.state.watch(listener)

    def hear(self, timeout_s: float) -> bool:
        """Wait so long at most until hintsd has accepted the job, or a warning has said why not;
        whether that came."""
        return self.is_over or self._link.hear(timeout_s)

    def stats(self, timeout_s: float = ASKED_TIMEOUT_S) -> dict[str, Number]:
        """Its figures now, for a training's log: `epoch`, `index`, `not_late`, `late`, `unplanned`,
        `window_bytes`, `samples_per_s`, `predicted_stall_s`, as `hintsd status` explains them. {}:
        hintsd did not say so within `timeout_s` seconds, or is not there. Never a warning. Of
        samples within large files: `ranges` and `bytes` that were asked for.
        """
        own = self._link.figures()
        if own is not None:
            return {**own}
        name = self.name
        return {} if name is None else ask_figures(self._path, name, timeout_s)

    def __repr__(self) -> str:
        return f"<hintsd.Job {self._link}>"

    def step(self, batch_index: int, epoch: int | None = None) -> None:
        """The trainer is at this batch of its epoch, counted from 0. Optional; costs nothing.

        Without `epoch`, a smaller index than the one before means the next epoch.
        ValueError: one of them is no number of a batch or an epoch.
        """
        batch_index = whole_number("batch_index", batch_index, 0)
        if epoch is None:
            epoch = self._epoch + (batch_index < self._batch)
        else:
            epoch = whole_number("epoch", epoch, 0)
        is_new = epoch != self._epoch
        self._epoch, self._batch = epoch, batch_index
        self._link.step(epoch, batch_index)
        if is_new:
            self._look_ahead()

    def announce(self, epoch: int, spec: OrderSpec) -> None:
        """The order of this epoch, which begins now or later. It replaces what was told of it."""
        self._link.announce(epoch, spec)

    def score(
        self, uses: npt.ArrayLike, *, substituted: int | None = None, h_list: int | None = None
    ) -> None:
        """How often each index of the dataset is expected to be used in an epoch whose order is not
        announced yet (Σ = its samples): what is used most stays in RAM. It replaces what was told
        before. Shape (samples,), finite, 0 or more; else one warning, and what was told before
        holds. `substituted`, `h_list`: for `hintsd status`: reads of the epoch that stand for
        another sample's, and how many samples iCACHE's H-list has.
        """
        array = np.asarray(uses, np.float32)
        if array.ndim != 1 or not (np.isfinite(array).all() and (array >= 0).all()):
            warn_once("scores must be a row of finite numbers of 0 or more; the last ones hold")
            return
        told = {"uses": array.astype("<f4").tobytes(), "substituted": substituted, "h_list": h_list}
        self._link.score(told)

    def cached(
        self, timeout_s: float = ASKED_TIMEOUT_S, *, staged: bool = False
    ) -> npt.NDArray[np.bool_] | None:
        """Which samples of the dataset need no read of the origin now (on SSD, or kept in RAM;
        `staged`: or in RAM for a moment, for any job): shape (samples,). None: hintsd did not say
        so within `timeout_s` seconds, or is not there or too old, which is known at once. Never a
        warning.
        """
        asking = self._link.asking("cached", *(("staged",) if staged else ()))
        return None if asking is None else asking.cached(timeout_s, staged=staged)

    def next_chunk(
        self, unread: list[int], chunks: int, timeout_s: float = ASKED_TIMEOUT_S
    ) -> int | None:
        """Which of the `unread` ones of a ring of `chunks` a ChunkedSampler reads next, by where
        the other jobs of this dataset are; it counts as read from now on. None: as of `cached`.
        """
        asking = self._link.asking("chunks")
        return None if asking is None else asking.next_chunk(unread, chunks, timeout_s)

    def drawn(self, batches: int, epoch: int) -> None:
        """This epoch has so many batches, and all are drawn: where the reader is, if the job ends
        before its next step. Until then the last of them may be held by workers."""
        self._link.drawn(epoch, batches)

    def close(self, wait_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the job; waits at most `wait_s` for hintsd to confirm it. Again: nothing."""
        self._link.stop(wait_s)

    def give_up(self, why: str) -> None:
        """Close the job, with one warning at the line that made it: it cannot be hinted."""
        self._link.give_up(why)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look_ahead(self) -> None:
        while self._ahead is not None and self._next_epoch <= self._epoch + 1:
            spec = self._ahead(self._next_epoch)
            if spec is None:
                self._ahead = None
                return
            self._link.announce(self._next_epoch, spec)
            self._next_epoch += 1


class Connection:
    """A dataset whose reader is about to be described. Nothing is opened before that."""

    def __init__(self, path: Path) -> None:
        self._path = os.path.abspath(_path("path", path))

    def shuffle(
        self,
        *,
        seed: int = 0,
        epochs: int | None = None,
        batch_size: int = 1,
        sampler: Literal["random", "distributed", "sequential"] = "random",
        world_size: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
        start_epoch: int = 0,
        start_batch: int = 0,
        num_samples: int | None = None,
        replacement: bool = False,
        loader_draws: LoaderDraws = "every",
        workers: int = 0,
        prefetch_factor: int = 2,
        extensions: Sequence[str] = IMG_EXTENSIONS,
        paths: Sequence[Path] | None = None,
    ) -> Job:
        """The reader follows a stock sampler of torch.utils.data.

        `random`: RandomSampler with a generator of its own, seeded with `seed` before epoch 0
        (`num_samples`, `replacement`: its arguments), read to the end in each epoch. `loader_draws`
        tells whether the DataLoader has that generator, too (`DataLoader(…, shuffle=True,
        generator=g)`: "every", with persistent workers "first") or only the sampler ("never").
        `distributed`: DistributedSampler(num_replicas=world_size, rank=rank, seed=seed,
        drop_last=drop_last), `set_epoch` called before each epoch. For the others `drop_last` is
        the DataLoader's.

        Index i is file i of `torchvision.datasets.ImageFolder(path)`, with these `extensions`, or
        of `paths` (relative ones: to the connection's path), for any other dataset class.
        `workers`, `prefetch_factor`: of the DataLoader; they bound how far it reads ahead.
        ValueError: see the module.
        """
        order = stock_order(
            sampler=sampler,
            seed=seed,
            batch_size=batch_size,
            world_size=world_size,
            rank=rank,
            drop_last=drop_last,
            num_samples=num_samples,
            replacement=replacement,
            loader_draws=loader_draws,
        )
        hint, ways = self._describe(
            order, epochs, start_epoch, start_batch, workers, prefetch_factor, extensions, paths
        )
        return Job(hint, ways)

    def order(
        self,
        arrays: Orders,
        *,
        epochs: int | None = None,
        batch_size: int = 1,
        drop_last: bool = False,
        start_epoch: int = 0,
        start_batch: int = 0,
        workers: int = 0,
        prefetch_factor: int = 2,
        extensions: Sequence[str] = IMG_EXTENSIONS,
        paths: Sequence[Path] | None = None,
    ) -> Job:
        """The reader follows index arrays: one for each epoch, from `start_epoch` on, or a
        function of the epoch. The other arguments are those of `shuffle`.

        Each array is asked for when the epoch before it begins, in the caller's thread: here those
        of the first two epochs, and one in each `Job.step` that begins an epoch.
        """
        batch_size = whole_number("batch_size", batch_size, 1)
        drop_last = _boolean("drop_last", drop_last)
        hint, ways = self._describe(
            None, epochs, start_epoch, start_batch, workers, prefetch_factor, extensions, paths
        )
        if callable(arrays):
            given: Iterator[npt.ArrayLike] = map(arrays, itertools.count(start_epoch))
        elif isinstance(arrays, Iterable):
            given = iter(arrays)
        else:
            raise ValueError(f"arrays must be index arrays, or a function, not {_shown(arrays)}")

        def ahead(epoch: int) -> OrderSpec | None:
            if epochs is not None and epoch >= epochs:
                return None
            indices = next(given, None)
            if indices is None:
                return None
            return explicit_order(indices, epoch, batch_size, drop_last)

        return Job(hint, ways, ahead)

    def _describe(
        self,
        order: OrderSpec | None,
        epochs: int | None,
        start_epoch: int,
        start_batch: int,
        workers: int,
        prefetch_factor: int,
        extensions: Sequence[str],
        paths: Sequence[Path] | None,
    ) -> tuple[Hint, Ways]:
        epochs = None if epochs is None else whole_number("epochs", epochs, 1)
        start_epoch = whole_number("start_epoch", start_epoch, 0)
        if epochs is not None and start_epoch >= epochs:
            raise ValueError("start_epoch must lie below epochs")
        root = self._path
        if paths is None:
            files = folder_files(_extensions(extensions))
        else:
            tidy = tidy_paths(paths, root)
            root = common_root(tidy)
            files = listed_files(root, lambda: tidy)
        hint = Hint(
            path=os.fsencode(root),
            spec=order,
            epochs=epochs,
            start_epoch=start_epoch,
            start_batch=whole_number("start_batch", start_batch, 0),
            workers=whole_number("workers", workers, 0),
            prefetch_factor=whole_number("prefetch_factor", prefetch_factor, 0),
            name=program_name(),
        )
        return hint, (files,)


def stock_order(
    *,
    sampler: Literal["random", "distributed", "sequential"],
    seed: int,
    batch_size: int,
    world_size: int | None,
    rank: int | None,
    drop_last: bool,
    num_samples: int | None,
    replacement: bool,
    loader_draws: LoaderDraws,
) -> OrderSpec:
    """Of all files that hintsd finds. The arguments are `Connection.shuffle`'s. ValueError: see the
    module.
    """
    if sampler not in ("random", "distributed", "sequential"):
        raise ValueError(f"sampler {sampler!r} is none of random, distributed, sequential")
    is_distributed = sampler == "distributed"
    seed = whole_number("seed", seed)
    batch_size = whole_number("batch_size", batch_size)
    drop_last, replacement = _boolean("drop_last", drop_last), _boolean("replacement", replacement)
    world_size = None if world_size is None else whole_number("world_size", world_size)
    rank = None if rank is None else whole_number("rank", rank)
    num_samples = None if num_samples is None else whole_number("num_samples", num_samples)
    for name, number, alone in (("world_size", world_size, 1), ("rank", rank, 0)):
        # torch would ask the process group, which is the trainer's.
        if is_distributed and number is None:
            raise ValueError(f"{name} must be given for the distributed sampler")
        if not is_distributed and number not in (None, alone):
            raise ValueError(f"{name} is for the distributed sampler")
    for name, is_given in (("num_samples", num_samples is not None), ("replacement", replacement)):
        if is_given and sampler != "random":
            raise ValueError(f"{name} is for the random sampler")
    if seed and sampler == "sequential":
        raise ValueError("seed is for the random and the distributed sampler")
    return OrderSpec(
        sampler=sampler,
        seed=None if sampler == "sequential" else seed,
        loader_draws=loader_draws if sampler == "random" else "never",
        replacement=replacement,
        num_samples=num_samples,
        world_size=1 if world_size is None else world_size,
        rank=0 if rank is None else rank,
        drop_last=drop_last and is_distributed,
        batch_size=batch_size,
        batch_drop_last=drop_last and not is_distributed,
    )


def connect(path: Path) -> Connection:
    """The dataset directory `path`, somewhere in a fusecache mount."""
    return Connection(path)


def files(
    order: Iterable[Path] | Callable[[int], Iterable[Path]],
    *,
    epochs: int | None = None,
    batch_size: int = 1,
    workers: int = 0,
    prefetch_factor: int = 2,
) -> Job:
    """A reader of any kind (tf.data, DALI, a loop) reads these files in this order.

    `order`: paths, read in this order in each epoch; or a function that gives those of an epoch,
    counted from 0, among the paths of the first one. Such a function is asked for an epoch when the
    one before begins: say so with `job.step(0, epoch)`. The other arguments: `Connection.shuffle`.
    ValueError: it has no paths, or a later epoch has one that the first has not.
    """
    here = os.getcwd()
    connection = connect(here)
    if not callable(order):
        return connection.shuffle(
            sampler="sequential",
            paths=tidy_paths(list(order), here),
            epochs=epochs,
            batch_size=batch_size,
            workers=workers,
            prefetch_factor=prefetch_factor,
        )
    of_epoch, first = order, tidy_paths(list(order(0)), here)
    paths = sorted({*first})
    number = {path: index for index, path in enumerate(paths)}

    def indices(epoch: int) -> list[int]:
        told = tidy_paths(list(of_epoch(epoch)), here) if epoch else first
        strange = next((path for path in told if path not in number), None)
        if strange is not None:
            raise ValueError(f"order of epoch {epoch} has {strange}, which epoch 0 has not")
        return [number[path] for path in told]

    return connection.order(
        indices,
        paths=paths,
        epochs=epochs,
        batch_size=batch_size,
        workers=workers,
        prefetch_factor=prefetch_factor,
    )


def explicit_order(
    indices: npt.ArrayLike, epoch: int, batch_size: int, drop_last: bool, length: int | None = None
) -> OrderSpec:
    """One epoch's indices, in order; `length` of the dataset, if known. ValueError: not indices."""
    try:
        array = np.asarray(indices)
    except (TypeError, ValueError) as error:  # rows of several lengths; on a GPU
        raise ValueError(f"an order must be a row of integers: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise ValueError("an order must be a row of integers, not empty")
    array = array.astype(np.int64)  # a copy: the caller may shuffle its own again
    return OrderSpec(
        sampler="indices",
        length=int(array.max()) + 1 if length is None else length,
        indices=array,
        batch_size=batch_size,
        batch_drop_last=drop_last,
        start_epoch=epoch,
        epochs_known=1,
    )


def folder_files(
    extensions: list[str], check: Callable[[], Check] | None = None
) -> Callable[[], Files]:
    """Files by torchvision's rule. An empty class is no error here: torchvision has judged it."""
    return lambda: Files(extensions, check=None if check is None else check())


def listed_files(root: str, paths: Callable[[], Iterable[str]]) -> Callable[[], Files]:
    """Files by an explicit list of absolute, tidy paths below `root`, index by index."""

    def files() -> Files:
        prefix = root.rstrip("/") + "/"
        relative = []
        for path in paths():
            if not path.startswith(prefix):
                raise Unhinted(f"{path} is not below {root}; going on without hints")
            relative.append(path[len(prefix) :])
        return Files(paths=os.fsencode("\0".join(relative)))

    return files


def common_root(paths: Sequence[str]) -> str:
    """The deepest directory that all these absolute, tidy paths lie below."""
    if not paths:
        raise ValueError("paths must not be empty")
    # What the least and the greatest string have in common, all between them have, too.
    return os.path.commonpath([os.path.dirname(min(paths)), os.path.dirname(max(paths))])


def tidy_paths(paths: Sequence[Path], base: str) -> list[str]:
    """Of an argument `paths`, each as `absolute` gives it. ValueError: not paths."""
    if isinstance(paths, (str, bytes, os.PathLike)) or not isinstance(paths, Iterable):
        raise ValueError(f"paths must be a sequence of paths, not {_shown(paths)}")
    given = list(paths)
    try:
        return [absolute(path, base) for path in given]
    except TypeError:  # looked for afterwards: there may be millions
        for index, path in enumerate(given):
            _path(f"paths[{index}]", path)
        return [absolute(os.fsdecode(path), base) for path in given]


def absolute(path: Path, base: str) -> str:
    """As os.path.abspath, below the absolute `base`; fast for a path that is tidy already."""
    joined = os.path.join(base, path)
    return os.path.normpath(joined) if "//" in joined or "/." in joined else joined


def program_name() -> str:
    """The script's, for `hintsd status`."""
    return os.path.basename(sys.argv[0] if sys.argv else "") or "python"


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """`value` as an int, of whatever integer type it is."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, not {_shown(value)}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}")
    return number


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, not {_shown(value)}")
    return bool(value)


def _path(name: str, value: Any) -> str:
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise ValueError(f"{name} must be a path, not {_shown(value)}")
    return os.fsdecode(value)


def _extensions(value: str | Sequence[str]) -> list[str]:
    """One extension alone stands for itself, as in torchvision."""
    extensions = [value] if isinstance(value, str) else value
    if not isinstance(extensions, Iterable) or not all(isinstance(e, str) for e in extensions):
        raise ValueError(f"extensions must be strings like '.jpg', not {_shown(value)}")
    return list(extensions)


def _shown(value: object) -> str:
    """Short, and one line, whatever it is."""
    return " ".join(reprlib.repr(value).split())

"""`hintsd explain` in the trainer: which of its DataLoaders `hintsd run` would hint, and why not
the others. Told where the first of them is iterated; there the process ends.

INVARIANT: `explain` does not return, whatever fails. What is told of a loader is what `hintsd run`
does or warns of: `loaders.foretell` and `link.greet` decide.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final, NoReturn

from hintsd.client import summary
from hintsd.client.warning import Place, script_place

if TYPE_CHECKING:
    from hintsd.client.loaders import Readable

_MAKERS: Final = {
    *("accelerate", "lightning", "monai", "pytorch_lightning", "timm", "torchdata", "transformers"),
    *("multiprocessing", "pickle"),
}
"""Packages that make loaders for a script, whose line is looked for above them."""

_made: list[tuple[weakref.ref[Any], Place]] = []


def remember(loader: Any) -> None:
    """A loader that is being made."""
    _made.append((weakref.ref(loader), script_place(_MAKERS)))


def explain(iterated: Any) -> NoReturn:
    """Tell of each loader that is there, and end the process, with 0; by SIGINT, if that came."""
    is_interrupted = False
    try:
        _tell(iterated)
    except KeyboardInterrupt:
        is_interrupted = True
    except BaseException as error:
        line = f"what is left of its loaders could not be looked at: {error!r}"
        _note(len(_made) + 1, summary.WOULD_NOT_BE, line)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if is_interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)


def _tell(iterated: Any) -> None:
    known = [(loader, place) for ref, place in _made if (loader := ref()) is not None]
    # What has no batch_sampler was refused while it was made.
    loaders: list[tuple[Any, Place | None]] = [
        (loader, place) for loader, place in known if hasattr(loader, "batch_sampler")
    ]
    if all(loader is not iterated for loader, _ in loaders):
        loaders.append((iterated, None))
    for number, (loader, place) in enumerate(loaders):
        _note(number, *_told(loader, place))


def _note(number: int, state: str, line: str) -> None:
    if not summary.note(number, state, line):  # on another machine, say
        sys.stderr.write(f"hintsd: explain: {line}\n")


def _told(loader: Any, place: Place | None) -> tuple[str, str]:
    """The state to be noted, and the line."""
    shown = type(loader).__name__
    try:
        shown = f"{_place(place)}: {shown}({_contents(loader)})"
        state, outlook = _outlook(loader)
    except Exception as error:  # numpy is not there, say
        state, outlook = (
            summary.WOULD_NOT_BE,
            f"would not be hinted: {error!r}; see docs/LOADERS.md",
        )
    return state, f"{shown}: {outlook}"


def _outlook(loader: Any) -> tuple[str, str]:
    from hintsd.client import link
    from hintsd.client.client import Job
    from hintsd.client.finding import Unhinted
    from hintsd.client.known.extending import Needless, Unreadable
    from hintsd.client.loaders import REQUIRED_TIMEOUT_S, foretell
    from hintsd.client.ranges.advice import check_files, check_mounted
    from hintsd.client.ranges.rows import Ranges

    order = ""
    try:
        found = foretell(loader)
        if isinstance(found, Job):
            found.hear(REQUIRED_TIMEOUT_S)
            if found.name is None and found.state != "hinted":
                raise Unhinted(found.why or summary.UNANSWERED)
            return summary.WOULD_BE, "would be hinted: the script has attached it"
        order = _order(found)
        if isinstance(found.ways, Ranges):
            check_mounted(found.ways)
            check_files(found.ways)
            return summary.WOULD_BE, f"would be hinted: {order}; by ranges, which need no hintsd"
        link.greet(found.root)
        return summary.WOULD_BE, f"would be hinted: {order}; hintsd answers"
    except (Unreadable, Unhinted) as problem:
        state = summary.NEEDLESS if isinstance(problem, Needless) else summary.WOULD_NOT_BE
        known = f" (its order is known: {order})" if order else ""
        why = f"{summary.reason(str(problem))}{known}; {problem.advice}"
        return state, f"would not be hinted: {why}"


def _order(found: Readable) -> str:
    """In the words of docs/LOADERS.md."""
    from hintsd.client.known.shards import ShardOrder

    if isinstance(found.source, ShardOrder):
        return f"{found.source.described}, as each epoch begins"
    name = found.source.sampler.__class__.__name__
    is_copied = not found.is_told and found.source.rebatched_spec() is None
    whose = f"the order of {'a copy of ' if is_copied else ''}{name}"
    return f"{whose}, {'as each epoch begins' if found.spec is None else 'all epochs ahead'}"


def _place(place: Place | None) -> str:
    if place is None:
        return "made at a line that is not known"
    here = os.getcwd().rstrip("/") + "/"
    file = place.file[len(here) :] if place.file.startswith(here) else place.file
    return f"{file}:{place.line}"


def _contents(loader: Any) -> str:
    """Its dataset, sampler and batch size."""
    from torch.utils.data import IterableDataset

    from hintsd.client.known.datasets import files_of
    from hintsd.client.sampler_order import seat_of

    dataset = type(loader.dataset).__name__
    with contextlib.suppress(Exception):  # it is not known
        dataset += f" in {files_of(loader.dataset)[0]}"
    sampler = "no sampler"
    if not isinstance(loader.dataset, IterableDataset):
        sampler = seat_of(loader).taken_by.__class__.__name__  # of an Announcer: its sampler's
    is_batched = loader.batch_sampler is not None
    own = "batches of its own" if is_batched else "no batches"
    size = own if loader.batch_size is None else f"batch size {loader.batch_size}"
    return f"{dataset}, {sampler}, {size}"

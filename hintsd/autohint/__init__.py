"""`hintsd run`: hints for a script that does not know of them.

`environment` puts this directory first on PYTHONPATH, so that every Python below the command finds
the sitecustomize.py here when it starts. That installs an import hook, which does nothing until
torch's DataLoader is imported; then each DataLoader is attached when it is first iterated (its
sampler may still be replaced before, as Lightning does). Below `hintsd explain` each is remembered
when it is made, and where one is first iterated the process tells of all, and ends.

INVARIANT: the script sees no difference: what fails here is silent or one warning (`--require`
alone ends a script that is not hinted). The directory
holds no other module, since anything in it could be imported by its bare name.
Not reached: `python -S`, `-I`, `-E`, and an interpreter that has no hintsd installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final

DIRECTORY: Final = os.path.dirname(os.path.abspath(__file__))
LOADER_MODULE: Final = "torch.utils.data.dataloader"


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for `hintsd run`'s command: `environ`, this directory first on PYTHONPATH."""
    path = environ.get("PYTHONPATH", "")
    before = [entry for entry in path.split(os.pathsep) if entry != DIRECTORY] if path else []
    return {**environ, "PYTHONPATH": os.pathsep.join([DIRECTORY, *before])}


def install() -> None:
    """Hint all DataLoaders of this process. Again: nothing."""
    module = sys.modules.get(LOADER_MODULE)
    if module is not None:
        _patch(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds LOADER_MODULE by way of the other finders, and has it patched once it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != LOADER_MODULE:
            return None
        if self in sys.meta_path:  # absent: this import is the second of two at once
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            # On the instance: the loader stays what it is for all who look at it.
            run = spec.loader.exec_module

            def run_and_patch(module: ModuleType) -> None:
                run(module)
                _patch(module)

            spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


def _patch(module: ModuleType) -> None:
    # What iterates any DataLoader, torchdata's as well, which has an `__iter__` of its own.
    iterator_class: Any = getattr(module, "_BaseDataLoaderIter", None)
    original = getattr(iterator_class, "__init__", None)
    if original is None or hasattr(original, "_hintsd"):
        return
    is_explained = os.environ.get("HINTSD_EXPLAIN") == "1"
    if is_explained:
        _remember(module.DataLoader)

    @functools.wraps(original)
    def begin(self: Any, loader: Any, *rest: Any, **named: Any) -> None:
        attach: Any = None
        with contextlib.suppress(Exception):  # without numpy, say; the script must not notice
            if is_explained:
                from hintsd.client.explaining import explain as attach
            else:
                from hintsd.client.loaders import attach_unasked as attach
        if attach is not None:
            attach(loader)
        original(self, loader, *rest, **named)

    begin._hintsd = True  # type: ignore[attr-defined]
    iterator_class.__init__ = begin


def _remember(loader_class: Any) -> None:
    """Have each loader remembered. By `__new__`: torchdata's has an `__init__` of its own."""
    from hintsd.client.explaining import remember

    def make(cls: Any, *given: Any, **named: Any) -> Any:
        following = super(loader_class, cls).__new__
        is_last = following is object.__new__  # it refuses arguments
        loader = following(cls) if is_last else following(cls, *given, **named)
        with contextlib.suppress(Exception):
            remember(loader)
        return loader

    loader_class.__new__ = functools.wraps(loader_class.__init__)(make)  # its signature stays

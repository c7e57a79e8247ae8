"""Whether a directory is a cache, or may become one, and is ours: by the names in it and who owns
them (docs/FORMAT.md, SECURITY.md).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Final

from fusecache.base import trust
from fusecache.base.errors import EXIT_USAGE, UserError

CHECK_PREFIX: Final = ".fusecache-check-"  # of a file that `mount` makes to see whether it can

# What a cache directory may hold before it has its `format` and segments: `probe` is of a command,
# lost+found mkfs's.
_BEGINNINGS: Final = frozenset(("lock", "index", "high", "format.tmp", "probe", "lost+found"))
_FILES: Final = ("format", "set", "high", "lock", "probe", "format.tmp", "set.tmp")
_FOLDERS: Final = ("index", "segments", "tables")


def is_cache(names: Iterable[str]) -> bool:
    """Or empty, or what is left of one that was just begun. False: other people's files."""
    names = set(names)
    return bool(names & {"format", "segments"}) or all(
        name in _BEGINNINGS or name.startswith(CHECK_PREFIX) for name in names
    )


def check(path: str, *, make: bool = False, claim: bool = False) -> None:
    """That a directory is a cache, or may become one, and that it is ours. With `make` a new one if
    only that is missing; with `claim` it is made private, and all that is in it must be ours.

    UserError; OSError: it cannot be looked at.
    """
    try:
        fd = trust.open_directory(path, make=make)
        try:
            names = os.listdir(fd)
            if not is_cache(names):
                raise UserError(
                    f"cache directory {path} holds other files and is no cache: "
                    "choose an empty or a new directory",
                    EXIT_USAGE,
                )
            if claim:
                # Before looking at what is in it: from now on no other user adds to that.
                if os.fstat(fd).st_mode & 0o077:
                    os.fchmod(fd, 0o700)
                trust.check_private(os.fstat(fd), path)
            for name in _FILES:
                _check_file(fd, name, path)
            for name in _FOLDERS if claim else ():
                _check_folder(os.path.join(path, name))
        finally:
            os.close(fd)
    except trust.Untrusted as error:
        raise refusal(path, error) from None


def refusal(path: str, error: trust.Untrusted) -> UserError:
    """Of a cache directory, by who may change it, or what is in it."""
    return UserError(
        f"cache directory {path} is not used: {error.strerror}; "
        "choose one that only you (or root) can change, or remove what is not yours"
    )


def _check_folder(path: str) -> None:
    """Our own link may lead to another disk."""
    try:
        fd = trust.open_directory(path)
    except (FileNotFoundError, NotADirectoryError):
        return  # none yet, or damaged: whoever uses it will say so
    try:
        trust.check_private(os.fstat(fd), path)
        for name in os.listdir(fd):
            _check_file(fd, name, path)
    finally:
        os.close(fd)


def _check_file(fd: int, name: str, path: str) -> None:
    """What is there instead of a file is damage like any other, if it is ours."""
    try:
        status = os.lstat(name, dir_fd=fd)
    except FileNotFoundError:
        return
    check = trust.check_private if stat.S_ISREG(status.st_mode) else trust.check_owner
    check(status, os.path.join(path, name))

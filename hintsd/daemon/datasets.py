"""A job's dataset on a mount: where it is, and which files its samples are."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import trio

from fusecache.base import mounts
from hintsd.daemon.messages import JobRefused
from hintsd.daemon.mount_link import Bytes, LinkTree, MountLink, relative
from hintsd.orders import folders
from hintsd.orders.folders import DatasetError, Samples
from hintsd.orders.hint import Check, Files, Hint
from hintsd.users.identity import Identity
from hintsd.users.rights import LIST, SEARCH, CannotLook, Eyes, Rights

LOOK_TIMEOUT_S: Final = 30.0
GUEST: Final = "guest"
NO_GROUP: Final = 65534  # of an entry that does not tell


def is_guests(uid: int) -> bool:
    """Whether user `uid` is neither hintsd's own nor root."""
    return uid not in (os.geteuid(), 0)


class Guest(NamedTuple):
    """A user other than hintsd's own, who names a dataset."""

    identity: Identity
    rights: Rights

    @classmethod
    def of_journal(cls, uid: int, message: Mapping[str, Any], rights: Rights) -> Guest | None:
        """Who `uid` was in the hintsd before; None: no guest."""
        if not is_guests(uid):
            return None
        gid, *groups = message.get(GUEST) or [NO_GROUP]
        return cls(Identity(uid, gid, tuple(groups)), rights)

    def to_journal(self) -> list[int]:
        """In a job's message, as GUEST."""
        return [self.identity.gid, *self.identity.groups]

    async def find(self, hint: Hint) -> bytes:
        """The dataset's directory without links, as the guest sees it. JobRefused."""
        with _refusing(hint.path):
            real = await self.rights.real(self.identity, hint.path, _mode(hint))
        if real is None:
            raise JobRefused(_not_theirs(hint.path))
        return real

    async def check(self, directories: Sequence[bytes], hint: Hint) -> None:
        """JobRefused: one of these is not theirs to list, or, where the hint names its files, to
        have a file named in.
        """
        with _refusing(hint.path):
            denied = await self.rights.first_denied(self.identity, directories, _mode(hint))
        if denied is not None:
            raise JobRefused(_not_theirs(denied))


def _mode(hint: Hint) -> int:
    return LIST if hint.files.paths is None else SEARCH


def _not_theirs(path: bytes) -> str:
    return f"{os.fsdecode(path)} is not there, or not yours to read"


@contextmanager
def _refusing(path: bytes) -> Iterator[None]:
    """JobRefused: nobody could look."""
    try:
        yield
    except CannotLook as error:
        raise JobRefused(f"{os.fsdecode(path)}: {error}") from None


class Resolved(NamedTuple):
    samples: Samples
    where: Bytes
    """Of each the bits of `wire.Place`."""
    warnings: list[str]
    """What the job's user should know."""


async def placed(hint: Hint, device: str, inside: bytes, guest: Guest | None = None) -> Hint:
    """With its dataset's path as we see it. Its client may be in another mount namespace, or read
    through a bind mount of a part. JobRefused: it is not mounted here, or not for this guest to
    read: they do not learn where it is.
    """
    found = mounts.shown_at(device, os.fsdecode(inside))
    if found is None:
        raise JobRefused(
            f"{os.fsdecode(hint.path)} is on a mount that hintsd does not see (device {device})"
        )
    ours = replace(hint, path=os.fsencode(found[1]))
    if guest is not None:
        try:
            await guest.find(ours)
        except JobRefused:
            raise JobRefused(_not_theirs(hint.path)) from None
    return ours


async def locate(path: bytes) -> tuple[str, bytes]:
    """The mount point that a dataset's directory is below, and its path from there. JobRefused."""
    shown = os.fsdecode(path)

    def look() -> tuple[str, bytes]:
        if mounts.find(shown) is None:
            raise JobRefused(f"{shown} is not in a fusecache mount")
        try:
            real = os.path.realpath(shown, strict=True)
        except OSError as error:
            raise JobRefused(f"{shown}: {error.strerror}") from None
        mount = mounts.find(real)
        if mount is None:
            raise JobRefused(f"{shown} is not in a fusecache mount, but leads to {real}")
        return _place(os.fsencode(real), mount)

    with trio.move_on_after(LOOK_TIMEOUT_S):
        return await trio.to_thread.run_sync(look, abandon_on_cancel=True)
    raise JobRefused(f"{shown}: its mount does not answer")


async def locate_for(guest: Guest, hint: Hint) -> tuple[str, bytes]:
    """As `locate`. No link is followed but by the guest: it may be another one a moment later.

    Guests are served on our own mounts alone: another user's has that user's hintsd.
    """
    real = await guest.find(hint)
    mount = mounts.holding(os.fsdecode(real))
    if mount is None or not mount.is_fusecache:
        raise JobRefused(f"{os.fsdecode(hint.path)} is not in a fusecache mount")
    if mount.uid != os.geteuid():
        raise JobRefused(f"{mount.mountpoint} is the mount of another user (uid {mount.uid})")
    return _place(real, mount)


def _place(real: bytes, mount: mounts.Mount) -> tuple[str, bytes]:
    """`real` may lie in a bind mount of a part of it."""
    shown = os.fsdecode(real)
    inside = mounts.inside(shown, mount)
    found = None if mount.is_deleted else mounts.shown_at(mount.device, inside)
    if found is None:
        raise JobRefused(f"{shown} is a part of a mount that hintsd does not see as a whole")
    whole, path = found
    root = relative(os.fsencode(path), os.fsencode(whole.mountpoint))
    if root is None:
        raise JobRefused(f"{shown} cannot be found in {whole.mountpoint}")
    return whole.mountpoint, root


async def resolve(
    link: MountLink,
    root: bytes,
    hint: Hint,
    limiter: trio.CapacityLimiter,
    guest: Guest | None = None,
) -> Resolved:
    """The files of `hint` below `root`, the dataset's directory relative to its mount. JobRefused.

    A guest learns nothing of directories that are not theirs to read: not that, nor why, one of
    them is no dataset. Links are followed by the guest alone.
    """
    if guest is not None:
        limiter = guest.rights.limiter(guest.identity)
    shown, files = os.fsdecode(hint.path), hint.files
    fault: Exception | None = None
    listed: list[bytes] = []
    async with trio.open_nursery() as nursery:
        try:
            samples, where = await trio.to_thread.run_sync(
                functools.partial(_list, link, root, files, nursery, listed, guest),
                limiter=limiter,
            )
        except (DatasetError, JobRefused, CannotLook, OSError) as error:
            fault = error
        nursery.cancel_scope.cancel()  # what was listed ahead in vain
    if guest is not None:
        top = os.path.join(os.fsencode(link.mountpoint), root)
        await guest.check([os.path.join(top, path) for path in listed], hint)
    if isinstance(fault, OSError):
        name = f" ({fault.filename})" if fault.filename else ""
        raise JobRefused(f"{shown} cannot be listed: {fault.strerror}{name}")
    if fault is not None:
        raise JobRefused(f"{shown}: {fault}")
    if len(samples) == 0:
        raise JobRefused(f"{shown}: there are no samples")
    return Resolved(samples, where, _warnings(samples, shown, is_checked=files.check is not None))


def _list(
    link: MountLink,
    root: bytes,
    files: Files,
    nursery: trio.Nursery,
    listed: list[bytes],
    guest: Guest | None,
) -> tuple[Samples, Bytes]:
    """`listed`: gets the directories that were looked into."""
    if guest is None:
        return _list_as(None, link, root, files, nursery, listed)
    with closing(Eyes(guest.identity)) as eyes:
        return _list_as(eyes, link, root, files, nursery, listed)


def _list_as(
    eyes: Eyes | None,
    link: MountLink,
    root: bytes,
    files: Files,
    nursery: trio.Nursery,
    listed: list[bytes],
) -> tuple[Samples, Bytes]:
    if files.paths is None:
        tree = LinkTree(link, root, nursery, listed, eyes=eyes)
        samples = folders.sample_files(tree, files.extensions, allow_empty=files.allow_empty)
    else:
        paths = files.split_paths()
        directories = dict.fromkeys(path.rpartition(b"/")[0] for path in paths)
        tree = LinkTree(link, root, nursery, listed, directories, eyes)
        samples = folders.explicit_files(tree, paths)
    if files.check is not None:
        _compare(tree, samples, files.check)
    return samples, tree.where(samples.inos)


def _compare(tree: LinkTree, samples: Samples, check: Check) -> None:
    """With what the client knows of its dataset. JobRefused: the first difference."""
    if check.count != len(samples):
        raise JobRefused(
            f"your dataset has {check.count} samples, but the directory holds {len(samples)}"
        )
    for index, path in check.samples:
        target = tree.resolve(path)
        if target.ino != samples.inos[index]:
            raise JobRefused(
                f"your sample {index} is {os.fsdecode(path)!r}, but sample {index} of the "
                "directory is another file"
            )


def _warnings(samples: Samples, shown: str, *, is_checked: bool) -> list[str]:
    warnings = []
    outside = int(np.count_nonzero(samples.inos == 0))
    if outside:
        warnings.append(f"{outside} of {len(samples)} samples lie outside the mount")
    if samples.splits and not is_checked:
        names = ", ".join(os.fsdecode(name) for name in samples.splits[: folders.NAMED_MOST])
        warnings.append(
            f"the classes {names} of {shown} hold no files but directories: is the dataset "
            f"{os.path.join(shown, os.fsdecode(samples.splits[0]))}?"
        )
    return warnings

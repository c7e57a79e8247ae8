"""Paths that no other user chose: which directories and files may be used at all (SECURITY.md).

*Ours* is what we or root own. A path is trusted when each directory on the way is ours, and only we
and root can put another one in its place; links on the way are followed when they are ours.
What is opened here was looked at by descriptor, so nothing can be exchanged between the two.

INVARIANT: below a trusted path only we and root change names, so paths may be used after the check.
INVARIANT: stdlib and `mounts` only: the keeper imports this module.
It knows nothing of what the files mean (`cache_names` knows what a cache holds).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from typing import Final

from fusecache.base import mounts

LOG_BYTES_MAX: Final = 10 << 20
_LINKS_MOST: Final = 40  # the kernel's own limit
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_AT: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_ACL: Final = "system.posix_acl_access"


class Untrusted(PermissionError):
    """`strerror` is one line: which part of the path is not ours, and why."""

    def __init__(self, line: str) -> None:
        super().__init__(errno.EPERM, line)


def is_ours(uid: int) -> bool:
    """Whether that is us, or root."""
    return uid in (0, os.geteuid())


def real_path(path: str) -> str:
    """Absolute `path` without links; what does not exist yet is left as it is.

    Untrusted; OSError: cannot be looked up.
    """
    with _way(path) as (_, done, rest):
        return os.path.join(done, *rest)


def open_directory(path: str, *, make: bool = False) -> int:
    """A descriptor of the directory, which is ours; with `make` a new one (0700) if only that is
    missing. Its own mode is the caller's business.

    Untrusted; OSError: it is not there, or no directory.
    """
    with _way(path) as (at, done, rest):
        if rest and (len(rest) > 1 or not make):
            _refuse_rest(at, done, rest)
        name = rest[0] if rest else "."
        if rest:
            with contextlib.suppress(FileExistsError):  # somebody was faster: it is looked at
                os.mkdir(name, 0o700, dir_fd=at)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        check_owner(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_log(path: str, rotate_bytes: int = LOG_BYTES_MAX) -> int:
    """A descriptor that appends to the file, made if it is not there; one that has grown larger
    gets the name PATH.1 first. The way may lead through other users' directories, not through their
    links: what counts is that the file is ours. A FIFO without a reader is refused (ENXIO).

    Untrusted; OSError.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    with _way(path, is_strict=False) as (at, done, rest):
        if len(rest) > 1:
            _refuse_rest(at, done, rest)
        if not rest:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        name = rest[0]
        if _is_own_descriptor(at):
            fd = os.open(name, flags & ~os.O_CREAT, dir_fd=at)
        else:
            with contextlib.suppress(FileNotFoundError):
                before = os.lstat(name, dir_fd=at)
                if stat.S_ISREG(before.st_mode) and before.st_size > rotate_bytes:
                    check_file(before, path)
                    os.rename(name, f"{name}.1", src_dir_fd=at, dst_dir_fd=at)
            fd = os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=at)
            try:
                check_file(os.fstat(fd), os.path.join(done, name))
            except BaseException:
                os.close(fd)
                raise
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    return fd


def open_file(path: str) -> int:
    """A descriptor to read a plain file of ours, which no other user may write. The way may lead
    through other users' directories, not through their links.

    Untrusted; OSError.
    """
    with _way(path, is_strict=False) as (at, done, rest):
        if len(rest) > 1:
            _refuse_rest(at, done, rest)
        if not rest:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return open_in(at, rest[0], path)


def open_in(directory: int, name: str, path: str, flags: int = os.O_RDONLY) -> int:
    """The same of file `name` in a directory: no link is followed. `path` is what is shown.

    Untrusted; OSError.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Untrusted(f"{path} is a link") from None
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Untrusted(f"{path} is no plain file")
        check_private(status, path)
        _check_file_system(status.st_dev, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_owner(status: os.stat_result, path: str) -> None:
    """Untrusted: neither ours nor root's."""
    if not is_ours(status.st_uid):
        raise Untrusted(f"{path} belongs to {_user(status.st_uid)}")


def check_file(status: os.stat_result, path: str) -> None:
    """Untrusted: it is not ours, or a file that has another name elsewhere."""
    check_owner(status, path)
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        raise Untrusted(f"{path} is a file that has another name, too (a hard link)")


def check_private(status: os.stat_result, path: str) -> None:
    """Untrusted: not ours, or others may write to it."""
    check_file(status, path)
    check_unwritable(status, path)


def check_unwritable(status: os.stat_result, path: str) -> None:
    """The same, but it may have other names: what a package manager links in from its cache."""
    check_owner(status, path)
    if not stat.S_ISLNK(status.st_mode) and status.st_mode & _OTHERS_WRITE:
        raise Untrusted(f"others may write to {path}")


# ---- the way -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _way(path: str, *, is_strict: bool = True) -> Iterator[tuple[int, str, list[str]]]:
    """Go along absolute `path`: (descriptor of the deepest directory that exists, its path, the
    names that follow: a name that does not exist or is no directory, and what comes after it).
    Not `is_strict`: only links have to be ours.
    """
    done, rest, links = "/", _names(path), 0
    at = os.open("/", _AT | os.O_DIRECTORY)
    try:
        while rest:
            name = rest[-1]
            if is_strict and name != "..":
                _check_way(at, done)
            try:
                found = os.open(name, _AT, dir_fd=at)
            except FileNotFoundError:
                break
            try:
                status = os.fstat(found)
                step = os.path.dirname(done) if name == ".." else os.path.join(done, name)
                if stat.S_ISLNK(status.st_mode):
                    links += 1
                    if links > _LINKS_MOST:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    if not is_ours(status.st_uid):
                        raise Untrusted(f"{step} is a link of {_user(status.st_uid)}")
                    if _is_own_descriptor(at):
                        break  # its text is no path
                    target = os.readlink("", dir_fd=found)
                    rest[-1:] = _names(target)
                    step = "/" if target.startswith("/") else done
                    below = os.open("/" if step == "/" else ".", _AT | os.O_DIRECTORY, dir_fd=at)
                elif stat.S_ISDIR(status.st_mode):
                    rest.pop()
                    # Anew: only this has an automounter mount what is wanted.
                    below = os.open(name, _AT | os.O_DIRECTORY, dir_fd=at)
                else:
                    break
            finally:
                os.close(found)
            above, at, done = at, below, step
            try:
                if is_strict:
                    _check_mount(above, at, done)
            finally:
                os.close(above)
        yield at, done, rest[::-1]
    finally:
        os.close(at)


def _names(path: str) -> list[str]:
    """The components, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _refuse_rest(at: int, done: str, rest: list[str]) -> None:
    """OSError that `open` would give for a way that ends early."""
    try:
        os.lstat(rest[0], dir_fd=at)
    except FileNotFoundError as error:
        error.filename = os.path.join(done, rest[0])
        raise
    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.path.join(done, rest[0]))


def _is_own_descriptor(at: int) -> bool:
    """Is this the /proc/self/fd of a process?"""
    status = os.fstat(at)
    with contextlib.suppress(OSError):
        own = os.stat("/proc/self/fd")
        return (status.st_dev, status.st_ino) == (own.st_dev, own.st_ino)
    return False


def _check_way(at: int, path: str) -> None:
    """Untrusted: another user may put something else in the place of what is in this directory."""
    status = os.fstat(at)
    if not is_ours(status.st_uid) and status.st_uid != _unknown_owner():
        raise Untrusted(f"{path} belongs to {_user(status.st_uid)}")
    if (
        status.st_mode & _OTHERS_WRITE
        and not status.st_mode & stat.S_ISVTX
        and not _is_writable_by_us_alone(at, status)
    ):
        raise Untrusted(
            f"others may write to {path}, and replace what is in it (its owner can end that: "
            f"chmod {'+t' if status.st_mode & stat.S_IWOTH else 'g-w'} {path})"
        )


def _check_mount(above: int, at: int, path: str) -> None:
    """Untrusted: a FUSE file system of another user, who says what owners they like."""
    device = os.fstat(at).st_dev
    if device != os.fstat(above).st_dev:
        _check_file_system(device, path)


def _check_file_system(device: int, path: str) -> None:
    """Untrusted: that of another user, in FUSE."""
    name = f"{os.major(device)}:{os.minor(device)}"
    for mount in mounts.mounts():
        is_fuse = mount.filesystem.partition(".")[0] in ("fuse", "fuseblk")
        if mount.device == name and is_fuse and not is_ours(mount.uid):
            raise Untrusted(f"{path} is on a FUSE file system of {_user(mount.uid)}")


def _is_writable_by_us_alone(at: int, status: os.stat_result) -> bool:
    """By a group that has us as its only member, as distributions make one for each user."""
    if status.st_mode & stat.S_IWOTH:
        return False
    try:
        os.getxattr(f"/proc/self/fd/{at}", _ACL)
        return False  # the group's bits are those of everybody who is named
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            return False
    try:
        us, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return (
        (group.gr_name, group.gr_gid) == (us.pw_name, us.pw_gid)
        and not {*group.gr_mem} - {us.pw_name}
    )  # fmt: skip


def _unknown_owner() -> int | None:
    """Whom a user namespace shows for all owners that it does not know: root outside, mostly. None:
    it knows all.
    """
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            known = sum(int(line.split()[2]) for line in file)
        if known >= (1 << 32) - 1:
            return None
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError, IndexError):
        return None


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"

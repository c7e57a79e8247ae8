"""A mount and the descriptors that keep it alive."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import time

from fusecache.base import mounts
from fusecache.keeper import mounting
from fusecache.keeper.log_file import LogFile
from fusecache.keeper.mounting import EXIT_BUSY, EXIT_FAILED, Json, KeeperError

BUSY_RETRY_S, BUSY_RETRY_PAUSE_S = 1.0, 0.01
CONTROL_BACKLOG, KEEPER_BACKLOG = 64, 16


class HeldMount:
    """INVARIANT: what is open here stays so until the mount is gone."""

    def __init__(self, config: Json, log: LogFile) -> None:
        """Of `config` what is fixed for life counts."""
        self._config = config
        self._log = log
        self.mountpoint: str = config["mountpoint"]
        self.source: str = config["source"]
        self.source_device = ""
        self.source_identity: dict[str, str] | None = None
        self.device = ""
        """Of the mount; "" before it."""
        self.is_detached = False
        self._source_fd = self._fuse_fd = self._table_fd = -1
        self._directory, self._directory_fd = "", -1  # the runtime directory
        self._control: socket.socket | None = None
        self.listener: socket.socket | None = None
        """keeper.sock."""

    def open_source(self) -> None:
        """Before mounting: the mount may hide it."""
        try:
            self._source_fd = os.open(self.source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            device = os.fstat(self._source_fd).st_dev
            self.source_device = f"{os.major(device)}:{os.minor(device)}"
            mount = mounts.of_descriptor(self._source_fd, mounts.mounts())
            if mount is not None:
                self.source_identity = mounts.identity(self.source, mount)
        except OSError as error:
            raise KeeperError(f"cannot open source {self.source}: {error.strerror}") from None

    def mount(self) -> None:
        """With all that belongs to it. KeeperError: nothing is left of it."""
        doing = f"mount on {self.mountpoint}"
        try:
            with mounts.mounting():
                self._refuse_second(mounts.mounts())
                call = mounting.mount_as_root if os.getuid() == 0 else mounting.mount_as_user
                self._fuse_fd = call(self._config)
                table = mounts.mounts()
                on_it = mounts.fusecaches_on(self.mountpoint, table)
                ours = [mount for mount in on_it if mount.uid == os.getuid()]
                if not ours:
                    line = f"mounted on {self.mountpoint}, but the kernel does not list it there"
                    raise KeeperError(line)
                self.device = ours[-1].device
                # another user's, who has a lock of their own, may have been faster by an instant
                self._refuse_second(table[: table.index(ours[-1])])
                doing = "make the runtime directory or the inode table"
                self._make_runtime_directory()
            self._table_fd = os.memfd_create("fusecache-table", os.MFD_CLOEXEC)
            self._log.open_in(self._directory)
        except OSError as error:
            self.take_down()
            raise KeeperError(f"cannot {doing}: {error.strerror}") from None
        except KeeperError:
            self.take_down()
            raise

    def _refuse_second(self, table: list[mounts.Mount]) -> None:
        if mounts.fusecaches_on(self.mountpoint, table):
            line = f"mount point {self.mountpoint} is a fusecache already: another mount was faster"
            raise KeeperError(line, EXIT_BUSY)

    def _make_runtime_directory(self) -> None:
        self._directory, self._directory_fd = mounts.make_runtime_directory(self.device)
        self.listener = mounts.listen(self._directory, mounts.KEEPER_SOCKET, KEEPER_BACKLOG)
        self.listener.setblocking(False)
        self._control = mounts.listen(self._directory, mounts.CONTROL_SOCKET, CONTROL_BACKLOG)

    def fds(self) -> dict[str, int]:
        """What a server gets."""
        assert self._control is not None
        return {
            "fuse": self._fuse_fd,
            "source": self._source_fd,
            "table": self._table_fd,
            "control": self._control.fileno(),
        }

    def write_record(self, record: Json) -> None:
        path = os.path.join(self._directory, mounts.KEEPER_FILE)
        with contextlib.suppress(OSError):
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(path + ".new", path)

    @property
    def is_gone(self) -> bool:
        return mounting.is_gone(self._fuse_fd)

    # ---- its end ---------------------------------------------------------------------------------

    def take_down(self) -> None:
        """Undo `mount` after a start that failed."""
        if self.device:
            # a server's threads, or a reader, may wait for an answer
            mounting.abort_connection(self.device)
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                mounted = mounts.at(self.mountpoint)
                if mounted is not None and mounted.device == self.device:
                    mounting.unmount(self.mountpoint, lazy=True, abort=True)
        for fd in (self._fuse_fd, self._table_fd):
            if fd >= 0:
                os.close(fd)
        self._fuse_fd = self._table_fd = -1
        self.remove_runtime_directory()

    def remove_runtime_directory(self) -> None:
        for listener in (self.listener, self._control):
            if listener is not None:
                listener.close()
        if self._directory_fd >= 0:
            mounts.remove_runtime_directory(self._directory, self._directory_fd)

    def unmount(self, lazy: bool, own: frozenset[int]) -> Json | None:
        """None: it is gone; else the answer to the command. `own`: processes that may use it."""
        if not self.is_detached:
            mounted = mounts.at(self.mountpoint)
            if mounted is None or mounted.device != self.device:
                what = "something is mounted over it" if mounted else "not mounted any more"
                return {"ok": False, "error": f"{self.mountpoint}: {what}", "exit": EXIT_FAILED}
            try:
                users = self._unmount_unless_used(lazy, own)
            except (OSError, subprocess.SubprocessError) as error:
                return {"ok": False, "error": f"{self.mountpoint}: {error}", "exit": EXIT_FAILED}
            if users is not None:
                return {"ok": False, "error": "busy", "exit": EXIT_BUSY, "pids": users}
            self.is_detached = lazy
        deadline = time.monotonic() + 1.0
        while not self.is_gone and time.monotonic() < deadline:
            time.sleep(0.005)
        if not self.is_gone:
            self._log.write("INFO", "unmounted; open files are served until they are closed")
            return {"ok": True, "detached": True}
        return None

    def _unmount_unless_used(self, lazy: bool, own: frozenset[int]) -> list[int] | None:
        """None: unmounted. Else the processes that use it (of those we may see). OSError.

        Tried again for a while: whoever looks at all mounts of a host has this one open for an
        instant, and so has the server, to drop pages.
        """
        deadline = time.monotonic() + BUSY_RETRY_S
        while True:
            try:
                mounting.unmount(self.mountpoint, lazy)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
            else:
                return None
            if time.monotonic() > deadline:
                # what lies below a mount over itself, `own` have open all the time
                return mounting.users_of(self.mountpoint, own)
            time.sleep(BUSY_RETRY_PAUSE_S)

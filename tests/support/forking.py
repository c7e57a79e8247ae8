"""Keeper and server as forks of a process that has imported them: tests start thousands.

Of half a second of a processor that a mount needs to start, nearly all is imports. What is forked
is otherwise as if it had been started: arguments (also those that /proc shows), environment,
directory, descriptors, signals, session. `environment(TESTS_EXEC="1")` has them started as users
have them: for tests of starts, and of deaths amid a start.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from fusecache.base import processes

EXEC: Final = "TESTS_EXEC"
_MODULES: Final = ("fusecache.keeper", "fusecache.server")
_TO_PYTHON: Final = ("PYTHON", "LD_", "OPENBLAS_", "OMP_", "MALLOC_", "ASAN_", "TSAN_", EXEC)
ROOM: Final = "." * (64 << 10)
"""An argument of the process that is forked: what is forked shows its own in this place."""
_own: dict[str, str] = {}  # what of the environment Python itself read
_events: dict[int, int] = {}  # that the C extension makes when it is imported, and their counts


def prepare() -> None:
    """Import what keeper and server need, and have them forked from now on, by this process and
    its forks. ROOM is the last argument of this process.
    """
    from fusecache.server.entry import load_extension

    load_extension(zero_open=True)
    for name in ("fusecache.cli.mount_command", "fusecache.keeper.keeper"):
        importlib.import_module(name)
    importlib.import_module("fusecache.server.serving")
    _own.update(_to_python(os.environ))
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventfd]":
                info = Path(f"/proc/self/fdinfo/{fd}").read_text().split()
                _events[fd] = int(info[info.index("eventfd-count:") + 1], 16)
    subprocess.Popen = Forked  # type: ignore[misc]
    gc.collect()
    gc.freeze()


def _to_python(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_TO_PYTHON)}


def _show(words: Sequence[str]) -> None:
    """As /proc/PID/cmdline: there is room for them where our own arguments were."""
    with open("/proc/self/stat", "rb") as file:
        begin, end = map(int, processes.fields_of(file.read())[45:47])  # arg_start, arg_end
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


class Forked(subprocess.Popen[Any]):
    """Popen, of keeper and server by a fork."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any,
        cwd: Any, env: Any, startupinfo: Any, creationflags: Any, shell: Any,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: int,
        start_new_session: bool, process_group: int,
    ) -> None:  # fmt: skip
        if (
            not isinstance(args, list)
            or args[:3] != [sys.executable, "-P", "-m"]
            or args[3] not in _MODULES
            or _to_python({} if env is None else env) != _own
            or sum(map(len, map(os.fsencode, args))) > len(ROOM)
        ):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                restore_signals, gid, gids, uid, umask, start_new_session, process_group,
            )  # fmt: skip
            return
        is_begun, begins = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for fd, theirs in enumerate((p2cread, c2pwrite, errwrite)):
                    if theirs not in (-1, fd):
                        os.dup2(theirs, fd)
                    os.set_inheritable(fd, True)
                _close_all_but({0, 1, 2, begins, *pass_fds})
                for fd in pass_fds:
                    os.set_inheritable(fd, True)
                _have_events()
                if cwd is not None:
                    os.chdir(cwd)
                if start_new_session:
                    os.setsid()
                if process_group >= 0:
                    os.setpgid(0, process_group)
                os.environ.clear()
                os.environ.update(env)
                _begin_anew(args)
                os.close(begins)
            except BaseException:
                traceback.print_exc()
                os._exit(255)
            _run(args[3], args[4:])
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )
        os.close(begins)
        os.read(is_begun, 1)  # its end: the child has none of our descriptors any more
        os.close(is_begun)


def _close_all_but(kept: set[int]) -> None:
    edges = [-1, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for before, after in itertools.pairwise(edges):
        if before + 1 < after:  # of nothing it would be all
            os.closerange(before + 1, after)


def _have_events() -> None:
    """The C extension's, at the same numbers, and shared with nobody."""
    for fd, count in _events.items():
        event = os.eventfd(count, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if event != fd:
            os.dup2(event, fd, inheritable=False)
            os.close(event)


def _begin_anew(words: Sequence[str]) -> None:
    """Signals, logging and arguments as Python has them at its start."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    logging.captureWarnings(False)
    logging.root.handlers.clear()
    gc.freeze()  # objects of what we were forked from would close descriptors of ours
    _show(words)


def _run(module: str, arguments: Sequence[str]) -> NoReturn:
    sys.argv = [module, *arguments]
    run_to_end(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def run_to_end(program: Callable[[], object]) -> NoReturn:
    """Of this process, with the exit code that Python would give it; what is imported is not taken
    apart, which takes long.
    """
    code = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

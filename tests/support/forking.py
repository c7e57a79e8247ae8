"""Python programs as forks of a process that has imported what they need: tests start thousands.

Nearly all that it takes a mount to start is imports: half a second of a processor; where torch is
needed, two. What is forked is otherwise as if it had been started: arguments (also those in /proc),
environment, directory, descriptors, signals, session. For tests of starts, and of deaths amid a
start, `Mount(…, env=started())` has keeper and server started as users have them.
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
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from fusecache.base import processes

EXEC: Final = "TESTS_EXEC"
FORKED: Final = ("fusecache.keeper", "fusecache.server", "hintsd.orders.torch_process")
_TO_PYTHON: Final = ("PYTHON", "LD_", "OPENBLAS_", "OMP_", "MALLOC_", "ASAN_", "TSAN_", EXEC)
ROOM: Final = "." * (120 << 10)
"""An argument of the process that is forked: what is forked shows its own in this place."""
_own: dict[str, str] = {}  # what of the environment Python itself read
_events: dict[int, int] = {}  # that the C extension makes when it is imported, and their counts


def prepare(*modules: str) -> None:
    """Import them, and have FORKED forked from now on, by this process and its forks. ROOM is an
    argument of this process.
    """
    for name in modules:
        importlib.import_module(name)
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


def _customized(environment: Mapping[str, str]) -> list[str] | None:
    """The directories that its PYTHONPATH has besides ours, where all else that Python itself reads
    is as ours. None: a fork is not what it would start.
    """
    wanted = _to_python(environment)
    path = wanted.pop("PYTHONPATH", "").split(os.pathsep)
    ours = _own.get("PYTHONPATH", "").split(os.pathsep)
    rest = {name: value for name, value in _own.items() if name != "PYTHONPATH"}
    return path[len(ours) :] if wanted == rest and path[: len(ours)] == ours else None


def is_room_for(words: Sequence[str]) -> bool:
    return sum(len(os.fsencode(word)) + 1 for word in words) <= len(ROOM)


def _show(words: Sequence[str]) -> None:
    """As /proc/PID/cmdline: there is room for them where our own arguments were."""
    with open("/proc/self/stat", "rb") as file:
        begin, end = map(int, processes.fields_of(file.read())[45:47])  # arg_start, arg_end
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


class Forked(subprocess.Popen[Any]):
    """Popen; a fork, where what is to run is FORKED."""

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
            or args[3] not in FORKED
            or args[3].partition(".")[0] not in sys.modules
            or _customized(os.environ if env is None else env) is None
            or not is_room_for(args)
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
            streams = (p2cread, c2pwrite, errwrite)
            become(
                args,
                dict(os.environ if env is None else env),
                streams,
                [begins, *pass_fds],
                cwd,
                is_leader=start_new_session,
                group=process_group,
            )
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )
        os.close(begins)
        os.read(is_begun, 1)  # its end: the child has none of our descriptors any more
        os.close(is_begun)


def become(
    words: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int],
    kept: Sequence[int],
    directory: str | None = None,
    *,
    is_leader: bool = False,
    group: int = -1,
) -> NoReturn:
    """In a fork: run `python …`, or `fusecache …`. `streams`: its standard descriptors, -1 is ours.
    Of the others it has `kept`; the first of them is closed when the program begins.
    """
    try:
        for fd, theirs in enumerate(streams):
            if theirs not in (-1, fd):
                os.dup2(theirs, fd)
            os.set_inheritable(fd, True)
        _close_all_but({0, 1, 2, *kept})
        for fd in kept:
            os.set_inheritable(fd, True)
        _have_events()
        if directory is not None:
            os.chdir(directory)
        if is_leader:
            os.setsid()
        if group >= 0:
            os.setpgid(0, group)
        os.environ.clear()
        os.environ.update(environment)
        _begin_anew(words)
        os.close(kept[0])
    except BaseException:
        traceback.print_exc()
        os._exit(255)
    run_to_end(lambda: _run([word for word in words if word != "-P"]))


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
    sys.orig_argv = list(words)
    for directory in _customized(os.environ) or ():
        sys.path.insert(1, directory)
        with contextlib.suppress(FileNotFoundError):
            runpy.run_path(f"{directory}/sitecustomize.py")


def _run(words: Sequence[str]) -> None:
    """fusecache …, python -m MODULE …, or python -c CODE …"""
    if words[0] == "fusecache":
        from fusecache.cli.main import main as fusecache

        sys.argv = list(words)
        fusecache()
        return
    _, kind, what, *arguments = words
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)


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

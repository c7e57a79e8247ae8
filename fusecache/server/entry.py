"""The server process: loads the C extension in the right way, then serves.

Started by the keeper with one JSON argument (see `launch.Launch`), or as a spare (`--spare FD
MOUNTPOINT`, see keeper/spare.py), which imports everything and waits for that argument. Says on the
ready descriptor that it serves, or why it cannot. Exit code 0: unmounted, or asked to stop
(SIGTERM); anything else is a crash to the keeper.

The order of imports matters: the C extension has to be loaded with RTLD_GLOBAL before pyfuse3 is,
or its interposed functions are not found (zero-open mode, docs/ARCHITECTURE.md). So `serving`,
which imports pyfuse3, is imported late.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import resource
import sys
from importlib.util import find_spec

from fusecache.base import logs, processes
from fusecache.base.errors import UserError
from fusecache.config.settings import Config
from fusecache.keeper import spare
from fusecache.server.launch import Launch

log = logging.getLogger(__name__)


def load_extension(zero_open: bool) -> str:
    """Load the C extension so that pyfuse3 binds to it.

    Returns why zero-open is not possible, or "". Raises UserError when there is none.
    """
    spec = find_spec("fusecache._native")
    if spec is None or spec.origin is None:
        raise UserError("the C extension fusecache._native is missing: install the package again")
    try:
        ctypes.CDLL(spec.origin, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return f"the C extension cannot be loaded before pyfuse3: {error}"
    if not zero_open:
        return "switched off with --no-zero-open"
    release = tuple(int(part) for part in os.uname().release.split(".")[:2] if part.isdigit())
    return "this kernel is older than Linux 5.1" if release < (5, 1) else ""


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--spare"]:
        arguments += [""]  # a keeper of an older version names no mount point
        processes.show_as(f"fusecache: spare {arguments[2]}")
        load_extension(zero_open=True)
        _import()
        needed = spare.wait(int(arguments[1]))
        if needed is None:
            return 0
        arguments = [needed]
    if len(arguments) != 1:
        print("fusecache.server is started by the keeper; use: fusecache mount", file=sys.stderr)
        return 2
    launch = Launch.from_json(arguments[0])
    config, mountpoint = launch.config, launch.config["mountpoint"]
    level, form = config.get("log_level", "info"), config.get("log_format", "text")
    logs.begin(level, form, mount=mountpoint)
    processes.show_as(f"fusecache: server {mountpoint}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return _run(launch)
    except UserError as error:
        log.error("%s", error)
        launch.report(error=str(error), exit=error.exit_code)
        return error.exit_code
    except Exception:
        log.exception("the server failed")
        return 1


def _import() -> None:
    """What needs the extension to be loaded before, and half a second."""
    # numpy's linear algebra is not used: its threads would spin while the server starts.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    importlib.import_module("fusecache.server.serving")


def _run(launch: Launch) -> int:
    config = Config.from_json(json.dumps(launch.config))
    why_ordinary = load_extension(config.zero_open)
    _import()

    import trio

    from fusecache.server.serving import Server

    return trio.run(Server(launch, config, why_ordinary).run)

"""The C client of a pool, in a process of its own: `python -m tools.bench.pool_client`.

Reads JSON on stdin: root (a directory of files), address, port, ca, certificate, key, user,
password (null: none), passes. Writes all files into the pool, and prints a line; then, after a line
on stdin, gets all of them so often, and prints what that took of this process: processor_s, bytes.
"""

import json
import os
import resource
import sys
from typing import Any

from fusecache import _native
from fusecache.pool.slots import SLOTS

ROOT_INO = 1
PATIENCE_NS = 5_000_000_000


def _attach(root: str) -> list[int]:
    """The inodes of the files."""
    source_fd, table_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY), os.memfd_create("table")
    _native.attach(table_fd, source_fd, True)
    _native.scan(ROOT_INO)
    return [_native.lookup(ROOT_INO, os.fsencode(name)) for name in sorted(os.listdir(root))]


def _join(told: dict[str, Any]) -> None:
    _native.pool_begin(
        "cost", told["user"], told["password"], told["ca"], told["certificate"], told["key"],
        0, PATIENCE_NS, has_peers=False,
    )  # fmt: skip
    server = _native.pool_server(told["address"], str(told["port"]))
    _native.pool_address(server, told["address"], str(told["port"]))
    _native.pool_slots(bytes(SLOTS))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    told = json.loads(sys.stdin.readline())
    inos = _attach(told["root"])
    _join(told)
    files = [(ino, _native.version(ino)) for ino in inos]
    for ino, version in files:
        data, ticket = _native.pool_get(ino, version, 0, version[1])
        assert data is None
        fd = _native.open(ino, os.O_RDONLY)
        _native.pool_finish(ticket, os.pread(fd, version[1], 0))
        os.close(fd)
    print("written", flush=True)
    sys.stdin.readline()
    got, before_s = 0, _cpu_s()
    for _ in range(told["passes"]):
        for ino, version in files:
            data, _ = _native.pool_get(ino, version, 0, version[1])
            assert data is not None, _native.pool_servers()
            got += len(data)
    print(json.dumps({"processor_s": _cpu_s() - before_s, "bytes": got}), flush=True)


main()

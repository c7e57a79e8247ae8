"""A reader that never stops, for the kill row: cold reads in a loop, each one timed and compared.

Run as a process of its own (`python -m tools.bench.stalls ROOT LIST`): the killer must not share
its interpreter lock. Ends when its standard input closes, and prints JSON: reads, errors, wrong,
spans (begin and end of each read, on the monotonic clock that all processes share).

INVARIANT: each read misses the page cache: the file's pages are dropped before it.
"""

import json
import os
import select
import sys
import time
import zlib


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(fd).st_size
        parts, got = [], 0
        while got < size:
            part = os.read(fd, size - got)
            if not part:
                break
            parts.append(part)
            got += len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def main() -> None:
    root, listed = sys.argv[1:]
    expected = {}
    for line in open(listed):  # noqa: SIM115  (closed with the process)
        name, number = line.split()
        expected[f"{root}/{name}"] = int(number)
    spans: list[tuple[float, float]] = []
    errors: list[str] = []
    wrong = 0
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for path, checksum in expected.items():
            begin = time.monotonic()
            try:
                data = _read(path)
            except OSError as error:
                errors.append(f"{path}: {error}")
                continue
            spans.append((begin, time.monotonic()))
            wrong += zlib.crc32(data) != checksum
            if select.select([sys.stdin], [], [], 0)[0]:
                break
    print(json.dumps({"reads": len(spans), "errors": errors, "wrong": wrong, "spans": spans}))


if __name__ == "__main__":
    main()

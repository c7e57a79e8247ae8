"""A reader that never stops, for rows kill and wide: cold reads in a loop, each one timed and
compared.

A process of its own (`python -m tools.bench.stalls ROOT LIST`): who disturbs it must not share its
interpreter lock. Ends when its standard input closes, and prints JSON: reads, errors, wrong,
spans (begin and end of each read, on the monotonic clock that all processes share).

INVARIANT: each read misses the page cache: the file's pages are dropped before it.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Outcome = dict[str, Any]


@contextlib.contextmanager
def reading(
    root: Path, source: Path, names: Sequence[str], listed: Path
) -> Iterator[Callable[[], Outcome]]:
    """Reads these files below `root`, as they are in `source`, until what it yields is called,
    which gives what the process prints. `listed`: a file to be written.
    """
    checksums = [zlib.crc32((source / name).read_bytes()) for name in names]
    listed.write_text("".join(f"{n} {c}\n" for n, c in zip(names, checksums, strict=True)))
    reader = subprocess.Popen(
        [sys.executable, "-m", "tools.bench.stalls", str(root), str(listed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> Outcome:
        output, _ = reader.communicate("stop\n", timeout=60)
        outcome: Outcome = json.loads(output.splitlines()[-1])
        return outcome

    try:
        assert reader.stdout is not None
        reader.stdout.readline()
        yield end
    finally:
        if reader.poll() is None:
            reader.kill()
            reader.wait()


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

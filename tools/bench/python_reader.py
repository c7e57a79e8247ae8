"""The same reads as `reader files`, by a Python loop: what a data loader in Python sees of the
difference.

Run as a process: `python python_reader.py LIST READERS`; prints "SECONDS ITEMS BYTES" as reader.c
does.
"""

import os
import sys
import time


def _read_files(paths: list[str]) -> int:
    total = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        total += len(os.read(fd, os.fstat(fd).st_size))
        os.close(fd)
    return total


def main() -> None:
    listed, readers = sys.argv[1], int(sys.argv[2])
    with open(listed) as lines:
        paths = lines.read().splitlines()
    gate_out, gate_in = os.pipe()
    done_out, done_in = os.pipe()
    children = []
    for number in range(readers):
        pid = os.fork()
        if pid == 0:
            os.close(gate_in)
            os.read(gate_out, 1)  # returns when the parent has closed the gate
            begin = time.monotonic()
            size_bytes = _read_files(paths[number::readers])
            os.write(done_in, f"{begin!r} {time.monotonic()!r} {size_bytes}\n".encode())
            os._exit(0)
        children.append(pid)
    time.sleep(0.02)
    os.close(gate_in)
    os.close(done_in)
    for pid in children:
        if os.waitpid(pid, 0)[1] != 0:
            sys.exit("a reader failed")
    with open(done_out) as results:
        rows = [line.split() for line in results]
    begin = min(float(row[0]) for row in rows)
    end = max(float(row[1]) for row in rows)
    print(end - begin, len(paths), sum(int(row[2]) for row in rows))


if __name__ == "__main__":
    main()

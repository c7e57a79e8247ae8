"""A dataset for readers of a cluster: what its files are, and a sum that tells wrong bytes."""

import os
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

_A_FOLDER = 500  # files


@dataclass(frozen=True)
class Dataset:
    """Names relative to its directory, sorted; `checksum`: of all files' CRC-32, the sum."""

    names: tuple[str, ...]
    bytes: int
    checksum: int


def make(directory: Path, files: int, file_bytes: int, seed: int) -> Dataset:
    """Random bytes in `directory`, which is empty."""
    random_bytes = random.Random(seed).randbytes
    for number in range(files):
        folder = directory / f"{number // _A_FOLDER:03}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:06}").write_bytes(random_bytes(file_bytes))
    return of(directory)


def of(directory: Path) -> Dataset:
    """The regular files below, all of which are read. ValueError: there is none."""
    found = (Path(top, name) for top, _, names in os.walk(directory) for name in names)
    paths = sorted(path for path in found if path.is_file() and not path.is_symlink())
    if not paths:
        raise ValueError(f"{directory} has no files")
    names, total, checksum = [], 0, 0
    for path in paths:
        content = path.read_bytes()
        names.append(str(path.relative_to(directory)))
        total += len(content)
        checksum += zlib.crc32(content)
    return Dataset(tuple(names), total, checksum)

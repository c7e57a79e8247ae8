"""The checksums that are compiled in are xxhash's, whichever vectors the processor has."""

from __future__ import annotations

import ctypes
import random
import subprocess
from pathlib import Path

import pytest
import xxhash

ROOT = Path(__file__).resolve().parents[3]
LENGTHS = [0, 1, 8, 16, 17, 128, 129, 240, 241, 1000, 1024, 4096, 65535, 65536, 100_001]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("hash") / "hash.so"
    sources = sorted((ROOT / "fusecache/native/hash").glob("*.c"))
    assert len(sources) == 3
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", path, *sources], check=True)
    return ctypes.CDLL(str(path))


def functions() -> list[str]:
    """Those that this processor can run."""
    flags = Path("/proc/cpuinfo").read_text().split()
    wide = {"hash64_avx2": "avx2", "hash64_avx512": "avx512f"}
    return ["hash64", *(name for name, flag in wide.items() if flag in flags)]


@pytest.mark.parametrize("name", functions())
def test_the_numbers_are_those_of_xxhash(library: ctypes.CDLL, name: str) -> None:
    function = getattr(library, name)
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]
    chance = random.Random(name)
    for length in LENGTHS:
        data = chance.randbytes(length)
        for seed in (0, 1, 2**64 - 1):
            expected = xxhash.xxh3_64_intdigest(data, seed)
            assert function(data, length, seed) == expected, (length, seed)


def test_the_extension_needs_no_xxhash_library() -> None:
    from fusecache import _native

    assert _native.__file__ is not None
    dynamic = subprocess.run(
        ["readelf", "-d", _native.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert "NEEDED" in dynamic
    assert "xxhash" not in dynamic

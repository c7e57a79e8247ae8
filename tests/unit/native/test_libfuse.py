"""Which libfuse is there is found at run time: what it lacks costs zero-open reads, nothing else.

A libfuse and a caller of it are compiled here, as many as there are kinds (`libfuse_parts.c`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fusecache import _native
from tests.conftest import Place
from tests.support.mounted import COMMAND, ROOT, Mount, environment, is_mounted

PARTS = Path(__file__).with_name("libfuse_parts.c")
FUSE_INIT = 26
UNKNOWN = "pyfuse3 began its session by a function of libfuse that fusecache does not know"
DESCRIPTOR = 1234567  # the library's own

BEGIN = f"""
import ctypes, json, sys
ctypes.CDLL({_native.__file__!r}, mode=ctypes.RTLD_GLOBAL)
from fusecache import _native
_native.configure_session(True, 1, 1e9)
caller = ctypes.CDLL(sys.argv[1])
caller.version.restype = ctypes.c_char_p
answer = {{"fd": caller.begin(), "why": _native.why_not_interposed()}}
for figure in ("wrapped", "begun", "inits_of_one"):
    answer[figure] = getattr(caller, figure)()
answer["version"] = caller.version().decode()
_native.resume_session()
answer["init_opcode"] = caller.init_opcode()
print(json.dumps(answer))
"""


def compiled(into: Path, *flags: str | Path) -> Path:
    command = ["gcc", "-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra"]
    subprocess.run([*command, "-o", into, PARTS, *flags], check=True)
    return into


def begun(tmp_path: Path, library: Sequence[str], entry: str) -> dict[str, Any]:
    """What happens when a caller begins a session with such a libfuse by this entry."""
    compiled(tmp_path / "libfuse3.so.9", "-DLIBRARY", *library, "-Wl,-soname,libfuse3.so.9")
    caller = compiled(
        tmp_path / "caller.so",
        *("-DCALLER", f"-DENTRY={entry}", f"-Wl,-rpath,{tmp_path}"),
        *([] if entry == "fuse_session_new" else ["-DVERSIONED"]),
        tmp_path / "libfuse3.so.9",
    )
    done = subprocess.run(
        [sys.executable, "-c", BEGIN, caller],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["begun"] == 1
    assert answer["inits_of_one"] == 1
    assert answer["init_opcode"] == FUSE_INIT, "a mount without the front cannot be resumed"
    return answer


@pytest.mark.parametrize(
    ("library", "entry", "version"),
    [
        (["-DOLD"], "fuse_session_new", ""),
        (["-DOLD", "-DNEW"], "fuse_session_new_versioned", "mine"),
        (["-DOLD", "-DNEW"], "fuse_session_new", "unknown"),
    ],
    ids=["3.16", "3.17", "built for 3.16, runs with 3.17"],
)
def test_each_entry_of_libfuse_is_interposed(
    tmp_path: Path, library: list[str], entry: str, version: str
) -> None:
    answer = begun(tmp_path, library, entry)
    assert answer["why"] == ""
    assert answer["wrapped"]
    assert answer["fd"] != DESCRIPTOR
    assert answer["version"] == version


@pytest.mark.parametrize(
    ("library", "entry", "why"),
    [
        (["-DOLD", "-DNEW"], "fuse_session_new_of_tomorrow", UNKNOWN),
        (
            ["-DOLD", "-DNEW", "-DLACKING"],
            "fuse_session_new_versioned",
            "this libfuse has no fuse_add_direntry_plus",
        ),
    ],
    ids=["unknown entry", "something is missing"],
)
def test_a_libfuse_never_seen_is_left_to_pyfuse3(
    tmp_path: Path, library: list[str], entry: str, why: str
) -> None:
    answer = begun(tmp_path, library, entry)
    assert answer["why"] == why
    assert not answer["wrapped"]
    assert answer["fd"] == DESCRIPTOR


class Fallen(Mount):
    """Asked for zero-open reads, and gets the ordinary mode."""

    said = ""

    def mount_arguments(self) -> list[str]:
        return [part for part in super().mount_arguments() if part != "--no-zero-open"]

    def run(
        self, *arguments: str | Path, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        done = super().run(*arguments, timeout_s=timeout_s)
        self.said += done.stderr
        return done


def test_a_mount_with_a_libfuse_never_seen(place: Place, tmp_path: Path) -> None:
    detour = compiled(tmp_path / "detour.so", "-DDETOUR", "-ldl")
    files = {f"file {number}": os.urandom(200_000) for number in range(4)}
    for name, content in files.items():
        place.write(name, content)
    mount = Fallen(
        *(place.source, place.mountpoint, place.cache_dir, "--ssd", "256M"),
        zero_open=False,
        env=environment(LD_PRELOAD=str(detour)),
        allow_log=["ordinary open mode"],
    )
    with mount:
        said = [line for line in mount.said.splitlines() if "ordinary open mode" in line]
        assert len(said) == 1, mount.said
        assert UNKNOWN in said[0]
        for name in ("file 0", "file 1"):
            assert (mount.path / name).read_bytes() == files[name]
        mount.kill_server()
        for name, content in files.items():
            assert (mount.path / name).read_bytes() == content


@pytest.mark.claim("X7")
def test_lists_that_cannot_be_honoured(place: Place, tmp_path: Path) -> None:
    detour = compiled(tmp_path / "detour.so", "-DDETOUR", "-ldl")
    place.write("file", b"content")
    done = subprocess.run(
        [
            *(*COMMAND, "mount", place.source, place.mountpoint, "--cache-dir", place.cache_dir),
            *("--ssd", "64M", "--hintsd", "none", "--allow-other"),
        ],
        capture_output=True,
        text=True,
        env=environment(LD_PRELOAD=str(detour)),
        timeout=60,
    )
    assert done.returncode != 0
    assert "--allow-other: the origin's access control lists would not be honoured" in done.stderr
    assert not is_mounted(place.mountpoint)


def test_it_compiles_where_the_entry_is_a_macro(tmp_path: Path) -> None:
    """As in the headers of libfuse 3.17 and later, whichever are installed here."""
    (tmp_path / "fuse3").mkdir()
    (tmp_path / "fuse3/fuse_lowlevel.h").write_text(
        """
#include_next <fuse3/fuse_lowlevel.h>
#ifndef fuse_session_new
struct libfuse_version;
struct fuse_session *fuse_session_new_versioned(struct fuse_args *,
    const struct fuse_lowlevel_ops *, size_t, const struct libfuse_version *, void *);
static inline struct fuse_session *fuse_session_new_fn(struct fuse_args *args,
    const struct fuse_lowlevel_ops *op, size_t op_size, void *userdata)
{
    return fuse_session_new_versioned(args, op, op_size, NULL, userdata);
}
#define fuse_session_new(args, op, op_size, userdata) \\
    fuse_session_new_fn(args, op, op_size, userdata)
#endif
"""
    )
    done = subprocess.run(
        [
            *("gcc", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"),
            *(f"-I{tmp_path}", "-I/usr/include/fuse3"),
            *(ROOT / "fusecache/native/front").glob("*.c"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

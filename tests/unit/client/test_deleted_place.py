"""A bind mount of a directory that was deleted: mountinfo has `//deleted` behind its path, which is
not to be taken for a directory of that name."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from fusecache.base import mounts
from hintsd.client import finding
from hintsd.daemon import datasets, messages


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    table = mounts.parse(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "40 22 0:35 / /data ro - fuse.fusecache /mnt/nfs ro,user_id=0\n"
        f"41 22 0:35 /train//deleted {tmp_path} ro - fuse.fusecache /mnt/nfs ro,user_id=0\n"
    )
    monkeypatch.setattr(mounts, "mounts", lambda: table)
    return tmp_path


def test_the_client_says_so(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(finding.SOCKET_VARIABLE, "/run/hintsd.sock")
    with pytest.raises(finding.Unhinted, match="shows a directory that was deleted"):
        finding.find_socket(str(box / "x"))


def test_hintsd_takes_it_for_no_other_directory(box: Path) -> None:
    (box / "x").mkdir()
    with pytest.raises(messages.JobRefused, match="hintsd does not see as a whole"):
        trio.run(datasets.locate, bytes(box / "x"))

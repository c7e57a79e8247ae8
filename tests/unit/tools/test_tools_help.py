"""`--help` of the scripts in tools/: at once, on a machine where nothing is set up."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize(
    "name", ["build", "campaign", "check", "demo", "platforms", "sanitize", "test", "setup"]
)
def test_help_needs_no_setup(tmp_path: Path, name: str, flag: str) -> None:
    (tmp_path / "tools").mkdir()
    for script in {name, "setup"}:
        shutil.copy(ROOT / "tools" / script, tmp_path / "tools")
    done = subprocess.run(
        [tmp_path / "tools" / name, flag], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: tools/{name}" in done.stdout
    assert "setup:" not in done.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["tools"]


def test_the_demos_help_has_all_its_options() -> None:
    source = (ROOT / "tools/demo_lib/__main__.py").read_text()
    options = re.findall(r'click\.option\(\s*"(--[a-z-]+)"', source)
    assert options
    shown = subprocess.run(
        [ROOT / "tools/demo", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert [option for option in options if f"  {option} " not in shown] == []


def test_platforms_says_what_it_cannot_do() -> None:
    script = ROOT / "tools/platforms"
    unknown = subprocess.run([script, "hurd"], capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "unknown system hurd: bookworm trixie" in unknown.stderr
    with open(script) as source:
        ordinary = subprocess.run(
            ["bash", "-s"], stdin=source, user=65534, cwd="/", capture_output=True, text=True
        )
    assert ordinary.returncode == 3, "CI goes on"
    assert ordinary.stdout == ("tools/platforms: not run: needs root, for debootstrap and chroot\n")


def test_check_and_test_share_their_checks() -> None:
    for name in ("check", "test"):
        assert "\nsource tools/checks.sh\n" in (ROOT / "tools" / name).read_text()


@pytest.mark.parametrize("name", ["check", "sanitize"])
def test_checks_say_what_they_need(tmp_path: Path, name: str) -> None:
    (tmp_path / "tools").mkdir()
    script = shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    unknown = subprocess.run([script, "--all"], capture_output=True, text=True)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == f"tools/{name}: unknown argument --all (see --help)\n"
    bare = subprocess.run([script], capture_output=True, text=True)
    assert (bare.returncode, bare.stdout) == (1, "")
    assert bare.stderr == f"tools/{name}: .venv is not ready: run tools/setup\n"

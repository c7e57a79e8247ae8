"""What the documentation claims is tested: SEMANTICS.md and SECURITY.md, claim by claim."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fusecache import processes
from hintsd import link
from tools.campaign_lib.__main__ import ATTACKS, main

ROOT = Path(__file__).resolve().parent.parent
CLAIM = re.compile(r"^\* \*\*([A-Z][0-9]+)\*\* ", re.MULTILINE)
CLAIMING = ("docs/SEMANTICS.md", "SECURITY.md")


def claims() -> list[str]:
    return CLAIM.findall("\n".join((ROOT / name).read_text() for name in CLAIMING))


def quoted() -> Iterator[tuple[str, str]]:
    """(claim number, test that quotes it) for every `pytest.mark.claim` on a test function."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == (
                    "pytest.mark.claim"
                ):
                    assert node.name.startswith("test_"), f"{node.name} is not a test"
                    for argument in decorator.args:
                        yield ast.literal_eval(argument), f"{path.name}::{node.name}"


def test_every_claim_is_numbered_once() -> None:
    twice = [number for number, count in Counter(claims()).items() if count > 1]
    assert not twice
    lines = [line for name in CLAIMING for line in (ROOT / name).read_text().splitlines()]
    bullets = [line for line in lines if line.startswith("* ")]
    assert len(bullets) == len(claims()) > 40


def test_every_claim_has_a_test() -> None:
    assert set(claims()) - {number for number, _ in quoted()} == set()


def test_no_test_quotes_a_claim_that_is_not_there() -> None:
    known = set(claims())
    assert [(number, test) for number, test in quoted() if number not in known] == []


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / name for name in ("README.md", "SECURITY.md", "client/README.md")]
    documents += sorted((ROOT / "docs").glob("*.md"))
    missing = []
    for document in documents:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            if "://" not in target and not (document.parent / target).exists():
                missing.append((document.name, target))
    assert missing == []


def test_the_table_of_c_files_names_each_once() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    table = text[text.index("| C file | what |") :].partition("\n\n")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines()]
    named = re.findall(r"`(\w+\.c)`", " ".join(first_cells))
    assert sorted(named) == sorted(path.name for path in (ROOT / "fusecache").glob("native*.c"))


def imported_of_fusecache(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("fusecache."):
                    yield alias.name.split(".")[1]
        elif isinstance(node, ast.ImportFrom) and node.module == "fusecache":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fusecache."):
            yield str(node.module).split(".")[1]


def test_what_hintsd_imports_of_fusecache_is_told() -> None:
    text = " ".join((ROOT / "docs/ARCHITECTURE.md").read_text().split())
    told = re.search(r"hintsd/ .{,80}of fusecache it imports (.+?) only", text)
    assert told is not None
    imported = {
        name for path in (ROOT / "hintsd").rglob("*.py") for name in imported_of_fusecache(path)
    }
    assert sorted(re.split(", | and ", told[1])) == sorted(imported)


def test_the_campaigns_attacks_are_told_with_their_shares() -> None:
    text = (ROOT / "docs/CAMPAIGN.md").read_text()
    told = re.findall(r"^\| `(\w+)` \| (\d+) % \|", text, re.MULTILINE)
    assert {name: int(share) / 100 for name, share in told} == {
        name: share for name, (_, share) in ATTACKS.items()
    }
    assert sum(int(share) for _, share in told) == 100


def options_told(tool: str) -> list[str]:
    """In the comment at the head of a script, which is its --help."""
    return re.findall(r"^#   (--[a-z-]+)", (ROOT / "tools" / tool).read_text(), re.MULTILINE)


def test_the_heads_of_the_tools_tell_their_options() -> None:
    build = re.findall(r'add_argument\("(--[a-z-]+)"', (ROOT / "tools/packages.py").read_text())
    assert sorted(options_told("build")) == sorted(build)
    campaign = [option.opts[0] for option in main.params]
    assert sorted(options_told("campaign")) == sorted(campaign)
    arms = re.findall(r"^    (-[-a-z |]+)\)", (ROOT / "tools/platforms").read_text(), re.MULTILINE)
    platforms = {option for arm in arms for option in arm.split(" | ")} - {"-h", "--help"}
    assert sorted(options_told("platforms")) == sorted(platforms)
    only = re.search(r"--only .* of ([a-z, ]+) \[", (ROOT / "tools/campaign").read_text())
    assert only is not None
    assert sorted(only[1].split(", ")) == sorted(ATTACKS)


def test_the_ioctl_has_one_number() -> None:
    """_IOR of <linux/ioctl.h>: read is 2 << 30, then the size, the type, and the number."""
    source = (ROOT / "fusecache/native_raw.c").read_text()
    made = re.search(r"#define HINTSD_IOCTL _IOR\((\w+), (\d+), char\[PATH_MAX\]\)", source)
    assert made is not None
    path_max = 4096
    assert 2 << 30 | path_max << 16 | int(made[1], 0) << 8 | int(made[2]) == link.SOCKET_IOCTL


def test_how_long_a_server_may_hang_is_told() -> None:
    stopped, silent = f"{processes.STOPPED_S:g} s", f"{processes.SILENT_S:g} s"
    lines = {
        "README.md": rf"is stopped \(SIGSTOP\) is replaced after {stopped}, .* after {silent}",
        "docs/SEMANTICS.md": rf"is stopped \(SIGSTOP\) for {stopped}, .* for {silent}",
        "docs/ARCHITECTURE.md": rf"\(SIGSTOP\) \| .* after {stopped} it is .*\n.* after {silent} ",
    }
    for name, line in lines.items():
        assert re.search(line, (ROOT / name).read_text()), f"{name}: {line}"

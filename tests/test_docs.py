"""What the documentation claims is tested: SEMANTICS.md and SECURITY.md, claim by claim."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fusecache.base import processes
from hintsd.client import finding
from tools.campaign_lib.__main__ import ATTACKS, main

ROOT = Path(__file__).resolve().parent.parent
CLAIM = re.compile(r"^\* \*\*([A-Z][0-9]+)\*\* ", re.MULTILINE)
NAMED_FILE = re.compile(r"(?<![\w./])(?:fusecache|hintsd|tests|tools)/[\w/]+\.(?:py|pyi|c|sh)\b")
IN_CODE = re.compile(r"(?<![\w./*{}<>-])(?:\w+/)*\w+\.(?:pyi?|[ch])\b(?!\*)")
FROM = ("", "tests", "fusecache", "fusecache/native", "hintsd")  # where a path in code may begin
# What comments and docstrings name of others, and the one face that all C files have.
ELSEWHERE = ("_native.pyi", "dataloader.py", "S3FIFO.c", "train.py", "xxhash.h")
ELSEWHERE_UNDER = ("torch/", "torchvision/")
LINE_MOST = 120  # characters of a line of Markdown
TABLES_OF_ROWS = (
    "| fusecache/ | what it owns",
    "| hintsd/ | what it owns",
    "| C room | what it is about |",
    "| library | stack | its order |",
)
CLIENT = ROOT / "client/README.md"
CLAIMING = ("docs/SEMANTICS.md", "SECURITY.md")


def claims() -> list[str]:
    return CLAIM.findall("\n".join((ROOT / name).read_text() for name in CLAIMING))


def quoted() -> Iterator[tuple[str, str]]:
    """(claim number, test that quotes it) for every `pytest.mark.claim` on a test function."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if ".claim" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
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


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), CLIENT]


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


def test_links_between_documents_lead_somewhere() -> None:
    missing = []
    for document in documents():
        for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
            name, _, anchor = target.partition("#")
            path = document.parent / name if name else document
            if "://" not in target and (
                not path.exists() or (anchor and anchor not in anchors(path))
            ):
                missing.append((document.name, target))
    assert missing == []


def test_files_that_documents_name_are_there() -> None:
    missing = []
    for document in documents():
        for name in NAMED_FILE.findall(document.read_text()):
            if not (ROOT / name).exists():
                missing.append((document.name, name))
    assert missing == []


def told_in(path: Path) -> list[str]:
    """Its comments and docstrings."""
    text = path.read_text()
    if path.suffix in (".c", ".h"):
        return re.findall(r"/\*.*?\*/|//.*", text, re.DOTALL)
    found = [
        node.value.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    told = [text for text in found if isinstance(text, str)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return told + [token.string for token in tokens if token.type == tokenize.COMMENT]


def is_missing(path: Path, name: str) -> bool:
    places = [ROOT / start for start in FROM] if "/" in name else [path.parent]
    is_there = any((place / name).exists() for place in places)
    return not is_there and name not in ELSEWHERE and not name.startswith(ELSEWHERE_UNDER)


def test_files_that_code_names_are_there() -> None:
    """A bare name is of the same folder; a path begins at one of FROM."""
    missing = []
    for folder in ("fusecache", "hintsd", "tests", "tools"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix not in (".py", ".pyi", ".c", ".h"):
                continue
            if not any(is_missing(path, name) for name in IN_CODE.findall(path.read_text())):
                continue  # not even in its code
            for name in {name for text in told_in(path) for name in IN_CODE.findall(text)}:
                if is_missing(path, name):
                    missing.append((str(path.relative_to(ROOT)), name))
    assert missing == []


def long_lines(document: Path) -> list[str]:
    """But of the tables of rooms and of C files, one row each."""
    lines = document.read_text().splitlines()
    exempt = False
    long = []
    for number, line in enumerate(lines, 1):
        exempt = line.startswith("|") and (exempt or line.startswith(TABLES_OF_ROWS))
        if len(line) > LINE_MOST and not exempt:
            long.append(f"{document.name}:{number}")
    return long


def test_lines_of_markdown_are_short() -> None:
    assert [line for document in documents() for line in long_lines(document)] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


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
    source = (ROOT / "fusecache/native/front/raw.c").read_text()
    made = re.search(r"#define HINTSD_IOCTL _IOR\((\w+), (\d+), char\[PATH_MAX\]\)", source)
    assert made is not None
    path_max = 4096
    assert 2 << 30 | path_max << 16 | int(made[1], 0) << 8 | int(made[2]) == finding.SOCKET_IOCTL


def test_how_long_a_server_may_hang_is_told() -> None:
    stopped, silent = f"{processes.STOPPED_S:g} s", f"{processes.SILENT_S:g} s"
    lines = {
        "docs/LIMITS.md": rf"stopped \(SIGSTOP\) is replaced after {stopped}, [^.]* after {silent}",
        "docs/SEMANTICS.md": rf"is stopped \(SIGSTOP\) for {stopped}, [^.]* for {silent}",
        "docs/ARCHITECTURE.md": rf"\(SIGSTOP\)\*\*: [^*]* after {stopped} it is .* after {silent} ",
    }
    for name, line in lines.items():
        text = " ".join((ROOT / name).read_text().split())
        assert re.search(line, text), f"{name}: {line}"

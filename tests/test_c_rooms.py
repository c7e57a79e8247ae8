"""The C part's house: a folder has one header, and no file knows one further up."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "fusecache/native"
SOURCES = sorted(NATIVE.glob("*/*.c"))
FILES = [*SOURCES, *sorted(NATIVE.glob("*/*.h"))]
LINES_MOST = 600
FUNCTION = r"^(?!static|typedef|#|\s)[^\n(){};=]*?\b(\w+)\([^{};]*\)[^{};]*"


def told() -> dict[str, list[str]]:
    """Of each room in the table of ARCHITECTURE.md, from the top: its files."""
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| `native/(\w+)/` \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    return {room: re.findall(r"`(\w+\.c)`", files) for room, files in rows}


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def test_the_table_of_c_files_names_each_once() -> None:
    named = [f"{room}/{file}" for room, files in told().items() for file in files]
    assert sorted(named) == [name(path) for path in SOURCES]


def test_a_room_has_one_header() -> None:
    headers = [name(path) for path in NATIVE.rglob("*.h")]
    assert sorted(headers) == sorted(f"{room}/{room}.h" for room in told())
    assert sorted(NATIVE.rglob("*.[ch]")) == sorted(FILES)


def test_includes_point_down() -> None:
    rooms = list(told())
    for path in FILES:
        below = rooms[rooms.index(path.parent.name) + 1 :]
        own = f"{path.parent.name}.h"
        included = re.findall(r'^\s*#\s*include\s+"(.+)"', path.read_text(), re.MULTILINE)
        strange = set(included) - {own, *(f"../{room}/{room}.h" for room in below)}
        assert not strange, f"{name(path)} includes {strange}"
        assert (own in included) == (path.suffix == ".c"), name(path)


def test_what_a_file_calls_is_in_headers() -> None:
    """It declares nothing that another file defines."""
    for path in SOURCES:
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        assert not re.search(r"\bextern\b", text), name(path)
        declared = set(re.findall(FUNCTION + ";", text, re.MULTILINE)) - {"_Static_assert"}
        strange = declared - set(re.findall(FUNCTION + r"\s\{", text, re.MULTILINE))
        assert not strange, f"{name(path)} declares {strange}"


def test_what_is_of_a_room_alone_is_called_there() -> None:
    for room in told():
        _, _, inner = (NATIVE / room / f"{room}.h").read_text().partition("of this room alone")
        for function in re.findall(r"^\w[^(\n]*\b(\w+)\([^;{]*[;{]", inner, re.MULTILINE):
            called = re.compile(rf"\b{function}\(")
            strangers = [p for p in FILES if p.parent.name != room and called.search(p.read_text())]
            assert not strangers, f"{function} of {room}: {[name(path) for path in strangers]}"


def test_no_file_is_too_long() -> None:
    assert [name(path) for path in FILES if path.read_text().count("\n") > LINES_MOST] == []


def test_all_are_built() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms, alone = project["tool"]["setuptools"]["ext-modules"]
    built = [*rooms["sources"], *rooms["depends"]]
    assert sorted(built) == sorted(str(path.relative_to(ROOT)) for path in FILES)
    other = [str(path.relative_to(ROOT)) for path in (ROOT / "hintsd/native").iterdir()]
    assert alone["sources"] == other

"""The house: rooms are told of, none is too full, and no modules import each other in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLES = {"fusecache": "docs/ARCHITECTURE.md", "hintsd": "docs/HINTS.md"}
MODULES_MOST, LINES_MOST, CLASS_LINES_MOST, METHODS_MOST = 12, 600, 400, 25
HANDLERS = "Operations"  # one for each request of the kernel
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# What a module may write, or use of the private part, though it is another's: libraries mean it so.
EXCEPTIONS = (
    "fusecache.base.terminal target.width",
    "fusecache.base.trust error.filename",
    "fusecache.pool.engine context.minimum_version",
    "fusecache.read.operations entry.*",
    "hintsd.autohint begin._hintsd",
    "hintsd.autohint iterator_class.__init__",
    "hintsd.autohint loader_class.__new__",
    "hintsd.autohint spec.loader.exec_module",
    "hintsd.autohint.sitecustomize sys.*",
    "hintsd.client.known.streams dataset.*",  # the library tells its order to itself alone
    "hintsd.client.known.streams node.*",
    "hintsd.client.known.streams self.dataset.*",
    "hintsd.client.ranges.tables dataset.*",  # where its rows are, no library tells
    "hintsd.client.known.web_dataset worker._worker_info",  # torch has no other way to say so
    "hintsd.client.client weakref.finalize(*).atexit",
    "hintsd.lab.replay policy.on_load",  # a policy's caller sets them
    "hintsd.orders.samplers twin.batch_sampler",
    "hintsd.simulator.figures.report column.justify",
    "* *scope.deadline",
    "* *.flags.writeable",
    "* *._replace",
    "* os._exit",
    "* sys._getframe",
)
OTHERS = ("autohint", "lab", "policies", "simulator")  # have pages of their own


def rooms(package: str) -> list[Path]:
    return sorted(path.parent for path in (ROOT / package).glob("*/__init__.py"))


def modules(room: Path) -> list[Path]:
    return [path for path in room.glob("*.py") if not path.stem.startswith("__")]


def told(package: str) -> dict[str, list[str]]:
    """Of each room, from the top: its modules and folders, in its row of the table (where what is
    in brackets is no module), or one line each below it.
    """
    text = (ROOT / TABLES[package]).read_text()
    rows = re.findall(r"^\| `(\w+)/` (?:\(pure\) )?\| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    bare = {room: re.sub(r"\([^)]*\)", "", modules) for room, modules in rows}
    found = {room: re.findall(r"`(\w+)`", modules) for room, modules in bare.items()}
    for room, module in re.findall(r"^\* `(\w+)/(\w+)/?`: ", text, re.MULTILINE):
        found[room].append(module)
    return found


@pytest.mark.parametrize("package", TABLES)
def test_the_table_of_rooms_names_each(package: str) -> None:
    assert sorted(told(package)) == [room.name for room in rooms(package)]


@pytest.mark.parametrize("package", TABLES)
def test_the_table_of_rooms_names_their_modules(package: str) -> None:
    for room in rooms(package):
        if room.name not in OTHERS:
            folders = [path.parent.name for path in room.glob("*/__init__.py")]
            there = [path.stem for path in modules(room)] + folders
            assert sorted(told(package)[room.name]) == sorted(there), room


@pytest.mark.parametrize("package", TABLES)
def test_imports_within_a_room_point_down(package: str) -> None:
    """As the tables list its modules. A folder in a room is one of them."""
    graph = grimp.build_graph(*TABLES)
    for room in rooms(package):
        names, above = told(package)[room.name], f"{package}.{room.name}."
        place = {name: number for number, name in enumerate(names)} | {"__main__": -1}
        inside = {each: each[len(above) :].split(".")[0] for each in graph.modules if above in each}
        for module, name in inside.items() if room.name not in OTHERS else ():
            imported = graph.find_modules_directly_imported_by(module) & inside.keys()
            up = [target for target in imported if place[inside[target]] < place[name]]
            assert not up, f"{module} imports {up}"


@pytest.mark.parametrize("package", TABLES)
def test_no_room_is_too_full(package: str) -> None:
    for path in (ROOT / package).rglob("__init__.py"):
        assert len(modules(path.parent)) <= MODULES_MOST, path.parent


@pytest.mark.parametrize("package", TABLES)
def test_no_module_and_no_class_is_too_large(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= LINES_MOST, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name != HANDLERS:
                methods = [part for part in node.body if isinstance(part, FUNCTIONS)]
                assert len(methods) <= METHODS_MOST, f"{path}: {node.name}"
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= CLASS_LINES_MOST, f"{path}: {node.name}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph(*TABLES)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imported).prepare()  # CycleError names them


def fields_of(tree: ast.Module) -> set[str]:
    """What the classes of a module own."""
    found = set[str]()
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef):
            for node in ast.walk(each):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add(node.target.id)
                elif isinstance(node, FUNCTIONS):
                    found.add(node.name)
                elif isinstance(node, ast.Attribute) and is_own(node) and writes(node):
                    found.add(node.attr)
                elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
                    found.update(ast.literal_eval(node.value))
    return found


def is_own(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls", "super()")


def writes(node: ast.Attribute | ast.Subscript) -> bool:
    return isinstance(node.ctx, (ast.Store, ast.Del))


def reaches(tree: ast.Module) -> Iterator[str]:
    """Fields of objects of other modules that are written, and private ones that are used."""
    own = fields_of(tree)
    for node in ast.walk(tree):
        is_item = isinstance(node, ast.Subscript) and writes(node)
        at = node.value if isinstance(node, ast.Subscript) and is_item else node
        if not isinstance(at, ast.Attribute) or is_own(at) or at.attr in own:
            continue
        is_private = at.attr.startswith("_") and not at.attr.startswith("__")
        if is_item or is_private or writes(at):
            yield ast.unparse(at)


def test_nobody_reaches_into_objects_of_other_modules() -> None:
    """By name: a field that a class of the same module has, too, is taken for that one."""
    strange, used = [], set[str]()
    for package in TABLES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for reach in reaches(ast.parse(path.read_text())):
                name = f"{module.removesuffix('.__init__')} {reach}"
                fitting = {each for each in EXCEPTIONS if fnmatch(name, each)}
                used |= fitting
                if not fitting:
                    strange.append(name)
    assert not strange
    assert used == set(EXCEPTIONS)

"""Holds the order of the rooms: a room imports itself and earlier ones alone, and the plain ones never torch."""

import ast
import re
from pathlib import Path

import networkx as nx
import pytest

PACKAGE = Path(__file__).parents[1] / "autovaruna"
ROOMS = [
    "errors",
    "config",
    "log",
    "_torch",
    "interception",
    "graph",
    "profiler",
    "schedule",
    "planner",
    "stage",
    "runtime",
    "checkpoint",
    "session",
    "api",
    "elastic",
    "varuna",
    "integrations",
    "commands",
    "__main__",
]
ROOM_OF_FILE = {"run_varuna": "varuna"}
PLAIN_ROOMS = {"errors", "log", "config", "schedule", "planner"}
PLAIN_FILES = {"graph/records.py", "profiler/records.py"}
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
ROOM_FILES = [file for file in FILES if file != "__init__.py"]


def room_of(first: str) -> str:
    return ROOM_OF_FILE.get(first, first)


def is_plain(file: str) -> bool:
    return room_of(Path(file).with_suffix("").parts[0]) in PLAIN_ROOMS or file in PLAIN_FILES


def imports(file: str) -> list[list[str]]:
    """Returns the dotted names that a file imports, as lists of their parts."""
    package = ["autovaruna", *Path(file).parent.parts]
    names = []
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names += [[*base, alias.name] for alias in node.names]
    return names


def own_imports(file: str) -> list[list[str]]:
    return [name[1:] for name in imports(file) if name[0] == "autovaruna" and len(name) > 1]


def test_every_folder_is_a_package_that_is_installed():
    assert {path.parent for path in PACKAGE.rglob("*.py")} == {path.parent for path in PACKAGE.rglob("__init__.py")}


def test_every_file_is_in_a_room():
    assert {room_of(Path(file).with_suffix("").parts[0]) for file in ROOM_FILES} <= set(ROOMS)


@pytest.mark.parametrize("file", ROOM_FILES)
def test_imports_go_to_the_same_room_or_an_earlier_one(file):
    room = ROOMS.index(room_of(Path(file).with_suffix("").parts[0]))
    later = [".".join(name) for name in own_imports(file) if room_of(name[0]) in ROOMS[room + 1 :]]
    assert not later, f"{file} of room {ROOMS[room]} imports from later rooms: {later}"


@pytest.mark.parametrize("file", [file for file in FILES if is_plain(file)])
def test_plain_files_import_no_torch(file):
    assert not [name for name in imports(file) if name[0] == "torch"]


@pytest.mark.parametrize("file", [file for file in FILES if is_plain(file)])
def test_plain_files_import_only_plain_files(file):
    others = [name for name in own_imports(file) if room_of(name[0]) in set(ROOMS) - PLAIN_ROOMS]
    assert not [name for name in others if name[1:2] != ["records"]]


def private_names(file: str) -> list[str]:
    """Returns the names that are private to torch in a file: those of imports, attributes, and modules in texts."""
    tree = ast.parse((PACKAGE / file).read_text())
    found = [".".join(name) for name in imports(file)]
    found += [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return sorted({name for name in found if re.fullmatch(r"(torch|nn|fx)(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*", name)})


@pytest.mark.parametrize("file", [file for file in FILES if file != "_torch.py"])
def test_private_names_of_torch_are_in_one_file(file):
    assert not private_names(file)


def test_no_file_is_a_drawer_for_everything():
    assert not {Path(file).stem for file in FILES} & {"utils", "common", "helpers", "misc"}


def test_no_class_name_stands_twice():
    places = {}
    for file in FILES:
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(file)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_files_import_each_other():
    modules = {tuple(Path(file).with_suffix("").parts): file for file in FILES}
    imported = nx.DiGraph()
    for module, file in modules.items():
        names = [tuple(name) for name in own_imports(file)]
        imported.add_edges_from((file, modules[name[:-1]]) for name in names if name[:-1] in modules)
        imported.add_edges_from((file, modules[name]) for name in names if name in modules and name != module)
    imported.remove_edges_from(nx.selfloop_edges(imported))
    assert [sorted(circle) for circle in nx.strongly_connected_components(imported) if len(circle) > 1] == []

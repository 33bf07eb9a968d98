"""Holds the order of the rooms: a room imports itself and earlier ones alone, and the plain ones never torch."""

import ast
import re
from functools import cache
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

from autovaruna._torch import FakeTensor, FakeTensorMode

PACKAGE = Path(__file__).parents[1] / "autovaruna"
ROOMS = [
    *("errors", "config", "log", "heap", "_torch", "interception", "ranks", "graph", "profiler", "schedule", "planner"),
    *("stage", "evidence", "runtime", "checkpoint", "elastic", "session", "api", "varuna", "integrations", "commands"),
    "__main__",
]
ROOM_OF_FILE = {"run_varuna": "varuna"}
LEVELS = {
    "graph": "records source_lines key_values tree precision random rounding cuts operators > outside evaluate > guards"
    " > call module_state constant_values side_effects > opaque lengths > export > facts traced > batch"
    " > grouping pieces > methods trace",
    "evidence": "clock verify stage_rows refusal > sample_runs > witness",
    "ranks": "system launcher tls transport > exchange > deadlock > reduction > world"
    " > buckets environment torch_channel",
    "runtime": "metrics autograd remote_parameter batch mail timeline > weights"
    " > optimizer clipping scaler > gradients > program > witness > outputs executor > step > engine",
    "session": "links manager_link memory shared_call > batch_values measuring run traces > generation model recheck"
    " > agreement persistence preparation > record > session",
    "checkpoint": "manifest remote_file > folder tensor_file > encoding > state source > load save",
    "elastic": "host_list options host_processes job_folder rank_script sampler stub > ahead snapshot standby"
    " > copies > job keeper notices > link slow_ranks > watch job_state > hosts > run > manager",
}
"""Files and folders of a room by level: each imports those of its own level and of those before it alone."""
PLAIN_ROOMS = {"errors", "log", "config", "schedule", "planner"}
PLAIN_FILES = {"graph/records.py", "profiler/records.py"}
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
ROOM_FILES = [file for file in FILES if file != "__init__.py"]


def room_of(first: str) -> str:
    return ROOM_OF_FILE.get(first, first)


def is_plain(file: str) -> bool:
    return room_of(Path(file).with_suffix("").parts[0]) in PLAIN_ROOMS or file in PLAIN_FILES


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text())


@cache
def nodes_of(file: str) -> list[ast.AST]:
    return list(ast.walk(tree_of(file)))


@cache
def imports(file: str) -> list[list[str]]:
    """Returns the dotted names that a file imports, as lists of their parts."""
    package = ["autovaruna", *Path(file).parent.parts]
    names = []
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            names += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names += [[*base, alias.name] for alias in node.names]
    return names


def own_imports(file: str) -> list[list[str]]:
    return [name[1:] for name in imports(file) if name[0] == "autovaruna" and len(name) > 1]


def test_every_folder_is_a_package_that_is_installed_and_every_file_is_in_a_room():
    assert {path.parent for path in PACKAGE.rglob("*.py")} == {path.parent for path in PACKAGE.rglob("__init__.py")}
    assert {room_of(Path(file).with_suffix("").parts[0]) for file in ROOM_FILES} <= set(ROOMS)


def test_imports_go_to_the_same_room_or_an_earlier_one():
    for file in ROOM_FILES:
        room = ROOMS.index(room_of(Path(file).with_suffix("").parts[0]))
        later = [".".join(name) for name in own_imports(file) if room_of(name[0]) in ROOMS[room + 1 :]]
        assert not later, f"{file} of room {ROOMS[room]} imports from later rooms: {later}"


@pytest.mark.parametrize("room", LEVELS)
def test_imports_within_a_room_go_to_the_same_level_or_an_earlier_one(room):
    level_of = {name: level for level, names in enumerate(LEVELS[room].split(">")) for name in names.split()}
    files = [file for file in FILES if file.startswith(f"{room}/") and file != f"{room}/__init__.py"]
    for file in files:
        own = level_of[Path(file).with_suffix("").parts[1]]
        names = [name[1] for name in own_imports(file) if name[0] == room and name[1:]]
        later = {name for name in names if level_of[name] > own}
        assert not later, f"{file} imports from later levels of {room}: {later}"


def test_plain_files_import_no_torch_and_only_plain_files():
    for file in filter(is_plain, FILES):
        others = [name for name in own_imports(file) if room_of(name[0]) in set(ROOMS) - PLAIN_ROOMS]
        others = [name for name in others if name[1:2] != ["records"]]
        assert not others and not [name for name in imports(file) if name[0] == "torch"], file


def private_names(file: str) -> list[str]:
    """Returns the names that are private to torch in a file: those of imports, attributes, and modules in texts."""
    nodes = nodes_of(file)
    found = [".".join(name) for name in imports(file)]
    found += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found += [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
    return sorted({name for name in found if re.fullmatch(r"(torch|nn|fx)(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*", name)})


def test_private_names_of_torch_are_in_one_file():
    assert {file: names for file in FILES if file != "_torch.py" and (names := private_names(file))} == {}


def private_attributes() -> set[str]:
    """Returns the private names that objects and modules of torch have, which a user or the library may hold."""
    parameter, graph = nn.Parameter(torch.zeros(1)), fx.Graph()
    optimizer = torch.optim.SGD([parameter])
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    samples = (
        *(nn.Module(), nn.RNN(1, 1), nn.BatchNorm1d(1), nn.parallel.DistributedDataParallel, torch.jit.ScriptModule),
        *(parameter, parameter.untyped_storage(), torch.Generator(), FakeTensor, FakeTensorMode, torch.distributed),
        *(optimizer, scheduler, torch.amp.GradScaler("cpu"), torch.distributions.Distribution),
        *(torch.autograd.Function, torch.autograd.Variable, torch.autograd.graph.Node, parametrize),
        *(graph, graph.placeholder("x"), fx.GraphModule(nn.Module(), fx.Graph()), fx.Interpreter),
        *(torch.ops.aten.mul.Tensor, torch.SymInt, SymNode, ShapeEnv(), torch.export.ExportedProgram),
        *(DataLoader([0]), iter(DataLoader([0]))),
    )
    return {name for sample in samples for name in dir(sample) if re.fullmatch(r"_[a-zA-Z]\w*", name)}


PRIVATE = private_attributes()
KEYS_OF_FILES = {"_growth_tracker", "_reconstruct"}  # what a GradScaler's state and NumPy's pickles have


def test_private_attributes_of_torch_are_read_in_one_file():
    for file in FILES:
        nodes = nodes_of(file)
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        stores = [each for each in attributes if isinstance(each.ctx, ast.Store)]
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {each.attr for each in stores if ast.unparse(each.value) == "self"}
        own |= {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
        read = {each.attr for each in attributes} - own
        read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert file == "_torch.py" or not read & PRIVATE - KEYS_OF_FILES, file


def late_constants(file: str) -> list[str]:
    """Returns the constants (UPPER_CASE) after a file's first class or function that refer to none of the file."""
    own, late = set(), []
    for node in tree_of(file).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            names = {each.id: type(each.ctx) for each in ast.walk(node) if isinstance(each, ast.Name)}
            targets = [name for name, context in names.items() if context is ast.Store]
            if names.keys() & own:
                own.update(targets)
            elif own:
                late += [name for name in targets if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name)]
    return late


def test_constants_come_first():
    assert {file: late for file in FILES if (late := late_constants(file))} == {}


def test_no_file_is_a_drawer_for_everything_and_no_class_name_stands_twice():
    assert not {Path(file).stem for file in FILES} & {"utils", "common", "helpers", "misc"}
    places = {}
    for file in FILES:
        for node in nodes_of(file):
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

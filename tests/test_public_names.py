"""Holds the public face: a package exports exactly its ``__all__``, and rooms use each other's public names alone."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import autovaruna
from tests.test_layers import FILES, PACKAGE
from tests.test_layers import nodes_of as all_nodes_of

ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
LAZY = {"varuna"}  # rooms that export names, each with its first use; of others one imports files
NOT_OURS = {"_apply", "_buffers", "_exit", "_is_param", "_is_view", "_make", "_parameters", "_replace"}
"""Names that torch, the system and named tuples have, and classes of ours as well."""


def test_public_names_are_there_errors_among_them_and_nothing_else_is_public():
    assert all(hasattr(autovaruna, name) for name in autovaruna.__all__)
    public = {name for name, value in vars(autovaruna).items() if not (name.startswith("_") or inspect.ismodule(value))}
    assert public - {"annotations"} <= set(autovaruna.__all__)
    assert {name for name, each in vars(autovaruna.errors).items() if inspect.isclass(each)} <= set(autovaruna.__all__)
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_exports_its_public_names_alone(room):
    module = importlib.import_module(f"autovaruna.{room}")
    if room in LAZY:
        assert module.__all__ and all(hasattr(module, name) for name in module.__all__)
        return
    (docstring,) = ast.parse(Path(module.__file__).read_text()).body
    assert isinstance(docstring, ast.Expr)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_uses_no_private_name_of_another(room):
    files = [file for file in FILES if file.startswith(f"{room}/")]
    others = [file for file in FILES if file not in files]
    used = {each.attr for each in nodes_of(files, ast.Attribute) if not is_of_self(each)}
    imported = {alias.name for each in nodes_of(files, ast.ImportFrom) for alias in each.names}
    assert not (used | imported) & (private_names(others) - private_names(files) - NOT_OURS)


def nodes_of(files, kind):
    return [node for file in files for node in all_nodes_of(file) if isinstance(node, kind)]


def private_names(files):
    """Returns the private names that files define: attributes, methods, functions and constants."""
    names = {each.attr for each in nodes_of(files, ast.Attribute) if is_of_self(each)}
    names |= {each.name for each in nodes_of(files, (ast.FunctionDef, ast.ClassDef))}
    names |= {each.id for each in nodes_of(files, ast.Name) if isinstance(each.ctx, ast.Store)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def is_of_self(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")

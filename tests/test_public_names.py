"""Holds the public face: what a package exports is exactly its ``__all__`` (ruff holds its order)."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import autovaruna

PACKAGE = Path(autovaruna.__file__).parent
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_public_names_are_there():
    assert all(hasattr(autovaruna, name) for name in autovaruna.__all__)


def test_nothing_else_is_public():
    public = {name for name, value in vars(autovaruna).items() if not (name.startswith("_") or inspect.ismodule(value))}
    assert public - {"annotations"} <= set(autovaruna.__all__)


def test_every_error_is_public():
    assert {name for name, each in vars(autovaruna.errors).items() if inspect.isclass(each)} <= set(autovaruna.__all__)


def test_the_names_of_varuna_s_room_are_there():
    module = importlib.import_module("autovaruna.varuna")
    assert module.__all__ and all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_s_init_only_exports(room):
    statements = ast.parse((PACKAGE / room / "__init__.py").read_text()).body
    exporting = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)
    assert all(isinstance(each, exporting) or is_lazy_import(each) for each in statements)


def is_lazy_import(statement):
    """Says whether a statement imports names with their first use, and tells type checkers of them."""
    is_for_types = isinstance(statement, ast.If) and getattr(statement.test, "id", "") == "_TYPE_CHECKING"
    return is_for_types or (isinstance(statement, ast.FunctionDef) and statement.name == "__getattr__")


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()

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


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_s_names_are_there(room):
    module = importlib.import_module(f"autovaruna.{room}")
    assert all(hasattr(module, name) for name in getattr(module, "__all__", []))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_s_init_only_exports(room):
    statements = ast.parse((PACKAGE / room / "__init__.py").read_text()).body
    assert all(isinstance(each, (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)) for each in statements)


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()

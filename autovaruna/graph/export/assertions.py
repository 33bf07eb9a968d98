"""Keeps a line of a model that raises if a number is wrong, and does nothing else, as a node that checks in every run.

While a model is traced, such a condition counts as passed, unless its numbers are known, and leaves the operator
`check` in the graph.
"""

from __future__ import annotations

import ast
import linecache
import sys
from functools import lru_cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna._torch import FakeTensor
from autovaruna.errors import InputError
from autovaruna.graph.export.constant_values import truth_of
from autovaruna.graph.module_state import is_profiling
from autovaruna.graph.source_lines import is_users, origin

_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Try, ast.NamedExpr)
_HIDES_TRUTH = (ast.Not, ast.IfExp, ast.Lambda, ast.comprehension, ast.NamedExpr, ast.In, ast.NotIn, ast.Await)


def passing(filename: str, line: int) -> bool | None:
    """Returns the truth of tensors with which the check at a line passes; None: there is none, or it does more."""
    tests = [test for test in _checks(filename) if test[0] <= line <= test[1]]
    return min(tests, key=lambda test: test[1] - test[0])[2] if tests else None


@lru_cache(maxsize=256)
def _checks(filename: str) -> tuple[tuple[int, int, bool | None], ...]:
    """Returns the first and the last line of each condition of a file, and its truth where nothing is raised."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    found = [_condition(each) for each in ast.walk(tree) if isinstance(each, ast.If | ast.Assert | ast.While)]
    return tuple(found)


def _condition(statement: ast.If | ast.Assert | ast.While) -> tuple[int, int, bool | None]:
    """Returns the lines of a statement's condition, and what its tensors must be."""
    test: ast.expr = statement.test
    lines = test.lineno, test.end_lineno or test.lineno
    wanted = isinstance(statement, ast.Assert)
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, wanted = test.operand, not wanted
    return *lines, wanted if _only_raises(statement) and _is_told_by_each(test, wanted) else None


def _is_told_by_each(test: ast.expr, wanted: bool) -> bool:
    """Whether a condition is as wanted just where each tensor in it that Python asks for its truth is.

    Not so in ``a and b`` that must be false: either may be true alone.
    """
    if isinstance(test, ast.BoolOp):
        *first, last = test.values
        if isinstance(test.op, ast.And) is wanted:
            return all(_is_told_by_each(each, wanted) for each in test.values)
        return all(map(_is_no_tensor, first)) and _is_told_by_each(last, wanted)
    if isinstance(test, ast.Compare) and len(test.ops) > 1 and not wanted:
        return False
    return not any(isinstance(each, _HIDES_TRUTH) or _calls_by_name(each) for each in ast.walk(test))


def _is_no_tensor(test: ast.expr) -> bool:
    """Whether an expression is true or false, and no tensor."""
    return isinstance(test, ast.Compare) and isinstance(test.ops[-1], ast.Is | ast.IsNot)


def _only_raises(statement: ast.stmt) -> bool:
    """Whether a statement raises, or does nothing, by its condition."""
    if isinstance(statement, ast.Assert):
        return True
    if not isinstance(statement, ast.If) or not isinstance(statement.body[-1], ast.Raise):
        return False
    return not any(isinstance(each, _LEAVES) for line in statement.body for each in ast.walk(line))


def _calls_by_name(node: ast.AST) -> bool:
    """Whether a function is called by its name alone: ``bool`` or ``any``, say, which ask for the truth themselves."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in ("len", "isinstance")


aten = torch.ops.aten


@torch.library.custom_op("autovaruna::check", mutates_args=())
def _check(condition: Tensor, wanted: bool, place: str) -> None:
    """Stands for a check in a trace."""
    check(condition, wanted, place)


@_check.register_fake
def _fake(condition: Tensor, wanted: bool, place: str) -> None:
    """Checks nothing: there are no numbers."""


def check(condition: Tensor, wanted: bool, place: str) -> None:
    """Looks at a condition of the model, where its numbers are those of a step.

    Args:
        condition: One boolean.
        wanted: What it has to be.
        place: The model's line that raises otherwise.

    Raises:
        InputError: it is something else.
    """
    if not isinstance(condition, FakeTensor) and not is_profiling() and bool(condition) is not wanted:
        raise InputError(
            f"The model raises at {place}: got numbers that do not pass this check of its own. Expected inputs that "
            "the model takes on one process, without AutoVaruna; try it so. If it takes them, look for an argument "
            "whose first dimension is not the batch: every micro-batch gets all of it."
        )


for _each in (torch.ops.autovaruna.check.default, check):  # they stay in a graph, though nothing uses what they return
    fx.node.has_side_effect(_each)


def truth(tensor: Tensor, frame: FrameType) -> bool:
    """Returns what a fake tensor counts as in a condition; where the line that asks is a check, that leaves a node.

    Args:
        tensor: The condition.
        frame: Where Python asks.
    """
    if (known := truth_of(tensor)) is not None:
        return known
    wanted = passing(frame.f_code.co_filename, frame.f_lineno)
    if wanted is None:
        return Tensor.__bool__(tensor)
    torch.ops.autovaruna.check(tensor, wanted, _line(frame))
    return wanted


def left_check(condition: Tensor) -> Any:
    """Leaves a node for a condition that torch checks for all elements of a tensor; returns what passes the check."""
    places = map(_line, _users(sys._getframe(1)))
    torch.ops.autovaruna.check(condition.all(), True, ", called at ".join(places))
    return SimpleNamespace(item=lambda: True)


def _users(frame: FrameType | None) -> list[FrameType]:
    """Returns the two innermost frames of the user's model: libraries have helpers that check."""
    found: list[FrameType] = []
    while frame is not None and len(found) < 2:
        if is_users(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found


def _line(frame: FrameType) -> str:
    """Returns where a frame is; without the folder, which may be another on each host."""
    name, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(name).name}:{line} ({linecache.getline(name, line).strip()})"


def take_checks(module: fx.GraphModule) -> None:
    """Has a graph, and the regions in it, call `check` where a check was."""
    for each in [each for each in module.modules() if isinstance(each, fx.GraphModule)]:
        for node in each.graph.nodes:
            if node.target is torch.ops.autovaruna.check.default:
                node.target = check
            elif node.target is aten._assert_async.msg:
                node.target, node.args = check, (node.args[0], True, Path(origin(node)).name)
        if each is not module:
            each.recompile()

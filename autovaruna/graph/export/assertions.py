"""Traces lines that raise by the numbers in tensors: each becomes a node that checks them in every run.

The condition counts as passed while a model is traced, if the line does nothing but raise.
"""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna._torch import FakeTensor, FunctionalTensor, all_true
from autovaruna.errors import InputError
from autovaruna.graph.constant_values import follows_held, numbers_of
from autovaruna.graph.export.errors import refuse_int
from autovaruna.graph.opaque.run import is_profiling
from autovaruna.graph.source_lines import is_users, origin

_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Try, ast.NamedExpr)
_IDENTITY = ast.Is | ast.IsNot
_HIDES_TRUTH = (ast.Not, ast.IfExp, ast.Lambda, ast.comprehension, ast.NamedExpr, ast.In, ast.NotIn, ast.Await)
_CASTS = {Tensor.__bool__: Tensor.bool, Tensor.__int__: Tensor.long}
_aten = torch.ops.aten


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
    return *lines, wanted if _only_raises(statement) and _follows_each(test, wanted) else None


def _follows_each(test: ast.expr, wanted: bool) -> bool:
    """Whether a condition is as wanted just where each tensor in it that Python asks for its truth is.

    Not so in ``a and b`` that must be false: either may be true alone.
    """
    if isinstance(test, ast.BoolOp):
        *first, last = test.values
        if isinstance(test.op, ast.And) is wanted:
            return all(_follows_each(each, wanted) for each in test.values)
        are_no_tensors = all(isinstance(each, ast.Compare) and isinstance(each.ops[-1], _IDENTITY) for each in first)
        return are_no_tensors and _follows_each(last, wanted)
    if isinstance(test, ast.Compare) and len(test.ops) > 1 and not wanted:
        return False
    return not any(
        isinstance(each, _HIDES_TRUTH) or _calls_by_name(each) or _compares_item(each) for each in ast.walk(test)
    )


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


def _compares_item(node: ast.AST) -> bool:
    """Whether the truth in a tensor is compared, as in ``t.item() == False``."""
    sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    return any(isinstance(each, ast.Call) and getattr(each.func, "attr", "") == "item" for each in sides)


@torch.library.custom_op("autovaruna::check", mutates_args=())
def _check(condition: Tensor, wanted: bool, place: str, is_held: bool = False) -> None:
    check(condition, wanted, place, is_held)


@_check.register_fake
def _fake(condition: Tensor, wanted: bool, place: str, is_held: bool = False) -> None:
    """Checks nothing: there are no numbers."""


def check(condition: Tensor, wanted: bool, place: str, is_held: bool = False) -> None:
    """Looks at a condition of the model, where its numbers are those of a step, or of tensors that the model holds."""
    if isinstance(condition, FakeTensor) or is_profiling() or bool(condition) is wanted:
        return
    if is_held:
        raise InputError(
            f"Forward goes by the numbers of a tensor that the model holds, at {place}, and they are others than when "
            "it was traced. Expected a tensor that stays as it is: put a new one in its place, which is traced anew."
        )
    raise InputError(
        f"The model raises at {place}: got numbers that do not pass this check of its own. Expected inputs that "
        "the model takes on one process, without AutoVaruna; try it so. If it takes them, look for an argument "
        "whose first dimension is not the batch: every micro-batch gets all of it."
    )


for _each in (torch.ops.autovaruna.check.default, check):  # they stay in a graph, though nothing uses what they return
    fx.node.has_side_effect(_each)


def number_in(plain: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """Returns the numbers in a tensor as Python's; of a fake one they must follow from constants and shapes."""
    if not is_traced(tensor):
        return plain(tensor)
    if (known := numbers_of(tensor, plain)) is not None:
        if follows_held(tensor):
            own = _CASTS[plain](tensor) if plain in _CASTS else tensor
            same = own == (torch.tensor(known, dtype=own.dtype, device=own.device) if plain is Tensor.tolist else known)
            users = (each for each, _ in traceback.walk_stack(sys._getframe()) if is_users(each.f_code.co_filename))
            torch.ops.autovaruna.check(same.all(), True, _line(next(users)), True)
        return known
    frame = sys._getframe(3)  # behind the two of `Idioms`
    is_condition = plain is Tensor.__bool__ or (plain is Tensor.item and tensor.dtype is torch.bool)
    wanted = passing(frame.f_code.co_filename, frame.f_lineno) if is_condition else None
    if wanted is not None:
        torch.ops.autovaruna.check(tensor, wanted, _line(frame))
    elif plain is Tensor.__int__:
        raise refuse_int()
    return plain(tensor) if wanted is None else wanted


def all_pass(condition: Tensor) -> Any:
    """Leaves a node for a condition that torch checks for all elements of a tensor; returns what passes the check."""
    if not is_traced(condition):
        return all_true(condition)
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if is_users(frame.f_code.co_filename))
    places = map(_line, islice(frames, 2))  # libraries have helpers that check
    torch.ops.autovaruna.check(condition.all(), True, ", called at ".join(places))
    return SimpleNamespace(item=lambda: True)


def _line(frame: FrameType) -> str:
    """Returns where a frame is; without the folder, which may be another on each host."""
    name, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(name).name}:{line} ({linecache.getline(name, line).strip()})"


def place_checks(module: fx.GraphModule) -> None:
    """Has a graph call `check` where a check was."""
    for node in module.graph.nodes:
        if node.target is torch.ops.autovaruna.check.default:
            node.target = check
        elif node.target is _aten._assert_async.msg:
            node.target, node.args = check, (node.args[0], True, Path(origin(node)).name)


def is_traced(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor | FunctionalTensor)

"""Keeps the checks of a model: lines that raise if a number in a tensor is wrong, and do nothing else.

While a model is traced, such a condition counts as passed, unless its numbers are known, and leaves the operator
``autovaruna::check``; `take_checks` makes each a call of `check`, which looks at the number in every run.
"""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna._torch import FakeTensor
from autovaruna.errors import InputError
from autovaruna.graph.exporting.known import truth_of
from autovaruna.graph.exporting.raising import passing
from autovaruna.graph.kept_whole.rehearsal import is_rehearsing
from autovaruna.graph.origin import is_users, origin

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
    if not isinstance(condition, FakeTensor) and not is_rehearsing() and bool(condition) is not wanted:
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
        each.recompile()

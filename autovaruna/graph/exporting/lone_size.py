"""Notes the line of the user's model that tells a batch of one sample from larger ones; a trace is of those alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import sympy
import torch

from autovaruna.graph.origin import is_users, users_line


@contextmanager
def noted_lone_sizes() -> Iterator[list[str]]:
    """Notes ``at file:line (code)`` of each branch, on this thread, that one sample would take otherwise.

    torch takes it for granted that a size that is kept free is at least two, and says nothing of it.
    """
    tracing, places = get_ident(), list[str]()
    known: Any = torch.SymBool.__bool__

    def noting(self: torch.SymBool) -> bool:
        answer: bool = known(self)
        if get_ident() == tracing and _is_users_branch() and _differs_for_one(self, answer):
            places.append(users_line())
        return answer

    torch.SymBool.__bool__ = noting  # type: ignore[method-assign]
    try:
        yield places
    finally:
        torch.SymBool.__bool__ = known  # type: ignore[method-assign]


def _is_users_branch() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == torch.__file__:  # ``if x.shape[0] - 1:``
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


def _differs_for_one(condition: torch.SymBool, answer: bool) -> bool:
    """Whether a condition on one size that an input has is otherwise where that is one."""
    expression = condition.node.expr
    symbols = expression.free_symbols
    if len(symbols) != 1 or not symbols <= condition.node.shape_env.backed_var_to_val.keys():
        return False
    alone = expression.xreplace(dict.fromkeys(symbols, sympy.Integer(1)))
    return alone in (sympy.true, sympy.false) and bool(alone) != answer

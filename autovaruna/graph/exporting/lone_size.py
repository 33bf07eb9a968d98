"""Notes the line of the user's model that tells a batch of one sample, or a very large one, from others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import sympy
import torch

from autovaruna.graph.origin import is_users, users_line

_MANY = sympy.Integer(2**24)


@contextmanager
def noted_branches() -> Iterator[tuple[list[str], list[str]]]:
    """Notes ``at file:line (code)`` of branches, on this thread, that one sample, or very many, would not take.

    torch takes it for granted that a size that is kept free is at least two, and says nothing of it.

    Yields:
        The branches on one sample in the user's own lines, and the lines that came to a branch on many.
    """
    tracing, lone, large = get_ident(), list[str](), list[str]()
    known: Any = torch.SymBool.__bool__

    def noting(self: torch.SymBool) -> bool:
        answer: bool = known(self)
        if get_ident() == tracing and _differs_for(sympy.Integer(1), self, answer) and _is_users_branch():
            lone.append(users_line())
        elif get_ident() == tracing and _differs_for(_MANY, self, answer):
            large.append(users_line())
        return answer

    torch.SymBool.__bool__ = noting  # type: ignore[method-assign]
    try:
        yield lone, large
    finally:
        torch.SymBool.__bool__ = known  # type: ignore[method-assign]


def _is_users_branch() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == torch.__file__:  # ``if x.shape[0] - 1:``
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


def _differs_for(size: sympy.Integer, condition: torch.SymBool, answer: bool) -> bool:
    """Whether a condition on one size that an input has is otherwise where that is `size`."""
    expression = condition.node.expr
    symbols = expression.free_symbols
    if len(symbols) != 1 or not symbols <= condition.node.shape_env.backed_var_to_val.keys():
        return False
    found = expression.xreplace(dict.fromkeys(symbols, size))
    return found in (sympy.true, sympy.false) and bool(found) != answer

"""Reads source code for lines that raise by a condition, and do nothing else."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache

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

"""Finds the user's line that made a node, that runs now, or that raised, and the modules around it."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import sympy
import torch
from torch import fx, nn

from autovaruna._torch import call_impl

_HIDDEN = (*(str(Path(str(each.__file__)).parent) for each in (torch, sympy)), str(Path(__file__).parents[1]), "<")
_FRAME = re.compile(r'File "(.+)", line (\d+), in .*\n\s*(.*)')
GENERATED = "<eval_with_key>"  # what torch.fx calls the code of a graph


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, which includes its algebra, nor of this package."""
    return not filename.startswith(_HIDDEN)


def is_of_script(filename: str) -> bool:
    """Whether a file is a user's and in no installed package: the line that calls a function of one says more."""
    return is_users(filename) and {"site-packages", "dist-packages"}.isdisjoint(Path(filename).parts)


def users_line() -> str:
    """Returns `` at file:line (code)`` of the innermost line of a user's file that runs now; empty: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f" at {file}:{line} ({linecache.getline(file, line, frame.f_globals).strip()})"


def line_with(words: re.Pattern[str], module: nn.Module) -> str:
    """Returns `` at file:line (code)`` of the first line of a module's forward that has some words, or of its first."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)  # one that the script has put on the instance, too
    if code is None:
        return ""
    lines = {line: linecache.getline(code.co_filename, line).strip() for *_, line in code.co_lines() if line}
    found = next((line for line, text in sorted(lines.items()) if words.search(text)), code.co_firstlineno)
    return f" at {code.co_filename}:{found} ({lines.get(found, '')})"


def running_modules() -> tuple[nn.Module, ...]:
    """Returns the modules whose forward runs now, the innermost first."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return tuple(frame.f_locals["self"] for frame in frames if frame.f_code is call_impl.__code__)


def origin(node: fx.Node) -> str:
    """Returns ``file:line (code)`` of the user's line that made a node; empty if it is not known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return next((f"{file}:{line} ({code})" for file, line, code in reversed(frames) if is_users(file)), "")


def modules_of(node: fx.Node) -> list[str]:
    """Returns the paths of the modules that a node of a traced graph is in, the outermost first."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return [str(path).removeprefix("model").removeprefix(".") for path, _ in stack]


def failed_at(error: BaseException, nodes: Mapping[str, fx.Node]) -> str:
    """Returns ``, at file:line (code)`` of the user's line whose operation raised while a graph ran; else nothing.

    `nodes` are those of the graph that was traced; parts of it have nodes of the same names.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(GENERATED):
            node = nodes.get(re.split(r"\W", frame.line or "", maxsplit=1)[0])
            return f", at {origin(node)}" if node is not None and origin(node) else ""
    return ""


def where_raised(error: BaseException) -> str:
    """Returns `` at file:line (code)`` for the deepest frame outside torch and this package."""
    for link in reversed(list(chain_of(error))):
        for frame in reversed(traceback.extract_tb(link.__traceback__)):
            if is_users(frame.filename):
                return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, what caused it, and so on."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].removesuffix(".")

"""Decides what the next attempt to trace a model keeps opaque: the submodule or function that stopped this one."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autovaruna._torch import call_impl
from autovaruna.graph.export.errors import TRANSFORMS, InModuleError, chain_of, warn_once
from autovaruna.graph.opaque.functions import Function

_HOLDERS = {"torch.nn.functional": nn.functional, "torch.functional": torch}


def failing_modules(error: BaseException, model: nn.Module, kept: Collection[str]) -> frozenset[str]:
    """Returns the paths of the modules to keep whole after a trace has stopped; empty: the model itself stopped it.

    Modules of one class stop a trace for one reason, as a rule, so all of the class are kept. If one that is kept stops
    it, the module that called it is next.

    Args:
        error: What stopped the trace.
        model: The model.
        kept: Paths of what is kept whole already.
    """
    paths = {id(module.__dict__): path for path, module in reversed(list(model.named_modules()))}
    for path in [error.path] if isinstance(error, InModuleError) else _running(error, paths):
        if path and path not in kept:
            kind = type(model.get_submodule(path))
            alike = {name for name, module in model.named_modules() if type(module) is kind and name}
            is_own = not kind.__module__.startswith("torch.") and not any(_is_inside(each, path) for each in kept)
            wanted = alike if is_own else {path}
            return outermost({*kept, *wanted})
        if not path:
            break
    return frozenset()


def failing_function(error: BaseException) -> str:
    """Returns the name of torch's function in which a trace stopped, as the model calls it; empty: there is none.

    Args:
        error: What stopped the trace.
    """
    for link in reversed(list(chain_of(error))):
        called = ""
        for frame, _ in traceback.walk_tb(link.__traceback__):
            holder = _HOLDERS.get(frame.f_globals.get("__name__", ""))
            if frame.f_code is call_impl.__code__:
                called = ""
            elif holder is not None and not called and callable(getattr(holder, frame.f_code.co_name, None)):
                called = f"{holder.__name__}.{frame.f_code.co_name}"
        if called:
            return called
    return ""


def _running(error: BaseException, paths: dict[int, str]) -> list[str]:
    """Returns the paths of the modules that were running when an error was raised, the innermost first.

    Those that run in a function transform do not count: what they return has no place in a trace.
    """
    for link in reversed(list(chain_of(error))):
        found: list[str] = []
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if frame.f_code.co_filename.endswith(TRANSFORMS):
                break
            if frame.f_code is call_impl.__code__:
                path = paths.get(id(frame.f_locals["self"].__dict__))
                found += [] if path is None else [path]
        if found:
            return found[::-1]
    return []


def outermost(paths: Collection[str]) -> frozenset[str]:
    """Returns the paths that are inside of no other."""
    return frozenset(path for path in paths if not any(_is_inside(path, other) for other in paths))


def _is_inside(path: str, other: str) -> bool:
    return path.startswith(f"{other}.")


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opaque:
    """What is kept whole.

    Attributes:
        functions: autograd functions, where gradients are wanted.
        operations: names of functions of torch; the way that ``cdist`` takes depends on the batch size.
        modules: paths of submodules.
        can_grow: whether a submodule that stops the trace joins them.
        is_told: whether the model is told that it is traced, for which libraries have ways of their own.
        can_tell: whether that is still to be tried.
        notes_draws: whether modules that draw from Python's generators are looked for.
    """

    functions: frozenset[Function] = frozenset()
    operations: frozenset[str] = frozenset({"torch.cdist"})
    modules: frozenset[str] = frozenset()
    can_grow: bool = True
    is_told: bool = False
    can_tell: bool = True
    notes_draws: bool = False


class RetryError(Exception):
    """Says what the next trace has to keep whole."""

    def __init__(self, kept: Opaque) -> None:
        super().__init__()
        self.kept = kept


def retry(error: Exception, model: nn.Module, kept: Opaque, stopped: Sequence[str] = ()) -> None:
    """Asks for another attempt: first one that does what stopped this one in another way, then without that.

    Args:
        error: What stopped this one.
        model: The model.
        kept: What this one has kept whole.
        stopped: Functions of torch that it has stopped in, the innermost first.
    """
    if kept.can_tell and not isinstance(error, InModuleError):
        raise RetryError(replace(kept, is_told=True, can_tell=False)) from error
    kept = replace(kept, is_told=False, can_tell=False)
    modules = failing_modules(error, model, kept.modules)
    if modules:
        _warn(model, sorted(modules - kept.modules), error)
        raise RetryError(replace(kept, modules=modules)) from error
    function = failing_function(error) or next(iter(stopped), "")
    if function and function not in kept.operations:
        _warn(model, [function], error)
        raise RetryError(replace(kept, operations=kept.operations | {function})) from error


def _warn(model: nn.Module, new: list[str], error: Exception) -> None:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    warn_once(logger, model, f"{', '.join(new)} cannot be traced and is kept whole, never cut ({reason})")

"""Finds the submodule in which a trace stopped."""

from __future__ import annotations

import traceback
from collections.abc import Collection

import torch
from torch import nn

from autovaruna._torch import call_impl
from autovaruna.graph.explain import TRANSFORMS, chain_of
from autovaruna.graph.refused import InModuleError

_HOLDERS = {"torch.nn.functional": nn.functional, "torch.functional": torch}


def more_to_keep(error: BaseException, model: nn.Module, kept: Collection[str]) -> frozenset[str]:
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


def function_to_keep(error: BaseException) -> str:
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

"""Runs parts of a model under the autocasts of its trace; records where these, and gradients, are on or off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna._torch import (
    enter_autocast,
    exit_autocast,
    is_any_autocast_enabled,
    passes_of_export,
    replaced,
    set_gradients,
)

DEVICES = ("cpu", "cuda")
is_autocast = is_any_autocast_enabled
_lock = Lock()
_users: list[ExitStack] = []
"""Contexts of all threads that last; the first holds the stance, which is of the whole process."""


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast that is on for one device type; `is_cached`: a weight is cast once while it is on, not at each use."""

    device: str
    dtype: torch.dtype
    is_cached: bool

    def __str__(self) -> str:
        return f"{self.device}:{str(self.dtype).removeprefix('torch.')}{'' if self.is_cached else ':uncached'}"


Precision = tuple[Autocast, ...]
"""The autocasts that are on, by device; empty: every operation runs in the dtypes of its arguments."""


def current_precision() -> Precision:
    if not is_autocast():
        return ()
    is_cached = torch.is_autocast_cache_enabled()
    return tuple(
        Autocast(device, torch.get_autocast_dtype(device), is_cached)
        for device in DEVICES
        if torch.is_autocast_enabled(device)
    )


@contextmanager
def in_precision(precision: Precision) -> Iterator[None]:
    """Turns on the autocasts of `precision` and no others."""
    with ExitStack() as stack:
        stack.enter_context(without_autocast())
        for each in precision:
            stack.enter_context(torch.autocast(each.device, each.dtype, True, each.is_cached))
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turns autocast off; weights that are cast inside, under autocasts of its own, are cast once until the end."""
    before = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES]
    is_cached = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.autocast_increment_nesting()
    try:
        for device, is_on, _ in before:
            if is_on:
                torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device, is_on, dtype in before:
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(is_cached)
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def precision_of(node: fx.Node) -> Precision:
    """Returns the autocasts under which a node of a traced graph runs."""
    found: Precision = node.meta.get("precision", ())
    return found


def cast_dtype(user: fx.Node, weight: Tensor, result: Any) -> torch.dtype | None:
    """Returns the dtype of the copy of a weight that autocast keeps for an operation on it; None: it keeps none."""
    first = result[0] if isinstance(result, tuple | list) and result else result
    if not (isinstance(first, Tensor) and weight.dtype is torch.float32 and weight.requires_grad):
        return None
    kept = (each.dtype for each in precision_of(user) if each.is_cached and each.device == first.device.type)
    return next((dtype for dtype in kept if dtype is first.dtype), None)


class Switch:
    """Adds to a graph, which runs where autocast is off, what enters and leaves autocast."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._now: Precision = ()
        self._entered: list[fx.Node] = []

    def to(self, precision: Precision) -> None:
        """Makes what is added to the graph from now on run in a precision."""
        if precision == self._now:
            return
        while self._entered:
            self._graph.call_function(exit_autocast, (self._entered.pop(),))
        for each in precision:
            arguments = (each.device, each.dtype, True, each.is_cached)
            self._entered.append(self._graph.call_function(enter_autocast, arguments))
        self._now = precision


@contextmanager
def recorded_modes(around: Precision) -> Iterator[None]:
    """Has torch.export record whether gradients are off, and the precision, at each node; what sets these is dropped.

    It would make regions of them, and lose ``torch.no_grad()`` inside ``torch.autocast`` (seen in torch 2.13).
    """
    passes = passes_of_export()
    make_regions = passes.replace_set_grad_with_hop_pass

    def record_first(module: fx.GraphModule, *rest: Any) -> Any:
        _record(module, around)
        return make_regions(module, *rest)

    with replaced(passes, "replace_set_grad_with_hop_pass", record_first):
        yield


def _record(module: fx.GraphModule, around: Precision) -> None:
    precisions = [around]
    has_gradients = is_trained = torch.is_grad_enabled()
    switches: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.target is enter_autocast:
            precisions.append(_inside(precisions[-1], *node.args[:3]))
        elif node.target is exit_autocast:
            precisions.pop()
        elif node.target is set_gradients:
            has_gradients = bool(node.args[0])
        if node.target in (enter_autocast, exit_autocast, set_gradients):
            switches.append(node)
        node.meta["precision"], node.meta["no_grad"] = precisions[-1], is_trained and not has_gradients
    for node in reversed(switches):
        module.graph.erase_node(node)


def _inside(around: Precision, device: Any, dtype: Any, is_enabled: Any) -> Precision:
    """Returns what is on inside ``torch.autocast(device, dtype, is_enabled)``; tracing hides whether it is cached."""
    others = tuple(each for each in around if each.device != device)
    own = (Autocast(device, dtype, True),) if is_enabled else ()
    return tuple(sorted((*others, *own), key=lambda each: each.device))


@contextmanager
def compiling_nothing() -> Iterator[None]:
    """Has ``torch.compile`` run what it is given as it is, on all threads, while the context lasts."""
    with _lock:
        _users.append(ExitStack())
        if len(_users) == 1:
            _users[0].enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            _users.pop().close()  # the first comes last

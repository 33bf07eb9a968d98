"""Keeps ``torch.autocast`` apart from the operations: every node of a graph says under which autocast it runs.

torch.export records operations as they were called, before autocast casts their arguments, and what runs under a
``with torch.autocast`` of the model itself as one operation that wraps a region. Here such regions are laid open, so
that they can be cut like anything else, and the autocast around the call is noted at each node too. Pieces enter and
leave autocast as their nodes say, and run where it is off otherwise: the casts, and the kernels, are PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

DEVICES = ("cpu", "cuda")
_WRAPPED = torch.ops.higher_order.wrap_with_autocast if hasattr(torch.ops.higher_order, "wrap_with_autocast") else None


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
    """Returns the autocasts that are on now."""
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
    """Returns the dtype of the copy of a weight that autocast keeps for an operation that uses it; None: it keeps none.

    Args:
        user: The operation.
        weight: The weight.
        result: What the operation returns; its dtype tells whether autocast cast the arguments.
    """
    first = result[0] if isinstance(result, tuple | list) and result else result
    if not (isinstance(first, Tensor) and weight.dtype is torch.float32 and weight.requires_grad):
        return None
    kept = (each.dtype for each in precision_of(user) if each.is_cached and each.device == first.device.type)
    return next((dtype for dtype in kept if dtype is first.dtype), None)


class Switch:
    """Adds to a graph what enters and leaves autocast.

    Args:
        graph: The graph; it runs where autocast is off.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._now: Precision = ()
        self._entered: list[fx.Node] = []

    def to(self, precision: Precision) -> None:
        """Makes what is added to the graph from now on run in a precision."""
        if precision == self._now:
            return
        while self._entered:
            self._graph.call_function(torch.amp.autocast_mode._exit_autocast, (self._entered.pop(),))
        for each in precision:
            arguments = (each.device, each.dtype, True, each.is_cached)
            self._entered.append(self._graph.call_function(torch.amp.autocast_mode._enter_autocast, arguments))
        self._now = precision


def note_precision(module: fx.GraphModule, around: Precision) -> None:
    """Lays open the regions of a graph that run under an autocast of their own, and notes each node's precision.

    Args:
        module: What torch.export made; it is changed.
        around: The autocasts around the call.
    """
    for node in module.graph.nodes:
        node.meta["precision"] = around
    while regions := [node for node in module.graph.nodes if _is_region(node)]:
        for node in regions:
            _lay_open(module, node)
    module.graph.lint()


def _is_region(node: fx.Node) -> bool:
    return node.op == "call_function" and _WRAPPED is not None and node.target is _WRAPPED


def _lay_open(module: fx.GraphModule, region: fx.Node) -> None:
    """Puts the operations of a region in its place."""
    device, dtype, is_enabled, is_cached, holder, *arguments = region.args
    path = str(holder.target)  # type: ignore[union-attr]
    body = module.get_submodule(path)
    assert isinstance(body, fx.GraphModule)
    precision = _inside(precision_of(region), device, dtype, is_enabled, is_cached)
    copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), arguments, strict=True))
    results: Sequence[Any] = ()
    for node in body.graph.nodes:
        if node.op == "output":
            results = fx.map_arg(node.args[0], copies.__getitem__)
        elif node.op != "placeholder":
            with module.graph.inserting_before(region):
                copies[node] = module.graph.node_copy(node, copies.__getitem__)
            copies[node].meta["precision"] = precision
            if node.op == "get_attr":
                copies[node].target = f"{path}.{node.target}"
    for user in list(region.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        module.graph.erase_node(user)
    module.graph.erase_node(region)
    if not holder.users:  # type: ignore[union-attr]
        module.graph.erase_node(holder)  # type: ignore[arg-type]


def _inside(around: Precision, device: Any, dtype: Any, is_enabled: Any, is_cached: Any) -> Precision:
    """Returns what is on inside ``torch.autocast(device, dtype, is_enabled, is_cached)``."""
    others = tuple(each for each in around if each.device != device)
    if not is_enabled:
        return others
    dtype = torch.get_autocast_dtype(device) if dtype is None else dtype
    is_cached = torch.is_autocast_cache_enabled() if is_cached is None else is_cached
    return tuple(sorted((*others, Autocast(device, dtype, bool(is_cached))), key=lambda each: each.device))

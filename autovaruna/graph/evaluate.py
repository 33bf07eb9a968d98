"""Runs nodes of a graph one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import fx

from autovaruna.graph.precision import in_precision, is_autocast, precision_of

ValueOf = Callable[[fx.Node], Any]
Run = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]


class NodeError(Exception):
    """What a node has raised."""

    def __init__(self, node: fx.Node, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.node, self.error = node, error


def call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the operation of a node."""
    target: Any = node.target
    return target(*args, **kwargs)


def evaluate(
    nodes: Sequence[fx.Node], value_of: ValueOf, wanted: Iterable[fx.Node] = (), run: Run = call
) -> dict[fx.Node, Any]:
    """Runs nodes in order, each in its precision, and returns the values of those that are `wanted`.

    Args:
        value_of: Returns the value of a node that is not among `nodes`.
        run: Runs a node on the values of its arguments.

    Raises:
        NodeError: a node has raised something.
    """
    last = {source: node for node in nodes for source in node.all_input_nodes}
    own, kept, found = set(nodes), set(wanted), dict[fx.Node, Any]()
    dropped: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last.items():
        if source in own and source not in kept:
            dropped.setdefault(node, []).append(source)

    def value(source: fx.Node) -> Any:
        return found[source] if source in own else value_of(source)

    for node in nodes:
        try:
            args, kwargs = fx.map_arg((node.args, node.kwargs), value)
            with _precision_around(node):
                found[node] = run(node, args, kwargs)
        except Exception as error:
            raise NodeError(node, error) from error
        for source in (*dropped.get(node, ()), *(() if node in last or node in kept else (node,))):
            del found[source]
    return {node: value(node) for node in kept}


def _precision_around(node: fx.Node) -> AbstractContextManager[None]:
    """Returns what turns on the autocasts that a trace has recorded for a node; while one is made, they are on."""
    precision = precision_of(node)
    is_other = precision or ("precision" in node.meta and is_autocast())
    return in_precision(precision) if is_other else nullcontext()

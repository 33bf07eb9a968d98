"""Finds out how the results of autograd functions that are kept whole are joined, as those of kept modules are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna.graph.facts import Fact
from autovaruna.graph.kept_whole.functions import function_name, run_function
from autovaruna.graph.kept_whole.joining import with_joins
from autovaruna.graph.kept_whole.kept import kept_by
from autovaruna.graph.kept_whole.returned import Join, Line
from autovaruna.graph.kept_whole.trial import Trial, run_apart
from autovaruna.graph.precision import precision_of
from autovaruna.graph.tree import flatten

_JOINS = "joins"


class _Applied(nn.Module):
    """Runs a function."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return run_function(self.key, tensors)


def learn_joins(graph: fx.Graph, facts: Mapping[str, Fact], batch: Collection[str], device: torch.device) -> None:
    """Tries the kept functions of a graph out; notes what is found at their nodes.

    Args:
        graph: The graph.
        facts: What is known of each node.
        batch: Names of the inputs whose first dimension is the batch.
        device: Where the graph will run.
    """
    sizes = [node.meta["val"].shape[0] for node in graph.find_nodes(op="placeholder") if node.name in batch]
    known: dict[Any, list[Join]] = {}
    for node in graph.find_nodes(op="call_function", target=run_function):
        key, sources = node.args
        inputs = [_like(source, facts) for source in sources]
        kind = key, tuple((str(each.shape), each.dtype, each.requires_grad) for each in inputs), precision_of(node)
        if kind not in known:
            given, call = flatten(((inputs,), {}))
            trial = Trial(_Applied(str(key)), (), call, given, sizes, device, precision_of(node), True)
            known[kind] = _tried(trial, len(node.meta["val"]))
        node.meta[_JOINS] = known[kind]


def join_of(item: fx.Node) -> Join | None:
    """Returns how what a node takes out of the results of a kept module or function is joined; None: of another one."""
    made: Any = item.args[0] if item.args else None
    if not isinstance(made, fx.Node) or item.target is run_function:
        return None
    place: Any = item.args[1] if len(item.args) > 1 else None
    if (kept := kept_by(made)) is not None:
        line: Line = kept.returned.tensors[place]
        return line.join
    joins: list[Join] | None = made.meta.get(_JOINS)
    return None if joins is None else joins[place]


def name_of_kept(item: fx.Node) -> str:
    """Returns the path of the module, or the name of the function, from whose results a node takes one out."""
    made: Any = item.args[0]
    kept = kept_by(made)
    return kept.path if kept is not None else function_name(made.args[0])


def _like(source: fx.Node, facts: Mapping[str, Fact]) -> Tensor:
    value: Tensor = source.meta["val"].detach()
    return value.requires_grad_(facts[source.name].needs_gradient)


def _tried(trial: Trial, num_results: int) -> list[Join]:
    try:
        returned = run_apart(lambda: with_joins(trial), trial.device)
    except Exception:  # it may want other numbers
        return [Join.UNKNOWN] * num_results
    return [line.join for line in returned.tensors]

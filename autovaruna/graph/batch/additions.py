"""Adds operations to a graph that has been traced already, with all that is known of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna.graph.facts import Fact, storage_of, tensors_in
from autovaruna.graph.precision import in_precision, precision_of

_KEPT = ("stack_trace", "nn_module_stack", "precision")


class Additions:
    """Adds nodes to a graph.

    Args:
        graph: The graph.
        facts: What is known of each node; gets what is known of the new ones.
    """

    def __init__(self, graph: fx.Graph, facts: MutableMapping[str, Fact]) -> None:
        self._graph = graph
        self._facts = facts
        placeholder = next(iter(graph.find_nodes(op="placeholder")))
        self._modes = placeholder.meta["val"].fake_mode, facts[placeholder.name].value.fake_mode

    def before(self, user: fx.Node, target: Any, *args: Any) -> fx.Node:
        """Returns a new call of a function, right before a node, of whose line of the model it becomes a part."""
        with self._graph.inserting_before(user):
            node = self._graph.call_function(target, args)
        node.meta = {name: user.meta[name] for name in _KEPT if name in user.meta}
        self.learn(node)
        return node

    def again(self, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Returns a copy of a node, right after it, with other arguments of the same kinds in place of some."""
        with self._graph.inserting_after(node):
            copy = self._graph.node_copy(node, lambda each: made.get(each, each))
        reads = frozenset(storage for each in copy.all_input_nodes for storage in self._facts[each.name].makes)
        self._facts[copy.name] = replace(self._facts[node.name], reads=reads)
        return copy

    def drop_unused(self, nodes: Iterable[fx.Node]) -> None:
        """Takes nodes out that nothing uses, users before what they use."""
        for node in nodes:
            if not node.users:
                self._graph.erase_node(node)
                del self._facts[node.name]

    def has(self, name: str) -> bool:
        """Whether there is a node of a name."""
        return name in self._facts

    def learn(self, node: fx.Node) -> None:
        """Notes what a node returns, and what else is known of it: that it is new, or has other arguments now."""
        symbolic, numeric = self._modes
        with torch.no_grad(), symbolic:
            node.meta["val"] = _run(node, lambda each: each.meta["val"])
        with numeric:
            value = _run(node, lambda each: self._facts[each.name].value)
        tensors = tensors_in(value)
        known = self._facts.get(node.name)
        given = [self._facts[each.name] for each in node.all_input_nodes]
        memory = {
            storage_of(fact.value): storage
            for fact in given
            if isinstance(fact.value, Tensor)
            for storage in fact.makes
        }
        self._facts[node.name] = Fact(
            value=value,
            needs_gradient=any(tensor.requires_grad for tensor in tensors),
            reads=frozenset(storage for fact in given for storage in fact.makes),
            writes=frozenset(),
            makes=frozenset(memory.get(storage_of(each), storage_of(each)) for each in tensors),
            is_random=False,
            num_flops=0.0 if known is None else known.num_flops,
        )


def _run(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    with in_precision(precision_of(node)):
        return target(*args, **kwargs)

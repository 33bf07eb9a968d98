"""Finds what follows from the inputs of a graph alone: it can be computed before a step, without the model."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna.graph.batch.class_counts import count_by_class
from autovaruna.graph.batch.of_batch import is_of_batch
from autovaruna.graph.facts import Fact, outliving_storages

_OF_NUMBERS = {math.__name__, operator.__name__, f"_{operator.__name__}", torch.sym_max.__module__}
"""Modules whose functions do arithmetic on sizes."""


def from_inputs(graph: fx.Graph, facts: Mapping[str, Fact], parameters: Collection[str]) -> list[fx.Node]:
    """Returns the nodes that follow from inputs, buffers and constants alone, in order of execution.

    None of them is random, needs a gradient or changes what outlives the step. Memory of their own they may change.

    Args:
        graph: The graph.
        facts: What is known of each node.
        parameters: Names of the attributes that are parameters.
    """
    outliving = outliving_storages(graph, facts)
    foreign: set[int] = set()  # memory that other nodes change
    while True:
        found: dict[fx.Node, None] = {}
        written: set[int] = set()
        for node in graph.nodes:
            if node.op == "output":
                break
            fact = facts[node.name]
            touched = fact.reads | fact.makes | fact.writes
            is_own = not fact.writes & outliving and not touched & foreign
            if is_own and _is_free(node, fact, parameters) and found.keys() >= set(node.all_input_nodes):
                found[node] = None
            else:
                written |= fact.writes
        if written <= foreign:
            return list(found)
        foreign |= written


def what_makes(nodes: Iterable[fx.Node], known: Iterable[fx.Node], facts: Mapping[str, Fact]) -> list[fx.Node]:
    """Returns nodes, the operations among `known` that they need, and what changes their memory; in order.

    Args:
        nodes: The nodes that are wanted.
        known: All that follow from the inputs, in order of execution.
        facts: What is known of each node.
    """
    operations = [node for node in known if node.op == "call_function"]
    wanted = set(nodes)
    while True:
        memory = {storage for node in wanted for storage in facts[node.name].makes | facts[node.name].reads}
        new = {source for node in wanted for source in node.all_input_nodes}
        new |= {node for node in operations if facts[node.name].writes & memory}
        if new <= wanted:
            return [node for node in operations if node in wanted]
        wanted |= new


def _is_free(node: fx.Node, fact: Fact, parameters: Collection[str]) -> bool:
    """Whether a node may follow from inputs alone, if what it is made of does."""
    if fact.needs_gradient or fact.is_random or is_of_batch(node):
        return False
    if node.op == "get_attr":
        return str(node.target) not in parameters and isinstance(fact.value, Tensor)
    target: Any = node.target
    is_arithmetic = getattr(target, "__module__", None) in _OF_NUMBERS or target is count_by_class
    return node.op == "placeholder" or isinstance(target, torch._ops.OpOverload) or is_arithmetic

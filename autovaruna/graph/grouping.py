"""Groups the nodes of a graph into blocks that are never cut, in topological order."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import torch
from torch import Tensor, fx

from autovaruna.graph.batch.interpret import counted
from autovaruna.graph.export.assertions import check
from autovaruna.graph.facts import Fact, KnownGraph

_CHEAP_SHARE = 1e-3
_LOOKUPS = {torch.ops.aten.embedding.default, torch.ops.aten.lstm.input, torch.ops.aten.gru.input}


@dataclass(frozen=True)
class Grouping:
    """The result: names of nodes, in execution order.

    Attributes:
        blocks: what is never cut.
        repeated: nodes that are in no block; each maps to all nodes that are repeated together with it.
        joins: nodes that no cut may part, and the rule that says so.
    """

    blocks: tuple[tuple[str, ...], ...]
    repeated: Mapping[str, tuple[str, ...]]
    joins: tuple[tuple[tuple[str, ...], str], ...] = ()


def group(known: KnownGraph) -> Grouping:
    """Groups the nodes of a graph."""
    is_given, parameters = known.sizes.is_given, known.parameters
    nodes = [
        node for node in known.module.graph.nodes if node.op in ("call_function", "call_module") and not is_given(node)
    ]
    rules = _Rules(nodes, known)
    rules.tuples_stay_whole()
    rules.changes_stay_with_what_they_change()
    rules.data_dependent_shapes_stay()
    rules.numbers_stay_with_what_they_count()
    repeated = _repeated(rules, parameters)
    worked = [node for node in nodes if node.name not in repeated]
    if not worked:  # nothing has a parameter, or needs a gradient: a stage has to hold something
        repeated, worked = {}, nodes
    rules.join_cycles(worked)
    while rules.join_users_out_of_order(worked):
        rules.join_cycles(worked)
    blocks = tuple(tuple(node.name for node in block) for block in rules.ordered(worked))
    return Grouping(blocks, repeated, tuple(rules.joins))


class _Rules:
    def __init__(self, nodes: Sequence[fx.Node], known: KnownGraph) -> None:
        self.nodes = nodes
        self.known = known
        self.facts = known.facts
        self.depends_on_data = known.sizes.depends_on_data
        self.position = {node: index for index, node in enumerate(nodes)}
        self.sets = nx.utils.UnionFind(nodes)
        self.joins: list[tuple[tuple[str, ...], str]] = []

    def tuples_stay_whole(self) -> None:
        """Applies rule 1."""
        for node in self.nodes:
            if node.target is operator.getitem:
                self._join([node, *node.all_input_nodes], "a value of several tensors stays with what takes it apart")

    def changes_stay_with_what_they_change(self) -> None:
        """Applies rules 2 and 3."""
        outliving = self.known.outliving_storages()
        last_write: dict[int, int] = {}
        for node in self.nodes:
            for storage in self.facts[node.name].writes:
                last_write[storage] = len(self.nodes) if storage in outliving else self.position[node]
        touching: dict[int, list[fx.Node]] = {storage: [] for storage in last_write}
        for node in self.nodes:
            fact = self.facts[node.name]
            for storage in (fact.reads | fact.makes | fact.writes) & last_write.keys():
                if self.position[node] <= last_write[storage]:
                    touching[storage].append(node)
        for members in touching.values():
            self._join(members, "memory that is changed in place stays with what made or read it before")

    def data_dependent_shapes_stay(self) -> None:
        """Applies rule 4."""
        for node in self.nodes:
            if self.depends_on_data(node):
                self._join([node, *node.users], "a value whose shape depends on data stays with its users")

    def numbers_stay_with_what_they_count(self) -> None:
        """Applies rule 7."""
        data = [node for node in self.nodes if self.depends_on_data(node)]
        numbers = [node for node in data if not isinstance(self.facts[node.name].value, Tensor)]
        for number, sources in counted(numbers, self.known):
            self._join([number, *sources], "a number out of a tensor stays with what it was counted from")

    def join_users_out_of_order(self, nodes: Sequence[fx.Node]) -> bool:
        """Applies rule 5; returns whether anything was joined."""
        place = {node: index for index, block in enumerate(self.ordered(nodes)) for node in block}
        for value in nodes:
            users = [user for user in value.users if user in place and self.facts[user.name].needs_gradient]
            if not self.facts[value.name].needs_gradient or len(users) < 3:
                continue
            users.sort(key=self.position.__getitem__)
            places = [place[user] for user in users]
            if places != sorted(places):
                self._join(users, "gradients of a value's users are summed in the order of one process")
                return True
        return False

    def join_cycles(self, nodes: Sequence[fx.Node]) -> None:
        """Applies rule 6."""
        for groups in nx.strongly_connected_components(self._waiting(nodes)):
            self._join(groups, "operations that wait for each other both ways stay together")

    def ordered(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """Returns the groups in topological order, the earliest node first among those that are free."""
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            members.setdefault(self.sets[node], []).append(node)
        order = nx.lexicographical_topological_sort(self._waiting(nodes), lambda root: self.position[members[root][0]])
        return [members[root] for root in order]

    def _waiting(self, nodes: Sequence[fx.Node]) -> nx.DiGraph[fx.Node]:
        """Returns the graph of the groups: an edge leads from each to those that use its values."""
        roots = {node: self.sets[node] for node in nodes}
        waiting = nx.DiGraph()
        waiting.add_nodes_from(roots.values())
        used = ((roots.get(source, root), root) for node, root in roots.items() for source in node.all_input_nodes)
        waiting.add_edges_from((source, user) for source, user in used if source is not user)
        return waiting

    def _join(self, nodes: Iterable[fx.Node], rule: str) -> None:
        known = sorted({node for node in nodes if node in self.position}, key=self.position.__getitem__)
        if len(known) > 1:
            self.sets.union(*known)
            self.joins.append((tuple(node.name for node in known), rule))

    def groups(self) -> list[list[fx.Node]]:
        """Returns the groups in order of their first nodes."""
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            members.setdefault(self.sets[node], []).append(node)
        return list(members.values())


def _repeated(rules: _Rules, parameters: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Returns the nodes of every group that can be run again in each stage that uses it."""
    total = sum(fact.num_flops for fact in rules.facts.values())
    written = {storage for node in rules.nodes for storage in rules.facts[node.name].writes}
    changed = written & rules.known.outliving_storages()
    repeated: dict[str, tuple[str, ...]] = {}
    waiting = [
        members
        for members in rules.groups()
        if all(
            _is_cheap(rules.facts[node.name], node, total) and not _touches(rules.facts[node.name], changed)
            for node in members
        )
    ]
    while True:
        ready = [members for members in waiting if _is_fed(members, repeated, rules, parameters)]
        if not ready:
            return repeated
        waiting = [members for members in waiting if members not in ready]
        for members in ready:
            names = tuple(node.name for node in members)
            repeated |= dict.fromkeys(names, names)


def _is_cheap(fact: Fact, node: fx.Node, total_flops: float) -> bool:
    """Whether a node needs no gradient, no random numbers and little arithmetic, and is no check, which nobody uses."""
    is_light = node.target is not check and fact.num_flops <= _CHEAP_SHARE * total_flops and node.target not in _LOOKUPS
    return is_light and not fact.needs_gradient and not fact.is_random


def _touches(fact: Fact, storages: set[int]) -> bool:
    return bool((fact.reads | fact.writes | fact.makes) & storages)


def _is_fed(
    members: Sequence[fx.Node], repeated: Mapping[str, object], rules: _Rules, parameters: Collection[str]
) -> bool:
    """Whether a group needs only inputs without gradient, buffers, constants, sizes and repeated nodes."""
    inside = set(members)
    return all(
        source in inside or source.name in repeated or _is_free(source, rules, parameters)
        for node in members
        for source in node.all_input_nodes
    )


def _is_free(source: fx.Node, rules: _Rules, parameters: Collection[str]) -> bool:
    if source.op == "get_attr":
        return str(source.target) not in parameters
    return source not in rules.position and not rules.facts[source.name].needs_gradient

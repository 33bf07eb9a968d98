"""Groups the nodes of a traced graph into blocks: what no cut may part, in one order of execution.

The rules (each is a method of `_Rules`, each has a test):

1. A node with a tuple value stays with the nodes that take it apart.
2. A node that changes memory in place stays with every earlier node that made, viewed or read that memory.
3. Memory that outlives the step (a buffer, an input) and is changed stays with every node that touches it.
4. A value whose shape depends on data stays with its users.
5. A value with three or more users in need of a gradient: users stay in execution order, so that the sum of their
   gradients has the order of one process. Where grouping would break that order, those users join one block.
6. Groups on a cycle are one group.

Nodes without gradient, parameters, randomness or much arithmetic (masks, positions, casts of inputs) belong to no
block: they are repeated in every stage that uses them and so never cross a cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import torch
from networkx.utils import UnionFind
from torch import fx

from autovaruna.graph.facts import Fact

_CHEAP_SHARE = 1e-3
_LOOKUPS = {torch.ops.aten.embedding.default, torch.ops.aten.lstm.input, torch.ops.aten.gru.input}


@dataclass(frozen=True)
class Grouping:
    """The result: `blocks` in execution order, each the names of its nodes; `repeated` nodes are in no block."""

    blocks: tuple[tuple[str, ...], ...]
    repeated: frozenset[str]


def group(
    graph: fx.Graph,
    facts: Mapping[str, Fact],
    is_size: Callable[[fx.Node], bool],
    depends_on_data: Callable[[fx.Node], bool],
) -> Grouping:
    """Groups the nodes of a graph.

    Args:
        graph: A tidied graph of torch.export.
        facts: What is known of each node.
        is_size: Whether a node is a number that follows from the micro-batch size.
        depends_on_data: Whether the shape of a node's value depends on the numbers in tensors.
    """
    nodes = [node for node in graph.nodes if node.op in ("call_function", "call_module") and not is_size(node)]
    rules = _Rules(nodes, facts, depends_on_data)
    rules.tuples_stay_whole()
    rules.changes_stay_with_what_they_change()
    rules.data_dependent_shapes_stay()
    repeated = _repeated(rules)
    worked = [node for node in nodes if node not in repeated]
    rules.join_cycles(worked)
    while rules.join_users_out_of_order(worked):
        rules.join_cycles(worked)
    blocks = tuple(tuple(node.name for node in block) for block in rules.ordered(worked))
    return Grouping(blocks, frozenset(node.name for node in repeated))


class _Rules:
    def __init__(
        self, nodes: Sequence[fx.Node], facts: Mapping[str, Fact], depends_on_data: Callable[[fx.Node], bool]
    ) -> None:
        self.nodes = nodes
        self.facts = facts
        self.depends_on_data = depends_on_data
        self.position = {node: index for index, node in enumerate(nodes)}
        self.sets: UnionFind[fx.Node] = UnionFind(nodes)

    def tuples_stay_whole(self) -> None:
        """Applies rule 1."""
        for node in self.nodes:
            if node.target is operator.getitem:
                self._join([node, *node.all_input_nodes])

    def changes_stay_with_what_they_change(self) -> None:
        """Applies rules 2 and 3."""
        outliving = self._outliving_storages()
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
            self._join(members)

    def data_dependent_shapes_stay(self) -> None:
        """Applies rule 4."""
        for node in self.nodes:
            if self.depends_on_data(node):
                self._join([node, *node.users])

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
                self._join(users)
                return True
        return False

    def join_cycles(self, nodes: Sequence[fx.Node]) -> None:
        """Applies rule 6."""
        for component in nx.strongly_connected_components(self._group_graph(nodes)):
            self._join(list(component))

    def ordered(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """Returns the groups in topological order, the earliest node first among those that are free."""
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            members.setdefault(self.sets[node], []).append(node)
        order = nx.lexicographical_topological_sort(
            self._group_graph(nodes), key=lambda root: self.position[members[root][0]]
        )
        return [members[root] for root in order]

    def _group_graph(self, nodes: Sequence[fx.Node]) -> nx.DiGraph[fx.Node]:
        inside = set(nodes)
        graph: nx.DiGraph[fx.Node] = nx.DiGraph()
        graph.add_nodes_from(self.sets[node] for node in nodes)
        for node in nodes:
            for source in node.all_input_nodes:
                if source in inside and self.sets[source] != self.sets[node]:
                    graph.add_edge(self.sets[source], self.sets[node])
        return graph

    def _outliving_storages(self) -> set[int]:
        """Storages of buffers, parameters, constants and inputs."""
        graph = self.nodes[0].graph if self.nodes else fx.Graph()
        roots = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
        return {storage for root in roots for storage in self.facts[root.name].makes}

    def _join(self, nodes: Iterable[fx.Node]) -> None:
        known = [node for node in nodes if node in self.position]
        if len(known) > 1:
            self.sets.union(*known)

    def groups(self) -> list[list[fx.Node]]:
        """Returns the groups in order of their first nodes."""
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            members.setdefault(self.sets[node], []).append(node)
        return list(members.values())


def _repeated(rules: _Rules) -> set[fx.Node]:
    """Returns the nodes of every group that can be run again in each stage that uses it."""
    total = sum(fact.num_flops for fact in rules.facts.values())
    outliving = rules._outliving_storages()
    changed = {storage for node in rules.nodes for storage in rules.facts[node.name].writes}
    repeated: set[fx.Node] = set()
    waiting = rules.groups()
    while True:
        ready = [members for members in waiting if _is_repeatable(members, repeated, rules, total, changed & outliving)]
        if not ready:
            return repeated
        waiting = [members for members in waiting if members not in ready]
        repeated.update(node for members in ready for node in members)


def _is_repeatable(
    members: Sequence[fx.Node], repeated: set[fx.Node], rules: _Rules, total_flops: float, changed: set[int]
) -> bool:
    inside = set(members)
    for node in members:
        fact = rules.facts[node.name]
        if fact.needs_gradient or fact.is_random or node.target in _LOOKUPS or fact.num_flops > _CHEAP_SHARE * total_flops:
            return False
        if (fact.reads | fact.writes | fact.makes) & changed:
            return False
        for source in node.all_input_nodes:
            is_free = source.op in ("placeholder", "get_attr") or source not in rules.position
            if not is_free and source not in inside and source not in repeated:
                return False
            if is_free and rules.facts[source.name].needs_gradient:
                return False
    return True

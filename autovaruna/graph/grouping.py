"""Groups the nodes of a graph into blocks that are never cut, and builds the record of them with their signatures.

Cuts lie between blocks: at the user's cut points, and where no smaller cut is next to one.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from autovaruna._torch import OpOverload
from autovaruna.graph.batch.interpret import counted
from autovaruna.graph.cuts import Marker
from autovaruna.graph.export.assertions import check
from autovaruna.graph.facts import Fact, KnownGraph
from autovaruna.graph.lengths import Sizes
from autovaruna.graph.operators import as_tensor, count_by_class, of_batch, run_opaque
from autovaruna.graph.precision import cast_dtype, precision_of
from autovaruna.graph.records import Block, CutMark, Graph, Input, Output, Parameter, Size, Value
from autovaruna.graph.source_lines import modules_of

_CHEAP_SHARE = 1e-3
_LOOKUPS = {torch.ops.aten.embedding.default, torch.ops.aten.lstm.input, torch.ops.aten.gru.input}
_SYMBOL = re.compile(r"\b[suz]\d+\b")
_OWN_NAMES: dict[Any, str] = {
    run_opaque: "autovaruna.graph.opaque.run.run_opaque",
    check: "autovaruna.graph.export.idioms.check",
    **{each: f"autovaruna.graph.batch.operators.{each.__name__}" for each in (as_tensor, count_by_class, of_batch)},
}
"""What signatures call our own functions, wherever these stand: saved plans and measured costs have them."""
_DEVICE = re.compile(r"device\(type='\w+'(?:, index=\d+)?\)")


@dataclass(frozen=True)
class Grouping:
    """The result: names of nodes, in blocks in execution order; `joins` are those that no cut may part, and the rule.

    Each node that is `repeated`, and in no block, maps to all that are repeated with it. They come in the order of
    their first uses, which is the same on every rank where forward goes over a set, too.
    """

    blocks: tuple[tuple[str, ...], ...]
    repeated: Mapping[str, tuple[str, ...]]
    joins: tuple[tuple[tuple[str, ...], str], ...] = ()


def group(known: KnownGraph) -> Grouping:
    is_given, parameters = known.sizes.is_given, known.parameters
    nodes = [
        node for node in known.module.graph.nodes if node.op in ("call_function", "call_module") and not is_given(node)
    ]
    rules = _Rules(nodes, known)
    rules.tuples_stay_whole()
    rules.changes_stay_with_what_they_change()
    rules.what_data_decide_stays()
    rules.changes_of_a_module_stay_together()
    repeated = _repeated(rules, parameters)
    worked = [node for node in nodes if node.name not in repeated]
    if not worked:  # nothing has a parameter, or needs a gradient: a stage has to hold something
        repeated, worked = {}, nodes
    rules.join_cycles(worked)
    while rules.join_users_out_of_order(worked):
        rules.join_cycles(worked)
    blocks = tuple(tuple(node.name for node in block) for block in rules.ordered(worked))
    used = _in_order_of_use(worked, repeated)
    return Grouping(blocks, {name: repeated[name] for name in (*used, *repeated)}, tuple(rules.joins))


class _Rules:
    def __init__(self, nodes: Sequence[fx.Node], known: KnownGraph) -> None:
        self.nodes, self.known = nodes, known
        self.facts = known.facts
        self.position = {node: index for index, node in enumerate(nodes)}
        self.sets = nx.utils.UnionFind(nodes)
        self.joins: list[tuple[tuple[str, ...], str]] = []

    def tuples_stay_whole(self) -> None:
        """Joins what takes a tuple apart with what makes it."""
        for node in self.nodes:
            if node.target is operator.getitem:
                self._join([node, *node.all_input_nodes], "a value of several tensors stays with what takes it apart")

    def what_data_decide_stays(self) -> None:
        """Joins values whose shapes depend on data with their users, and numbers with what they were counted from."""
        data = [node for node in self.nodes if self.known.sizes.depends_on_data(node)]
        for node in data:
            self._join([node, *node.users], "a value whose shape depends on data stays with its users")
        numbers = [node for node in data if not isinstance(self.facts[node.name].value, Tensor)]
        for number, sources in counted(numbers, self.known):
            self._join([number, *sources], "a number out of a tensor stays with what it was counted from")

    def changes_stay_with_what_they_change(self) -> None:
        """Joins what touches memory up to the last write to it; all that does, if the memory outlives the call."""
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

    def changes_of_a_module_stay_together(self) -> None:
        """Joins them: in another mode, or with other options, one operation may use what two change now."""
        buffers = self.known.buffers
        owners = {_owner(name) for name in (*self.known.parameters.values(), *buffers.values())}
        inner = {"", *(owner[:end] for owner in owners for end, letter in enumerate(owner) if letter == ".")}
        owner_of = {
            storage: _owner(buffers[str(source.target)])
            for source in self.known.module.graph.find_nodes(op="get_attr")
            if str(source.target) in buffers
            for storage in self.facts[source.name].makes
        }
        changing: dict[str, list[fx.Node]] = {}
        for node in self.nodes:
            for storage in self.facts[node.name].writes & owner_of.keys():
                changing.setdefault(owner_of[storage], []).append(node)
        for members in (nodes for owner, nodes in changing.items() if owner not in inner):
            self._join(members, "what a module without modules changes of itself stays together")

    def join_users_out_of_order(self, nodes: Sequence[fx.Node]) -> bool:
        """Joins users of the first value whose gradients would be summed in another order; returns whether any was."""
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
        """Joins operations of which each waits for the other."""
        for groups in nx.strongly_connected_components(self._waiting(nodes)):
            self._join(groups, "operations that wait for each other both ways stay together")

    def ordered(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """Returns the groups in topological order, the earliest node first among those that are free."""
        members = self.groups(nodes)
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

    def groups(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """Returns the groups by their roots, in order of their first nodes."""
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            members.setdefault(self.sets[node], []).append(node)
        return members


def _owner(name: str) -> str:
    """Returns the path of the module that a parameter or buffer belongs to."""
    return name.rpartition(".")[0]


def _repeated(rules: _Rules, parameters: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Returns the nodes of every group that can be run again in each stage that uses it."""
    most_flops = _CHEAP_SHARE * sum(fact.num_flops for fact in rules.facts.values())
    written = {storage for node in rules.nodes for storage in rules.facts[node.name].writes}
    changed = written & rules.known.outliving_storages()
    repeated: dict[str, tuple[str, ...]] = {}

    def may_repeat(node: fx.Node) -> bool:
        """Whether a node needs no gradient, no random numbers and little arithmetic, and is no check."""
        fact = rules.facts[node.name]
        is_light = node.target is not check and fact.num_flops <= most_flops and node.target not in _LOOKUPS
        is_pure = not fact.needs_gradient and not fact.is_random
        return is_light and is_pure and not (fact.reads | fact.writes | fact.makes) & changed

    def is_there(source: fx.Node) -> bool:
        """Whether every stage has a value: an input without gradient, a buffer, constant or size, or a repeated one."""
        if source.op == "get_attr":
            return str(source.target) not in parameters
        is_outside = source not in rules.position and not rules.facts[source.name].needs_gradient
        return source.name in repeated or is_outside

    def is_fed(members: Sequence[fx.Node]) -> bool:
        sources = {source for node in members for source in node.all_input_nodes}
        return all(map(is_there, sources.difference(members)))

    waiting = [members for members in rules.groups(rules.nodes).values() if all(map(may_repeat, members))]
    while True:
        ready = [members for members in waiting if is_fed(members)]
        if not ready:
            return repeated
        waiting = [members for members in waiting if members not in ready]
        for members in ready:
            names = tuple(node.name for node in members)
            repeated |= dict.fromkeys(names, names)


def _in_order_of_use(worked: Sequence[fx.Node], repeated: Collection[str]) -> dict[str, None]:
    """Returns the repeated nodes that blocks use, each after its sources, in the order of their first uses."""
    found: dict[str, None] = {}
    waiting = list(reversed(worked))
    while waiting:
        node = waiting.pop()
        sources = [each for each in node.all_input_nodes if each.name in repeated and each.name not in found]
        if sources:
            waiting += [node, *reversed(sources)]
        elif node.name in repeated:
            found[node.name] = None
    return found


def signature(nodes: Sequence[fx.Node], facts: Mapping[str, Fact], sizes: Sizes) -> str:
    """Returns a digest of operations, arguments, wiring, and of what comes in and goes out.

    Of a tensor that comes in it holds the shape (the batch size as a symbol), strides, dtype and whether it needs a
    gradient; of one that goes out, whether it needs a gradient. It holds no names and no device.
    """
    names = {node: f"%{index}" for index, node in enumerate(nodes)}
    outside: dict[fx.Node, str] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in names and source not in outside:
                outside[source] = f"${len(outside)} {_incoming(source, facts)}"
    every = names | outside
    lines = []
    for node in nodes:
        target: Any = node.target
        has_name = hasattr(target, "__qualname__") and not isinstance(target, str | OpOverload)
        name = f"{target.__module__}.{target.__qualname__}" if has_name else str(target)
        words = [_OWN_NAMES.get(target, name), *map(str, precision_of(node))]
        lines.append(f"{' '.join(words)} {fx.map_arg((node.args, node.kwargs), every.__getitem__)}")
    leaving = [node for node in nodes if any(user not in names for user in node.users)]
    outputs = [f"{names[node]} {facts[node.name].needs_gradient}" for node in leaving]
    order = {str(sizes.symbol): "batch"}  # torch counts the names of symbols up: they are replaced by their order
    text = _DEVICE.sub("device", "\n".join([*lines, *outputs]))
    text = _SYMBOL.sub(lambda match: order.setdefault(match[0], f"size{len(order)}"), text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _incoming(node: fx.Node, facts: Mapping[str, Fact]) -> str:
    fact = facts.get(node.name)
    value = node.meta.get("val", fact.value if fact else None)
    if fact is not None and not isinstance(value, Tensor):
        value = fact.value if isinstance(fact.value, Tensor) else value
    if isinstance(value, Tensor):
        needs_gradient = fact.value.requires_grad if fact else value.requires_grad
        return f"{node.op}{tuple(value.shape)}{value.stride()}{value.dtype}{needs_gradient}"
    return repr(value)


class Builder:
    """Turns a grouped graph into records."""

    def __init__(self, known: KnownGraph, grouping: Grouping) -> None:
        self.module, self.facts, self.sizes = known.module, known.facts, known.sizes
        self.parameters, self.buffers = known.parameters, known.buffers
        self.grouping = grouping
        self.nodes: dict[str, fx.Node] = {node.name: node for node in self.module.graph.nodes}
        self._users: dict[fx.Node, set[int]] = {}
        self.block_of = {name: index for index, names in enumerate(grouping.blocks) for name in names}

    def build(self, marks: Sequence[CutMark] = ()) -> Graph:
        """Returns the record, with the user's cut points as `marks`."""
        buffer_bytes = self._buffer_bytes()
        blocks = tuple(
            self._block(index, names, buffer_bytes[index]) for index, names in enumerate(self.grouping.blocks)
        )
        values = self.values()
        inputs = tuple(
            Input(node.name, tuple(sorted(self.users(node))), self.sizes.num_bytes(node.meta["val"]))
            for node in self.module.graph.find_nodes(op="placeholder")
        )
        parameters = tuple(
            Parameter(name, tensor.numel() * tensor.element_size(), tensor.requires_grad, tuple(sorted(used_by)))
            for name, (tensor, used_by) in self._attributes(self.parameters).items()
        )
        repeated = signature([self.nodes[name] for name in self.grouping.repeated], self.facts, self.sizes)
        text = repr((blocks, repeated, values, inputs, parameters, str(self.module.graph.output_node().args), *marks))
        fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        return Graph(blocks, values, inputs, parameters, fingerprint, tuple(marks), self._outputs())

    def _outputs(self) -> tuple[Output, ...]:
        """Returns the tensors of samples that blocks make and the model returns, whose length is known beforehand."""
        returned: Any = self.module.graph.output_node().args[0]
        nodes = dict.fromkeys(node for node in returned if node.name in self.block_of)
        values = {node.name: node.meta["val"] for node in nodes if not self.sizes.depends_on_data(node)}
        sizes = {name: self.sizes.num_bytes(value) for name, value in values.items()}
        return tuple(Output(name, self.block_of[name], size) for name, size in sizes.items() if size.sample_bytes)

    def values(self) -> tuple[Value, ...]:
        """Returns the tensors that are used by another block than their own, in execution order."""
        tensors = [name for name in self.nodes if name in self.block_of and isinstance(self.facts[name].value, Tensor)]
        users = {name: tuple(sorted(self.users(self.nodes[name]) - {self.block_of[name]})) for name in tensors}
        sizes = {name: self.sizes.num_bytes(self.nodes[name].meta["val"]) for name in tensors if users[name]}
        return tuple(
            Value(name, self.block_of[name], users[name], size, self.facts[name].needs_gradient)
            for name, size in sizes.items()
        )

    def users(self, node: fx.Node) -> set[int]:
        """Returns the blocks that use a node, directly or through repeated nodes and sizes."""
        if node not in self._users:
            together = [self.nodes[name] for name in self.grouping.repeated.get(node.name, (node.name,))]
            users = {user for member in together for user in member.users} - set(together)
            found: set[int] = set()
            for user in users:
                if user.name in self.block_of:
                    found.add(self.block_of[user.name])
                elif user.op != "output" and not self.sizes.is_given(user):
                    found |= self.users(user)
            self._users |= dict.fromkeys(together, found)
        return self._users[node]

    def _attributes(self, names: Mapping[str, str]) -> dict[str, tuple[Tensor, set[int]]]:
        """Returns, for each attribute in `names`, its tensor and the blocks that use it."""
        found: dict[str, tuple[Tensor, set[int]]] = {}
        for node in self.module.graph.find_nodes(op="get_attr"):
            name = names.get(str(node.target))
            if name is not None:
                _, blocks = found.setdefault(name, (self.facts[node.name].value, set()))
                blocks |= self.users(node)
        return found

    def _buffer_bytes(self) -> Counter[int]:
        """Returns, by block, the bytes of its buffers and of the copies of weights that autocast keeps for a step."""
        num_bytes: Counter[int] = Counter()
        for tensor, blocks in self._attributes(self.buffers).values():
            num_bytes.update(dict.fromkeys(blocks, tensor.numel() * tensor.element_size()))
        casts: dict[tuple[str, int], int] = {}
        for node in self.module.graph.find_nodes(op="get_attr"):
            name = self.parameters.get(str(node.target), "")
            for user in [user for user in node.users if name and user.name in self.block_of]:
                dtype = cast_dtype(user, self.facts[node.name].value, self.facts[user.name].value)
                if dtype is not None:
                    casts[name, self.block_of[user.name]] = self.facts[node.name].value.numel() * dtype.itemsize
        for (_, block), size in casts.items():
            num_bytes[block] += size
        return num_bytes

    def _block(self, index: int, names: Iterable[str], buffer_bytes: int) -> Block:
        nodes = [self.nodes[name] for name in names]
        module = (modules_of(nodes[0]) or [""])[-1]
        flops = sum(self.facts[node.name].num_flops for node in nodes)
        return Block(
            index=index,
            name=f"{module}/{nodes[0].name}",
            module=module,
            nodes=tuple(node.name for node in nodes),
            signature=signature(nodes, self.facts, self.sizes),
            buffer_bytes=buffer_bytes,
            num_flops_per_sample=flops / self.sizes.batch_size,
        )


def locate(
    markers: Sequence[Marker],
    blocks: Sequence[Sequence[str]],
    graph: Builder,
    joins: Sequence[tuple[Sequence[str], str]],
) -> list[CutMark]:
    """Finds the cut that each marker means: its value is made before, what used it comes after."""
    places = {name: place for place, name in enumerate(graph.nodes)}
    starts = [places[names[0]] for names in blocks]
    found = []
    for marker in markers:
        least = graph.block_of.get(marker.source, -1) + 1
        after = [
            {graph.block_of[name]} if name in graph.block_of else graph.users(graph.nodes[name])
            for name in marker.users
        ]
        most = min(set().union(*after), default=len(blocks))
        block = min(max(sum(start < marker.place for start in starts), least), most)
        if least > most:
            reason = _why_joined(marker.source, marker.users, joins)
        else:
            ends = {0: "nothing of the model lies before it", len(blocks): "nothing of the model lies after it"}
            reason = ends.get(block, "")
        found.append(CutMark(marker.name, -1 if reason else block, reason))
    return found


def _why_joined(source: str, users: Collection[str], joins: Sequence[tuple[Sequence[str], str]]) -> str:
    """Returns the rules that keep a value and its users on one stage, by the shortest chain of joins."""
    reached: dict[str, tuple[str, ...]] = {source: ()}
    waiting = [source]
    for name in waiting:
        if name in users:
            return "no cut may part what is before and after it: " + "; ".join(dict.fromkeys(reached[name]))
        for members, rule in joins:
            if name in members:
                new = [member for member in members if member not in reached]
                reached |= dict.fromkeys(new, (*reached[name], rule))
                waiting += new
    return "no cut may part what is before and after it"


def crossing_sizes(values: Sequence[Value], num_blocks: int) -> list[Size]:
    """Returns the bytes that cross the cut after each block (the last one: nothing does)."""
    fixed, sample = [0.0] * (num_blocks + 1), [0.0] * (num_blocks + 1)
    for value in values:
        if value.consumers:
            last = max(value.consumers)
            for totals, num_bytes in ((fixed, value.size.fixed_bytes), (sample, value.size.sample_bytes)):
                totals[value.producer] += num_bytes
                totals[last] -= num_bytes
    return list(map(Size, accumulate(fixed[:-1]), accumulate(sample[:-1])))


def merge_free_blocks(
    blocks: Sequence[tuple[str, ...]],
    crossing: Sequence[Size],
    is_free: Callable[[int], bool],
    marked: Collection[int] = (),
) -> tuple[tuple[str, ...], ...]:
    """Joins blocks so that only cuts are left that no other cut beats, and those that the user has `marked`.

    `crossing` is what crosses the cut after each block; `is_free` says whether a block holds views alone.
    """
    kept: list[int] = []
    run: list[int] = []
    for cut in range(len(blocks) - 1):
        if run and not is_free(cut):
            kept += _unbeaten(run, crossing)
            run = []
        run.append(cut)
    kept += _unbeaten(run, crossing)
    if len(blocks) > 1 and is_free(len(blocks) - 1):
        kept = [cut for cut in kept if cut not in run]
    if kept and is_free(0):
        first_run = [cut for cut in range(len(blocks) - 1) if all(is_free(block) for block in range(cut + 1))]
        kept = [cut for cut in kept if cut not in first_run]
    bounds = pairwise([0, *(cut + 1 for cut in sorted({*kept, *marked})), len(blocks)])
    return tuple(tuple(chain.from_iterable(blocks[start:end])) for start, end in bounds)


def _unbeaten(run: Sequence[int], crossing: Sequence[Size]) -> list[int]:
    """Returns the cuts than which no other is never worse; of equals the earlier one wins."""

    def beats(one: int, other: int) -> bool:
        mine, its = crossing[one], crossing[other]
        is_never_worse = mine.fixed_bytes <= its.fixed_bytes and mine.sample_bytes <= its.sample_bytes
        return is_never_worse and (mine != its or one < other)

    return [cut for cut in run if not any(beats(other, cut) for other in run)]

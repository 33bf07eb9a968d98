"""Builds the record of a graph from its blocks, with a signature of what each computes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from autovaruna._torch import OpOverload
from autovaruna.graph.facts import Fact, KnownGraph
from autovaruna.graph.grouping import Grouping
from autovaruna.graph.precision import cast_dtype, precision_of
from autovaruna.graph.records import Block, CutMark, Graph, Input, Parameter, Value
from autovaruna.graph.sizes import Sizes
from autovaruna.graph.source_lines import modules_of

_SYMBOL = re.compile(r"\b[suz]\d+\b")
_DEVICE = re.compile(r"device\(type='\w+'(?:, index=\d+)?\)")


def signature(nodes: Sequence[fx.Node], facts: Mapping[str, Fact], sizes: Sizes) -> str:
    """Returns a digest of operations, arguments, wiring, and of what comes in and goes out.

    Of a tensor that comes in it holds the shape (the batch size as a symbol), strides, dtype and whether it needs a
    gradient; of one that goes out, whether it needs a gradient. It holds no names and no device.

    Args:
        nodes: The nodes, in execution order.
        facts: What is known of each node.
        sizes: Says which symbol is the batch size.
    """
    names = {node: f"%{index}" for index, node in enumerate(nodes)}
    outside: dict[fx.Node, str] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in names and source not in outside:
                outside[source] = f"${len(outside)} {_incoming(source, facts)}"
    every = names | outside
    lines = [f"{_described(node)} {fx.map_arg((node.args, node.kwargs), every.__getitem__)}" for node in nodes]
    leaving = [node for node in nodes if any(user not in names for user in node.users)]
    outputs = [f"{names[node]} {facts[node.name].needs_gradient}" for node in leaving]
    text = _DEVICE.sub("device", "\n".join([*lines, *outputs]))
    return hashlib.sha256(_plain(text, str(sizes.symbol)).encode()).hexdigest()[:16]


def _incoming(node: fx.Node, facts: Mapping[str, Fact]) -> str:
    fact = facts.get(node.name)
    value = node.meta.get("val", fact.value if fact else None)
    if fact is not None and not isinstance(value, Tensor):
        value = fact.value if isinstance(fact.value, Tensor | fx.GraphModule) else value
    if isinstance(value, Tensor):
        needs_gradient = fact.value.requires_grad if fact else value.requires_grad
        return f"{node.op}{tuple(value.shape)}{value.stride()}{value.dtype}{needs_gradient}"
    if isinstance(value, fx.GraphModule):
        return "\n".join(str(each.code) for each in value.modules() if isinstance(each, fx.GraphModule))
    return repr(value)


def _described(node: fx.Node) -> str:
    return " ".join([_operation(node.target), *map(str, precision_of(node))])


def _operation(target: Any) -> str:
    if isinstance(target, str | OpOverload) or not hasattr(target, "__qualname__"):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


def _plain(text: str, batch: str) -> str:
    """Returns the text with the names of symbols, which torch counts up, replaced by their order in it."""
    names = {batch: "batch"}
    return _SYMBOL.sub(lambda match: names.setdefault(match[0], f"size{len(names)}"), text)


class Builder:
    """Turns a grouped graph into records.

    Args:
        known: The traced graph.
        grouping: Blocks and repeated nodes.
    """

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
            self._block(index, names, buffer_bytes.get(index, 0)) for index, names in enumerate(self.grouping.blocks)
        )
        values = self.values()
        inputs = tuple(self._input(node) for node in self.module.graph.find_nodes(op="placeholder"))
        parameters = self._parameters()
        text = repr((blocks, values, inputs, parameters, str(self.module.graph.output_node().args), *marks))
        fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        return Graph(blocks, values, inputs, parameters, fingerprint, tuple(marks))

    def values(self) -> tuple[Value, ...]:
        """Returns the tensors that are used by another block than their own, in execution order."""
        return tuple(self._value(name) for name in self.nodes if name in self.block_of and self._later_users(name))

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

    def _later_users(self, name: str) -> tuple[int, ...]:
        if not isinstance(self.facts[name].value, Tensor):
            return ()
        return tuple(sorted(self.users(self.nodes[name]) - {self.block_of[name]}))

    def _value(self, name: str) -> Value:
        size = self.sizes.num_bytes(self.nodes[name].meta["val"])
        fact = self.facts[name]
        return Value(name, self.block_of[name], self._later_users(name), size, fact.needs_gradient)

    def _input(self, node: fx.Node) -> Input:
        return Input(node.name, tuple(sorted(self.users(node))), self.sizes.num_bytes(node.meta["val"]))

    def _attributes(self, names: Mapping[str, str]) -> dict[str, tuple[Tensor, set[int]]]:
        """Returns, for each attribute in `names`, its tensor and the blocks that use it."""
        found: dict[str, tuple[Tensor, set[int]]] = {}
        for node in self.module.graph.find_nodes(op="get_attr"):
            name = names.get(str(node.target))
            if name is not None:
                _, blocks = found.setdefault(name, (self.facts[node.name].value, set()))
                blocks |= self.users(node)
        return found

    def _parameters(self) -> tuple[Parameter, ...]:
        return tuple(
            Parameter(name, tensor.numel() * tensor.element_size(), tensor.requires_grad, tuple(sorted(blocks)))
            for name, (tensor, blocks) in self._attributes(self.parameters).items()
        )

    def _buffer_bytes(self) -> dict[int, int]:
        num_bytes: dict[int, int] = {}
        for tensor, blocks in self._attributes(self.buffers).values():
            for block in blocks:
                num_bytes[block] = num_bytes.get(block, 0) + tensor.numel() * tensor.element_size()
        for (_, block), size in self._cast_bytes().items():
            num_bytes[block] = num_bytes.get(block, 0) + size
        return num_bytes

    def _cast_bytes(self) -> dict[tuple[str, int], int]:
        """Returns the bytes of the copy of a weight that autocast keeps for a step, by weight and block."""
        found: dict[tuple[str, int], int] = {}
        for node in self.module.graph.find_nodes(op="get_attr"):
            name = self.parameters.get(str(node.target), "")
            users = [user for user in node.users if name and user.name in self.block_of]
            for user in users:
                dtype = cast_dtype(user, self.facts[node.name].value, self.facts[user.name].value)
                if dtype is not None:
                    found[name, self.block_of[user.name]] = self.facts[node.name].value.numel() * dtype.itemsize
        return found

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

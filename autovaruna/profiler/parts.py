"""Defines `Part`: consecutive blocks that are measured together, told apart by what they do, not by where they are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna._torch import OpOverload
from autovaruna.graph.build import signature
from autovaruna.graph.pieces.deferral import SplitPiece, direct, split_backward
from autovaruna.graph.pieces.extract import Argument, extract
from autovaruna.graph.records import Block
from autovaruna.graph.traced import TracedModel

aten = torch.ops.aten
_LEFT_TO_CHANCE = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)


@dataclass(frozen=True)
class Code:
    """What runs a part.

    Attributes:
        run: The forward.
        arguments: What it is called with.
        needs_gradient: Whether there is a backward.
        split: The same with a backward that leaves weight gradients for later; None: it has none to leave.
    """

    run: Callable[..., Any]
    arguments: tuple[Argument, ...]
    needs_gradient: bool
    split: SplitPiece | None


def make_code(traced: TracedModel, nodes: Sequence[str], outputs: Sequence[str]) -> Code:
    """Returns what runs some nodes of a traced model, and gives some of their values."""
    piece = extract(traced, nodes, outputs, is_bare=True)
    _fill_memory(piece.module)
    needs_gradient = any(traced.facts[name].needs_gradient for name in outputs)
    return Code(
        direct(piece.module),
        piece.arguments,
        needs_gradient,
        split_backward(piece) if needs_gradient else None,
    )


def _fill_memory(module: fx.GraphModule) -> None:
    """Has a graph fill memory that it leaves to chance.

    A model that writes it all at the places of a permutation, to index with it then, would index with what is there:
    here the permutation is zeros.
    """
    for node in list(module.graph.nodes):
        if node.target in _LEFT_TO_CHANCE:
            with module.graph.inserting_after(node):
                module.graph.call_function(aten.zero_.default, (node,))


_LEAST_BLOCKS = 12
_MOST_BLOCKS = 64


@dataclass(frozen=True)
class Part:
    """Consecutive blocks of a traced model.

    Attributes:
        traced: The traced model.
        blocks: The blocks.
        nodes: The nodes that are run.
        name: What to call it in a message.
    """

    traced: TracedModel
    blocks: tuple[Block, ...]
    nodes: tuple[str, ...]
    name: str

    @cached_property
    def signature(self) -> str:
        """A text that is equal for parts that do the same work and give the same results to others, in any model."""
        inside = {name: index for index, name in enumerate(self.nodes)}
        text = ",".join([self._work, *(str(inside[name]) for name in self.outputs)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def _work(self) -> str:
        if len(self.blocks) == 1:
            return self.blocks[0].signature
        return signature([self.traced.nodes[name] for name in self.nodes], self.traced.facts, self.traced.sizes)

    @property
    def is_of_torch(self) -> bool:
        """Whether all its operations are torch's own, so that what they take is the same in every program."""
        return all(_is_of_torch(self.traced.nodes[name].target) for name in self.nodes)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Tensors of the part that other blocks use or that the model returns, in execution order."""
        inside, returned = set(self.nodes), {spec.node for spec in self.traced.outputs}
        return tuple(name for name in self.nodes if self._is_tensor(name) and self._leaves(name, inside, returned))

    @cached_property
    def values(self) -> tuple[str, ...]:
        """Tensors that come in from other blocks or from repeated nodes, in order of first use."""
        inside = set(self.nodes)
        sources = [source for name in self.nodes for source in self.traced.nodes[name].all_input_nodes]
        return tuple(
            dict.fromkeys(
                source.name
                for source in sources
                if source.op == "call_function" and source.name not in inside and self._is_tensor(source.name)
                if not self.traced.sizes.is_given(source)
            )
        )

    @cached_property
    def code(self) -> Code:
        """What runs it."""
        return make_code(self.traced, self.nodes, self.outputs)

    def storage(self, name: str) -> int:
        """Returns which memory a tensor lies in; views share theirs."""
        (memory,) = self.traced.facts[name].makes
        return memory

    def _is_tensor(self, name: str) -> bool:
        return isinstance(self.traced.facts[name].value, Tensor)

    def _leaves(self, name: str, inside: set[str], returned: set[str]) -> bool:
        users = self.traced.nodes[name].users
        used = any(
            user.name not in inside and user.op != "output" and not self.traced.sizes.is_given(user) for user in users
        )
        return used or name in returned


def block_parts(traced: TracedModel) -> list[Part]:
    """Returns each block as a part."""
    return [_part(traced, [block]) for block in traced.graph.blocks]


def layer_parts(traced: TracedModel) -> list[Part]:
    """Returns runs of whole layers; a layer is what a module path says up to its first number.

    Layers of few blocks are taken together, and a layer of very many blocks is parted.
    """
    runs: list[list[Block]] = [[]]
    for _, layer in groupby(traced.graph.blocks, key=_layer):
        if len(runs[-1]) >= _LEAST_BLOCKS:
            runs.append([])
        runs[-1] += layer
    return [
        _part(traced, run[start : start + _MOST_BLOCKS]) for run in runs for start in range(0, len(run), _MOST_BLOCKS)
    ]


def repeated_part(traced: TracedModel) -> Part:
    """Returns the repeated nodes, which are in no block, as a part."""
    return Part(traced, (), tuple(name for name in traced.nodes if name in traced.repeated), "repeated operations")


def _part(traced: TracedModel, blocks: Iterable[Block]) -> Part:
    blocks = tuple(blocks)
    nodes = tuple(name for block in blocks for name in block.nodes)
    name = blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} to {blocks[-1].name}"
    return Part(traced, blocks, nodes, name)


def _layer(block: Block) -> str:
    match = re.match(r"(?:.*?\.)?\d+(?=\.|$)", block.module)
    return match[0] if match else ""


def _is_of_torch(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target.namespace in ("aten", "prim", "prims")
    module = str(getattr(target, "__module__", ""))
    return isinstance(target, str) or module.split(".")[0] in ("torch", "_operator", "math", "builtins")

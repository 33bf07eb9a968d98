"""Makes what is measured ready to run: `MeasuredPart` says what, `Samples` makes its arguments, `Work` runs.

A part is consecutive blocks, told apart by what they do, not by where they are. Arguments have random numbers where
numbers are free.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import OpOverload
from autovaruna.graph.grouping import signature
from autovaruna.graph.operators import EMPTY, name_of
from autovaruna.graph.pieces import Argument, ArgumentSource, Piece, direct, extract
from autovaruna.graph.precision import precision_of
from autovaruna.graph.random import RandomStream
from autovaruna.graph.records import Block
from autovaruna.graph.traced import TracedModel

aten = torch.ops.aten
_OF_SHARES = (aten.binary_cross_entropy, aten.bernoulli, aten.multinomial, aten.poisson, aten.binomial)
"""Operations that refuse other numbers; on a GPU that ends the process, so none is tried out there."""
_LEAST_BLOCKS = 12
_MOST_BLOCKS = 64
_PATTERN_LENGTH = 65_521
_SCALE = 0.05


@dataclass(frozen=True)
class Code:
    """What runs a part; shares are from 0 to 1."""

    run: Callable[..., Any]
    arguments: tuple[Argument, ...]
    needs_gradient: bool
    takes_shares: bool


def make_code(traced: TracedModel, nodes: Sequence[str], outputs: Sequence[str]) -> Code:
    """Returns what runs some nodes of a traced model, and gives some of their values."""
    piece = extract(traced, nodes, outputs, is_bare=True)
    graph = piece.module.graph
    for node in list(graph.nodes):
        if name_of(node) in EMPTY:  # it may hold places that the graph goes on to index with
            with graph.inserting_after(node):
                graph.call_function(aten.zero_.default, (node,))
    called = [target for node in graph.nodes for target in (node.target, *node.args)]  # `draw` takes what it calls
    takes_shares = any(isinstance(each, OpOverload) and each.overloadpacket in _OF_SHARES for each in called)
    needs_gradient = any(traced.facts[name].needs_gradient for name in outputs)
    return Code(direct(piece.module), piece.arguments, needs_gradient, takes_shares)


@dataclass(frozen=True)
class MeasuredPart:
    """Consecutive blocks of a traced model."""

    traced: TracedModel
    blocks: tuple[Block, ...]
    nodes: tuple[str, ...]
    name: str

    @cached_property
    def signature(self) -> str:
        """A text that is equal for parts that do the same work with the same `values` and `outputs`, in any model."""
        if len(self.blocks) == 1:
            work = self.blocks[0].signature
        else:
            work = signature([self.traced.nodes[name] for name in self.nodes], self.traced.facts, self.traced.sizes)
        inside = {name: index for index, name in enumerate(self.nodes)}
        values = [place for place, source in enumerate(self._sources) if source.name in self.values]
        text = f"{work} {values} {[inside[name] for name in self.outputs]}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def is_of_torch(self) -> bool:
        """Whether all its operations are torch's own, so that what they take is the same in every program."""
        targets: list[Any] = [self.traced.nodes[name].target for name in self.nodes]
        others = [each for each in targets if not isinstance(each, str | OpOverload)]
        modules = {str(getattr(each, "__module__", "")).split(".")[0] for each in others}
        spaces = {each.namespace for each in targets if isinstance(each, OpOverload)}
        return modules <= {"torch", "_operator", "math", "builtins"} and spaces <= {"aten", "prim", "prims"}

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Tensors of the part that other blocks use or that the model returns, in execution order."""
        inside, returned = set(self.nodes), {spec.node for spec in self.traced.outputs}

        def leaves(name: str) -> bool:
            users = [user for user in self.traced.nodes[name].users if user.op != "output" and user.name not in inside]
            return name in returned or not all(map(self.traced.sizes.is_given, users))

        return tuple(name for name in self.nodes if self._is_tensor(name) and leaves(name))

    @cached_property
    def _sources(self) -> list[fx.Node]:
        """What comes in, in order of first use."""
        inside = set(self.nodes)
        sources = dict.fromkeys(source for name in self.nodes for source in self.traced.nodes[name].all_input_nodes)
        return [source for source in sources if source.name not in inside]

    @cached_property
    def values(self) -> tuple[str, ...]:
        """Tensors that come in from other blocks or from repeated nodes, in order of first use."""
        return tuple(
            source.name
            for source in self._sources
            if source.op == "call_function" and self._is_tensor(source.name)
            if not self.traced.sizes.is_given(source)
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


def all_parts(traced: TracedModel) -> list[MeasuredPart]:
    """Returns everything that is measured of a model: blocks, layers, and what all stages repeat."""
    return [part for part in (*block_parts(traced), *layer_parts(traced), repeated_part(traced)) if part.nodes]


def distinct(parts: Sequence[MeasuredPart]) -> list[MeasuredPart]:
    """Returns the first part with each signature."""
    return list({part.signature: part for part in reversed(parts)}.values())[::-1]


def block_parts(traced: TracedModel) -> list[MeasuredPart]:
    """Returns each block as a part."""
    return [_part(traced, [block]) for block in traced.graph.blocks]


def layer_parts(traced: TracedModel) -> list[MeasuredPart]:
    """Returns runs of whole layers; a layer is what a module path says up to its first number.

    Layers of few blocks are taken together, and a layer of very many blocks is parted.
    """

    def layer_of(block: Block) -> str:
        match = re.match(r"(?:.*?\.)?\d+(?=\.|$)", block.module)
        return match[0] if match else ""

    runs: list[list[Block]] = [[]]
    for _, layer in groupby(traced.graph.blocks, key=layer_of):
        if len(runs[-1]) >= _LEAST_BLOCKS:
            runs.append([])
        runs[-1] += layer
    return [
        _part(traced, run[start : start + _MOST_BLOCKS]) for run in runs for start in range(0, len(run), _MOST_BLOCKS)
    ]


def repeated_part(traced: TracedModel) -> MeasuredPart:
    """Returns the repeated nodes, which are in no block, as a part."""
    return MeasuredPart(traced, (), tuple(traced.repeated), "repeated operations")


def _part(traced: TracedModel, blocks: Iterable[Block]) -> MeasuredPart:
    blocks = tuple(blocks)
    nodes = tuple(name for block in blocks for name in block.nodes)
    name = blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} to {blocks[-1].name}"
    return MeasuredPart(traced, blocks, nodes, name)


class Numbers(str, Enum):
    """What tensors are filled with; not every operation takes every number."""

    NORMAL = "normal"  # normal random numbers around zero
    SHARE = "share"  # random numbers between zero and one, as a probability or a variance may be
    IDENTITY = "identity"  # square matrices are near the identity, which has an inverse and a root; others are shares
    COMPUTED = "computed"  # normal, but what every stage repeats (masks, counts, positions) is computed from the inputs


@dataclass
class Samples:
    """Makes arguments for pieces of one traced model.

    `inputs` are tensors of one call, in the order of ``traced.call.inputs``; without them integers are zeros.
    """

    traced: TracedModel
    model: nn.Module
    device: torch.device
    inputs: Sequence[Tensor] = ()
    numbers: Numbers = Numbers.NORMAL

    def argument(self, argument: Argument, batch_size: int) -> Any:
        """Returns what to pass for one argument of a piece, for `batch_size` samples."""
        match argument.source:
            case ArgumentSource.RANDOM:
                return RandomStream(0, 0, 0, self.device)
            case ArgumentSource.SIZE:
                return self.traced.sizes.number(self.traced.nodes[argument.name].meta["val"], batch_size)
            case ArgumentSource.OF_BATCH:
                return self._of_batch(argument.name, batch_size)
            case ArgumentSource.PARAMETER:
                return self._parameter(argument.name)
            case ArgumentSource.BUFFER:
                return self._copy(self.model.get_buffer(argument.name))
            case ArgumentSource.CONSTANT:
                return self._copy(self.traced.constants[argument.name])
            case ArgumentSource.INPUT if self.inputs:
                return self._input(argument.name, batch_size)
            case _:
                return self._value(argument.name, batch_size)

    def _parameter(self, name: str) -> Tensor:
        """Returns a parameter in the steady state of a step: its gradient is there and is added to."""
        parameter = self.model.get_parameter(name)
        random = self._make(tuple(parameter.shape), parameter.stride(), parameter.dtype)
        made = random.detach().requires_grad_(parameter.requires_grad)  # no view, of which autocast keeps no copies
        if made.requires_grad:
            made.grad = torch.zeros_like(made)
        return made

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:  # or a stand-in, since its numbers are elsewhere
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device).fill_(1)
        return tensor.detach().to(self.device, copy=True)

    def _input(self, name: str, batch_size: int) -> Tensor:
        spec, tensor = self.traced.inputs[name], self.inputs[list(self.traced.inputs).index(name)].detach()
        if spec.is_batch:
            rows = torch.arange(batch_size, device=tensor.device) % max(tensor.shape[0], 1)
            tensor = tensor.index_select(0, rows)
        return tensor.to(self.device, copy=True).requires_grad_(spec.needs_gradient)

    def _value(self, name: str, batch_size: int) -> Tensor:
        if self.numbers is Numbers.COMPUTED and name in self.traced.repeated:
            return self._run(extract(self.traced, (), [name]), batch_size)
        traced: Tensor = self.traced.nodes[name].meta["val"]
        shape = self.traced.sizes.shape(traced, batch_size)
        strides = tuple(self.traced.sizes.number(stride, batch_size) for stride in traced.stride())
        return self._make(shape, strides, traced.dtype).requires_grad_(self.traced.facts[name].needs_gradient)

    def _of_batch(self, name: str, batch_size: int) -> Tensor:
        """Returns ones; integers, which may be sizes, are those of the samples."""
        value: Tensor = self.traced.nodes[name].meta["val"]
        if not self.inputs or value.is_floating_point():
            return torch.ones(value.shape, dtype=value.dtype, device=self.device)
        totals = self.traced.totals
        piece = extract(self.traced, (*totals.before, *totals.after), [totals.values[name][0]], is_bare=True)
        return torch.as_tensor(self._run(piece, batch_size), dtype=value.dtype, device=self.device)

    def _run(self, piece: Piece, batch_size: int) -> Tensor:
        with torch.no_grad():
            (value,) = piece.module(*(self.argument(argument, batch_size) for argument in piece.arguments))
        return value  # type: ignore[no-any-return]

    def _make(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor whose elements share memory where its strides say so (an expanded mask)."""
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        made = self._numbers(length, dtype).as_strided(shape, strides)
        is_square = len(shape) > 1 and shape[-1] == shape[-2] and made.is_floating_point()
        if self.numbers is Numbers.IDENTITY and is_square and length == math.prod(shape):
            made.mul_(_SCALE).diagonal(dim1=-2, dim2=-1).fill_(1.0)
        return made

    def _numbers(self, length: int, dtype: torch.dtype) -> Tensor:
        if dtype is torch.bool:
            return torch.ones(length, dtype=dtype, device=self.device)
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(length, dtype=dtype, device=self.device)
        numbers, pattern = torch.empty(length, dtype=dtype, device=self.device), self._pattern
        whole = length - length % len(pattern)
        numbers[:whole].view(-1, len(pattern)).copy_(pattern)
        numbers[whole:].copy_(pattern[: length - whole])
        return numbers

    @cached_property
    def _pattern(self) -> Tensor:
        """Normal random numbers; copies of them fill any tensor at the speed of a copy."""
        numbers = torch.randn(_PATTERN_LENGTH, generator=torch.Generator().manual_seed(0)) * _SCALE
        if self.numbers not in (Numbers.NORMAL, Numbers.COMPUTED):
            numbers = numbers.add_(0.5).clamp_(_SCALE, 1.0 - _SCALE)
        return numbers.to(self.device)


Outputs = Sequence[Tensor]


@dataclass(frozen=True)
class Work:
    """Something to measure.

    Attributes:
        values: Which arguments come from other blocks; their gradients are sent on, not kept.
        gradients: One for each output that needs a gradient; made for the outputs of the first run.
        is_cast: Whether autocast casts weights, once for all runs.
    """

    run: Callable[..., Outputs]
    arguments: tuple[Any, ...]
    values: tuple[Tensor, ...]
    needs_gradient: bool
    gradients: list[Tensor] = field(default_factory=list)
    is_cast: bool = False

    def forward(self) -> Outputs:
        with torch.set_grad_enabled(self.needs_gradient):
            return self.run(*self.arguments)

    def backward(self, outputs: Outputs) -> None:
        """Runs backward from outputs of `forward`; gradients of parameters add up, as over micro-batches."""
        roots = [output for output in outputs if output.requires_grad]
        if not self.gradients:
            self.gradients.extend(torch.full_like(root, 0.05) for root in roots)
        torch.autograd.backward(roots, self.gradients)
        for value in self.values:
            value.grad = None


def make_work(part: MeasuredPart, samples: Samples, batch_size: int) -> Work:
    """Returns a part as work on `batch_size` samples."""
    traced = part.traced
    code = part.code
    arguments = tuple(samples.argument(argument, batch_size) for argument in code.arguments)
    given = zip(code.arguments, arguments, strict=True)
    values = {argument.name: tensor for argument, tensor in given if argument.source is ArgumentSource.VALUE}
    return Work(
        code.run,
        arguments,
        tuple(values[name] for name in part.values),
        code.needs_gradient,
        is_cast=any(precision_of(traced.nodes[name]) for name in part.nodes),
    )


def empty_work(num_values: int, device: torch.device) -> Work:
    """Returns work that does nothing to `num_values` tensors that need a gradient: what every call costs."""
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"value_{index}") for index in range(num_values)]
    graph.output(tuple(placeholders))
    values = tuple(torch.zeros(1, device=device, requires_grad=True) for _ in range(num_values))
    return Work(direct(fx.GraphModule({}, graph)), values, values, True)

"""Traces small models for the tests of the graph, and runs one in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.graph.call import CallSpec, describe
from autovaruna.graph.pieces import Argument, Piece, Source, extract
from autovaruna.graph.random import RandomStream, untouched_generator
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from autovaruna.runtime.batch import cut_batch
from autovaruna.session.calls import BatchValues

CPU = torch.device("cpu")


class Function(nn.Module):
    """Wraps a function of tensors as a model; `parts` are modules and parameters that it may use as ``self.name``."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def call_of(model: nn.Module, *args: Any, **kwargs: Any) -> CallSpec:
    """Describes a call."""
    return describe(model, args, kwargs)[1]


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> TracedModel:
    """Traces one call of a model."""
    return trace(model, call_of(model, *args, **kwargs), CPU)


def traced_function(function: Callable[..., Any], *args: Tensor, **parts: nn.Module | Tensor) -> TracedModel:
    """Traces a function of ``(self, *args)``."""
    return traced(Function(function, **parts), *args)


def named(model: TracedModel, start: str) -> str:
    """Returns the only node whose name starts with a text."""
    found = [name for name in model.nodes if name.startswith(start)]
    assert len(found) == 1, (start, list(model.nodes))
    return found[0]


@dataclass
class Pieces:
    """Runs a traced model in one piece a stage, forwards and then backwards, as ranks would.

    Attributes:
        model: Whose numbers are used; it is not changed.
        traced: Its trace.
        starts: First block of each stage.
        gradients: by parameter name, the sums over the blocks that use it, in graph order.
        buffers: by name, as the pieces left them.
    """

    model: nn.Module
    traced: TracedModel
    starts: Sequence[int]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs one batch, with a gradient of ones for each output, and returns the outputs."""
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.leaves: dict[Argument, Tensor] = {}
        self.arrived: dict[str, Tensor] = {}
        self.inputs = dict(
            zip([node.name for node in self.traced.module.graph.find_nodes(op="placeholder")], tensors, strict=True)
        )
        self.batch_size = next(
            tensor.shape[0] for tensor, spec in zip(tensors, self.traced.call.inputs, strict=True) if spec.is_batch
        )
        values = BatchValues(self.traced, lambda: self.buffers, CPU)
        whole = cut_batch((self.batch_size,), 1, ((0,),))
        totals = values.of_samples(tensors, self.batch_size, ())
        self.of_batch = values.of_batch([totals], [self.batch_size], tensors, whole, ())[1.0]
        sent: dict[str, Tensor] = {}
        runs = []
        with untouched_generator(CPU):
            for stage in range(len(self.starts)):
                runs.append(self._forward(stage, sent))
        returned = [
            next(out[spec.node] for _, out in reversed(runs) if spec.node in out) for spec in self.traced.outputs
        ]
        self._backward(runs)
        return [tensor.detach() for tensor in returned]

    def _stage(self, block: int) -> int:
        return max(stage for stage, start in enumerate(self.starts) if start <= block)

    def _piece(self, stage: int) -> Piece:
        blocks = [block for block in self.traced.graph.blocks if self._stage(block.index) == stage]
        inside = {name for block in blocks for name in block.nodes}
        holders = {
            value.name: {self._stage(value.producer), *map(self._stage, value.consumers)}
            for value in self.traced.graph.values
        }
        outputs = [name for name, stages in holders.items() if stage in stages and stage < max(stages)]
        for spec in self.traced.outputs:
            stages = holders.get(spec.node, {self._stage(self.traced.block_of.get(spec.node, 0))})
            if stage == max(stages) and spec.node not in outputs:
                outputs.append(spec.node)
        return extract(self.traced, inside, outputs)

    def _forward(self, stage: int, sent: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        piece = self._piece(stage)
        received = {
            name: sent[name].detach().requires_grad_(sent[name].requires_grad) for name in piece.named(Source.VALUE)
        }
        for name, leaf in received.items():
            if leaf.requires_grad:  # a hook, since .grad would not keep the gradient's strides
                leaf.register_hook(partial(self.arrived.__setitem__, name))
        results = piece.module(*(self._argument(argument, received) for argument in piece.arguments))
        outputs = dict(zip(piece.outputs, results, strict=True))
        sent |= outputs
        return received, outputs

    def _argument(self, argument: Argument, received: dict[str, Tensor]) -> Any:
        match argument.source:
            case Source.INPUT:
                return self.inputs[argument.name]
            case Source.VALUE:
                return received[argument.name]
            case Source.OF_BATCH:
                return self.of_batch[argument.name]
            case Source.SIZE:
                return self.traced.sizes.number(self.traced.nodes[argument.name].meta["val"], self.batch_size)
            case Source.PARAMETER:
                parameter = self.model.get_parameter(argument.name)
                return self.leaves.setdefault(
                    argument, parameter.detach().clone().requires_grad_(parameter.requires_grad)
                )
            case Source.BUFFER:
                return self.buffers[argument.name]
            case Source.CONSTANT:
                return self.traced.constants[argument.name]
            case Source.RANDOM:
                return RandomStream(3, 1, 4, CPU)

    def _backward(self, runs: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
        gradients = self.arrived
        returned = {spec.node for spec in self.traced.outputs}
        for _, outputs in reversed(runs):
            roots = {name: output for name, output in outputs.items() if output.requires_grad}
            starts = {name: gradients.pop(name, None) for name in roots}
            starts |= {name: torch.ones_like(roots[name]) for name in roots.keys() & returned if starts[name] is None}
            roots = {name: root for name, root in roots.items() if starts[name] is not None}
            if roots:
                torch.autograd.backward(list(roots.values()), [starts[name] for name in roots])
        for argument in sorted(self.leaves, key=lambda argument: argument.block):
            gradient = self.leaves[argument].grad
            if gradient is not None:
                old = self.gradients.get(argument.name)
                self.gradients[argument.name] = gradient if old is None else old + gradient

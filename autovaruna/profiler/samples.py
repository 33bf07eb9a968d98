"""Makes arguments for a piece: tensors of the traced shapes, with random numbers where numbers are free.

Nothing of the user's is used or changed: parameters are random tensors of the same shapes, buffers are copies, and
the random numbers are not drawn from torch's generators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.graph.pieces.extract import Argument, Source, extract
from autovaruna.graph.random import RandomStream
from autovaruna.graph.traced import TracedModel

_PATTERN_LENGTH = 65_521
_SCALE = 0.05


class Numbers(str, Enum):
    """What tensors are filled with; not every operation takes every number."""

    NORMAL = "normal"
    """Normal random numbers around zero."""
    SHARE = "share"
    """Random numbers between zero and one, as a probability or a variance may be."""
    IDENTITY = "identity"
    """Square matrices are near the identity, which has an inverse and a root; others are shares."""
    COMPUTED = "computed"
    """Normal, but what every stage repeats (masks, counts, positions) is computed from the inputs."""


@dataclass
class Samples:
    """Makes arguments for pieces of one traced model.

    Attributes:
        traced: The traced model.
        model: Where buffers are copied from.
        device: Where the tensors are made.
        inputs: Tensors of one call, in the order of ``traced.call.inputs``; empty: integers are zeros.
        numbers: What floating-point tensors are filled with.
    """

    traced: TracedModel
    model: nn.Module
    device: torch.device
    inputs: Sequence[Tensor] = ()
    numbers: Numbers = Numbers.NORMAL
    _patterns: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def argument(self, argument: Argument, batch_size: int) -> Any:
        """Returns what to pass for one argument of a piece, for `batch_size` samples."""
        match argument.source:
            case Source.RANDOM:
                return RandomStream(0, 0, 0, self.device)
            case Source.SIZE:
                return self.traced.sizes.number(self.traced.nodes[argument.name].meta["val"], batch_size)
            case Source.OF_BATCH:
                return self._of_batch(argument.name, batch_size)
            case Source.PARAMETER:
                return self._parameter(argument.name)
            case Source.BUFFER:
                return self._copy(self.model.get_buffer(argument.name))
            case Source.CONSTANT:
                return self._copy(self.traced.constants[argument.name])
            case Source.INPUT if self.inputs:
                return self._input(argument.name, batch_size)
            case _:
                return self._value(argument.name, batch_size)

    def _random_like(self, tensor: Tensor) -> Tensor:
        """Returns random numbers in the layout of a tensor."""
        return self._make(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _parameter(self, name: str) -> Tensor:
        """Returns a parameter in the steady state of a step: its gradient is there and is added to."""
        parameter = self.model.get_parameter(name)
        random = self._random_like(parameter).detach()  # autocast keeps no copies of views, which this is no more
        made = random.requires_grad_(parameter.requires_grad)
        if made.requires_grad:
            made.grad = torch.zeros_like(made)
        return made

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:  # or a stand-in, since its numbers are elsewhere
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device).fill_(1)
        return tensor.detach().to(self.device, copy=True)

    def _input(self, name: str, batch_size: int) -> Tensor:
        places = [node.name for node in self.traced.module.graph.find_nodes(op="placeholder")]
        place = places.index(name)
        spec, tensor = self.traced.call.inputs[place], self.inputs[place].detach()
        if spec.is_batch:
            rows = torch.arange(batch_size, device=tensor.device) % max(tensor.shape[0], 1)
            tensor = tensor.index_select(0, rows)
        return tensor.to(self.device, copy=True).requires_grad_(spec.needs_gradient)

    def _value(self, name: str, batch_size: int) -> Tensor:
        if self.numbers is Numbers.COMPUTED and name in self.traced.repeated:
            return self._computed(name, batch_size)
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
        with torch.no_grad():
            (found,) = piece.module(*(self.argument(argument, batch_size) for argument in piece.arguments))
        return torch.as_tensor(found, dtype=value.dtype, device=self.device)

    def _computed(self, name: str, batch_size: int) -> Tensor:
        piece = extract(self.traced, (), [name])
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
        numbers, pattern = torch.empty(length, dtype=dtype, device=self.device), self._pattern(dtype)
        whole = length - length % len(pattern)
        numbers[:whole].view(-1, len(pattern)).copy_(pattern)
        numbers[whole:].copy_(pattern[: length - whole])
        return numbers

    def _pattern(self, dtype: torch.dtype) -> Tensor:
        """Returns normal random numbers; copies of them fill any tensor at the speed of a copy."""
        if dtype not in self._patterns:
            generator = torch.Generator().manual_seed(0)
            numbers = torch.randn(_PATTERN_LENGTH, generator=generator) * _SCALE
            if self.numbers not in (Numbers.NORMAL, Numbers.COMPUTED):
                numbers = numbers.add_(0.5).clamp_(_SCALE, 1.0 - _SCALE)
            self._patterns[dtype] = numbers.to(dtype).to(self.device)
        return self._patterns[dtype]

"""Runs one stage: binds the arguments of its piece to this rank's parameters and buffers.

Every parameter takes part through a leaf of its own for each block that uses it. The leaf shares the parameter's memory
and collects the gradient of a step outside ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from autovaruna.errors import InputError
from autovaruna.graph.pieces import Argument, ArgumentSource, direct
from autovaruna.graph.random import RandomStream
from autovaruna.stage.split import StagePart

ParameterUse = tuple[str, int]  # a parameter's first name and the block that uses it
_OF_MICRO_BATCH = (ArgumentSource.INPUT, ArgumentSource.VALUE, ArgumentSource.OF_BATCH)


class StageModule:
    """One stage on one rank; its leaves collect the gradients of parameters.

    A buffer is found by first name, as it is now: a script may replace one. `size_of` evaluates a size node for a
    micro-batch; `run` runs the piece on its arguments (None: its module does).
    """

    def __init__(
        self,
        part: StagePart,
        parameters: Mapping[str, nn.Parameter],
        buffer: Callable[[str], Tensor],
        constants: Mapping[str, Tensor],
        size_of: Callable[[str, int, tuple[int, ...]], Any],
        run: Callable[..., Sequence[Tensor]] | None = None,
    ) -> None:
        self.part, self.index = part, part.index
        self._run = direct(part.piece.module) if run is None else run
        self._parameters, self._buffer, self._constants, self._size_of = parameters, buffer, constants, size_of
        self.leaves: dict[ParameterUse, Tensor] = {}
        self._bound_buffers: list[tuple[str, Tensor]] = []
        places = list(enumerate(part.piece.arguments))
        self._sizes = [(place, each.name) for place, each in places if each.source is ArgumentSource.SIZE]
        self._values = [(place, each.name) for place, each in places if each.source in _OF_MICRO_BATCH]
        self._streams = [place for place, each in places if each.source is ArgumentSource.RANDOM]
        self.is_random = bool(self._streams)
        self.bind()

    def bind(self) -> None:
        """Makes the leaves share the parameters' present memory (an optimizer or a load may have replaced it)."""
        for name, known in self._bound_buffers:
            got, expected = ((tuple(each.shape), each.dtype, str(each.device)) for each in (self._buffer(name), known))
            if got != expected:
                raise InputError(
                    f"The buffer {name} has been replaced by one of another kind after the first call: got {got}, "
                    f"expected {expected}. Wrap the changed model anew."
                )
        arguments = self.part.piece.arguments
        self._bound: list[Any] = [self._state(argument) for argument in arguments]
        self._bound_buffers = [(name, self._buffer(name)) for name in self.part.piece.named(ArgumentSource.BUFFER)]
        bound = zip(arguments, self._bound, strict=True)
        self._bound_frozen = [
            (each.name, leaf) for each, leaf in bound if each.source is ArgumentSource.PARAMETER and each.block < 0
        ]

    def is_bound(self) -> bool:
        """Whether all parameters still have the memory that is bound, and no buffer has been replaced."""
        leaves = [(name, leaf) for (name, _), leaf in self.leaves.items()]
        for name, known in chain(leaves, self._bound_frozen):
            if known.data_ptr() != self._parameters[name].data_ptr():
                return False
        return all(self._buffer(name) is known for name, known in self._bound_buffers)

    def changed_state(self, names: frozenset[str]) -> dict[str, Tensor]:
        """Returns the parameters and buffers among `names` that this stage uses."""
        named = self.part.piece.named
        buffers = {name: self._buffer(name) for name in named(ArgumentSource.BUFFER) if name in names}
        parameters = [name for name in named(ArgumentSource.PARAMETER) if name in names]
        return buffers | {name: self._parameters[name].detach() for name in parameters}

    def held(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers of the stage by first name, as they are now, and its constants."""
        named = self.part.piece.named
        found = {name: self._constants[name] for name in named(ArgumentSource.CONSTANT)}
        found |= {name: self._buffer(name) for name in named(ArgumentSource.BUFFER)}
        return found | {name: self._parameters[name] for name in named(ArgumentSource.PARAMETER)}

    def run(
        self,
        tensors: Mapping[str, Tensor],
        micro_batch_size: int,
        stream: RandomStream | None,
        lengths: tuple[int, ...] = (),
    ) -> dict[str, Tensor]:
        """Runs the operations of the stage on inputs and received values; returns what it sends and makes, by name.

        Random nodes draw from the stream.
        """
        arguments = self._bound.copy()
        for place, name in self._values:
            arguments[place] = tensors[name]
        for place, name in self._sizes:
            arguments[place] = self._size_of(name, micro_batch_size, lengths)
        for place in self._streams:
            arguments[place] = stream
        return dict(zip(self.part.piece.outputs, self._run(*arguments), strict=True))

    def _state(self, argument: Argument) -> Tensor | None:
        if argument.source is ArgumentSource.PARAMETER:
            return self._leaf(argument)
        if argument.source is ArgumentSource.BUFFER:
            return self._buffer(argument.name)
        return self._constants[argument.name] if argument.source is ArgumentSource.CONSTANT else None

    def _leaf(self, argument: Argument) -> Tensor:
        parameter = self._parameters[argument.name]
        if argument.block < 0:
            return parameter.detach()
        use = (argument.name, argument.block)
        leaf = self.leaves.get(use)
        if leaf is None or leaf.data_ptr() != parameter.data_ptr() or leaf.shape != parameter.shape:
            gradient = None if leaf is None else leaf.grad
            leaf = parameter.detach().requires_grad_()
            leaf.grad = gradient
            self.leaves[use] = leaf
        return leaf

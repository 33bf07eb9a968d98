"""Tries a submodule out on small random tensors, to learn what it returns for every batch size.

Integers are zeros, or ones if the module refuses those, as lengths. The trial runs on a thread of its own, where
nothing traces, on a copy: neither the model nor its generators change.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from autovaruna.errors import TraceError
from autovaruna.graph.export.autograd import check_state, plain_state
from autovaruna.graph.export.constant_values import hide_tracing
from autovaruna.graph.export.fakes import put
from autovaruna.graph.guards import hooks_of
from autovaruna.graph.opaque.run import OutputShape, Returned, in_place, is_differentiable, places_of
from autovaruna.graph.precision import Precision, in_precision
from autovaruna.graph.random import python_generators, untouched_generator
from autovaruna.graph.tree import Opaque, Tree, flatten

_SIZES = (2, 3, 5)
_BY_NUMBERS = "the shapes of its arguments and results depend on the numbers in tensors"


class CannotKeepError(Exception):
    """Says why a module cannot be kept whole."""


@dataclass(frozen=True)
class Trial:
    """What a module is tried out with.

    Attributes:
        module: the copy, without numbers.
        state: the module's own tensors; random ones are taken for those that this rank does not hold.
        call: structure of its arguments.
        inputs: the fake tensors among them.
        batch: the batch size of each batch input of the trace, a symbol or a number; they are equal.
        device: where it runs.
        precision: the autocasts around it.
        is_differentiated: whether gradients are wanted.
        is_positive: whether floating-point arguments are between zero and one.
        integer: what integers are.
    """

    module: nn.Module
    state: Sequence[Tensor]
    call: Tree
    inputs: Sequence[Tensor]
    batch: Sequence[Any]
    device: torch.device
    precision: Precision
    is_differentiated: bool
    is_positive: bool = False
    integer: int = 0

    def returned(self) -> Returned:
        """Returns what the module returns.

        Raises:
            CannotKeepError: it cannot be said for every batch size, or the module does what a node may not.
        """
        sizes = _SIZES if isinstance(self.batch[0], torch.SymInt) else (int(self.batch[0]),)
        found = self._tried(sizes)
        trees = [tree for _, tree in found]
        if len({tree.key() for tree in trees}) > 1 or len({len(tensors) for tensors, _ in found}) > 1:
            raise CannotKeepError("what it returns besides tensors depends on the batch size or on numbers")
        if not found[0][0] or any(isinstance(leaf, Opaque) for leaf in trees[0].leaves):
            raise CannotKeepError("it returns no tensor, or an object that hides tensors")
        return Returned(trees[0], tuple(_line(sizes, each) for each in zip(*(t for t, _ in found), strict=True)))

    def _tried(self, sizes: Sequence[int]) -> list[tuple[list[Tensor], Tree]]:
        """Runs the module for batches of some sizes, with the first numbers that it takes."""
        refusals: list[Exception] = []
        for integer, is_positive in product((0, 1), (False, True)):
            trial = replace(self, integer=integer, is_positive=is_positive)
            try:
                return [trial._outputs(size) for size in sizes]
            except (CannotKeepError, TraceError):
                raise
            except Exception as error:  # it may want positive numbers, or probabilities
                refusals.append(error)
        raise refusals[0]

    def _outputs(self, size: int) -> tuple[list[Tensor], Tree]:
        """Runs the module on `size` samples."""
        generator = torch.Generator().manual_seed(0)
        state = [self._number_of(each, generator) for each in self.state]
        tensors = [self._made(each, size, generator) for each in self.inputs]
        versions = [each._version for each in tensors]
        outputs, tree, _ = self.run(tensors, state)
        if any(0 in each.shape for each in outputs) and any(map(self._has_open_length, self.inputs)):
            raise CannotKeepError(_BY_NUMBERS)
        if [each._version for each in tensors] != versions:
            raise CannotKeepError("it changes its arguments in place")
        return outputs, tree

    def run(
        self, tensors: Sequence[Tensor], state: Sequence[Tensor], seed: int = 0
    ) -> tuple[list[Tensor], Tree, dict[int, Tensor]]:
        """Runs the module; returns its tensors, what they are in, and what it has changed of its state, by place.

        Args:
            tensors: The tensors among its arguments.
            state: Numbers of its state; it may change those of buffers.
            seed: For Python's and numpy's generators.

        Raises:
            CannotKeepError: it changes its parameters.
        """
        args, kwargs = self.call.unflatten(tensors)
        numbers = plain_state(self.module)
        with (
            torch.set_grad_enabled(self.is_differentiated),
            in_precision(self.precision),
            hide_tracing(),
            python_generators(seed),
            in_place(places_of(self.module), state),
        ):
            places = [place for place, *_ in places_of(self.module)]
            before = [_bits(each).clone() for each in own_tensors(self.module)]
            outputs, tree = flatten(self.module(*args, **kwargs), "output")
            after = [getattr(*place).detach() for place in places]
            pairs = enumerate(zip(before, after, strict=True))
            changed = {place: left.clone() for place, (bits, left) in pairs if not torch.equal(bits, _bits(left))}
        if any(places[place][1] in places[place][0]._parameters for place in changed):
            raise CannotKeepError("its forward changes its parameters")
        check_state(numbers, plain_state(self.module))
        return outputs, tree, changed

    def shape_of(self, tensor: Tensor, size: int) -> tuple[int, ...]:
        """Returns the shape of an argument for a batch of `size` samples."""
        return tuple(_number(length, self.batch, size) for length in tensor.shape)

    def numbers(self) -> list[Tensor]:
        """Returns numbers of the module's state: its own, or random ones."""
        generator = torch.Generator().manual_seed(0)
        return [self._number_of(each, generator) for each in self.state]

    def _number_of(self, own: Tensor, generator: torch.Generator) -> Tensor:
        made = random_tensor(tuple(own.shape), own.dtype, generator) if own.is_meta else own.detach().clone()
        return made.to(self.device).requires_grad_(own.requires_grad)

    def _has_open_length(self, tensor: Tensor) -> bool:
        """Whether the numbers in other tensors decide a length."""
        return any(_open_symbols(length, self.batch) for length in tensor.shape)

    def _made(self, tensor: Tensor, size: int, generator: torch.Generator) -> Tensor:
        shape = self.shape_of(tensor, size)
        made = random_tensor(shape, tensor.dtype, generator, self.integer).to(self.device)
        if self.is_positive and is_differentiable(made) and not made.is_complex():
            made.mul_(2.0).add_(0.5).clamp_(0.1, 0.9)
        return made.requires_grad_(tensor.requires_grad and self.is_differentiated)


def run_apart(act: Callable[[], Any], device: torch.device) -> Any:
    """Does something on a thread of its own, and gives the device's generator back as it was."""

    def run() -> Any:
        with untouched_generator(device):
            return act()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def copy_of(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose tensors are on ``meta``, without hooks of backward: they change no result.

    Raises:
        CannotKeepError: it cannot be copied.
    """
    try:
        made = copy.deepcopy(module, {id(each): each for each in (*own_tensors(module), *hooks_of(module))})
    except Exception as error:
        raise CannotKeepError(f"it cannot be copied ({error})") from error
    for each in made.modules():
        each._backward_hooks, each._backward_pre_hooks = OrderedDict(), OrderedDict()
    for shared in places_of(made):
        empty = torch.empty_like(getattr(*shared[0]).detach(), device="meta")
        for place in shared:
            put(*place, empty)
    return made


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Returns the tensors of a module's state, in the order of `places_of`."""
    return [getattr(*shared[0]) for shared in places_of(module)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, whole: int = 0) -> Tensor:
    """Returns small random numbers; ones for booleans, the same number for all integers."""
    if dtype is torch.bool:
        return torch.ones(shape, dtype=dtype)
    kind = torch.empty((), dtype=dtype)
    if not is_differentiable(kind):
        return torch.full(shape, whole, dtype=dtype)
    wide = torch.complex64 if kind.is_complex() else torch.float32
    return (torch.randn(shape, generator=generator, dtype=wide) * 0.05).to(dtype)


def _number(length: Any, batch: Sequence[Any], size: int) -> int:
    """Returns a length for a batch of `size` samples; one that counts numbers is none, for integers are zeros."""
    if not isinstance(length, torch.SymInt):
        return int(length)
    expression = sympy.sympify(length.node.expr)
    counts = dict.fromkeys(_open_symbols(length, batch), 0)
    number = expression.subs({**dict.fromkeys(expression.free_symbols, size), **counts})
    return int(number)


def _open_symbols(length: Any, batch: Sequence[Any]) -> set[Any]:
    """Returns the symbols in a length that are not the batch size."""
    if not isinstance(length, torch.SymInt):
        return set()
    known = {each.node.expr for each in batch if isinstance(each, torch.SymInt)}
    return {symbol for symbol in sympy.sympify(length.node.expr).free_symbols if symbol not in known}


def _line(sizes: Sequence[int], tensors: Sequence[Tensor]) -> OutputShape:
    """Returns how a result's shape follows from the batch size."""
    first = tensors[0]
    if any((each.dim(), each.dtype) != (first.dim(), first.dtype) for each in tensors):
        raise CannotKeepError("the kind of tensor that it returns depends on the batch size or on numbers")
    lengths = []
    for place in range(first.dim()):
        found = [each.shape[place] for each in tensors]
        slope = (found[1] - found[0]) // (sizes[1] - sizes[0]) if len(sizes) > 1 else 0
        start = found[0] - slope * sizes[0]
        if found != [slope * size + start for size in sizes]:
            raise CannotKeepError("a shape that it returns is no multiple of the batch size")
        lengths.append((slope, start))
    strides = tensors[-1].stride()
    order = sorted(range(first.dim()), key=lambda place: (-strides[place], place))
    return OutputShape(tuple(lengths), tuple(order), first.dtype)

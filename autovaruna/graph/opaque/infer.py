"""Tries submodules and functions out on small random tensors, to learn what they return for every batch size.

Integers are zeros, or ones if a module refuses those, as lengths. The trial runs on a thread of its own, where nothing
traces, on a copy: neither the model nor its generators change. Whether samples meet is left to the first step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from autovaruna._torch import FakeTensor, hide_tracing, parameter_table, version_of
from autovaruna.errors import TraceError
from autovaruna.graph.guards import hooks_of
from autovaruna.graph.module_state import own_tensors, places_of, replace_tensor, with_state
from autovaruna.graph.opaque.functions import applied_by
from autovaruna.graph.opaque.run import OutputShape, Returned
from autovaruna.graph.operators import is_differentiable
from autovaruna.graph.precision import Precision, in_precision
from autovaruna.graph.random import python_generators, seed_generators, untouched_generator
from autovaruna.graph.rounding import CLEAR, clear_tolerance, distance
from autovaruna.graph.side_effects import check_modules, check_state, plain_state
from autovaruna.graph.tree import HidingLeaf, Tree, flatten

_SIZES = (2, 3, 5)
_BY_NUMBERS = "the shapes of its arguments and results depend on the numbers in tensors"
USES_WEIGHTS = "it uses tensors of {} that are not among its arguments"
_NEAR = 0.05
Drawn = tuple[bool, int | None]
"""Which numbers are drawn for arguments, since modules refuse some: whether floats lie in (0, 1), and the integers.

Integers may be classes or lengths: all are one number, or, for None, zeros and ones.
"""
_PLAIN: Drawn = (False, 0)
_FOR_SHAPES: tuple[Drawn, ...] = (_PLAIN, (True, 0), (False, 1), (True, 1))
_FOR_GRADIENTS: tuple[Drawn, ...] = ((False, None), (True, None), _PLAIN)


class CannotKeepError(Exception):
    """Says why a module cannot be kept whole."""


def _drawn(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, numbers: Drawn) -> Tensor:
    """Returns random numbers, small ones where integers are the same; booleans are true then."""
    is_share, whole = numbers
    kind = torch.empty((), dtype=dtype)
    if not is_differentiable(kind):
        drawn = torch.randint(2, tuple(shape), generator=generator)
        return (drawn if whole is None else drawn.fill_(dtype is torch.bool or whole)).to(dtype)
    drawn_dtype = torch.complex64 if dtype.is_complex else torch.float32
    drawn = torch.randn(tuple(shape), generator=generator, dtype=drawn_dtype)
    if is_share and not kind.is_complex():
        drawn = drawn.sigmoid()
    return (drawn if is_share or whole is None else _NEAR * drawn).to(dtype)


@dataclass(frozen=True)
class OpaqueTrial:
    """What a module is tried out with.

    Attributes:
        state: the module's own tensors; random ones are taken for those that this rank does not hold.
        batch: the batch size of each batch input of the trace, a symbol or a number; they are equal.
    """

    module: nn.Module
    state: Sequence[Tensor]
    call: Tree
    inputs: Sequence[Tensor]
    batch: Sequence[Any]
    device: torch.device
    precision: Precision
    is_differentiated: bool

    def returned(self) -> Returned:
        sizes = _SIZES if isinstance(self.batch[0], torch.SymInt) else (int(self.batch[0]),)
        found = self._tried(sizes)
        trees = [tree for _, tree, _ in found]
        if len({tree.key() for tree in trees}) > 1 or len({len(tensors) for tensors, *_ in found}) > 1:
            raise CannotKeepError("what it returns besides tensors depends on the batch size or on numbers")
        if not found[0][0] or any(isinstance(leaf, HidingLeaf) for leaf in trees[0].leaves):
            raise CannotKeepError("it returns no tensor, or an object that hides tensors")
        return Returned(
            trees[0],
            tuple(_output_shape(sizes, each) for each in zip(*(tensors for tensors, *_ in found), strict=True)),
            any(is_changed for *_, is_changed in found),
        )

    def _tried(self, sizes: Sequence[int]) -> list[tuple[list[Tensor], Tree, bool]]:
        """Runs the module for batches of some sizes, with the first numbers that it takes."""
        refusals: list[Exception] = []
        for numbers in _FOR_SHAPES:
            try:
                return [self._outputs(size, numbers) for size in sizes]
            except (CannotKeepError, TraceError):
                raise
            except Exception as error:  # it may want positive numbers, or probabilities
                refusals.append(error)
        raise refusals[0]

    def _outputs(self, size: int, numbers: Drawn) -> tuple[list[Tensor], Tree, bool]:
        state, tensors = self.numbers(), self.arguments(numbers, size)
        versions = [version_of(each) for each in tensors]
        outputs, tree, is_changed = self.run(tensors, state)
        is_open = any(_open_symbols(length, self.batch) for each in self.inputs for length in each.shape)
        if is_open and any(0 in each.shape for each in outputs):  # the numbers in other tensors decide a length
            raise CannotKeepError(_BY_NUMBERS)
        if [version_of(each) for each in tensors] != versions:
            raise CannotKeepError("it changes its arguments in place")
        return outputs, tree, is_changed

    def run(self, tensors: Sequence[Tensor], state: Sequence[Tensor]) -> tuple[list[Tensor], Tree, bool]:
        """Runs the module; returns its tensors, what they are in, and whether it has changed its state."""
        args, kwargs = self.call.unflatten(tensors)
        numbers, modules = plain_state(self.module), dict(self.module.named_modules())
        with (
            torch.set_grad_enabled(self.is_differentiated),
            in_precision(self.precision),
            hide_tracing(),
            python_generators(0),
            with_state(places_of(self.module), state),
            applied_by(lambda function, args, may_train, run: run()),
        ):
            before = [(place, _bits(getattr(*place)).clone()) for place, *_ in places_of(self.module)]
            outputs, tree = flatten(self.module(*args, **kwargs), "output")
            changed = [place for place, bits in before if not torch.equal(bits, _bits(getattr(*place)))]
        if any(isinstance(each, FakeTensor) for each in outputs):  # the model is traced, and its tensors are fake
            raise CannotKeepError(USES_WEIGHTS.format("the model"))
        if any(name in parameter_table(owner) for owner, name in changed):
            raise CannotKeepError("its forward changes its parameters")
        check_state(numbers, plain_state(self.module))
        check_modules(modules, dict(self.module.named_modules()))
        return outputs, tree, bool(changed)

    def numbers(self) -> list[Tensor]:
        """Returns numbers of the module's state: its own, or random ones."""
        generator = torch.Generator().manual_seed(0)
        made = [
            _drawn(own.shape, own.dtype, generator, _PLAIN) if own.is_meta else own.detach().clone()
            for own in self.state
        ]
        pairs = zip(made, self.state, strict=True)
        return [each.to(self.device).requires_grad_(own.requires_grad) for each, own in pairs]

    def arguments(self, numbers: Drawn, size: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [
            _drawn([_number(length, self.batch, size) for length in each.shape], each.dtype, generator, numbers)
            .to(self.device)
            .requires_grad_(each.requires_grad and self.is_differentiated)
            for each in self.inputs
        ]


def copy_of(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose tensors are on ``meta``."""
    try:
        made = copy.deepcopy(module, {id(each): each for each in (*own_tensors(module), *hooks_of(module))})
    except Exception as error:
        raise CannotKeepError(f"it cannot be copied ({error})") from error
    for shared in places_of(made):
        empty = torch.empty_like(getattr(*shared[0]).detach(), device="meta")
        for place in shared:
            replace_tensor(*place, empty)
    return made


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


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


def _output_shape(sizes: Sequence[int], tensors: Sequence[Tensor]) -> OutputShape:
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


def infer_outputs(trial: OpaqueTrial) -> Returned:
    """Tries a module out, on a thread of its own; returns what it returns."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_inferred, trial).result()


def _inferred(trial: OpaqueTrial) -> Returned:
    with untouched_generator(trial.device):
        return replace(trial.returned(), is_linear_back=_is_linear_back(trial))


def _is_linear_back(trial: OpaqueTrial) -> bool:
    """Whether gradients grow with those that come in, whatever is in what may be a switch.

    That is a number, or integers; a buffer is tried as it is, and as ones.
    """
    for numbers, is_on in product(_FOR_GRADIENTS, (False, True)):
        try:
            seed_generators(trial.device, 0)
            size = _SIZES[-1] if isinstance(trial.batch[0], torch.SymInt) else int(trial.batch[0])
            tensors, state = trial.arguments(numbers, size), trial.numbers()
            if is_on:
                state = [each if each.requires_grad else torch.ones_like(each) for each in state]
            outputs, *_ = trial.run([each.clone() for each in tensors], state)
            roots = [each for each in outputs if each.requires_grad]
            leaves = [each for each in (*tensors, *state) if each.requires_grad]
            given = [torch.randn_like(each) for each in roots]
            is_narrow = any(each.dtype is torch.float16 for each in (*roots, *leaves))
            noise = CLEAR * _allowed(trial, roots)
            most = 2.0 ** (4 if is_narrow else 14)
            one, again, *others = (
                [
                    (each if each is not None else torch.zeros(())) / factor
                    for each in torch.autograd.grad(
                        *(roots, leaves, [each * factor for each in given]), retain_graph=True, allow_unused=True
                    )
                ]
                for factor in (1.0, 1.0, most, 1 / most)
            )
            is_steady = all(map(torch.equal, one, again)) and all(each.isfinite().all() for each in one)
            if is_steady and any(each.any() for each in one):
                pairs = (pair for other in others for pair in zip(other, one, strict=True))
                if any(distance(*pair) > noise for pair in pairs):
                    return False
                if not any(not is_differentiable(each) or each.numel() == 1 for each in (*tensors, *state)):
                    return True
        except Exception:  # it has no gradient, wants other numbers, or goes back once
            continue
    return True


def _allowed(trial: OpaqueTrial, tensors: Sequence[Tensor]) -> float:
    """Returns how far apart numbers of a module may be by rounding: it may compute in single precision at the least."""
    kinds = [torch.empty((), dtype=each.dtype) for each in trial.precision]
    return clear_tolerance((*tensors, *trial.state, *kinds, torch.empty((), dtype=torch.float32)))

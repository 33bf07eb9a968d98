"""Describes one call of a model: its inputs, which of them are batches, and what would need another trace."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna._torch import is_parametrize_cached
from autovaruna.errors import InputError
from autovaruna.graph.guards import Guards
from autovaruna.graph.key_values import KeptTensor
from autovaruna.graph.precision import Precision, current_precision
from autovaruna.graph.tree import HidingLeaf, Tree, flatten

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_MOST_KNOWN = 64
_OBJECTS = 3  # objects in each other that are looked into
_CONSTANTS = (bool, int, float, str, type(None))
_Name = tuple[str, frozenset[str]]
"""The name of an input, and all names that cover it: those of what it is in, and of the argument."""


@dataclass(frozen=True)
class InputSpec:
    """One tensor argument; a batch input's `shape` begins with the batch size of the call described.

    The caller passes the batch in `dimension`; it is moved to the first one as the call is read, and back where the
    model is called.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_batch: bool
    needs_gradient: bool
    dimension: int = 0
    is_kept: bool = False
    """Whether the stages have its numbers already."""

    @property
    def passed_shape(self) -> tuple[int, ...]:
        """The shape as the caller passes it."""
        return tuple(_moved_back(self.shape, self.dimension))

    def place(self, dimension: int) -> int:
        """Returns where a dimension of `shape` is as the caller passes it."""
        return _moved_back(range(len(self.shape)), self.dimension).index(dimension)

    def batch_first(self, tensor: Tensor) -> Tensor:
        """Returns what the caller passes with the batch in the first dimension."""
        return tensor.movedim(self.dimension, 0) if self.dimension else tensor

    def as_passed(self, tensor: Tensor) -> Tensor:
        """Returns a batch, or some samples of it, as the model takes them, contiguous in memory."""
        if not self.dimension:
            return tensor
        return tensor.movedim(0, self.dimension).clone(memory_format=torch.contiguous_format)

    def words(self) -> str:
        """Returns shape and dtype as a person writes them, equal for inputs that one trace serves."""
        lengths = ["batch" if self.is_batch and place == 0 else str(length) for place, length in enumerate(self.shape)]
        shape = ", ".join(_moved_back(lengths, self.dimension))
        text = f"({shape}) {str(self.dtype).removeprefix('torch.')}"
        text = f"{text} with a gradient" if self.needs_gradient else text
        return f"{text} on stages" if self.is_kept else text


@dataclass(frozen=True)
class CallSpec:
    """A call of a model without the numbers in its tensors.

    Attributes:
        tree: structure of ``(args, kwargs)``.
        mode: texts that the trace depends on besides the inputs (training flags, grad mode, autocast).
        method: path of what is called: ``forward``, which is the model itself, another method, or a module of it.
    """

    tree: Tree
    inputs: tuple[InputSpec, ...]
    batch_size: int
    mode: str
    precision: Precision = ()
    method: str = "forward"

    def of(self, model: nn.Module) -> Callable[..., Any]:
        found: Callable[..., Any] = model if self.method == "forward" else attrgetter(self.method)(model)
        return found

    def arguments(self, tensors: Sequence[Tensor]) -> Any:
        """Returns ``(args, kwargs)`` for the model of tensors in the order of `inputs`, the batch first in each."""
        return self.tree.unflatten([spec.as_passed(each) for spec, each in zip(self.inputs, tensors, strict=True)])

    def with_batch(self, dimensions: Mapping[str, int]) -> CallSpec:
        """Returns the call as it is where these dimensions of inputs are the batch, as passed, and others' first."""
        shapes = {spec.name: spec.passed_shape for spec in self.inputs}
        size = next(shapes[name][place] for name, place in dimensions.items())
        inputs = []
        for spec in self.inputs:
            shape, place = spec.passed_shape, dimensions.get(spec.name, 0)
            is_batch = shape[place : place + 1] == (size,)
            if not is_batch and spec.name in dimensions:
                raise InputError(f"Dimension {place} of {spec.name} {shape} has not the {size} samples of the batch.")
            moved = (size, *shape[:place], *shape[place + 1 :]) if is_batch else shape
            inputs.append(replace(spec, shape=moved, is_batch=is_batch, dimension=place if is_batch else 0))
        return replace(self, inputs=tuple(inputs), batch_size=size)

    def plain_arguments(self, model: nn.Module) -> dict[str, str]:
        """Returns the words of the arguments that are no tensors, by name."""
        parameters = list(inspect.signature(method_of(model, self.method)).parameters.values())
        return {".".join(_keys(path, parameters)): value for path, value in self.tree.constants()}

    @cached_property
    def kind(self) -> str:
        """Digest that is equal for calls that differ in their mode and in lengths alone."""
        kinds = [
            (each.name, len(each.shape), each.dtype, each.is_batch, each.needs_gradient, each.is_kept)
            for each in self.inputs
        ]
        return hashlib.sha256(f"{self.tree.key()}\n{kinds}\n{self.method}".encode()).hexdigest()

    @cached_property
    def key(self) -> str:
        """Digest that is equal for calls that one trace serves, whatever their batch size."""
        method = [] if self.method == "forward" else [self.method]
        inputs = [f"{spec.name}:{spec.words()}" for spec in self.inputs]
        text = "\n".join([self.tree.key(), *inputs, self.mode, *method])
        return hashlib.sha256(text.encode()).hexdigest()


def method_of(model: nn.Module, path: str) -> Callable[..., Any]:
    """Returns a method of the model by its path, or that of a module of it: its parameters name the inputs."""
    found = attrgetter(path)(model)
    method: Callable[..., Any] = found.forward if isinstance(found, nn.Module) else found
    return method


def describe(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch_inputs: Sequence[str] = (),
    mode: str | None = None,
    method: str = "forward",
    batch_dims: Sequence[tuple[str, int]] = (),
) -> tuple[list[Tensor], CallSpec]:
    """Takes the arguments of a call apart; returns the tensors in order, with the batch first, and the description.

    Args:
        batch_inputs: Names of the arguments whose first dimension is the batch; empty: every tensor whose first
            dimension has the size of the first tensor's.
        mode: What `Guards.words` says of the model now, if that is known.
        batch_dims: Names of arguments, each with the dimension that is the batch, where that is not the first one.

    Raises:
        InputError: no argument is a batch, batches differ in size, a tensor is sparse, or an object hides some.
    """
    opens_caches = not torch.is_grad_enabled()
    tensors, tree = flatten((tuple(args), dict(kwargs)), levels=_OBJECTS, opens_caches=opens_caches)
    signature = inspect.signature(method_of(model, method))
    _refuse_objects(tree, list(signature.parameters.values()))
    names = _names_in(signature, tree.tensor_paths())
    plain_names = [name for name, _ in names]
    _refuse_layouts(plain_names, tensors)
    wanted = dict(batch_dims)
    if method == "forward":
        _check_names(wanted, plain_names, names, tensors, inspect.signature(model.forward).parameters)
    batch_size, places = _find_batch(names, tensors, batch_inputs, wanted, tree.arrays())
    inputs = []
    for place, (name, tensor, dimension) in enumerate(zip(plain_names, tensors, places, strict=True)):
        needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
        tensors[place] = tensor = tensor.movedim(dimension, 0) if dimension else tensor
        shape, is_batch = tuple(tensor.shape), dimension is not None
        is_kept = isinstance(tensor, KeptTensor)
        inputs.append(InputSpec(name, shape, tensor.dtype, is_batch, needs_gradient, dimension or 0, is_kept))
    mode = Guards(model).words() if mode is None else mode
    return tensors, CallSpec(tree, tuple(inputs), batch_size, mode, current_precision(), method)


class CallReader:
    """Describes the calls of a model; one that is like an earlier call is known by its outline, at little cost."""

    def __init__(
        self, model: nn.Module, batch_inputs: Sequence[str] = (), batch_dims: Sequence[tuple[str, int]] = ()
    ) -> None:
        self._model, self._batch_inputs, self._batch_dims = model, batch_inputs, batch_dims
        self._known: dict[Hashable, CallSpec] = {}

    def read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], mode: str, method: str = "forward"
    ) -> tuple[list[Tensor], CallSpec]:
        """Returns what `describe` returns; the description is the same object for calls that do not differ."""
        if is_parametrize_cached():
            raise InputError(
                "The model is called in torch.nn.utils.parametrize.cached(): what it keeps of one call, stages and "
                "micro-batches would find. Expected a call outside of it; where forward uses a parametrized tensor "
                "several times, enter it in forward."
            )
        tensors: list[Tensor] = []
        forward = getattr(method_of(self._model, method), "__func__", None)  # its parameters name the inputs
        try:
            known_as = mode, method, forward, outline((tuple(args), dict(kwargs)), tensors)
        except UnfamiliarError:
            return describe(self._model, args, kwargs, self._batch_inputs, mode, method, self._batch_dims)
        known = self._known.get(known_as) if forward is not None else None
        if known is not None:
            return [spec.batch_first(each) for spec, each in zip(known.inputs, tensors, strict=True)], known
        found, call = describe(self._model, args, kwargs, self._batch_inputs, mode, method, self._batch_dims)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[known_as] = call
        return found, call


class UnfamiliarError(Exception):
    """Says that a part of a call is of a class that `outline` cannot tell enough of."""


def outline(value: Any, tensors: list[Tensor]) -> Hashable:
    """Returns what is equal for values that only differ in the numbers of their tensors, which it collects in order."""
    kind = type(value)
    if (kind is Tensor or kind is nn.Parameter) and value.layout is torch.strided:
        tensors.append(value)
        return value.shape, value.dtype, value.requires_grad
    if kind in _CONSTANTS:
        return kind, repr(value)
    if kind is tuple or kind is list:
        return kind, tuple([outline(each, tensors) for each in value])
    if kind is dict and all(type(key) is str for key in value):
        return tuple(value), tuple([outline(each, tensors) for each in value.values()])
    raise UnfamiliarError


def _refuse_objects(tree: Tree, parameters: Sequence[inspect.Parameter]) -> None:
    for leaf in tree.walk():
        if isinstance(leaf, HidingLeaf):
            raise InputError(
                f"The argument {_joined(_keys(leaf.path, parameters))} is a {leaf.type_name}, which hides its tensors. "
                "Expected tensors, or lists, tuples, mappings, dataclasses and plain objects of them: pass those that "
                "forward uses as arguments, or tell torch how to take the class apart, with "
                "torch.utils._pytree.register_pytree_node."
            )


def _refuse_layouts(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.layout is not torch.strided:
            raise InputError(
                f"The input {name} is a sparse or nested tensor: got {tensor.layout}, expected torch.strided. Pass a "
                "dense one (to_dense()), or its indices and values as tensors, and write the product in forward with "
                "those: torch.zeros_like(out).index_add(0, rows, values[:, None] * x[columns])."
            )


def _names_in(signature: inspect.Signature, paths: Sequence[str]) -> list[_Name]:
    names: dict[str, frozenset[str]] = {}
    for path in paths:
        keys = _keys(path, list(signature.parameters.values()))
        name = _joined(keys) or "input"
        while name in names:
            name += "_"
        names[name] = frozenset([name, *(_joined(keys[:place]) for place in range(1, len(keys)))])
    return list(names.items())


def _joined(keys: Sequence[str]) -> str:
    return re.sub(r"\W", "_", "_".join(keys)).strip("_")


def _keys(path: str, parameters: Sequence[inspect.Parameter]) -> list[str]:
    """Turns ``[0][2][1]`` into the name of the third argument and 1, and ``[1]['labels']`` into ``labels``."""
    keys = re.findall(r"\['?([^\]']*)'?\]|\.(\w+)", path)
    first, *rest = [bracket or dot for bracket, dot in keys]
    return [*_positional(int(rest[0]), parameters), *rest[1:]] if first == "0" else rest


def _positional(place: int, parameters: Sequence[inspect.Parameter]) -> list[str]:
    """Returns the name of a positional argument; of those of ``*args``, ``args`` and their number in there."""
    names = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    if place < len(names):
        return [names[place]]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "input")
    return [rest, str(place - len(names))]


def _check_names(
    wanted: Mapping[str, int],
    shown: Sequence[str],
    names: Sequence[_Name],
    tensors: Sequence[Tensor],
    parameters: Mapping[str, inspect.Parameter],
) -> None:
    """Refuses names in batch_dims that no argument has; one that is left out in this call may come in another."""
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = {*parameters, *(each for _, covering in names for each in covering)}
    starts = tuple(f"{name}_" for name in parameters)
    if strange := [name for name in wanted if name not in known and not name.startswith(starts)]:
        raise InputError(
            f"batch_dims names {', '.join(strange)}, but the model got tensors {_shapes(shown, tensors)}. Expected "
            f"names of forward's arguments: {', '.join(parameters)}."
        )


def _find_batch(
    names: Sequence[_Name],
    tensors: Sequence[Tensor],
    batch_inputs: Sequence[str],
    batch_dims: Mapping[str, int],
    arrays: Sequence[str],
) -> tuple[int, list[int | None]]:
    """Returns the number of samples, and the dimension of each tensor that is the batch; None: it is no batch."""
    shown = [name for name, _ in names]
    places = [_named(name, tensor, batch_inputs, batch_dims) for name, tensor in zip(names, tensors, strict=True)]
    if not batch_inputs:
        some = [tensor.shape[place] for tensor, place in zip(tensors, places, strict=True) if place is not None]
        first = next((size for size in (*some, *(each.shape[0] for each in tensors if each.dim()))), None)
        for index, tensor in enumerate(tensors):
            if places[index] is None and tensor.dim() > 0 and tensor.shape[0] == first:
                places[index] = 0
    pairs = zip(shown, tensors, places, strict=True)
    sizes = {name: tensor.shape[place] for name, tensor, place in pairs if place is not None}
    if not sizes:
        raise InputError(
            f"No argument of the model is a batch: got tensors {_shapes(shown, tensors)}"
            f"{f' and batch_inputs={list(batch_inputs)}' if batch_inputs else ''}"
            f"{f', and {arrays}, which are constants: make tensors of them' if arrays else ''}. Expected at least one "
            "tensor whose first dimension is the batch; pass one, or name the arguments in batch_inputs."
        )
    if len(set(sizes.values())) > 1:
        raise InputError(f"The batch inputs differ in size: got {sizes}. Expected one size; check batch_inputs.")
    return next(iter(sizes.values())), places


def _named(name: _Name, tensor: Tensor, batch_inputs: Sequence[str], batch_dims: Mapping[str, int]) -> int | None:
    """Returns the dimension that settings say is the batch; None: they say nothing."""
    own, covering = name
    if isinstance(tensor, KeptTensor):
        return 0
    found = max((want for want in batch_dims if want in covering), key=len, default=None)
    if found is not None and tensor.dim():
        if batch_dims[found] >= tensor.dim():
            raise InputError(
                f"batch_dims says that dimension {batch_dims[found]} of {found} is the batch: got {own} of the shape "
                f"{tuple(tensor.shape)}. Expected a dimension that it has, from 0 on."
            )
        return batch_dims[found]
    return 0 if tensor.dim() and not covering.isdisjoint(batch_inputs) else None


def _shapes(names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in zip(names, tensors, strict=True)}


def _moved_back(lengths: Sequence[Any], dimension: int) -> list[Any]:
    """Returns what goes with each dimension, the first of which is put back to `dimension`."""
    return [*lengths[1 : dimension + 1], *lengths[:1], *lengths[dimension + 1 :]]

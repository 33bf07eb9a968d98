"""Describes one call of a model: its inputs, which of them are batches, and what would need another trace."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.errors import InputError
from autovaruna.graph.guards import mode_of
from autovaruna.graph.precision import Precision, current_precision
from autovaruna.graph.tree import Tree, flatten

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_MOST_KNOWN = 64
_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class InputSpec:
    """One tensor argument.

    `shape` is the full shape; for a batch input the first number is the batch size of the call described.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_batch: bool
    needs_gradient: bool

    def words(self) -> str:
        """Returns shape and dtype as a person writes them, equal for inputs that one trace serves."""
        lengths = ["batch" if self.is_batch and place == 0 else str(length) for place, length in enumerate(self.shape)]
        text = f"({', '.join(lengths)}) {str(self.dtype).removeprefix('torch.')}"
        return f"{text} with a gradient" if self.needs_gradient else text

    def key(self) -> str:
        """Returns a text that is equal for inputs that one trace serves."""
        shape = ("batch", *self.shape[1:]) if self.is_batch else self.shape
        return f"{self.name}:{shape}:{self.dtype}:{self.needs_gradient}"


@dataclass(frozen=True)
class CallSpec:
    """A call of a model without the numbers in its tensors.

    Attributes:
        tree: structure of ``(args, kwargs)``.
        inputs: its tensors in order.
        batch_size: samples in the mini-batch.
        mode: texts that the trace depends on besides the inputs (training flags, grad mode, autocast).
        precision: the autocasts around the call.
        method: the method of the model that is called.
    """

    tree: Tree
    inputs: tuple[InputSpec, ...]
    batch_size: int
    mode: str
    precision: Precision = ()
    method: str = "forward"

    def of(self, model: nn.Module) -> Callable[..., Any]:
        """Returns what is called of a model."""
        return model if self.method == "forward" else getattr(model, self.method)

    def key(self) -> str:
        """Returns a digest that is equal for calls that one trace serves, whatever their batch size."""
        return self._key

    def kind(self) -> str:
        """Returns a digest that is equal for calls that differ in their mode and in lengths alone."""
        return self._kind

    @cached_property
    def _kind(self) -> str:
        kinds = [(each.name, len(each.shape), each.dtype, each.is_batch, each.needs_gradient) for each in self.inputs]
        return hashlib.sha256(f"{self.tree.key()}\n{kinds}".encode()).hexdigest()

    @cached_property
    def _key(self) -> str:
        method = [] if self.method == "forward" else [self.method]
        text = "\n".join([self.tree.key(), *(spec.key() for spec in self.inputs), self.mode, *method])
        return hashlib.sha256(text.encode()).hexdigest()


def describe(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch_inputs: Sequence[str] = (),
    mode: str | None = None,
    method: str = "forward",
) -> tuple[list[Tensor], CallSpec]:
    """Takes the arguments of a call apart.

    Args:
        model: The model that is called.
        args: Positional arguments.
        kwargs: Keyword arguments.
        batch_inputs: Names of the arguments whose first dimension is the batch; empty: every tensor whose first
            dimension has the size of the first tensor's.
        mode: What `mode_of` says of the model now, if that is known.
        method: The method that is called.

    Returns:
        The tensors in order, and the description.

    Raises:
        InputError: no argument is a batch, batches differ in size, or a tensor is sparse.
    """
    tensors, tree = flatten((tuple(args), dict(kwargs)))
    names = _input_names(getattr(model, method), tree.tensor_paths())
    _refuse_layouts(names, tensors)
    batch_size, is_batch = _find_batch(names, tensors, batch_inputs, tree.arrays())
    inputs = tuple(
        InputSpec(name, tuple(tensor.shape), tensor.dtype, batch, tensor.requires_grad and torch.is_grad_enabled())
        for name, tensor, batch in zip(names, tensors, is_batch, strict=True)
    )
    mode = mode_of(model) if mode is None else mode
    return tensors, CallSpec(tree, inputs, batch_size, mode, current_precision(), method)


class CallReader:
    """Describes the calls of a model; one that is like an earlier call is known by its outline, at little cost.

    Args:
        model: The model.
        batch_inputs: As in `describe`.
    """

    def __init__(self, model: nn.Module, batch_inputs: Sequence[str] = ()) -> None:
        self._model = model
        self._batch_inputs = batch_inputs
        self._known: dict[Hashable, CallSpec] = {}

    def read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], mode: str, method: str = "forward"
    ) -> tuple[list[Tensor], CallSpec]:
        """Returns what `describe` returns; the description is the same object for calls that do not differ.

        Raises:
            InputError: as `describe`.
        """
        tensors: list[Tensor] = []
        forward = getattr(getattr(self._model, method), "__func__", None)  # its parameters name the inputs
        try:
            outline = mode, forward, _outline((tuple(args), dict(kwargs)), tensors)
        except _UnfamiliarError:
            return describe(self._model, args, kwargs, self._batch_inputs, mode, method)
        known = self._known.get(outline) if forward is not None else None
        if known is not None:
            return tensors, known
        found, call = describe(self._model, args, kwargs, self._batch_inputs, mode, method)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[outline] = call
        return found, call


class _UnfamiliarError(Exception):
    """A part of a call is of a class that no outline tells enough of."""


def _outline(value: Any, tensors: list[Tensor]) -> Hashable:
    """Returns what is equal for values that only differ in the numbers of their tensors, which it collects in order."""
    kind = type(value)
    if (kind is Tensor or kind is nn.Parameter) and value.layout is torch.strided:
        tensors.append(value)
        return value.shape, value.dtype, value.requires_grad
    if kind in _CONSTANTS:
        return kind, repr(value)
    if kind is tuple or kind is list:
        return kind, tuple([_outline(each, tensors) for each in value])
    if kind is dict and all(type(key) is str for key in value):
        return tuple(value), tuple([_outline(each, tensors) for each in value.values()])
    raise _UnfamiliarError


def _refuse_layouts(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Refuses inputs that are not plain tensors in memory."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.layout is not torch.strided:
            raise InputError(
                f"The input {name} is a sparse or nested tensor: got {tensor.layout}, expected torch.strided. Pass a "
                "dense one (to_dense()), or its indices and values as tensors, and write the product in forward with "
                "those: torch.zeros_like(out).index_add(0, rows, values[:, None] * x[columns])."
            )


def _input_names(forward: Callable[..., Any], paths: Sequence[str]) -> list[str]:
    if inspect.ismethod(forward):
        return list(_names_of_method(forward.__func__, tuple(paths)))
    return _names_in(list(inspect.signature(forward).parameters.values()), paths)


@lru_cache(maxsize=64)
def _names_of_method(function: Callable[..., Any], paths: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of inputs of a method; a function of the class, which keeps no model alive."""
    return tuple(_names_in(list(inspect.signature(function).parameters.values())[1:], paths))


def _names_in(parameters: Sequence[inspect.Parameter], paths: Sequence[str]) -> list[str]:
    names: list[str] = []
    for path in paths:
        name = _readable(path, parameters)
        while name in names:
            name += "_"
        names.append(name)
    return names


def _readable(path: str, parameters: Sequence[inspect.Parameter]) -> str:
    """Turns ``[0][2]`` into the name of the third argument and ``[1]['labels']`` into ``labels``."""
    keys = re.findall(r"\['?([^\]']*)'?\]|\.(\w+)", path)
    first, *rest = [bracket or dot for bracket, dot in keys]
    if first == "0":
        rest[0] = _positional(int(rest[0]), parameters)
    return re.sub(r"\W", "_", "_".join(rest)).strip("_") or "input"


def _positional(place: int, parameters: Sequence[inspect.Parameter]) -> str:
    """Returns the name of a positional argument; those of ``*args`` are ``args_0`` and so on."""
    names = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    if place < len(names):
        return names[place]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "input")
    return f"{rest}_{place - len(names)}"


def _find_batch(
    names: Sequence[str], tensors: Sequence[Tensor], wanted: Sequence[str], arrays: Sequence[str]
) -> tuple[int, list[bool]]:
    if wanted:
        is_batch = [
            tensor.dim() > 0 and any(_is_part_of(name, want) for want in wanted)
            for name, tensor in zip(names, tensors, strict=True)
        ]
    else:
        first = next((tensor.shape[0] for tensor in tensors if tensor.dim() > 0), None)
        is_batch = [tensor.dim() > 0 and tensor.shape[0] == first for tensor in tensors]
    sizes = {name: tensor.shape[0] for name, tensor, batch in zip(names, tensors, is_batch, strict=True) if batch}
    if not sizes:
        raise InputError(
            f"No argument of the model is a batch: got tensors {_shapes(names, tensors)}"
            f"{f' and batch_inputs={list(wanted)}' if wanted else ''}"
            f"{f', and {arrays}, which are constants: make tensors of them' if arrays else ''}. Expected at least one "
            "tensor whose first dimension is the batch; pass one, or name the arguments in batch_inputs."
        )
    if len(set(sizes.values())) > 1:
        raise InputError(f"The batch inputs differ in size: got {sizes}. Expected one size; check batch_inputs.")
    return next(iter(sizes.values())), is_batch


def _shapes(names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in zip(names, tensors, strict=True)}


def _is_part_of(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}_")

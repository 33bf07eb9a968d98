"""Describes the layout of fake tensors without the tensors, and makes new ones of the same layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autovaruna._torch import FakeTensor, FakeTensorMode, dispatch_keys, in_kernel_invocation


class NotPlainError(Exception):
    """Says that a value is no plain fake tensor whose layout is known."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a fake tensor in memory of its own looks like.

    Attributes:
        lengths: of its dimensions, then its strides. Each is a number or ``(place, node)`` of a symbolic one: its place
            among the sizes that were known before (-1: it is a new one), and what torch knows of it.
        dtype: of its elements.
        device: where it says it is.
        needs_gradient: whether it takes part in autograd.
    """

    lengths: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    needs_gradient: bool

    def make(self, mode: FakeTensorMode, known: Sequence[torch.SymInt]) -> FakeTensor:
        """Returns a new tensor of this layout that needs no gradient.

        Args:
            mode: The mode that it belongs to.
            known: The sizes that were known before, in their order.
        """
        lengths = [length if isinstance(length, int) else _size(length[0], length[1], known) for length in self.lengths]
        dims = len(lengths) // 2
        quiet = nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards()
        with in_kernel_invocation(mode), quiet:
            empty = torch.empty_strided(lengths[:dims], lengths[dims:], dtype=self.dtype, device="meta")
        return FakeTensor(mode, empty, self.device)


def _size(place: int, node: Any, known: Sequence[torch.SymInt]) -> torch.SymInt:
    """Returns a known size, or a new one that is equal to what `node` was."""
    if place >= 0:
        return known[place]
    new = type(node)(node._expr, node.shape_env, node.pytype, node._hint, node.constant, node.fx_node)
    return torch.SymInt(new)  # type: ignore[no-untyped-call]


def lengths_of(tensor: Tensor) -> tuple[Any, ...]:
    """Returns the lengths of a tensor's dimensions, and its strides."""
    return (*tensor.shape, *tensor.stride())


def expression(length: Any) -> Any:
    """Returns a size as a number or expression.

    Raises:
        NotPlainError: it depends on the numbers in tensors.
    """
    if isinstance(length, int):
        return length
    if not length.node.has_hint():
        raise NotPlainError
    return length.node.expr


def layout_of(tensor: Tensor, mode: FakeTensorMode, known: Sequence[torch.SymInt]) -> Layout:
    """Returns the layout of a fake tensor.

    Args:
        tensor: The tensor.
        mode: The mode that it belongs to.
        known: The sizes that were known before it was made.

    Raises:
        NotPlainError: a tensor that is made of the layout would differ from it.
    """
    if type(tensor) is not FakeTensor or tensor.fake_mode is not mode or tensor.constant is not None:
        raise NotPlainError
    if tensor.layout is not torch.strided or tensor.is_leaf == tensor.requires_grad:
        raise NotPlainError
    places = {id(size.node): place for place, size in enumerate(known)}
    lengths = tuple(
        length if isinstance(length, int) else (places.get(id(length.node), -1), length.node)
        for length in lengths_of(tensor)
    )
    layout = Layout(lengths, tensor.dtype, tensor.fake_device, tensor.requires_grad)
    if _essence(layout.make(mode, known)) != _essence(tensor):
        raise NotPlainError
    return layout


def storage_of(tensor: Tensor) -> int:
    """Returns which memory a tensor lies in; views share theirs."""
    return int(tensor.untyped_storage()._cdata)


def _essence(tensor: Tensor) -> tuple[Any, ...]:
    """Returns all by which torch tells fake tensors apart, gradients aside."""
    numbers = map(expression, (*lengths_of(tensor), tensor.storage_offset(), tensor.untyped_storage().nbytes()))
    return (*numbers, tensor.dtype, tensor.device, tensor.is_inference(), dispatch_keys(tensor).raw_repr())

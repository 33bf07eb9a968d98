"""Traces recurrent modules on packed sequences: each call goes through padded ones, and is one operation.

How long a packed sequence is depends on numbers, so a trace cannot follow it. ``pack_padded_sequence`` returns a
stand-in here, which holds the padded tensor and the lengths; a recurrent module that is called on it is kept whole,
with the packing and padding around it; and ``pad_packed_sequence`` takes the padded tensor out again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from autovaruna.errors import TraceError
from autovaruna.graph.kept_whole.keeping import Keeper, kept_whole, spare_of
from autovaruna.graph.origin import users_line

_NAMES = ("pack_padded_sequence", "pad_packed_sequence")
_PLAIN: dict[str, Any] = {}
for _name in _NAMES:
    _known: Any = getattr(rnn, _name)
    _PLAIN[_name] = FunctionType(_known.__code__, _known.__globals__, _name, _known.__defaults__)
_CODES = {name: getattr(rnn, name).__code__ for name in _NAMES}


class Padded(rnn.PackedSequence):
    """Stands for a packed sequence.

    Attributes:
        tensor: the padded sequences, shape ``(batch, length, *)``.
        lengths: of each.
        is_sorted: whether they were to be in order.
    """

    tensor: Tensor
    lengths: Tensor
    is_sorted: bool

    @classmethod
    def of(cls, tensor: Tensor, lengths: Tensor, is_sorted: bool) -> Padded:
        """Returns a stand-in."""
        made: Padded = tuple.__new__(cls, (None, None, None, None))
        made.tensor, made.lengths, made.is_sorted = tensor, lengths, is_sorted
        return made

    def __getattribute__(self, name: str) -> Any:
        if name in ("data", "batch_sizes", "sorted_indices", "unsorted_indices"):
            raise TraceError(
                f"forward takes {name} of a packed sequence{users_line()}, whose shape depends on the lengths in a "
                "tensor. Expected a packed sequence that goes through recurrent modules alone, then through "
                "pad_packed_sequence(); move what else is done with it into a submodule, which is then kept whole."
            )
        return super().__getattribute__(name)


class OnPacked(nn.Module):
    """Calls a recurrent module on padded sequences, which it packs, and pads again."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tensor: Tensor, lengths: Tensor, state: Any, is_sorted: bool) -> tuple[Tensor, Any]:
        """Returns the padded results, and the last states."""
        packed = rnn.pack_padded_sequence(tensor, lengths.cpu(), batch_first=True, enforce_sorted=is_sorted)
        made, state = self.module(packed, state)
        return rnn.pad_packed_sequence(made, batch_first=True, total_length=tensor.shape[1])[0], state


@contextmanager
def kept_or_packed(
    model: nn.Module, paths: Collection[str], functions: Collection[str], device: torch.device
) -> Iterator[Keeper]:
    """Keeps modules and functions whole as `kept_whole` does, and recurrent modules on packed sequences."""
    with kept_whole(model, paths, functions, device) as keeper, packed_sequences(model, keeper):
        yield keeper


@contextmanager
def packed_sequences(model: nn.Module, keeper: Keeper) -> Iterator[None]:
    """Traces recurrent modules on packed sequences, on this thread, while the context lasts.

    Args:
        model: The model, with its own tensors.
        keeper: Leaves nodes for modules.
    """
    recurrent = {path: each for path, each in model.named_modules() if isinstance(each, nn.RNNBase)}
    if not recurrent:
        yield
        return
    before = [(vars(each), vars(each).get("forward")) for each in recurrent.values()]
    for path, each in recurrent.items():
        wrapped = OnPacked(each)
        keep = partial(keeper.call, path, wrapped, spare_of(wrapped))
        vars(each)["forward"] = partial(_called, each.forward, keep, get_ident())
    try:
        with _in_place_of_torchs(get_ident()):
            yield
    finally:
        for place, forward in before:
            place.pop("forward")
            if forward is not None:
                place["forward"] = forward


def _called(forward: Callable[..., Any], keep: Callable[..., Any], tracing: int, given: Any, state: Any = None) -> Any:
    if get_ident() != tracing or not isinstance(given, Padded):
        return forward(given, state)
    tensor, left = keep(given.tensor, given.lengths, state, given.is_sorted)
    return Padded.of(tensor, given.lengths, given.is_sorted), left


def _pack(tensor: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Padded:
    if not isinstance(lengths, Tensor):
        raise TraceError(
            f"forward packs sequences{users_line()} by lengths that are no tensor: got {type(lengths).__qualname__}, "
            "which is not parted with the batch. Expected a tensor; pass one to the model."
        )
    return Padded.of(tensor if batch_first else tensor.transpose(0, 1), lengths, enforce_sorted)


def _pad(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    greatest: Any = sequence.lengths.max().item()
    tensor = sequence.tensor[:, :greatest]
    places = torch.arange(greatest, device=tensor.device)
    if padding_value != 0.0:
        is_padded = places >= sequence.lengths.to(tensor.device)[:, None]
        tensor = tensor.masked_fill(is_padded.unflatten(1, (-1, *[1] * (tensor.dim() - 2))), padding_value)
    if total_length is not None:
        shape = [tensor.shape[0], total_length - greatest, *tensor.shape[2:]]
        tensor = torch.cat([tensor, tensor.new_full(shape, padding_value)], 1)
    return (tensor if batch_first else tensor.transpose(0, 1)), sequence.lengths


@contextmanager
def _in_place_of_torchs(tracing: int) -> Iterator[None]:
    """Has torch's own two functions, by whatever name a program has them, run ours on one thread."""

    def packing(*args: Any, **kwargs: Any) -> Any:
        return (_pack if get_ident() == tracing else _PLAIN[_NAMES[0]])(*args, **kwargs)

    def padding(sequence: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = get_ident() == tracing and isinstance(sequence, Padded)
        return (_pad if is_ours else _PLAIN[_NAMES[1]])(sequence, *args, **kwargs)

    known = vars(rnn)
    known["_padded_packing"], known["_padded_padding"] = packing, padding
    rnn.pack_padded_sequence.__code__, rnn.pad_packed_sequence.__code__ = _call_ours.__code__, _call_other.__code__
    try:
        yield
    finally:
        for name in _NAMES:
            getattr(rnn, name).__code__ = _CODES[name]
        del known["_padded_packing"], known["_padded_padding"]


def _call_ours(*args: Any, **kwargs: Any) -> Any:
    return _padded_packing(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 - a name in torch's module


def _call_other(*args: Any, **kwargs: Any) -> Any:
    return _padded_padding(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 - a name in torch's module

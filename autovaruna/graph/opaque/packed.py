"""Keeps recurrent modules on packed sequences whole, together with the packing around them.

What ``pack_padded_sequence`` computes is a stand-in, which holds the padded tensor; the module that is called on it is
kept with the packing and padding; ``pad_packed_sequence`` takes the padded tensor out again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from autovaruna.errors import TraceError
from autovaruna.graph.guards import restored
from autovaruna.graph.opaque.keep import OpaqueCalls, spare_of
from autovaruna.graph.source_lines import users_line


@dataclass(frozen=True)
class Padded:
    """Stands for tensors that make up a packed sequence: its numbers, its lengths, and their order.

    Attributes:
        tensor: the padded sequences, shape ``(batch, length, *)``.
        is_sorted: whether they were to be in order.
    """

    tensor: Tensor
    lengths: Tensor
    is_sorted: bool
    device = torch.device("cpu")

    def to(self, *args: Any, **kwargs: Any) -> Padded:
        """Returns itself, as other methods do that torch's packing calls."""
        return self

    scatter_ = to

    def size(self, dim: int) -> int:
        """Returns no length; what asks for it goes on to `_pad`, which knows the length."""
        return 0

    def numel(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise _refuse_packed(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called_on_padded(function, args)


class OnPacked(nn.Module):
    """Calls a recurrent module on padded sequences, which it packs, and pads again."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tensor: Tensor, lengths: Tensor, state: Any, is_sorted: bool) -> tuple[Tensor, Any]:
        packed = rnn.pack_padded_sequence(tensor, lengths.cpu(), batch_first=True, enforce_sorted=is_sorted)
        made, state = self.module(packed, state)
        return rnn.pad_packed_sequence(made, batch_first=True, total_length=tensor.shape[1])[0], state


def packing(frame: FrameType, lengths: Tensor) -> Padded | None:
    """Returns what stands for lengths where a sequence is about to be packed; None: `frame` does something else."""
    if frame.f_code is not rnn.pack_padded_sequence.__code__:
        return None
    given = frame.f_locals
    tensor: Tensor = given["input"]
    return Padded(tensor if given["batch_first"] else tensor.transpose(0, 1), lengths, given["enforce_sorted"])


def called_on_padded(function: Any, args: Sequence[Any]) -> Any:
    """Returns what a function of torch, called to pack or to pad, gives for stand-ins; refuses others."""
    name = function.__name__
    if name in ("index_select", "empty_like"):  # sequences are left in their order
        return args[0]
    if name == "sort":
        return args[0], args[0]
    if name == "_pack_padded_sequence":
        return args[1], args[1]
    if name == "_pad_packed_sequence":
        return _pad(args[0], *args[2:])
    raise _refuse_packed(f"{name}()")


def refuse_lengths(*args: Any) -> Any:
    """Refuses to pack sequences by lengths that are no tensor of the batch; `args` are torch's own."""
    raise TraceError(
        f"forward packs sequences{users_line()} by lengths that are no tensor, which are not parted with the batch. "
        "Expected a tensor; pass one to the model."
    )


@contextmanager
def packed_sequences(model: nn.Module, keeper: OpaqueCalls) -> Iterator[None]:
    """Traces recurrent modules on packed sequences, on this thread, while the context lasts."""
    recurrent = {path: each for path, each in model.named_modules() if isinstance(each, nn.RNNBase)}
    with restored(map(vars, recurrent.values())):
        for path, each in recurrent.items():
            wrapped = OnPacked(each)
            keep = partial(keeper.call, path, wrapped, spare_of(wrapped))
            vars(each)["forward"] = partial(_called_on_packed, each.forward, keep, get_ident())
        yield


def _called_on_packed(
    forward: Callable[..., Any], keep: Callable[..., Any], tracing: int, given: Any, state: Any = None
) -> Any:
    padded = given.data if isinstance(given, rnn.PackedSequence) else None
    if get_ident() != tracing or not isinstance(padded, Padded):
        return forward(given, state)
    tensor, left = keep(padded.tensor, padded.lengths, state, padded.is_sorted)
    made: Any = Padded(tensor, padded.lengths, padded.is_sorted)
    return rnn.PackedSequence(made, made), left


def _refuse_packed(name: str) -> TraceError:
    return TraceError(
        f"forward takes {name} of a packed sequence{users_line()}, whose shape depends on the lengths in a tensor. "
        "Expected a packed sequence that goes through recurrent modules alone, then through pad_packed_sequence(); "
        "move what else is done with it into a submodule, which is then kept whole."
    )


def _pad(padded: Padded, batch_first: bool, padding_value: float, total_length: int) -> tuple[Tensor, Tensor]:
    greatest: Any = padded.lengths.max().item()
    tensor = padded.tensor[:, :greatest]
    if padding_value != 0.0:
        is_padded = torch.arange(greatest, device=tensor.device) >= padded.lengths.to(tensor.device)[:, None]
        tensor = tensor.masked_fill(is_padded[(..., *[None] * (tensor.dim() - 2))], padding_value)
    if total_length:
        shape = [tensor.shape[0], total_length - greatest, *tensor.shape[2:]]
        tensor = torch.cat([tensor, tensor.new_full(shape, padding_value)], 1)
    return (tensor if batch_first else tensor.transpose(0, 1)), padded.lengths

"""Replaces functions of torch while a model is traced, on the thread that traces it, and puts them back.

Libraries do not see that a tensor of known numbers is fake; torch follows the modules of this thread alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna._torch import FakeTensor, ModuleStackTracer, convert_impl, replaced, subclasses
from autovaruna.errors import TraceError
from autovaruna.graph.constant_values import is_known
from autovaruna.graph.export.assertions import is_traced
from autovaruna.graph.source_lines import is_users, users_line


@contextmanager
def modules_followed() -> Iterator[None]:
    """Has torch.export follow the modules of this thread alone while the context lasts, those that raise as well.

    It sees those of all threads, copies that are tried out as well, and goes wrong where forward catches an error.
    """
    tracing, call, get = get_ident(), ModuleStackTracer.call_module, ModuleStackTracer.getattr

    def call_module(self: Any, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if get_ident() != tracing:
            return forward(*args, **kwargs)
        running = self.module_stack.copy()
        try:
            return call(self, module, forward, args, kwargs)
        except BaseException:
            self.module_stack = running
            raise

    def get_own(self: Any, name: str, value: Any, known: Any) -> Any:
        return get(self, name, value, known) if get_ident() == tracing else value

    with replaced(ModuleStackTracer, "call_module", call_module), replaced(ModuleStackTracer, "getattr", get_own):
        yield


@contextmanager
def hide_fakes() -> Iterator[None]:
    """Lets no library see on this thread, while the context lasts, that a tensor whose numbers are known is fake."""
    tracing = get_ident()

    class _Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            asks = get_ident() == tracing and is_users(sys._getframe(1).f_code.co_filename)
            return isinstance(value, FakeTensor) and not (asks and is_known(value))

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, FakeTensor)

    class _Seen(metaclass=_Kind):
        """Stands for the class of fake tensors where others than torch ask for it."""

    with replaced(subclasses, "FakeTensor", _Seen):
        yield


@contextmanager
def padded_encoders() -> Iterator[None]:
    """Traces encoders that plain PyTorch would give nested tensors by their formula, on this thread, while it lasts."""
    tracing, plain = get_ident(), nn.TransformerEncoder.forward

    def forward(
        self: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        is_plain = get_ident() != tracing or mask is not None or is_causal
        if is_plain or src_key_padding_mask is None or not _nests(self, src):
            return plain(self, src, mask, src_key_padding_mask, is_causal)
        return _evaluated(self, src, src_key_padding_mask)

    with replaced(nn.TransformerEncoder, "forward", forward):
        yield


def _nests(encoder: Any, src: Tensor) -> bool:
    """Whether plain PyTorch makes a nested tensor of what an encoder gets with a padding mask."""
    first = encoder.layers[0]
    is_meant = getattr(encoder, "use_nested_tensor", False) and torch.backends.mha.get_fastpath_enabled()
    if not is_meant or first.training or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in (src, *first.parameters())))


def _evaluated(encoder: Any, src: Tensor, padding: Tensor) -> Tensor:
    """Runs an encoder; in front of its norm, padded places are zero if all padding is at the ends."""
    is_word = padding.logical_not()
    output = src
    for layer in encoder.layers:
        output = layer(output, src_key_padding_mask=padding)
    is_aligned = (is_word[:, 1:] <= is_word[:, :-1]).all()
    output = torch.where((is_word | ~is_aligned).unsqueeze(-1), output, 0.0)
    return output if encoder.norm is None else encoder.norm(output)


@contextmanager
def conversions() -> Iterator[None]:
    """Lets forward convert modules to what they are, as ``self.head = self.head.to(x.dtype)`` does, while it lasts."""

    def apply(self: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        state = dict([*self.named_parameters(recurse=recurse), *self.named_buffers(recurse=recurse)])
        if not any(map(is_traced, state.values())):
            return convert_impl(self, convert, recurse)
        for name, tensor in state.items():
            _refuse_conversion(f"{name} of a {type(self).__qualname__}", tensor, convert(torch.empty_like(tensor)))
        return self

    with replaced(nn.Module, "_apply", apply):
        yield


def _refuse_conversion(name: str, before: Tensor, after: Tensor) -> None:
    kinds = [f"{each.dtype}, {each.device}, strides {each.stride()}" for each in (before, after)]
    if kinds[0] != kinds[1]:
        raise TraceError(
            f"forward converts {name}{users_line()}: it would be {kinds[1]} and is {kinds[0]}. Expected a model that "
            "stays as it is: convert it before it is wrapped, or convert what enters the module, as in "
            "self.head(x.to(self.head.weight.dtype))."
        )

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

from autovaruna._torch import CONVERT, FakeTensor, ModuleStackTracer, convert_impl, replaced, subclasses
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
    """Hides from libraries, on this thread, that a tensor is fake, if its numbers are known."""
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
def conversions() -> Iterator[None]:
    """Has a conversion of a module to the dtype and device that it has, as ``self.head.to(x.dtype)``, do nothing."""

    def apply(self: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        state = dict([*self.named_parameters(recurse=recurse), *self.named_buffers(recurse=recurse)])
        if not any(map(is_traced, state.values())):
            return convert_impl(self, convert, recurse)
        for name, tensor in state.items():
            _refuse_conversion(f"{name} of a {type(self).__qualname__}", tensor, convert(torch.empty_like(tensor)))
        return self

    with replaced(nn.Module, CONVERT, apply):
        yield


def _refuse_conversion(name: str, before: Tensor, after: Tensor) -> None:
    kinds = [f"{each.dtype}, {each.device}, strides {each.stride()}" for each in (before, after)]
    if kinds[0] != kinds[1]:
        raise TraceError(
            f"forward converts {name}{users_line()}: it would be {kinds[1]} and is {kinds[0]}. Expected a model that "
            "stays as it is: convert it before it is wrapped, or convert what enters the module, as in "
            "self.head(x.to(self.head.weight.dtype))."
        )

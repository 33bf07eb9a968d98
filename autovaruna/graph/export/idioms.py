"""Handles what torch.export misreads or drops, on the thread that traces a model.

A mode of torch sees each function of torch that a forward calls. A few have to be replaced in torch instead, while the
model is traced: libraries do not see then that a tensor of known numbers is fake, and torch follows this thread alone.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import dropwhile
from threading import get_ident
from traceback import StackSummary
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptFunction
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from autovaruna._torch import (
    CONVERT,
    FRAMES,
    FakeTensor,
    ModuleStackTracer,
    all_true,
    convert_impl,
    generalize,
    pack_by_lengths,
    replaced,
    replaced_here,
    subclasses,
    top_saved_tensors_hooks,
)
from autovaruna._torch import check as check_sizes
from autovaruna.errors import TraceError
from autovaruna.graph.constant_values import is_known
from autovaruna.graph.export.assertions import all_pass, is_traced, number_in
from autovaruna.graph.export.errors import BatchSizeError, refuse_backward, refuse_hook, refuse_parameter
from autovaruna.graph.opaque.keep import NamedFunction
from autovaruna.graph.side_effects import StateError
from autovaruna.graph.source_lines import chain_of, is_of_script, is_users, users_line

_LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div", "poisson_nll_loss"),
    *("binary_cross_entropy_with_logits", "soft_margin_loss"),
)
_HOLDERS = {
    "torch": torch,
    "torch.nn.functional": nn.functional,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch.Tensor": Tensor,
}
_OF_NUMBERS = frozenset({"item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "nonzero", "masked_select"})
"""Functions that return numbers of tensors, or as many as those say: none of them can be kept whole."""
_OWN_GENERATOR = (
    "forward draws from a torch.Generator{}, whose state no trace can keep. Expected draws without generator=, which "
    "are seeded (seed=...) for each call and micro-batch; or draw in the script, and pass the numbers as an argument."
)
_OF_LAYOUT = (Tensor.is_contiguous, Tensor.stride)
_STOPS = frozenset({"DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException"})
_grad_fn: Any = Tensor.grad_fn


class Idioms(TorchFunctionMode):
    """Sees the functions of torch that a forward calls on fake tensors; what `kept` has for them is called instead.

    `own` says where the model holds its parameters and buffers, by identity: a list or a closure may lead to them, too.
    """

    def __init__(self, kept: Mapping[Any, Callable[..., Any]], own: Mapping[int, tuple[nn.Module, str]]) -> None:
        super().__init__()
        self._own = own
        self.asks_for_layout = ""  # the first line of the script that does
        self._failed: list[tuple[Exception, NamedFunction]] = []
        self._kept = kept
        self._before = _modes()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _modes() != self._before:
            _refuse_modes(self._before)
        if function in _OF_LAYOUT and is_of_script(sys._getframe(1).f_code.co_filename):
            self.asks_for_layout = self.asks_for_layout or users_line()
        args, given = (
            tuple(map(self._traced, args)),
            {name: self._traced(each) for name, each in (kwargs or {}).items()},
        )
        if any(isinstance(each, torch.Generator) for each in (*args, *given.values())):
            raise StateError(_OWN_GENERATOR.format(users_line()))
        return self._call(function, _HANDLERS.get(function) or function, args, given)

    def _traced(self, argument: Any) -> Any:
        """Returns what is traced in the place of a parameter or buffer of the model, or of those in a list."""
        if type(argument) in (list, tuple):
            return type(argument)(map(self._traced, argument))
        place = self._own.get(id(argument))
        return argument if place is None else getattr(*place)

    def _call(self, function: Any, act: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return self._kept.get(function, act)(*args, **kwargs)
        except Exception as error:
            is_seen = isinstance(function, FunctionType | ScriptFunction) or type(error).__name__ in _STOPS
            if is_seen and (name := _name_of(function)):
                self._failed.append((error, (name, function)))
            raise

    @contextmanager
    def scripted_functions(self) -> Iterator[None]:
        """Sees calls of functions of ``torch.jit.script``, of which torch tells no mode, while the context lasts."""

        def call(plain: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            generalize(function)
            return self._call(function, partial(plain, function), args, kwargs)

        with replaced_here(ScriptFunction, "__call__", call):
            yield

    def function_of(self, error: Exception) -> NamedFunction | None:
        """Returns the function of torch, or of TorchScript, that raised an error, if it can be kept whole."""
        return next((found for link in chain_of(error) for each, found in self._failed if each is link), None)


def _modes() -> tuple[Any, ...]:
    """Returns whether inference mode is on, and the hooks of saved tensors; a trace would drop both."""
    return torch.is_inference_mode_enabled(), top_saved_tensors_hooks(True)


def _refuse_modes(before: tuple[Any, ...]) -> None:
    is_inference, hooks = _modes()
    if is_inference and not before[0]:
        raise TraceError(
            f"forward enters torch.inference_mode(){users_line()}, which a trace cannot keep. Expected "
            "torch.no_grad(), which gives the same numbers."
        )
    if hooks != before[1] and hooks is not None and is_users(hooks[0].__code__.co_filename):
        raise refuse_hook("sets hooks for saved tensors")


def _length(tensor: Tensor) -> int:
    length = tensor.shape[0] if tensor.dim() else 0
    if isinstance(length, torch.SymInt):
        raise BatchSizeError(
            f"forward asks for len() of a tensor{users_line()}: got a tensor whose length varies, but len() returns "
            "fixed numbers alone. Expected x.shape[0] in place of len(x), unless it compares samples with each other."
        )
    return int(Tensor.__len__(tensor))  # type: ignore[no-untyped-call]


def _assign(target: Tensor, value: Tensor) -> None:
    """Copies what is assigned to ``data``, which torch.export does not see."""
    if value.shape != target.shape or value.dtype != target.dtype:
        raise TraceError(
            f"forward assigns to the data of a tensor: got {tuple(value.shape)} {value.dtype}, expected "
            f"{tuple(target.shape)} {target.dtype}. Keep the shape and dtype, or make a new tensor."
        )
    target.detach().copy_(value.detach())


def _of_one_length(loss: Callable[..., Any], input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a loss; what masks have picked of both tensors is of one length, which only data could tell."""
    if isinstance(input, Tensor) and isinstance(target, Tensor):
        for one, other in zip(input.shape, target.shape, strict=False):
            if _is_of_data(one) and _is_of_data(other):
                check_sizes(one == other)  # type: ignore[no-untyped-call]
    return loss(input, target, *args, **kwargs)


def _where(condition: Tensor, *values: Any, **more: Any) -> Any:
    """Finds places one tensor at a time: which tensor says how many there are is known then."""
    if values or more or not condition.dim():
        return torch.where(condition, *values, **more)
    return condition.nonzero().unbind(1)


def _nonzero(condition: Tensor, *, as_tuple: bool = False, **more: Any) -> Any:
    return _where(condition) if as_tuple else torch.nonzero(condition, **more)


def _take_along(source: Tensor, places: Tensor, dim: int | None = None, **more: Any) -> Any:
    if dim is None or source.shape != places.shape:
        return torch.take_along_dim(source, places, dim, **more)
    return source.gather(dim, places, **more)


def _refuse_packing(*args: Any) -> Any:
    raise TraceError(
        f"forward packs sequences{users_line()}, and how long a packed one is depends on the lengths in a tensor. "
        "Expected a submodule of tensors that does it, which is then kept whole: move into one what goes from "
        "pack_padded_sequence() to pad_packed_sequence(..., total_length=x.shape[1]), the recurrent module with it, "
        "and call it with the padded tensor and the lengths, as a tensor."
    )


def _node(tensor: Tensor) -> Any:
    """Refuses ``grad_fn``, unless a checkpoint of torch asks for it; `register_parameter` asks for it as well."""
    asking = sys._getframe(3)  # behind the two of `Idioms`
    if asking.f_globals.get("__name__") == checkpoint.__name__:
        return _grad_fn.__get__(tensor)
    if asking.f_code is nn.Module.register_parameter.__code__:
        raise refuse_parameter()
    raise refuse_hook("takes the node of a tensor (grad_fn)")


def _refusing(refuse: Callable[[str], TraceError], what: str) -> Callable[..., Any]:
    def act(*args: Any, **kwargs: Any) -> Any:
        raise refuse(what)

    return act


def _is_of_data(length: Any) -> bool:
    return isinstance(length, torch.SymInt) and not length.node.has_hint()


def _name_of(function: Any) -> str:
    """Returns what a model calls a function by; empty: it is none that can be kept whole."""
    if isinstance(function, ScriptFunction):
        return str(function.name)
    name = getattr(function, "__name__", "")
    if name.startswith("_") or name in _OF_NUMBERS:
        return ""
    holders = (path for path, holder in _HOLDERS.items() if getattr(holder, name, None) is function)
    return next((f"{path}.{name}" for path in holders), "")


_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.__len__: _length,
    **{each: partial(number_in, each) for each in (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.item)},
    Tensor.tolist: partial(number_in, Tensor.tolist),
    all_true: all_pass,
    torch.where: _where,
    **dict.fromkeys((torch.nonzero, Tensor.nonzero), _nonzero),
    **dict.fromkeys((torch.take_along_dim, Tensor.take_along_dim), _take_along),
    Tensor.data.__get__: Tensor.detach,  # type: ignore[attr-defined]
    Tensor.data.__set__: _assign,  # type: ignore[attr-defined]
    pack_by_lengths: _refuse_packing,
    _grad_fn.__get__: _node,
    Tensor.register_hook: _refusing(refuse_hook, "registers a hook on a tensor"),
    Tensor.register_post_accumulate_grad_hook: _refusing(refuse_hook, "registers a hook on a tensor"),
    Tensor.backward: _refusing(refuse_backward, "backward()"),
    torch.autograd.grad: _refusing(refuse_backward, "torch.autograd.grad"),
    **{each: partial(_of_one_length, each) for each in (getattr(nn.functional, name) for name in _LOSSES)},
}


@contextmanager
def modules_followed() -> Iterator[None]:
    """Has torch.export follow the modules of this thread alone while the context lasts, those that raise as well.

    It sees those of all threads, copies that are tried out as well, and goes wrong where forward catches an error. Of
    the lines that led to an operation it keeps those of methods named forward; here, of the script's functions as well.
    """
    tracing, plain, get = get_ident(), ModuleStackTracer.call_module, ModuleStackTracer.getattr

    def call_module(self: Any, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if get_ident() != tracing:
            return forward(*args, **kwargs)
        running = self.module_stack.copy()
        try:
            return plain(self, module, forward, args, kwargs)
        except BaseException:
            self.module_stack = running
            raise

    def get_own(self: Any, name: str, value: Any, known: Any) -> Any:
        return get(self, name, value, known) if get_ident() == tracing else value

    def users_frames(self: Any, frames: StackSummary) -> StackSummary:
        begun = dropwhile(lambda frame: frame.name != "forward", frames)
        return StackSummary.from_list(
            frame for frame in begun if frame.name == "forward" or is_of_script(frame.filename)
        )

    with ExitStack() as stack:
        for name, act in (("call_module", call_module), ("getattr", get_own), (FRAMES, users_frames)):
            stack.enter_context(replaced(ModuleStackTracer, name, act))
        yield


@contextmanager
def varying_lengths() -> Iterator[None]:
    """Has ``len(x)`` of a tensor be ``x.shape[0]`` in a user's line on this thread, while the context lasts.

    Python takes whole numbers alone from ``__len__``, and a length may vary with the batch.
    """

    def length(plain: Any, value: Any) -> Any:
        is_length = isinstance(value, Tensor) and value.dim() and is_users(sys._getframe(2).f_code.co_filename)
        return value.shape[0] if is_length else plain(value)

    with replaced_here(builtins, "len", length):
        yield


@contextmanager
def refused_seeds() -> Iterator[None]:
    """Refuses a forward that seeds torch's generator, on this thread, while the context lasts."""

    def seed(plain: Any, *args: Any) -> Any:
        raise StateError(
            f"forward seeds torch's generator{users_line()}, whose draws are seeded (seed=...) for each call and "
            "micro-batch: got torch.manual_seed(). Expected numbers that stay the same in a buffer, drawn in "
            "__init__; or draw in the script, and pass the numbers as an argument."
        )

    with replaced_here(torch, "manual_seed", seed), replaced_here(torch.random, "manual_seed", seed):
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
def padded_encoders() -> Iterator[None]:
    """Traces encoders that plain PyTorch would give nested tensors by their formula, on this thread, while it lasts."""

    def forward(
        plain: Any,
        self: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Any:
        if mask is not None or is_causal or src_key_padding_mask is None or not _nests(self, src):
            return plain(self, src, mask, src_key_padding_mask, is_causal)
        return _evaluated(self, src, src_key_padding_mask)

    with replaced_here(nn.TransformerEncoder, "forward", forward):
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

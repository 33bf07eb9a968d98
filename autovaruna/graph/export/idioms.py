"""Looks at each function of torch that a forward calls: what torch.export takes for something else, or would drop.

A mode of torch sees the calls, so that nothing of Python or torch is replaced. A line that raises by numbers in
tensors, and does nothing else, counts as passed, unless they are known, and becomes a node that checks in every run.
"""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from threading import get_ident
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from autovaruna._torch import (
    FakeTensor,
    FunctionalTensor,
    all_true,
    convert_impl,
    pack_by_lengths,
    replaced,
    top_saved_tensors_hooks,
)
from autovaruna._torch import check as check_sizes
from autovaruna.errors import InputError, TraceError
from autovaruna.graph.export.errors import (
    BatchSizeError,
    is_users,
    origin,
    refuse_backward,
    refuse_hook,
    refuse_int,
    refuse_parameter,
    users_line,
)
from autovaruna.graph.export.fakes import follows_held, is_profiling, numbers_of, unchecked_distributions
from autovaruna.graph.opaque.keep import Padded, called_on_padded, packing, refuse_lengths
from autovaruna.graph.precision import regions

_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Try, ast.NamedExpr)
_IDENTITY = ast.Is | ast.IsNot
_HIDES_TRUTH = (ast.Not, ast.IfExp, ast.Lambda, ast.comprehension, ast.NamedExpr, ast.In, ast.NotIn, ast.Await)


def passing(filename: str, line: int) -> bool | None:
    """Returns the truth of tensors with which the check at a line passes; None: there is none, or it does more."""
    tests = [test for test in _checks(filename) if test[0] <= line <= test[1]]
    return min(tests, key=lambda test: test[1] - test[0])[2] if tests else None


@lru_cache(maxsize=256)
def _checks(filename: str) -> tuple[tuple[int, int, bool | None], ...]:
    """Returns the first and the last line of each condition of a file, and its truth where nothing is raised."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    found = [_condition(each) for each in ast.walk(tree) if isinstance(each, ast.If | ast.Assert | ast.While)]
    return tuple(found)


def _condition(statement: ast.If | ast.Assert | ast.While) -> tuple[int, int, bool | None]:
    """Returns the lines of a statement's condition, and what its tensors must be."""
    test: ast.expr = statement.test
    lines = test.lineno, test.end_lineno or test.lineno
    wanted = isinstance(statement, ast.Assert)
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, wanted = test.operand, not wanted
    return *lines, wanted if _only_raises(statement) and _is_told_by_each(test, wanted) else None


def _is_told_by_each(test: ast.expr, wanted: bool) -> bool:
    """Whether a condition is as wanted just where each tensor in it that Python asks for its truth is.

    Not so in ``a and b`` that must be false: either may be true alone.
    """
    if isinstance(test, ast.BoolOp):
        *first, last = test.values
        if isinstance(test.op, ast.And) is wanted:
            return all(_is_told_by_each(each, wanted) for each in test.values)
        are_no_tensors = all(isinstance(each, ast.Compare) and isinstance(each.ops[-1], _IDENTITY) for each in first)
        return are_no_tensors and _is_told_by_each(last, wanted)
    if isinstance(test, ast.Compare) and len(test.ops) > 1 and not wanted:
        return False
    return not any(
        isinstance(each, _HIDES_TRUTH) or _calls_by_name(each) or _compares_item(each) for each in ast.walk(test)
    )


def _only_raises(statement: ast.stmt) -> bool:
    """Whether a statement raises, or does nothing, by its condition."""
    if isinstance(statement, ast.Assert):
        return True
    if not isinstance(statement, ast.If) or not isinstance(statement.body[-1], ast.Raise):
        return False
    return not any(isinstance(each, _LEAVES) for line in statement.body for each in ast.walk(line))


def _calls_by_name(node: ast.AST) -> bool:
    """Whether a function is called by its name alone: ``bool`` or ``any``, say, which ask for the truth themselves."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in ("len", "isinstance")


def _compares_item(node: ast.AST) -> bool:
    """Whether the truth in a tensor is compared, as in ``t.item() == False``."""
    sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    return any(isinstance(each, ast.Call) and getattr(each.func, "attr", "") == "item" for each in sides)


_aten = torch.ops.aten


@torch.library.custom_op("autovaruna::check", mutates_args=())
def _check(condition: Tensor, wanted: bool, place: str, is_held: bool = False) -> None:
    check(condition, wanted, place, is_held)


@_check.register_fake
def _fake(condition: Tensor, wanted: bool, place: str, is_held: bool = False) -> None:
    """Checks nothing: there are no numbers."""


def check(condition: Tensor, wanted: bool, place: str, is_held: bool = False) -> None:
    """Looks at a condition of the model, where its numbers are those of a step, or of tensors that the model holds."""
    if isinstance(condition, FakeTensor) or is_profiling() or bool(condition) is wanted:
        return
    if is_held:
        raise InputError(
            f"Forward goes by the numbers of a tensor that the model holds, at {place}, and they are others than when "
            "it was traced. Expected a tensor that stays as it is: put a new one in its place, which is traced anew."
        )
    raise InputError(
        f"The model raises at {place}: got numbers that do not pass this check of its own. Expected inputs that "
        "the model takes on one process, without AutoVaruna; try it so. If it takes them, look for an argument "
        "whose first dimension is not the batch: every micro-batch gets all of it."
    )


for _each in (torch.ops.autovaruna.check.default, check):  # they stay in a graph, though nothing uses what they return
    fx.node.has_side_effect(_each)


def _number(plain: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """Returns the numbers in a tensor as Python's; of a fake one they must follow from constants and shapes."""
    if not _is_traced(tensor):
        return plain(tensor)
    if (known := numbers_of(tensor, plain)) is not None:
        if follows_held(tensor):
            own = _CASTS[plain](tensor) if plain in _CASTS else tensor
            same = own == (torch.tensor(known, dtype=own.dtype, device=own.device) if plain is Tensor.tolist else known)
            users = (each for each, _ in traceback.walk_stack(sys._getframe()) if is_users(each.f_code.co_filename))
            torch.ops.autovaruna.check(same.all(), True, _line(next(users)), True)
        return known
    frame = sys._getframe(2)
    is_condition = plain is Tensor.__bool__ or (plain is Tensor.item and tensor.dtype is torch.bool)
    wanted = passing(frame.f_code.co_filename, frame.f_lineno) if is_condition else None
    if wanted is not None:
        torch.ops.autovaruna.check(tensor, wanted, _line(frame))
    elif plain is Tensor.__int__:
        raise refuse_int()
    return plain(tensor) if wanted is None else wanted


_CASTS = {Tensor.__bool__: Tensor.bool, Tensor.__int__: Tensor.long}


def _all_true(condition: Tensor) -> Any:
    """Leaves a node for a condition that torch checks for all elements of a tensor; returns what passes the check."""
    if not _is_traced(condition):
        return all_true(condition)
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if is_users(frame.f_code.co_filename))
    places = map(_line, islice(frames, 2))  # libraries have helpers that check
    torch.ops.autovaruna.check(condition.all(), True, ", called at ".join(places))
    return SimpleNamespace(item=lambda: True)


def _line(frame: FrameType) -> str:
    """Returns where a frame is; without the folder, which may be another on each host."""
    name, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(name).name}:{line} ({linecache.getline(name, line).strip()})"


def take_checks(module: fx.GraphModule) -> None:
    """Has a graph, and the regions in it, call `check` where a check was."""
    for each in regions(module):
        for node in each.graph.nodes:
            if node.target is torch.ops.autovaruna.check.default:
                node.target = check
            elif node.target is _aten._assert_async.msg:
                node.target, node.args = check, (node.args[0], True, Path(origin(node)).name)
        if each is not module:
            each.recompile()


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
def _conversions() -> Iterator[None]:
    """Lets forward convert modules to what they are, as ``self.head = self.head.to(x.dtype)`` does, while it lasts."""

    def apply(self: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        state = dict([*self.named_parameters(recurse=recurse), *self.named_buffers(recurse=recurse)])
        if not any(map(_is_traced, state.values())):
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
_STOPS = frozenset({"DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException"})


class Idioms(TorchFunctionMode):
    """Sees the functions of torch that a forward calls on fake tensors; what `kept` has for them is called instead.

    Attributes:
        stopped: names of the functions in which the trace has stopped, the innermost first.
    """

    def __init__(self, kept: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.stopped: list[str] = []
        self._kept = kept
        self._before = _modes()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sees what this thread calls while the context lasts; distributions do not check their arguments meanwhile."""
        with unchecked_distributions(), _conversions(), self:
            yield

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _modes() != self._before:
            _refuse_modes(self._before)
        given: dict[str, Any] = kwargs or {}
        if any(isinstance(each, Padded) for each in args):
            return called_on_padded(function, args)
        act = self._kept.get(function) or _HANDLERS.get(function)
        try:
            return function(*args, **given) if act is None else act(*args, **given)
        except Exception as error:
            if type(error).__name__ in _STOPS and (name := _name_of(function)):
                self.stopped.append(name)
            raise


def _modes() -> tuple[Any, ...]:
    """Returns what a forward may set that a trace would drop: inference mode, and hooks of saved tensors."""
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
            "fixed numbers alone. Expected x.shape[0] in place of len(x)."
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


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    packed = packing(sys._getframe(2), tensor)
    return tensor.to(*args, **kwargs) if packed is None else packed


def _node(tensor: Tensor) -> Any:
    """Refuses to name the node of a tensor, which modules ask for as well, of every parameter that they get.

    Checkpoints of some versions ask whether there is one.
    """
    asking = sys._getframe(2)
    if asking.f_globals.get("__name__") == checkpoint.__name__:
        return _grad_fn.__get__(tensor)
    if asking.f_code is nn.Module.register_parameter.__code__:
        raise refuse_parameter()
    raise refuse_hook("takes the node of a tensor (grad_fn)")


def _refusing(refuse: Callable[[str], TraceError], what: str) -> Callable[..., Any]:
    def act(*args: Any, **kwargs: Any) -> Any:
        raise refuse(what)

    return act


def _is_traced(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor | FunctionalTensor)


def _is_of_data(length: Any) -> bool:
    return isinstance(length, torch.SymInt) and not length.node.has_hint()


def _name_of(function: Any) -> str:
    """Returns what a model calls a function by; empty: it is none that can be kept whole."""
    name = getattr(function, "__name__", "")
    if name.startswith("_") or name in _OF_NUMBERS:
        return ""
    holders = (path for path, holder in _HOLDERS.items() if getattr(holder, name, None) is function)
    return next((f"{path}.{name}" for path in holders), "")


_grad_fn: Any = Tensor.grad_fn
_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.__len__: _length,
    **{each: partial(_number, each) for each in (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.item)},
    Tensor.tolist: partial(_number, Tensor.tolist),
    all_true: _all_true,
    Tensor.data.__get__: Tensor.detach,  # type: ignore[attr-defined]
    Tensor.data.__set__: _assign,  # type: ignore[attr-defined]
    Tensor.to: _to,
    pack_by_lengths: refuse_lengths,
    _grad_fn.__get__: _node,
    Tensor.register_hook: _refusing(refuse_hook, "registers a hook on a tensor"),
    Tensor.register_post_accumulate_grad_hook: _refusing(refuse_hook, "registers a hook on a tensor"),
    Tensor.backward: _refusing(refuse_backward, "backward()"),
    torch.autograd.grad: _refusing(refuse_backward, "torch.autograd.grad"),
    **{each: partial(_of_one_length, each) for each in (getattr(nn.functional, name) for name in _LOSSES)},
}

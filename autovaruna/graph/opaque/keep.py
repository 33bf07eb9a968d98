"""Keeps submodules that cannot be traced whole: each call leaves the operator ``autovaruna::module`` in the trace.

So are recurrent modules on packed sequences, whose length depends on numbers. What ``pack_padded_sequence`` computes is
a stand-in, which holds the padded tensor; the module that is called on it is kept with the packing and padding around
it; and ``pad_packed_sequence`` takes the padded tensor out again.
"""

from __future__ import annotations

import pkgutil
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import rnn

from autovaruna.errors import TraceError
from autovaruna.graph.export.errors import users_line
from autovaruna.graph.guards import HOOKS, restored
from autovaruna.graph.opaque.functions import Function, StateError, plain_apply
from autovaruna.graph.opaque.infer import CannotKeepError, OpaqueTrial, copy_of, infer_reductions, own_tensors
from autovaruna.graph.opaque.run import KeptFunction, OpaqueModule, Returned, places_of, run_opaque
from autovaruna.graph.precision import current_precision, regions
from autovaruna.graph.tree import Constant, Opaque, flatten

_calls: dict[str, OpaqueModule] = {}


@torch.library.custom_op("autovaruna::module", mutates_args=())
def _module(tensors: Sequence[Tensor], state: Sequence[Tensor], batch: int, key: str) -> list[Tensor]:
    """Stands for a call in a trace; `_fake` says what comes out."""
    return [each.clone() for each in _calls[key](batch, tensors, state)]


@_module.register_fake
def _fake(tensors: Sequence[Tensor], state: Sequence[Tensor], batch: int, key: str) -> list[Tensor]:
    device = (*tensors, *state)[0].device
    return [line.make(batch, device) for line in _calls[key].returned.tensors]


@contextmanager
def kept_whole(
    model: nn.Module, paths: Collection[str], functions: Collection[str], device: torch.device
) -> Iterator[OpaqueCalls]:
    """Keeps modules and functions of torch whole while the context lasts; hooks of modules run inside of them."""
    keeper = OpaqueCalls(device, functions)
    modules = {model.get_submodule(path): path for path in sorted(paths, reverse=True)}
    try:
        with restored(map(vars, modules)):
            for module, path in modules.items():
                vars(module)["forward"] = partial(keeper.call, path, module, spare_of(module))
                vars(module).update({name: OrderedDict() for name in HOOKS if name in vars(module)})
            yield keeper
    finally:
        _calls.clear()


Spare = tuple[nn.Module | CannotKeepError, Sequence[Tensor]]
"""What a module is tried out with: a copy, or why there is none, and the module's own tensors."""


def spare_of(module: nn.Module) -> Spare:
    try:
        return copy_of(module), own_tensors(module)
    except CannotKeepError as error:
        return error, ()


class OpaqueCalls:
    """Leaves nodes for the calls of modules and functions that are kept whole.

    Attributes:
        batch: the batch size of each batch input of the trace, a symbol or a number; they are equal.
    """

    def __init__(self, device: torch.device, functions: Collection[str] = ()) -> None:
        self.functions = {pkgutil.resolve_name(name): partial(self._call_function, name) for name in functions}
        self._device = device
        self.batch: list[Any] = []
        self._known: dict[Any, Returned] = {}

    def _call_function(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = KeptFunction(name, pkgutil.resolve_name(name))
        return self.call(name, module, spare_of(module), *args, **kwargs)

    def call_own(self, function: Function, args: tuple[Any, ...]) -> Any:
        """Leaves a node for a call of an autograd function, in whose forward gradients are off."""
        module = KeptFunction(function.__qualname__, partial(plain_apply, function), is_own=True)
        return self.call(module.name, module, spare_of(module), *args)

    def call(self, path: str, module: nn.Module, spare: Spare, *args: Any, **kwargs: Any) -> Any:
        """Leaves a node for a call of a module."""
        try:
            return self._leave_node(path, module, spare, args, kwargs)
        except StateError as error:
            raise StateError(f"In {path}, which cannot be traced and would be kept whole, {error}") from error
        except TraceError:
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, CannotKeepError) else f"{type(error).__name__}: {error}"
            what = "function" if isinstance(module, KeptFunction) else "module"
            raise TraceError(
                f"The {what} {path} ({type(module).__qualname__}) can neither be traced nor kept whole: {reason}. "
                f"Expected a {what} of tensors that returns new ones."
            ) from error

    def _leave_node(self, path: str, module: nn.Module, spare: Spare, args: Any, kwargs: Any) -> Any:
        tensors, call = flatten((args, kwargs), levels=1)
        for leaf in call.leaves:
            if isinstance(leaf, Opaque):
                raise CannotKeepError(f"it takes a {leaf.type_name}, which hides tensors")
            if isinstance(leaf, Constant) and isinstance(leaf.value, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise CannotKeepError("it takes a size of the batch as a number")
        places = places_of(module)
        state = own_tensors(module)
        if not tensors and not state:
            raise CannotKeepError("it neither takes nor holds a tensor")
        is_own = isinstance(module, KeptFunction) and module.is_own
        mode = current_precision(), is_own or torch.is_grad_enabled()
        copy, own = spare
        if isinstance(copy, CannotKeepError):
            raise copy
        trial = OpaqueTrial(copy, own, call, tensors, self.batch, self._device, *mode)
        num_parameters = sum(1 for (owner, name), *_ in places if name in owner._parameters)
        inputs = tuple((str(each.shape), each.stride(), each.dtype, each.requires_grad) for each in tensors)
        kind = path, bool(state), call.key(), str(inputs), *mode
        returned = None if state else self._known.get(kind)
        if returned is None:
            returned = self._known[kind] = infer_reductions(trial)
        key = f"{path} {len(_calls)}"
        line = users_line().removeprefix(" at ")
        _calls[key] = OpaqueModule(path, module, copy, call, returned, num_parameters, line)
        results = _module(tensors, state, self.batch[0], key)
        return returned.tree.unflatten(results)


def is_of_keeper(error: BaseException) -> bool:
    """Whether an error says that a module cannot be kept whole."""
    return any(frame.f_code is OpaqueCalls.call.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def take_modules(module: fx.GraphModule) -> None:
    """Has a graph, and the regions in it, call `run_opaque` where a module was kept."""
    for each in regions(module):
        _take_from(each)
        if each is not module:  # a name in the model may be a word of Python, which cannot be compiled
            each.recompile()


def _take_from(module: fx.GraphModule) -> None:
    for number, node in enumerate(list(module.graph.nodes)):
        if node.target is torch.ops.autovaruna.module.default:
            tensors, state, batch, key = node.args
            name = f"kept_{number}"
            setattr(module, name, _calls[key])
            with module.graph.inserting_before(node):
                kept = module.graph.create_node("get_attr", name)
            kept.meta["precision"] = node.meta.get("precision", ())
            node.target, node.args = run_opaque, (kept, batch, tensors, state)


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

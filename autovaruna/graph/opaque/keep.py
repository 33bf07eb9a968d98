"""Keeps submodules that cannot be traced whole: each call leaves the operator ``autovaruna::module`` in the trace."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from threading import local
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import HOOKS, parameter_table, replaced
from autovaruna.errors import TraceError
from autovaruna.graph.guards import restored
from autovaruna.graph.module_state import own_tensors, places_of
from autovaruna.graph.opaque.functions import holder_of_weights
from autovaruna.graph.opaque.infer import USES_WEIGHTS, CannotKeepError, OpaqueTrial, copy_of, infer_outputs
from autovaruna.graph.opaque.run import OpaqueFunction, OpaqueModule, Returned
from autovaruna.graph.operators import run_opaque
from autovaruna.graph.precision import current_precision, precision_of
from autovaruna.graph.side_effects import StateError
from autovaruna.graph.source_lines import users_line
from autovaruna.graph.tree import Constant, HidingLeaf, flatten

_calls: dict[str, OpaqueModule] = {}
NamedFunction = tuple[str, Callable[..., Any]]
_Callable = TypeVar("_Callable", bound=Callable[..., Any])
_thread: Any = local()
Spare = tuple[nn.Module | CannotKeepError, Sequence[Tensor]]
"""What a module is tried out with: a copy, or why there is none, and the module's own tensors."""


@torch.library.custom_op("autovaruna::module", mutates_args=())
def _module(tensors: Sequence[Tensor], state: Sequence[Tensor], batch: int, key: str) -> list[Tensor]:
    """Stands for a call in a trace; `_fake` says what comes out."""
    return [each.clone() for each in _calls[key](batch, tensors, state)]


@_module.register_fake
def _fake(tensors: Sequence[Tensor], state: Sequence[Tensor], batch: int, key: str) -> list[Tensor]:
    device = (*tensors, *state)[0].device
    return [line.make(batch, device) for line in _calls[key].returned.tensors]


def keep_whole(function: _Callable) -> _Callable:
    """Keeps a function whole where a model calls it: one operation that is never cut, and runs as it is.

    For a function in which a trace stops, since its Python goes by the numbers in tensors. Outside of a trace it is the
    function itself.

    Args:
        function: takes tensors, and returns new ones whose shapes follow from those. It is given all tensors that it
            needs, the weights of the model as well.

    Examples:
        >>> import torch
        >>> from autovaruna import keep_whole
        >>> @keep_whole
        ... def without_even(tokens: torch.Tensor) -> torch.Tensor:
        ...     rows = [[token if token % 2 else 1 for token in row] for row in tokens.tolist()]
        ...     return torch.tensor(rows)
        >>> without_even(torch.tensor([[2, 3]]))
        tensor([[1, 3]])
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        keeper: OpaqueCalls | None = getattr(_thread, "keeper", None)  # of the trace on this thread
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return function(*args, **kwargs) if keeper is None else keeper.call_function(name, function, *args, **kwargs)

    return call  # type: ignore[return-value]


@contextmanager
def opaque_calls(
    model: nn.Module, paths: Collection[str], functions: Collection[NamedFunction], device: torch.device
) -> Iterator[OpaqueCalls]:
    """Keeps modules and functions whole while the context lasts; hooks of modules run inside of them."""
    keeper = OpaqueCalls(device, functions)
    modules = {model.get_submodule(path): path for path in sorted(paths, reverse=True)}
    try:
        with restored(map(vars, modules)), replaced(_thread, "keeper", keeper):
            for module, path in modules.items():
                vars(module)["forward"] = partial(keeper.call, path, module, spare_of(module))
                vars(module).update({name: OrderedDict() for name in HOOKS if name in vars(module)})
            yield keeper
    finally:
        _calls.clear()


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

    def __init__(self, device: torch.device, functions: Collection[NamedFunction] = ()) -> None:
        self.functions = {function: partial(self.call_function, name, function) for name, function in functions}
        self._device = device
        self.batch: list[Any] = []
        self._known: dict[Any, Returned] = {}

    def call_function(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = OpaqueFunction(name, function)
        holder = holder_of_weights((args, kwargs, function))
        spare = (CannotKeepError(USES_WEIGHTS.format(holder)), ()) if holder else spare_of(module)
        return self.call(name, module, spare, *args, **kwargs)

    def call(self, path: str, module: nn.Module, spare: Spare, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._leave_node(path, module, spare, args, kwargs)
        except StateError as error:
            raise StateError(f"In {path}, which cannot be traced and would be kept whole, {error}") from error
        except TraceError:
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, CannotKeepError) else f"{type(error).__name__}: {error}"
            what = "function" if isinstance(module, OpaqueFunction) else "module"
            raise TraceError(
                f"The {what} {path} ({type(module).__qualname__}) can neither be traced nor kept whole: {reason}. "
                f"Expected a {what} of tensors that returns new ones."
            ) from error

    def _leave_node(self, path: str, module: nn.Module, spare: Spare, args: Any, kwargs: Any) -> Any:
        tensors, call = flatten((args, kwargs), levels=1)
        for leaf in call.leaves:
            if isinstance(leaf, HidingLeaf):
                raise CannotKeepError(f"it takes a {leaf.type_name}, which hides tensors")
            if isinstance(leaf, Constant) and isinstance(leaf.value, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise CannotKeepError("it takes a size of the batch as a number")
        places = places_of(module)
        state = own_tensors(module)
        if not tensors and not state:
            raise CannotKeepError("it neither takes nor holds a tensor")
        is_own = isinstance(module, OpaqueFunction) and module.is_own  # in its forward gradients are off
        mode = current_precision(), is_own or torch.is_grad_enabled()
        copy, own = spare
        if isinstance(copy, CannotKeepError):
            raise copy
        trial = OpaqueTrial(copy, own, call, tensors, self.batch, self._device, *mode)
        num_parameters = sum(1 for (owner, name), *_ in places if name in parameter_table(owner))
        inputs = tuple((str(each.shape), each.stride(), each.dtype, each.requires_grad) for each in tensors)
        kind = path, bool(state), call.key(), str(inputs), *mode
        returned = None if state else self._known.get(kind)
        if returned is None:
            returned = self._known[kind] = infer_outputs(trial)
        key = f"{path} {len(_calls)}"
        line = users_line().removeprefix(" at ")
        _calls[key] = OpaqueModule(path, module, copy, call, returned, num_parameters, line, mode[1])
        results = _module(tensors, state, self.batch[0], key)
        return returned.tree.unflatten(results)


def is_of_keeper(error: BaseException) -> bool:
    """Whether an error says that a module cannot be kept whole."""
    return any(frame.f_code is OpaqueCalls.call.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def place_modules(module: fx.GraphModule) -> None:
    """Has a graph call `run_opaque` where a module was kept."""
    for number, node in enumerate(list(module.graph.nodes)):
        if node.target is torch.ops.autovaruna.module.default:
            tensors, state, batch, key = node.args
            name = f"kept_{number}"
            setattr(module, name, _calls[key])
            with module.graph.inserting_before(node):
                kept = module.graph.create_node("get_attr", name)
            kept.meta["precision"] = precision_of(node)
            node.target, node.args = run_opaque, (kept, batch, tensors, state)

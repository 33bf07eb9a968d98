"""Runs a submodule that cannot be traced: one node of the graph calls it as it is, with the tensors of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import local
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from autovaruna._torch import FakeTensor, replaced, without_saved_tensors_hooks
from autovaruna.errors import InputError, OrderError
from autovaruna.graph.module_state import places_of, with_state
from autovaruna.graph.opaque.functions import plain_checkpoints
from autovaruna.graph.operators import is_differentiable, run_opaque
from autovaruna.graph.outside import OutsidePlace, read_outside
from autovaruna.graph.random import python_generators
from autovaruna.graph.tree import Tree, flatten


class _ProfilingThread(local):
    is_profiling = False


_thread = _ProfilingThread()


def is_profiling() -> bool:
    """Whether only time and memory count on this thread."""
    return _thread.is_profiling


@contextmanager
def profiling_mode() -> Iterator[None]:
    """Has copies stand in for modules that are kept whole: measuring changes no state of the model."""
    with replaced(_thread, "is_profiling", True):
        yield


@dataclass(frozen=True)
class OutputShape:
    """A tensor that a module returns, for every batch size.

    Attributes:
        lengths: slope and start of each dimension: it has ``slope * batch + start`` elements.
        order: its dimensions from the slowest in memory to the fastest.
    """

    lengths: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    def shape(self, batch: Any) -> list[Any]:
        return [slope * batch + start if slope else start for slope, start in self.lengths]

    def make(self, batch: Any, device: torch.device) -> Tensor:
        return torch.empty_permuted(self.shape(batch), self.order, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Returned:
    """What a module returns: a structure, and its tensors.

    Attributes:
        changes_state: whether it was seen to change its state.
        is_linear_back: whether gradients that go through it grow with those that come in, which it may clip.
    """

    tree: Tree
    tensors: tuple[OutputShape, ...]
    changes_state: bool
    is_linear_back: bool = True


class OpaqueFunction(nn.Module):
    """Calls a function that is kept whole: one of torch, one that is marked, or ``apply`` of an autograd function."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__()
        self.name, self.function = name, function
        self.is_own = isinstance(getattr(function, "__self__", None), type(torch.autograd.Function))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        return self.name

    def __deepcopy__(self, memo: dict[int, Any]) -> OpaqueFunction:
        """Returns one of the same function; TorchScript's cannot be copied."""
        return OpaqueFunction(self.name, self.function)


class OpaqueModule:
    """A submodule that is kept whole.

    Attributes:
        num_parameters: how many of the tensors of its state are parameters; buffers follow them.
        line: ``file:line (code)`` of the user's line that calls it.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        stand_in: nn.Module,
        call: Tree,
        returned: Returned,
        num_parameters: int,
        line: str,
        is_differentiated: bool,
    ) -> None:
        self.path, self.line, self._is_differentiated = path, line, is_differentiated
        self._modules = {False: module, True: stand_in}
        self._places = {is_stand_in: places_of(each) for is_stand_in, each in self._modules.items()}
        self._call, self.returned, self.num_parameters = call, returned, num_parameters

    @property
    def adds_up(self) -> bool:
        """Whether a number that it returns is a sum over the samples: it is asked for by its name."""
        return any(words == "'sum'" for _, words in self._call.constants())

    @cached_property
    def backward_places(self) -> list[OutsidePlace]:
        """Returns what the backward of an autograd function reads from outside of it."""
        module = self._modules[False]
        if not isinstance(module, OpaqueFunction) or not module.is_own:
            return []
        return read_outside([SimpleNamespace(backward=vars(module)["function"].__self__.backward)], ("backward",))

    def __repr__(self) -> str:
        module = self._modules[False]
        return f"KeptModule({type(module).__qualname__}, {module!r}, {self._call.key()}, {self.returned.tree.key()})"

    def __call__(self, batch: int, tensors: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        """Runs the module; `state` is its parameters, then its buffers, which it may change."""
        if any(isinstance(each, FakeTensor) for each in (*tensors, *state)):
            return self._pretend(batch, tensors, state)
        is_stand_in = is_profiling()
        module, places = self._modules[is_stand_in], self._places[is_stand_in]
        given = [*state[: self.num_parameters], *(buffer.clone() for buffer in state[self.num_parameters :])]
        args, kwargs = self._call.unflatten(tensors)
        seed = torch.default_generator.initial_seed()
        saving = without_saved_tensors_hooks()  # a forward may go backward itself, or transform functions
        gradients = torch.set_grad_enabled(self._is_differentiated and torch.is_grad_enabled())
        with gradients, with_state(places, given), plain_checkpoints(), python_generators(seed), saving:
            outputs, tree = flatten(module(*args, **kwargs), "output")
            with torch.no_grad():  # what it has changed or assigned
                for ((owner, name), *_), buffer in list(zip(places, state, strict=True))[self.num_parameters :]:
                    buffer.copy_(getattr(owner, name))
        got = [(tuple(each.shape), each.dtype) for each in outputs]
        expected = [(tuple(line.shape(batch)), line.dtype) for line in self.returned.tensors]
        if got != expected or tree.key() != self.returned.tree.key():
            raise InputError(
                f"The module {self.path}, which is kept whole since it cannot be traced, returns something else than "
                f"when it was tried: got {_words(got)}, expected {_words(expected)} for {batch} samples and the same "
                "values in place of what is no tensor. Return tensors whose shapes follow from those of the arguments."
            )
        return _apart(outputs, [*tensors, *given])

    def _pretend(self, batch: int, tensors: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        """Returns fake results of fake arguments."""
        made = [line.make(batch, (*tensors, *state)[0].device) for line in self.returned.tensors]
        sources = [each for each in (*tensors, *state) if each.requires_grad]
        if not sources or not torch.is_grad_enabled():
            return made
        return list(_Through.apply(made, *sources))  # type: ignore[no-untyped-call]


class _Through(torch.autograd.Function):
    """Joins fake results to the fake tensors that they follow from; keeps these, as a module would keep some."""

    @staticmethod
    def forward(ctx: Any, results: list[Tensor], *sources: Tensor) -> Any:
        ctx.mark_non_differentiable(*(each for each in results if not is_differentiable(each)))
        ctx.save_for_backward(*sources)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, *map(torch.empty_like, ctx.saved_tensors))


def opaque_module_of(node: fx.Node) -> OpaqueModule | None:
    """Returns the module that a node runs as it is; None: the node runs something else."""
    if node.target is not run_opaque:
        return None
    holder: Any = node.args[0]
    kept: OpaqueModule = getattr(node.graph.owning_module, holder.target)
    return kept


def saving_nothing() -> saved_tensors_hooks:
    """Keeps nothing for a backward; under no_grad, lstm and others choose another kernel, with other last bits."""
    return saved_tensors_hooks(lambda tensor: None, _refuse_backward)


def _refuse_backward(nothing: None) -> Tensor:
    raise OrderError(
        "Backward reached a tensor that forward has left beside what it returns (by a hook, in an attribute or a "
        "global), while its trace was tried out. Expected a loss made of what the model returns; return that tensor, "
        "too."
    )


def _apart(outputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors with memory of their own, which the graph may change in place."""
    taken = {each.untyped_storage().data_ptr() for each in given}
    found: list[Tensor] = []
    for each in outputs:
        memory = each.untyped_storage().data_ptr()
        found.append(each.clone() if memory in taken else each)
        taken.add(memory)
    return found


def _words(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{shape} {str(dtype).removeprefix('torch.')}" for shape, dtype in kinds) or "no tensor"

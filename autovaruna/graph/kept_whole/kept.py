"""Runs a submodule that is kept whole: one node of the graph calls it as it is, with the tensors of this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from autovaruna._torch import FakeTensor, top_saved_tensors_hooks
from autovaruna.errors import InputError, OrderError
from autovaruna.graph.exporting.guards import plain_checkpoints
from autovaruna.graph.kept_whole.in_place import Places, in_place, places_of
from autovaruna.graph.kept_whole.rehearsal import is_rehearsing
from autovaruna.graph.kept_whole.returned import Join, Returned
from autovaruna.graph.own_cache import own_cache
from autovaruna.graph.precision import current_precision, in_precision
from autovaruna.graph.random import default_generator, python_generators
from autovaruna.graph.tree import Tree, flatten


class KeptModule:
    """A submodule that is kept whole.

    Args:
        path: Its path in the model.
        module: The module.
        stand_in: A copy of it without numbers, which runs when only time and memory count.
        call: Structure of its arguments.
        returned: What it returns.
        num_parameters: How many of the tensors of its state are parameters; buffers follow them.

    Attributes:
        returned: what it returns.
        num_parameters: how many of the tensors of its state are parameters.
        may_choose: whether it may use parameters in one call that it does not use in another.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        stand_in: nn.Module,
        call: Tree,
        returned: Returned,
        num_parameters: int,
    ) -> None:
        self.path = path
        self._modules = {False: module, True: stand_in}
        self._places = {is_stand_in: places_of(each) for is_stand_in, each in self._modules.items()}
        self._call = call
        self.returned = returned
        self.num_parameters = num_parameters
        self.may_choose = num_parameters > 0

    def adds_up(self, place: int) -> bool:
        """Whether a tensor that it returns is a sum over the samples: it was tried out, or is asked for by name."""
        if (join := self.returned.tensors[place].join) is not Join.UNKNOWN:
            return join is Join.SUM
        return any("reduction" in path and words == "'sum'" for path, words in self._call.constants())

    def __repr__(self) -> str:
        module = self._modules[False]
        return f"KeptModule({type(module).__qualname__}, {module!r}, {self._call.key()}, {self.returned.tree.key()})"

    def __call__(self, batch: int, tensors: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        """Runs the module.

        Args:
            batch: Samples in the micro-batch.
            tensors: The tensors among its arguments.
            state: Its parameters, then its buffers, which it may change.

        Returns:
            The tensors that it returns.

        Raises:
            InputError: it returns something else than when it was traced.
        """
        if any(isinstance(each, FakeTensor) for each in (*tensors, *state)):
            return self._pretend(batch, tensors, state)
        is_stand_in = is_rehearsing()
        module, places = self._modules[is_stand_in], self._places[is_stand_in]
        given = [*state[: self.num_parameters], *(buffer.clone() for buffer in state[self.num_parameters :])]
        args, kwargs = self._call.unflatten(tensors)
        device = next(each.device for each in (*given, *tensors))
        seed = default_generator(device).initial_seed()
        with in_place(places, given), plain_checkpoints(), python_generators(seed), own_cache(), _saving():
            outputs, tree = flatten(_called(module, args, kwargs), "output")
            self._take_buffers(places, state)
        self._check(outputs, tree, batch)
        return _apart(outputs, [*tensors, *given])

    def _take_buffers(self, places: Places, state: Sequence[Tensor]) -> None:
        """Copies the module's buffers, changed or assigned, into this rank's."""
        with torch.no_grad():
            for ((module, name), *_), buffer in list(zip(places, state, strict=True))[self.num_parameters :]:
                buffer.copy_(getattr(module, name))

    def _check(self, outputs: Sequence[Tensor], tree: Tree, batch: int) -> None:
        got = [(tuple(each.shape), each.dtype) for each in outputs]
        expected = [(tuple(line.shape(batch)), line.dtype) for line in self.returned.tensors]
        if got != expected or tree.key() != self.returned.tree.key():
            raise InputError(
                f"The module {self.path}, which is kept whole since it cannot be traced, returns something else than "
                f"when it was tried: got {_words(got)}, expected {_words(expected)} for {batch} samples and the same "
                "values in place of what is no tensor. Return tensors whose shapes follow from those of the arguments."
            )

    def _pretend(self, batch: int, tensors: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        """Returns fake results of fake arguments; all buffers count as changed."""
        for buffer in state[self.num_parameters :]:
            torch.autograd.graph.increment_version(buffer)
        made = [line.make(batch, (*tensors, *state)[0].device) for line in self.returned.tensors]
        sources = [each for each in (*tensors, *state) if each.requires_grad]
        if not sources or not torch.is_grad_enabled():
            return made
        return list(_Through.apply(made, *sources))  # type: ignore[no-untyped-call]


class _Through(torch.autograd.Function):
    """Joins fake results to the fake tensors that they follow from; keeps these, as a module would keep some."""

    @staticmethod
    def forward(ctx: Any, results: list[Tensor], *sources: Tensor) -> Any:
        """Returns the results."""
        ctx.mark_non_differentiable(*(each for each in results if not is_differentiable(each)))
        ctx.save_for_backward(*sources)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Returns empty gradients."""
        return (None, *map(torch.empty_like, ctx.saved_tensors))


def is_differentiable(tensor: Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def kept_by(node: fx.Node) -> KeptModule | None:
    """Returns the module that a node runs as it is; None: the node runs something else."""
    if node.target is not run_kept:
        return None
    holder: Any = node.args[0]
    kept: KeptModule = getattr(node.graph.owning_module, holder.target)
    return kept


def run_kept(kept: KeptModule, batch: int, tensors: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
    """Runs a module that is kept whole; a function, since graphs call functions."""
    return kept(batch, tensors, state)


def _called(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Calls a module; where function transforms refuse that saved tensors are watched, on a thread where none are."""
    try:
        return module(*args, **kwargs)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
    is_enabled, precision = torch.is_grad_enabled(), current_precision()

    def run() -> Any:
        with torch.set_grad_enabled(is_enabled), in_precision(precision):
            return module(*args, **kwargs)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@contextmanager
def _saving() -> Iterator[None]:
    """Lets a forward that goes backward itself do so where nothing is saved for a backward."""
    with saved_tensors_hooks(_same, _same) if _is_forgetting() else nullcontext():
        yield


def forgetting() -> saved_tensors_hooks:
    """Keeps nothing for a backward; under no_grad, lstm and others choose another kernel, with other last bits."""
    return saved_tensors_hooks(lambda tensor: None, _refuse_backward)


def _refuse_backward(nothing: None) -> Tensor:
    raise OrderError(
        "Backward reached a tensor that forward has left beside what it returns (by a hook, in an attribute or a "
        "global), while its trace was tried out. Expected a loss made of what the model returns; return that tensor, "
        "too."
    )


def _is_forgetting() -> bool:
    """Whether autograd is told how to save tensors."""
    return top_saved_tensors_hooks(True) is not None


def _same(tensor: Tensor) -> Tensor:
    return tensor


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

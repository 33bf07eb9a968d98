"""Runs a model and its graph on the same samples, with random numbers that are alike."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn

from autovaruna._torch import TorchDispatchMode, pytree
from autovaruna.graph.guards import OF_MODULES, entries
from autovaruna.graph.module_state import changed_attributes
from autovaruna.graph.opaque.run import OpaqueModule, forgetting, run_opaque
from autovaruna.graph.precision import in_precision, precision_of, without_autocast
from autovaruna.graph.profiling_mode import profiling_mode
from autovaruna.graph.random import default_generator, draw_from, own_cache, python_generators, untouched_generator
from autovaruna.graph.source_lines import modules_of
from autovaruna.graph.traced import TracedModel
from autovaruna.graph.tree import flatten

_SUMS = ("mm", "conv", "attention", "sum", "mean", "var", "norm", "softmax", "linear", "rnn")


class DrawnAlike(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets each random operator draw numbers that follow from its name and arguments, whatever was drawn before.

    Tensors among them count by shape and dtype. The law of the numbers is the operator's own.

    Args:
        device: Whose default generator operators draw from; it is left in another state.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        if isinstance(given.get("generator"), torch.Generator):
            given["generator"] = None
        return draw_from(_seed(func, args, given), self._device, partial(func, *args, **given))


class Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes the results of sums (products, means, norms, ...) by as much as another order of summing may.

    Args:
        device: Where the model runs.
        seed: Of the changes.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator(device).manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.endswith("_") or not any(each in name for each in _SUMS):
            return result
        return pytree.tree_map_only(Tensor, self._rounded, result)

    def _rounded(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.device != self._generator.device:
            return tensor
        step = torch.finfo(tensor.dtype).eps
        noise = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float32, device=tensor.device)
        return tensor.mul_((1.0 + step * (2.0 * noise.double() - 1.0)).to(tensor.dtype))


def _seed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    leaves = pytree.tree_leaves((args, kwargs))
    words = [f"{tuple(each.shape)}{each.dtype}" if isinstance(each, Tensor) else repr(each) for each in leaves]
    digest = hashlib.blake2b(f"{func}{words}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


_SEED = 0
Around = AbstractContextManager[Any]
Returned = dict[str, list[Tensor]]
"""What modules have returned last, by path, in that order."""


@dataclass(frozen=True)
class EagerVsGraph:
    """A model and its trace, on the same samples.

    Args:
        traced: The trace.
        model: The model, all of whose numbers are here.
        tensors: The samples, in the order of the call's inputs.
        device: Where both run.
    """

    traced: TracedModel
    model: nn.Module
    tensors: Sequence[Tensor]
    device: torch.device

    def plain(
        self, around: AbstractContextManager[Any] | None = None, returned: Returned | None = None
    ) -> list[Tensor]:
        """Runs a copy of the model; returns its outputs, then its state after that.

        Args:
            around: Changes what operators do.
            returned: Gets what each module returns.
        """
        own = self._copy()
        if returned is not None:
            for path, module in own.named_modules():
                module.register_forward_hook(partial(_note, returned, path))
        return self._called(own, around)

    def plain_again(self) -> tuple[list[Tensor], list[str]]:
        """Calls a copy twice, with the same samples and state; returns the same of its second call.

        Returns:
            Outputs and state, and the names of attributes that the first call has changed.
        """
        own = self._copy()
        self._called(own)
        left = changed_attributes(self.model, own)
        named, before = _state(own), _state(self.model)
        with torch.no_grad():
            for name in self.state:
                named[name].data = before[name].detach().clone()
        return self._called(own), left

    def _called(self, own: nn.Module, around: AbstractContextManager[Any] | None = None) -> list[Tensor]:
        args, kwargs = self.traced.call.tree.unflatten(self._inputs())
        seeded = [own.get_submodule(path).register_forward_pre_hook(_seed_python) for path in self._kept_paths]
        with around or nullcontext(), self._alike(), in_precision(self.traced.call.precision), _as_it_is():
            outputs, _ = flatten(own(*args, **kwargs), "output")
        for hook in seeded:
            hook.remove()
        named = _state(own)
        return [each.detach().clone() for each in (*outputs, *(named[name] for name in self.state))]

    def trace(
        self,
        nodes: dict[str, tuple[fx.Node, Any]] | None = None,
        each: Callable[[Run, fx.Node], Any] | None = None,
        around: AbstractContextManager[Any] | None = None,
    ) -> list[Tensor]:
        """Runs the graph; returns the same.

        Args:
            nodes: Gets the last node of each module, by path, with its value.
            each: Runs a node.
            around: Changes what operators do.
        """
        clones = self._clones()
        named = {name: clones.get(id(tensor), tensor) for name, tensor in _state(self.model).items()}
        run = Run(self.traced.module, named | self.traced.constants, self.device, nodes, each)
        with around or nullcontext(), self._alike(), without_autocast(), profiling_mode():
            outputs = run.run(*self._inputs(), enable_io_processing=False)
        return [each.detach() for each in (*outputs, *(named[name] for name in self.state))]

    @cached_property
    def state(self) -> list[str]:
        """Names of what a call may change: all buffers, and some parameters."""
        return sorted({*dict(self.model.named_buffers()), *self.traced.changed_state})

    @cached_property
    def _kept_paths(self) -> list[str]:
        """The submodules that are kept whole."""
        modules, held = dict(self.model.named_modules()), vars(self.traced.module).values()
        return [each.path for each in held if isinstance(each, OpaqueModule) and each.path in modules]

    @contextmanager
    def _alike(self) -> Iterator[None]:
        """Lets random numbers be the same both ways, keeps nothing for a backward, and gives generators back."""
        keeps = nullcontext() if self._kept_paths else forgetting()
        with untouched_generator(self.device), python_generators(_SEED), keeps, DrawnAlike(self.device):
            yield

    def _inputs(self) -> list[Tensor]:
        pairs = zip(self.tensors, self.traced.call.inputs, strict=True)
        return [_copy_of(each).requires_grad_(spec.needs_gradient) for each, spec in pairs]

    def _clones(self) -> dict[int, Tensor]:
        """Returns copies of what a call may change, by the identity of the tensor."""
        named = _state(self.model)
        return {id(named[name]): _copy_of(named[name]) for name in self.state}

    def _copy(self) -> nn.Module:
        """Returns a copy of the model that shares with it the numbers that no call changes."""
        memo: dict[int, Any] = {id(each): _copy_of(each) for each in _made_by_operations(self.model)}
        memo |= {id(each): each for each in self.model.parameters()}
        return copy.deepcopy(self.model, memo | self._clones())


class Run(fx.Interpreter):
    """Runs a graph with the numbers of its model."""

    extra_traceback = False

    def __init__(
        self,
        module: fx.GraphModule,
        attributes: dict[str, Tensor],
        device: torch.device,
        nodes: dict[str, tuple[fx.Node, Any]] | None,
        each: Callable[[Run, fx.Node], Any] | None = None,
    ) -> None:
        super().__init__(module)
        self._each = each or Run.plain
        self._attributes = attributes
        self._device = device
        self._nodes = nodes

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        known = self._attributes.get(str(target))
        return super().get_attr(target, args, kwargs) if known is None else known

    def plain(self, node: fx.Node) -> Any:
        """Runs a node as it is."""
        return super().run_node(node)

    def run_node(self, n: fx.Node) -> Any:
        if n.target is run_opaque:
            default_generator(self._device).manual_seed(_SEED)  # a module that is kept seeds Python's by it
        precision = precision_of(n)
        with in_precision(precision) if precision else nullcontext():
            value = self._each(self, n)
        if self._nodes is not None:
            self._nodes |= dict.fromkeys(modules_of(n), (n, value))
        return value


@contextmanager
def _as_it_is() -> Iterator[None]:
    """Compiles nothing, and leaves cached values as they are."""
    eagerly: Any = torch.compiler.set_stance("force_eager")
    with eagerly, own_cache():
        yield


def _state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _made_by_operations(model: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors in attributes that Python cannot copy."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in OF_MODULES:
                yield from (each for _, each in entries("", value) if isinstance(each, Tensor) and not each.is_leaf)


def _copy_of(tensor: Tensor) -> Tensor:
    """Returns a copy that is a parameter if the tensor is one."""
    made = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _seed_python(module: nn.Module, args: Any) -> None:
    random.seed(_SEED)
    numpy.random.seed(_SEED)


def _note(returned: Returned, path: str, module: nn.Module, args: Any, result: Any) -> None:
    returned.pop(path, None)
    returned[path] = [
        each.detach() for each in pytree.tree_leaves(result) if isinstance(each, Tensor) and not each.is_nested
    ]

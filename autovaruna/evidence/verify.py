"""Compares a model with its graph on a few samples, before it is split, and with its own second call.

Each random operator draws the same numbers in both, so every difference is one of the computation.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autovaruna._torch import TorchDispatchMode, pytree
from autovaruna.errors import TraceError
from autovaruna.graph.call import InputSpec
from autovaruna.graph.evaluate import NodeError, call, evaluate
from autovaruna.graph.export.watchers import without_script_hooks
from autovaruna.graph.guards import OF_MODULES, attributes_of, entries, full_name, hooks_of
from autovaruna.graph.opaque.run import OpaqueModule, profiling_mode, saving_nothing
from autovaruna.graph.operators import run_opaque
from autovaruna.graph.precision import compiling_nothing, in_precision, without_autocast
from autovaruna.graph.random import draw_from, python_generators, seed_generators, untouched_generator
from autovaruna.graph.rounding import BY_ROUNDING, CLEAR, SEEDS, Rounded, distance, tolerance, wide
from autovaruna.graph.side_effects import (
    changed,
    changed_attributes,
    python_state,
    restored_attributes,
    warn_of_running,
)
from autovaruna.graph.source_lines import first_line, modules_of, origin
from autovaruna.graph.traced import TracedModel
from autovaruna.graph.tree import flatten

_SEED = 0
_LESS = 0.75
"""Scales inputs and weights of a first call."""
_MORE_CALLS = 8
ModuleOutputs = dict[str, list[Tensor]]
"""What modules have returned last, by path, in that order."""
logger = logging.getLogger(__name__)
_MOST_NAMES = 5


class DrawnAlike(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has each random operator draw numbers that follow from its name and arguments, whatever was drawn before.

    Of tensors among the arguments, shape and dtype count.
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
        return draw_from(_seed(func, args, given), self._device, func, *args, **given)


def _seed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    leaves = pytree.tree_leaves((args, kwargs))
    words = [f"{tuple(each.shape)}{each.dtype}" if isinstance(each, Tensor) else repr(each) for each in leaves]
    digest = hashlib.blake2b(f"{func}{words}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class EagerVsGraph:
    """A model and its trace, on the same samples."""

    traced: TracedModel
    model: nn.Module
    tensors: Sequence[Tensor]
    device: torch.device

    def plain(
        self,
        around: AbstractContextManager[Any] | None = None,
        returned: ModuleOutputs | None = None,
        own: nn.Module | None = None,
    ) -> list[Tensor]:
        """Runs a copy of the model, its `own` if it is given; returns its outputs, then its state after that."""
        own = self.copy() if own is None else own
        if returned is not None:
            for path, module in own.named_modules():
                module.register_forward_hook(partial(_record_outputs, returned, path))
        with restored_attributes(self.model):
            return self._called(own, around)

    def again(self) -> Iterator[tuple[list[Tensor], list[str]]]:
        """Yields outputs and state of a copy's second call, and the names of attributes that the first has changed.

        Where each call changes other Python state than tensors, those of some more calls, too, and the names of that.
        """
        with restored_attributes(self.model) as outside:
            before = python_state(self.model, outside)
            own = self._called_before()
            left, first = changed_attributes(self.model, own) or list(self.traced.left), python_state(own, outside)
            for _ in range(_MORE_CALLS):
                self._give_numbers(own)
                yield self._called(own), left
                second = python_state(own, outside)
                counted = {full_name(each.path, each.name) for each in self.traced.changes}
                left = sorted((changed(before, first) & changed(first, second)) - counted)
                if not left:
                    return
            warn_of_running(left, self.model)

    def _give_numbers(self, own: nn.Module) -> None:
        """Gives a copy the numbers of the model again."""
        named = state_of(own)
        with torch.no_grad():
            for name, tensor in state_of(self.model).items():
                if name in self.state:
                    named[name].data = tensor.detach().clone()
                elif named[name] is not tensor:
                    named[name].data = tensor.detach()

    def _called_before(self) -> nn.Module:
        """Returns a copy of the model that has been called, with other numbers where forward leaves tensors.

        What it makes of the first batch, or of the first weights, and keeps, would be the same again with the same.
        """
        if self.traced.left:
            own = self.copy(_LESS)
            try:
                self._called(own, inputs=[*map(self._other, self._inputs(), self.traced.call.inputs)])
            except Exception as error:  # it takes no such numbers
                logger.info("the first of two calls has the same numbers: %s", _words(error))
            else:
                return own
        own = self.copy()
        self._called(own)
        return own

    @staticmethod
    def _other(tensor: Tensor, spec: InputSpec) -> Tensor:
        """Returns an input of samples in another order, and smaller; what is none of the batch stays."""
        if not spec.is_batch:
            return tensor
        other = tensor.detach().roll(1, 0)
        return (other * _LESS if other.is_floating_point() else other).requires_grad_(spec.needs_gradient)

    def _called(
        self,
        own: nn.Module,
        around: AbstractContextManager[Any] | None = None,
        inputs: list[Tensor] | None = None,
    ) -> list[Tensor]:
        args, kwargs = self.traced.call.arguments(self._inputs() if inputs is None else inputs)
        for path in self._kept_paths:
            own.get_submodule(path).register_forward_pre_hook(_seed_python)
        with around or nullcontext(), self._alike(), in_precision(self.traced.call.precision), compiling_nothing():
            call = self.traced.call
            outputs, _ = flatten(call.of(own)(*args, **kwargs), "output", opens_caches=call.tree.has_caches)
        named = state_of(own)
        return [each.detach().clone() for each in (*outputs, *(named[name] for name in self.state))]

    def traced_graph(self, nodes: dict[str, tuple[fx.Node, Any]] | None = None) -> list[Tensor]:
        """Runs the graph; returns the same. `nodes` gets the last node of each module, by path, with its value."""
        clones = self._clones()
        named = {name: clones.get(id(tensor), tensor) for name, tensor in state_of(self.model).items()}
        graph, held = self.traced.module.graph, named | self.traced.constants
        inputs = dict(zip(graph.find_nodes(op="placeholder"), self._inputs(), strict=True))

        def value_of(node: fx.Node) -> Any:
            name = str(node.target)
            return inputs[node] if node in inputs else held[name] if name in held else getattr(self.traced.module, name)

        def run(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if node.target is run_opaque:
                seed_generators(self.device, _SEED)  # a module that is kept seeds Python's by it
            value = call(node, args, kwargs)
            if nodes is not None:
                nodes.update(dict.fromkeys(modules_of(node), (node, value)))
            return value

        returned: Any = graph.output_node().args[0]
        with self._alike(), without_autocast(), profiling_mode():
            values = evaluate([each for each in graph.nodes if each.op == "call_function"], value_of, returned, run)
        return [each.detach() for each in (*map(values.__getitem__, returned), *map(named.__getitem__, self.state))]

    @cached_property
    def state(self) -> list[str]:
        """Names of what a call may change: all buffers, and some parameters."""
        return sorted({*dict(self.model.named_buffers()), *self.traced.changed_state})

    @cached_property
    def _kept_paths(self) -> list[str]:
        modules, held = dict(self.model.named_modules()), vars(self.traced.module).values()
        return [each.path for each in held if isinstance(each, OpaqueModule) and each.path in modules]

    @contextmanager
    def _alike(self) -> Iterator[None]:
        """Draws the same random numbers in model and graph, keeps nothing for a backward, and restores generators."""
        keeps = nullcontext() if self._kept_paths else saving_nothing()
        formula = sdpa_kernel(SDPBackend.MATH) if self._drops_attention else nullcontext()
        with untouched_generator(self.device), python_generators(_SEED), keeps, formula, DrawnAlike(self.device):
            yield

    @cached_property
    def _drops_attention(self) -> bool:
        """Whether attention has dropout: kernels of a GPU draw each in its own way, and a mask chooses among them."""
        attention = torch.ops.aten.scaled_dot_product_attention.default
        nodes = [name for name, node in self.traced.nodes.items() if node.target is attention]
        return any(self.traced.facts[name].is_random for name in nodes)

    def _inputs(self) -> list[Tensor]:
        pairs = zip(self.tensors, self.traced.call.inputs, strict=True)
        return [_copy_of(each).requires_grad_(spec.needs_gradient) for each, spec in pairs]

    def _clones(self) -> dict[int, Tensor]:
        """Returns copies of what a call may change, by the identity of the tensor."""
        named = state_of(self.model)
        return {id(named[name]): _copy_of(named[name]) for name in self.state}

    def copy(self, factor: float = 1.0) -> nn.Module:
        """Returns a copy of the model that shares with it the numbers that no call changes, or has others, by a factor.

        With a factor it takes the memory of the weights once more.
        """
        memo: dict[int, Any] = {id(each): _copy_of(each) for each in _made_by_operations(self.model)}
        memo |= {id(each): each if factor == 1.0 else _scaled(each, factor) for each in self.model.parameters()}
        memo |= {id(each): each for each in hooks_of(self.model)}
        with without_script_hooks(self.model) if self.traced.watched else nullcontext():
            return copy.deepcopy(self.model, memo | self._clones())


def state_of(model: nn.Module) -> dict[str, Tensor]:
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
    is_parameter = isinstance(tensor, nn.Parameter)
    made = nn.Parameter(made, tensor.requires_grad) if is_parameter else made.requires_grad_(tensor.requires_grad)
    vars(made).update(attributes_of(tensor))
    return made


def _scaled(weight: nn.Parameter, factor: float) -> nn.Parameter:
    is_whole = not (weight.is_floating_point() or weight.is_complex())
    return nn.Parameter(weight.detach() * (1 if is_whole else factor), weight.requires_grad)


def _seed_python(module: nn.Module, args: Any) -> None:
    random.seed(_SEED)
    numpy.random.seed(_SEED)


def _record_outputs(returned: ModuleOutputs, path: str, module: nn.Module, args: Any, result: Any) -> None:
    returned.pop(path, None)
    returned[path] = [
        each.detach() for each in pytree.tree_leaves(result) if isinstance(each, Tensor) and not each.is_nested
    ]


def compare(traced: TracedModel, model: nn.Module, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Makes sure that a trace computes what its model does, all of whose numbers are on `device`.

    Both run on the samples, drawing the same random numbers; neither leaves anything behind. The model must give the
    same in a second call, or it keeps something in Python that a trace would fix. If they differ, the model runs again
    with sums that are off by their rounding, to see whether that explains it.

    Raises:
        TraceError: they differ; says where that begins.
    """
    both = EagerVsGraph(traced, model, tensors, device)
    own: nn.Module | None = None
    plain: list[Tensor] = []
    try:
        own = both.copy()
        plain = both.plain(own=own)
        ours = both.traced_graph()
    except Exception as error:
        if own is not None and not plain:  # the model itself failed: the step says so
            return
        logger.info("the trace was not compared with the model: %s", _words(error))
        return
    _compare(both, plain, ours, model)
    try:
        others = (left for again, left in both.again() if _differs(again, plain, tolerance(traced.values())))
        left = next(others, None)
    except Exception as error:  # plain PyTorch will say so
        logger.info("the trace was not compared with a second call: %s", _words(error))
        return
    if left is not None:
        raise TraceError(
            f"forward changes Python state, and its next call computes something else: got changes of "
            f"{', '.join(left[:_MOST_NAMES]) or 'what is no attribute of a module'}, which a trace would fix for good. "
            "Expected a forward that changes buffers alone: make it one with register_buffer(). What has rows of the "
            "samples, as the state of an LSTM, cannot be one: pass it as an argument, the batch first, and return it."
        )


def _differs(again: Sequence[Tensor], plain: Sequence[Tensor], allowed: float) -> bool:
    return any(distance(one, other) > allowed for one, other in zip(again, plain, strict=True))


def _words(error: Exception) -> str:
    return first_line(error) if isinstance(error, NodeError) else f"{type(error).__name__}: {first_line(error)}"


def _compare(both: EagerVsGraph, plain: list[Tensor], ours: list[Tensor], model: nn.Module) -> None:
    """Makes sure that what the trace gives, `ours`, is what a call of the model gives."""
    allowed = tolerance(both.traced.values())
    found = [distance(one, other) for one, other in zip(ours, plain, strict=True)]
    if all(each <= allowed for each in found):
        return
    rounded = [both.plain(Rounded(both.device, seed)) for seed in SEEDS]
    noise = [max(distance(run[place], each) for run in rounded) for place, each in enumerate(plain)]
    bounds = [max(allowed, BY_ROUNDING * each) for each in noise]
    worst = max(range(len(found)), key=lambda place: found[place] / bounds[place])
    if found[worst] <= bounds[worst]:
        return
    names = [*(spec.path for spec in both.traced.outputs), *both.state]
    sizes = f"{found[worst]:.1e} of the largest, {bounds[worst]:.1e} is what rounding may do"
    difference = _difference(names[worst], ours[worst], plain[worst], sizes)
    text = f"The trace of {type(model).__qualname__} computes something else than the model itself: {difference}"
    text += f"{_where(both, allowed)}."
    if found[worst] <= CLEAR * bounds[worst]:
        logger.warning("%s Training goes on with the numbers of the trace.", text)
        return
    raise TraceError(
        f"{text} Expected the same numbers. Forward depends on something that a trace does not see, or a library takes "
        "another way while it is traced. Pass what it depends on to the model as an argument, make it a buffer, or "
        "write the line as operations on tensors; with check_trace=False the numbers are those of the trace."
    )


def _difference(name: str, ours: Tensor, plain: Tensor, sizes: str) -> str:
    """Says what a tensor is that the trace gives and the model does not."""
    if ours.shape != plain.shape or ours.dtype != plain.dtype:
        return f"{name} is {_kind(ours)} by the trace and {_kind(plain)} by the model itself"
    place = int((wide(ours) - wide(plain)).abs().nan_to_num(torch.inf, torch.inf).argmax())
    numbers = [each.reshape(-1)[place].item() for each in (ours, plain)]
    return (
        f"{name}{f', element {place},' if ours.dim() else ''} is {numbers[0]:.9g} by the trace and "
        f"{numbers[1]:.9g} by the model itself (they differ by {sizes})"
    )


def _where(both: EagerVsGraph, allowed: float) -> str:
    returned: ModuleOutputs = {}
    nodes: dict[str, tuple[fx.Node, Any]] = {}
    both.plain(returned=returned)
    both.traced_graph(nodes)
    for path, tensors in returned.items():
        if not path or path not in nodes:
            continue
        node, value = nodes[path]
        alike = [each for each in tensors if isinstance(value, Tensor) and each.shape == value.shape]
        if alike and min(distance(value, each) for each in alike) > allowed:
            line, kind = origin(node), type(both.model.get_submodule(path)).__qualname__
            return f". The first module that returns something else is {path}, a {kind}{line and f', at {line}'}"
    return ""


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

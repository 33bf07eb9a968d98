"""Learns what torch.export does not record: gradients, aliases, mutations, randomness and arithmetic of each node.

The graph runs once on fake tensors (shapes alone, no numbers) of one batch size, under autograd."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from autovaruna._torch import FakeTensorMode, OpOverload, pytree, schema_of, storage_of
from autovaruna.errors import TraceError
from autovaruna.graph.call import CallSpec, InputSpec
from autovaruna.graph.evaluate import NodeError, call, evaluate
from autovaruna.graph.export.errors import reason_of
from autovaruna.graph.export.exported import Exported
from autovaruna.graph.lengths import Sizes
from autovaruna.graph.module_state import example_inputs, fake_like, without_cudnn
from autovaruna.graph.operators import changed_by, is_random
from autovaruna.graph.precision import without_autocast
from autovaruna.graph.source_lines import origin

_aten = torch.ops.aten
Shape = Sequence[int]
_ATTENTIONS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")


class _NoModules(nullcontext[None]):
    """Stands for torch's tracker of modules, whose hooks fail in an autograd function that calls modules."""

    parents = frozenset({"Global"})


def flop_counter() -> FlopCounterMode:
    """Returns a counter for everything that runs in its context, whichever module it is in."""
    own = torch.ops.transformers  # what that library adds, once it is imported
    added = {getattr(own, name): formula for name, formula in _OF_TRANSFORMERS.items() if hasattr(own, name)}
    made = FlopCounterMode(display=False, custom_mapping=_FORMULAS | added)
    made.mod_tracker = _NoModules()  # type: ignore[assignment]
    return made


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Returns, for each operation with a formula, a function of its arguments and of ``out_val``, its result."""
    registry: dict[Any, Callable[..., int]] = flop_counter().flop_registry
    return registry


def _attention(query: Shape, key: Shape, value: Shape, *rest: Any, **more: Any) -> int:
    """Products with keys and values, which may have fewer heads; (batch, heads, tokens, features)."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *rest: Any, **more: Any) -> int:
    """Scores are computed again; gradients of scores and values, then of queries and keys."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _recurrent(x: Shape, of_input: Shape, of_hidden: Shape, *rest: Any, **more: Any) -> int:
    """One layer in one direction: two products for each step of each sample; (steps, samples, features)."""
    return 2 * x[0] * x[1] * (math.prod(of_input) + math.prod(of_hidden))


def _recurrent_gpu(x: Shape, weights: Sequence[Shape], *rest: Any, **more: Any) -> int:
    return 2 * x[0] * x[1] * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _product(matrix: Shape, *rest: Any, **more: Any) -> int:
    return 2 * math.prod(matrix)


def _grouped(one: Shape, other: Shape, *rest: Any, **more: Any) -> int:
    """Products of groups of rows, each with a matrix of its own: every row takes part in one product."""
    return 2 * math.prod(one) * other[-1]


_OF_TRANSFORMERS: dict[str, Callable[..., int]] = {
    "grouped_mm_fallback": _grouped,
    "grouped_mm_fallback_backward": lambda *args, **more: 2 * _grouped(*args),
}
_FORMULAS: dict[Any, Callable[..., int]] = {
    **{getattr(_aten, f"_scaled_dot_product_{name}"): _attention for name in _ATTENTIONS},
    **{getattr(_aten, f"_scaled_dot_product_{name}_backward"): _attention_backward for name in _ATTENTIONS},
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: lambda *args, **more: 2 * _recurrent(*args),
    _aten._cudnn_rnn: _recurrent_gpu,
    _aten._cudnn_rnn_backward: lambda *args, **more: 2 * _recurrent_gpu(*args),
    _aten.mv: _product,
    _aten.dot: _product,
    _aten.addmv: lambda vector, matrix, *rest, **more: 2 * math.prod(matrix),
    _aten.addr: _product,
    _aten._grouped_mm: _grouped,
}


@dataclass(frozen=True)
class Fact:
    """What is known of one node; its fake value has the batch size of the pass.

    `needs_gradient` is what holds at the end: what is written into a view of it counts.
    """

    value: Any
    needs_gradient: bool
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    is_random: bool
    num_flops: float

    @property
    def is_view(self) -> bool:
        """Whether the result is made of the arguments' own memory and nothing was changed."""
        return bool(self.makes) and self.makes <= self.reads and not self.writes


class _FactsPass:
    """Runs nodes on fake tensors and records a `Fact` for every one, those of inputs and attributes among them."""

    def __init__(self, given: Mapping[fx.Node, Any]) -> None:
        self._given, self._counter = given, flop_counter()
        self.facts: dict[str, Fact] = {}

    def run(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a node, and learns what is known of it."""
        inputs = [leaf for arg in node.all_input_nodes for leaf in tensors_in(self.facts[arg.name].value)]
        is_counted = node.op == "call_function" and not _is_view(node.target)
        if is_counted:
            with self._counter:
                value = call(node, args, kwargs)
        else:
            value = call(node, args, kwargs) if node.op == "call_function" else self._given.get(node, args)
        outputs = tensors_in(value)
        self.facts[node.name] = Fact(
            value=value,
            needs_gradient=any(tensor.requires_grad for tensor in outputs),
            reads=frozenset(map(storage_of, inputs)),
            writes=frozenset(map(storage_of, tensors_in(changed_by(node.target, args, kwargs)))),
            makes=frozenset(map(storage_of, outputs)),
            is_random=is_random(node),
            num_flops=_plain(self._counter.get_total_flops()) if is_counted else 0.0,
        )
        return value


@dataclass(frozen=True, kw_only=True)
class KnownGraph(Exported):
    """A graph of torch.export with what is known of it; `parameters` and `buffers` map each name to the first one."""

    facts: dict[str, Fact]
    sizes: Sizes
    call: CallSpec
    parameters: dict[str, str]
    buffers: dict[str, str]

    @cached_property
    def inputs(self) -> dict[str, InputSpec]:
        """The input tensors by the names of their nodes, in order."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        return {node.name: spec for node, spec in zip(placeholders, self.call.inputs, strict=True)}

    @cached_property
    def batch_inputs(self) -> frozenset[str]:
        """Names of the inputs whose first dimension is the batch."""
        return frozenset(name for name, spec in self.inputs.items() if spec.is_batch)

    def values(self) -> Iterator[Tensor]:
        """Yields the fake values of all nodes."""
        return (leaf for fact in self.facts.values() for leaf in tensors_in(fact.value))

    def outliving_storages(self) -> set[int]:
        """Returns the storages of buffers, parameters, constants and inputs."""
        roots = [node for node in self.module.graph.nodes if node.op in ("placeholder", "get_attr")]
        return {storage for root in roots for storage in self.facts[root.name].makes}

    def changed_attributes(self) -> frozenset[str]:
        """Returns the attributes that are parameters and buffers, and that forward changes."""
        written = {storage for fact in self.facts.values() for storage in fact.writes}
        names = {str(node.target): node.name for node in self.module.graph.find_nodes(op="get_attr")}
        state = self.parameters | self.buffers
        return frozenset(name for name, node in names.items() if name in state and self.facts[node].makes & written)


def learn(
    exported: Exported, model: nn.Module, call: CallSpec, batch_size: int, device: torch.device
) -> dict[str, Fact]:
    """Returns a `Fact` for every node of a graph, by name, for a batch size; reads shapes of the model alone."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    attributes: dict[str, Tensor] = {}
    memo: dict[int, Tensor] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in [*named, *exported.constants.items()]:
        if id(tensor) not in memo:
            memo[id(tensor)] = fake_like(tensor, mode, device).requires_grad_(tensor.requires_grad)
        attributes[name] = memo[id(tensor)]
    inputs = example_inputs(call, batch_size, mode, device)
    with mode, without_autocast(), without_cudnn():
        nodes = exported.module.graph
        given: dict[fx.Node, Any] = dict(zip(nodes.find_nodes(op="placeholder"), inputs, strict=True))
        for node in nodes.find_nodes(op="get_attr"):
            name = str(node.target)
            given[node] = attributes[name] if name in attributes else getattr(exported.module, name)
        graph_pass = _FactsPass(given)
        try:
            evaluate(list(nodes.nodes), given.__getitem__, run=graph_pass.run)
        except NodeError as failed:
            raise TraceError(
                f"The model cannot be traced at {origin(failed.node) or failed.node.name}: {reason_of(failed.error)}. "
                "Expected operations whose sizes follow from the shapes of their arguments. Move the line out of "
                "forward, or give it sizes that are numbers."
            ) from failed.error
    facts = graph_pass.facts
    return facts | {
        node.name: replace(facts[node.name], needs_gradient=True)  # since something was written into it, or into a view
        for node in exported.module.graph.nodes
        if node.op == "call_function" and not facts[node.name].needs_gradient
        if any(tensor.requires_grad for tensor in tensors_in(facts[node.name].value))
    }


def _plain(number: Any) -> float:
    """Returns a number; a length that only the data decides counts as one."""
    if not isinstance(number, torch.SymInt | torch.SymFloat):
        return float(number)
    expression = sympy.sympify(number.node.expr)
    return float(expression.subs(dict.fromkeys(expression.free_symbols, 1)))


def _is_view(target: Any) -> bool:
    """Whether an operation returns views of its arguments, or takes a tuple apart: there is no arithmetic to count."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    results = schema_of(target).returns
    return all(each.alias_info is not None and not each.alias_info.is_write for each in results) and bool(results)


def tensors_in(value: object) -> list[Tensor]:
    """Returns the tensors in what a node gives."""
    if isinstance(value, Tensor):  # as a rule; a walk through what it is made of takes ten times as long
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]

"""Traces a model: `nn.Module` in, `TracedModel` out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock

import sympy
import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from autovaruna.errors import TraceError
from autovaruna.graph.batch_totals import NO_TOTALS, BatchTotals, take_totals
from autovaruna.graph.build import Builder
from autovaruna.graph.call import CallSpec, InputSpec
from autovaruna.graph.candidates import crossing_sizes, merge_free_blocks
from autovaruna.graph.cutpoint import locate
from autovaruna.graph.export import Exported, export
from autovaruna.graph.facts import Fact, is_random, learn
from autovaruna.graph.function_joins import learn_joins
from autovaruna.graph.grouping import Grouping, group
from autovaruna.graph.kept import KeptModule
from autovaruna.graph.mixing import refuse_mixing
from autovaruna.graph.outputs import OutputKind, OutputSpec, classify
from autovaruna.graph.precision import precision_of
from autovaruna.graph.records import Graph
from autovaruna.graph.sizes import Sizes
from autovaruna.graph.steady import steady_state
from autovaruna.graph.tidy import PREFIX
from autovaruna.graph.tree import Tree

logger = logging.getLogger(__name__)
ONE_AT_A_TIME = Lock()  # torch.export keeps state of its own that threads share
_HINTS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


@dataclass(frozen=True)
class TracedModel:
    """A model as a graph that can be cut.

    Attributes:
        module: the graph; placeholders are inputs, attributes have the model's names.
        facts: what is known of each node.
        sizes: evaluates shapes for a micro-batch.
        graph: the graph as plain data.
        repeated: nodes that run in every stage that uses them, each with all that are repeated together.
        call: the call that was traced.
        output_tree: structure of what the model returns.
        outputs: its tensors.
        parameters: first name of each parameter, by each of its names.
        buffers: first name of each buffer, by each of its names.
        constants: other tensors, by attribute name.
        changed_state: first names of buffers, and of parameters, that forward changes.
        steady_state: those of them that it changes whatever the samples are.
        reads: attributes of modules that the model has read, as ``path.of.module.attribute``.
        totals: its values of the whole batch.
        joins_counts: nodes that join counts of several samples.
    """

    module: fx.GraphModule
    facts: dict[str, Fact]
    sizes: Sizes
    graph: Graph
    repeated: Mapping[str, tuple[str, ...]]
    call: CallSpec
    output_tree: Tree
    outputs: tuple[OutputSpec, ...]
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    changed_state: frozenset[str]
    steady_state: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    totals: BatchTotals = NO_TOTALS
    joins_counts: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Digest of the calls that this graph serves."""
        return self.call.key() if self.sizes.symbol is not None else f"{self.call.key()}/{self.sizes.batch_size}"

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """Nodes by name, in execution order."""
        return {node.name: node for node in self.module.graph.nodes}

    @cached_property
    def _regions(self) -> list[fx.GraphModule]:
        """The graph, and those within it."""
        return [each for each in self.module.modules() if isinstance(each, fx.GraphModule)]

    @cached_property
    def draws_or_casts(self) -> bool:
        """Whether an operation draws random numbers, or runs under autocast."""
        nodes = [node for region in self._regions for node in region.graph.nodes]
        return any(precision_of(node) or is_random(self.module, node) for node in nodes)

    @cached_property
    def has_kept_modules(self) -> bool:
        """Whether submodules with parameters are kept whole: which of them they use may vary."""
        regions = self._regions
        names = [(region, str(node.target)) for region in regions for node in region.graph.find_nodes(op="get_attr")]
        found = [getattr(region, name, None) for region, name in names]
        return any(isinstance(each, KeptModule) and each.may_choose for each in found)

    @cached_property
    def inputs(self) -> dict[str, InputSpec]:
        """The input tensors by the names of their nodes, in order."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        return {node.name: spec for node, spec in zip(placeholders, self.call.inputs, strict=True)}

    @cached_property
    def batch_inputs(self) -> frozenset[str]:
        """Names of the inputs whose first dimension is the batch."""
        return frozenset(name for name, spec in self.inputs.items() if spec.is_batch)

    @cached_property
    def places(self) -> dict[str, int]:
        """Position of each node in execution order."""
        return {name: place for place, name in enumerate(self.nodes)}

    @cached_property
    def changed_storages(self) -> frozenset[int]:
        """Storages of parameters and buffers that forward changes."""
        attributes = self.module.graph.find_nodes(op="get_attr")
        state = {storage for node in attributes for storage in self.facts[node.name].makes}
        return frozenset(state & {storage for fact in self.facts.values() for storage in fact.writes})

    @cached_property
    def block_of(self) -> dict[str, int]:
        """Block of each node that is in one."""
        return {name: block.index for block in self.graph.blocks for name in block.nodes}

    @cached_property
    def loss(self) -> OutputSpec | None:
        """The output that a step differentiates; None: the model returns other outputs."""
        return next((spec for spec in self.outputs if spec.kind is OutputKind.LOSS), None)


def trace(
    model: nn.Module,
    call: CallSpec,
    device: torch.device,
    *,
    is_dynamic: bool = True,
    micro_batch_size: int = 0,
    loss_mode: str = "auto",
    has_totals: bool = True,
    is_parted: bool = True,
) -> TracedModel:
    """Traces one call of a model in its present mode, without running it or holding its numbers.

    Args:
        model: The model; its parameters may be on ``meta``.
        call: The call, from `describe`.
        device: Where the graph will run.
        is_dynamic: Whether the graph serves every batch size.
        micro_batch_size: The one size that it serves if not.
        loss_mode: ``auto``, ``loss`` or ``outputs``.
        has_totals: Whether micro-batches use what was counted over the whole batch; else, over their own samples.
        is_parted: Whether there may be several micro-batches, for which samples must not meet.

    Raises:
        TraceError: the model cannot be traced.
    """
    with ONE_AT_A_TIME:
        return _trace(model, call, device, is_dynamic, micro_batch_size, loss_mode, has_totals, is_parted)


def _trace(
    model: nn.Module,
    call: CallSpec,
    device: torch.device,
    is_dynamic: bool,
    micro_batch_size: int,
    loss_mode: str,
    has_totals: bool,
    is_parted: bool,
) -> TracedModel:
    batch_size = _hint(model, call) if is_dynamic else micro_batch_size
    exported = export(model, call, batch_size, is_dynamic, device)
    sizes = _sizes(exported, call, batch_size)
    facts = learn(exported, model, call, batch_size, device)
    _refuse_writing(exported, facts, model)
    module = exported.module
    placeholders = module.graph.find_nodes(op="placeholder")
    batch = frozenset(node.name for node, spec in zip(placeholders, call.inputs, strict=True) if spec.is_batch)
    parameters = _first_names(dict(model.named_parameters(remove_duplicate=False)))
    totals = take_totals(module.graph, facts, sizes, batch, parameters) if has_totals else NO_TOTALS
    learn_joins(module.graph, facts, batch, device)
    name = type(model).__qualname__
    joining = refuse_mixing(name, module.graph, facts, sizes, batch) if is_parted else []
    if not any(node.op == "call_function" for node in module.graph.nodes):
        raise TraceError(
            f"{name} computes nothing: got a forward without operations. Expected a model with "
            "something to split over ranks; call it without AutoVaruna."
        )
    grouping = group(module.graph, facts, sizes.is_given, sizes.depends_on_data, parameters)
    buffers = _first_names(dict(model.named_buffers(remove_duplicate=False)))
    graph = _build(exported, facts, sizes, grouping, parameters, buffers)
    state = parameters | buffers
    changed = _changed(module, facts, state)
    logger.info("traced %s: %d operations in %d blocks", type(model).__name__, len(facts), len(graph.blocks))
    return TracedModel(
        module=module,
        facts=facts,
        sizes=sizes,
        graph=graph,
        repeated=grouping.repeated,
        call=call,
        output_tree=exported.output_tree,
        outputs=classify(module.graph, facts, sizes, exported.output_tree.tensor_paths(), loss_mode),
        parameters=parameters,
        buffers=buffers,
        constants=exported.constants,
        changed_state=frozenset(state[name] for name in changed),
        steady_state=frozenset(state[name] for name in steady_state(module, facts, batch, changed)),
        reads=exported.reads,
        totals=totals,
        joins_counts=tuple(node.name for node in joining),
    )


def _build(
    exported: Exported,
    facts: dict[str, Fact],
    sizes: Sizes,
    grouping: Grouping,
    parameters: dict[str, str],
    buffers: dict[str, str],
) -> Graph:
    """Builds the record without the cuts that others beat."""
    builder = Builder(exported.module, facts, sizes, grouping, parameters, buffers)
    marks = locate(exported.markers, grouping.blocks, builder, grouping.joins)
    blocks = merge_free_blocks(
        grouping.blocks,
        crossing_sizes(builder.values(), len(grouping.blocks)),
        lambda index: all(facts[name].is_view for name in grouping.blocks[index]),
        [mark.block - 1 for mark in marks if mark.block > 0],
    )
    starts = {names[0]: index for index, names in enumerate(blocks)}
    marks = [replace(mark, block=starts[grouping.blocks[mark.block][0]]) if mark.block > 0 else mark for mark in marks]
    return Builder(exported.module, facts, sizes, replace(grouping, blocks=blocks), parameters, buffers).build(marks)


def _hint(model: nn.Module, call: CallSpec) -> int:
    """Returns a batch size that no other dimension has, so that the two are never taken for each other."""
    taken = {length for spec in call.inputs for length in spec.shape[1 if spec.is_batch else 0 :]}
    taken |= {length for parameter in model.parameters() if not is_lazy(parameter) for length in parameter.shape}
    return next((hint for hint in _HINTS if hint not in taken), _HINTS[-1])


def _sizes(exported: Exported, call: CallSpec, batch_size: int) -> Sizes:
    placeholders = exported.module.graph.find_nodes(op="placeholder")
    if not exported.is_dynamic:
        return Sizes(None, batch_size)
    length = next(
        node.meta["val"].shape[0] for node, spec in zip(placeholders, call.inputs, strict=True) if spec.is_batch
    )
    symbol = length.node.expr
    assert isinstance(symbol, sympy.Symbol)
    return Sizes(symbol, batch_size)


def _refuse_writing(exported: Exported, facts: dict[str, Fact], model: nn.Module) -> None:
    """Refuses a forward that writes into a tensor of its own that is no buffer: ranks would not share what it holds."""
    written = {storage for fact in facts.values() for storage in fact.writes}
    for node in exported.module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name in exported.constants and facts[node.name].makes & written:
            raise TraceError(
                f"forward changes the tensor {name.removeprefix(PREFIX)} of {type(model).__qualname__} in place, which "
                "is neither a parameter nor a buffer: ranks would each change their own. Expected a forward that "
                "changes buffers alone; make it one with register_buffer()."
            )


def _first_names(named: dict[str, Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named.items()}


def _changed(module: fx.GraphModule, facts: dict[str, Fact], state: dict[str, str]) -> frozenset[str]:
    """Returns the attributes that are parameters and buffers, and that forward changes."""
    written = {storage for fact in facts.values() for storage in fact.writes}
    attributes = module.graph.find_nodes(op="get_attr")
    return frozenset(
        str(node.target) for node in attributes if str(node.target) in state and facts[node.name].makes & written
    )

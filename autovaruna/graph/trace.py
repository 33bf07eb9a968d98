"""Traces a model: `nn.Module` in, `TracedModel` out."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from time import thread_time
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autovaruna._torch import NormBase, buffer_table, warn_of_untried
from autovaruna.errors import InputError, TraceError
from autovaruna.graph.batch.interpret import steady_state
from autovaruna.graph.batch.order import SampleOrders
from autovaruna.graph.batch.refusals import refuse_mixing
from autovaruna.graph.batch.thresholds import thresholds
from autovaruna.graph.batch.totals import mark_totals
from autovaruna.graph.call import CallSpec
from autovaruna.graph.cuts import Marker
from autovaruna.graph.export.errors import EXAMPLE, EXAMPLE_OF, BatchSizeError, batch_dimensions, naming
from autovaruna.graph.export.exported import PREFIX, Exported
from autovaruna.graph.export.run import DEFAULTS, TraceOptions, export
from autovaruna.graph.export.watchers import marked, script_hooks, untouched
from autovaruna.graph.facts import Fact, KnownGraph, learn
from autovaruna.graph.grouping import Builder, Grouping, crossing_sizes, group, locate, merge_free_blocks
from autovaruna.graph.guards import full_name
from autovaruna.graph.lengths import Sizes
from autovaruna.graph.opaque.run import opaque_module_of
from autovaruna.graph.records import Graph
from autovaruna.graph.traced import NO_TOTALS, TracedModel, classify, is_same_graph
from autovaruna.graph.tree import HidingLeaf
from autovaruna.log import warn_once

logger = logging.getLogger(__name__)
one_at_a_time = Lock()  # torch.export keeps state of its own that threads share
_OF_EACH_SIZE = "There is one micro-batch, so the model is traced for its size alone, and anew for each other size."
_MOST_TRIED_SECONDS = 2.0  # a model whose trace takes longer is not traced again to try out advice
_HINTS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def _refuse_writing(exported: Exported, facts: dict[str, Fact], model: nn.Module) -> None:
    """Refuses a forward that writes into a tensor of its own that is no buffer, which ranks would not share."""
    written = {storage for fact in facts.values() for storage in fact.writes}
    placeholders = exported.module.graph.find_nodes(op="placeholder")
    if changed := [node.name for node in placeholders if facts[node.name].makes & written]:
        raise TraceError(
            f"forward of {type(model).__qualname__} changes its arguments {', '.join(changed)} in place: stages have "
            "parts and copies of them, and the caller's tensors would stay as they were. Expected a forward that "
            "leaves them alone: begin with x = x.clone(), or use x * 2 for x.mul_(2), torch.where() for x[mask] = 0; "
            "and return what the script is to see of the change."
        )
    for node in exported.module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name in exported.constants and facts[node.name].makes & written:
            raise TraceError(
                f"forward changes the tensor {name.removeprefix(PREFIX)} of {type(model).__qualname__} in place, which "
                "is neither a parameter nor a buffer: ranks would each change their own. Expected a forward that "
                "changes buffers alone; make it one with register_buffer()."
            )


def _refuse_shared_buffers(changed: Collection[str], model: nn.Module) -> None:
    """Refuses a forward that changes memory of several buffers, each of which is on ranks of its own."""
    memory = {
        full_name(path, name): range(each.data_ptr(), each.data_ptr() + each.nbytes)
        for path, module in model.named_modules()
        for name, each in buffer_table(module).items()
        if each is not None and each.numel() and not each.is_meta and each.layout is torch.strided
    }
    for one in sorted(changed & memory.keys()):
        own = memory.pop(one)
        others = (name for name, each in memory.items() if each.start < own.stop and own.start < each.stop)
        if other := next(others, ""):
            raise TraceError(
                f"forward changes {one}, whose memory {other} shares: got two buffers that are one tensor, and the "
                "ranks that hold one of them would not see what becomes of the other. Expected a buffer by one name, "
                "which forward reads wherever it needs it."
            )


def trace(model: nn.Module, call: CallSpec, device: torch.device, options: TraceOptions = DEFAULTS) -> TracedModel:
    """Traces one call of a model in its present mode, without running it or holding its numbers.

    Forward hooks of the script that change what the model computes are traced with it; others watch its steps. The
    parameters may be on ``meta``.

    Raises:
        TraceError: the model cannot be traced.
    """
    warn_of_untried()
    began = thread_time()
    try:
        return _trace_with_hooks(model, call, device, options)
    except TraceError as error:
        if options.free or thread_time() - began > _MOST_TRIED_SECONDS:
            raise
        refused = error
    raise _with_tried_advice(refused, model, call, device, options) from refused  # no context of what is tried


def _with_tried_advice(
    error: TraceError, model: nn.Module, call: CallSpec, device: torch.device, options: TraceOptions
) -> TraceError:
    """Returns an error that names such dimensions of the batch as the model can be traced with, or none."""
    text, proposed = str(error), batch_dimensions(call)
    said = naming(proposed[0])
    for dimensions in filter(None, proposed if said in text or EXAMPLE in text else ()):
        with suppress(TraceError, InputError):
            _trace(model, call.with_batch(dimensions), device, options)
            return type(error)(text.replace(said, naming(dimensions)).replace(EXAMPLE, f"(batch_dims={dimensions})"))
    first = next(spec.name for spec in call.inputs if spec.is_batch)
    text = text.replace(said, naming({})).replace(EXAMPLE, EXAMPLE_OF.format(first))
    return type(error)(text) if text != str(error) else error


def _trace_with_hooks(model: nn.Module, call: CallSpec, device: torch.device, options: TraceOptions) -> TracedModel:
    if not script_hooks(model):
        return _trace(model, call, device, options)
    watched = error = None
    try:
        with marked(model):
            watched = _trace(model, call, device, options)
    except TraceError as found:  # forward may use what a hook leaves
        error = found
    try:
        with untouched(model):
            can_keep = watched is None or bool(watched.kept)  # else hooks alone would ask for it
            whole = _trace(model, call, device, replace(options, can_keep=can_keep))
    except TraceError:
        if watched is None:
            raise
        whole = watched
    is_kept = watched is not None and len(whole.kept) > len(watched.kept)  # for the sake of hooks alone
    if watched is not None and (is_kept or is_same_graph(whole, watched)):
        _refuse_watching(watched)
        return watched
    text = (
        f"forward hooks of {', '.join(path or 'the model' for path in script_hooks(model))} change what the model "
        "computes, or what it leaves, and are traced with it: a hook there that records something sees no step. "
        "Compute in forward what hooks change, so that the others watch."
    )
    warn_once(logger, model, text + (f" ({error})" if error else ""))
    return whole


def _refuse_watching(traced: TracedModel) -> None:
    """Refuses hooks that see a tensor which a later operation writes into: they would see it as it is in the end."""
    written = {storage for fact in traced.facts.values() for storage in fact.writes}
    for call in traced.watched:
        for name in call.names[call.num_given :]:
            if name not in traced.facts or traced.facts[name].makes & written:
                raise TraceError(
                    f"A forward hook of {call.path or 'the model'} watches what cannot be shown: its result is changed "
                    "in place later (by inplace=True, say). Expected a result that stays as it is; pass inplace=False "
                    "to the module that follows, or register the hook on another module."
                )


def _trace(model: nn.Module, call: CallSpec, device: torch.device, options: TraceOptions) -> TracedModel:
    with one_at_a_time:
        exported, batch_size = _export(model, call, device, options)
        sizes = _sizes(exported, call, batch_size)
        facts = learn(exported, model, call, batch_size, device)
        _refuse_writing(exported, facts, model)
        parameters = _first_names(dict(model.named_parameters(remove_duplicate=False)))
        buffers = _first_names(dict(model.named_buffers(remove_duplicate=False)))
        about: dict[str, Any] = {**vars(exported), "facts": facts, "sizes": sizes, "call": call}
        about |= {"parameters": parameters, "buffers": buffers}
        known = KnownGraph(**about)
        totals = mark_totals(known, options.is_added) if options.has_totals else NO_TOTALS
        orders = SampleOrders(known)
        joining = refuse_mixing(model, known, orders) if options.is_parted else []
        _check_computes(exported, type(model).__qualname__)
        grouping = group(known)
        graph = _build(exported.markers, known, grouping)
        state, changed = parameters | buffers, known.changed_attributes()
        _refuse_shared_buffers(changed & buffers.keys(), model)
        steady = frozenset(state[name] for name in steady_state(known, changed))
        if options.is_parted:
            _say_what_follows_samples({state[name] for name in changed - _only_held(known)} - steady, model)
        logger.debug("traced %s: %d operations in %d blocks", type(model).__name__, len(facts), len(graph.blocks))
        return TracedModel(
            **about,
            graph=graph,
            repeated=grouping.repeated,
            outputs=classify(known, options.loss_mode, orders.outer if options.is_parted else lambda _: 1),
            changed_state=frozenset(state[name] for name in changed),
            steady_state=steady,
            totals=totals,
            joins_counts=tuple(node.name for node in joining),
            thresholds=thresholds(known, orders.values, set(joining)) if options.is_parted else (),
        )


def _export(model: nn.Module, call: CallSpec, device: torch.device, options: TraceOptions) -> tuple[Exported, int]:
    """Returns what torch.export makes of a call, and the number that stands for the batch in it."""
    batch_size = _hint(model, call) if options.is_dynamic else options.micro_batch_size
    try:
        return export(model, call, batch_size, device, options), batch_size
    except BatchSizeError as error:
        if options.is_parted:
            raise
        warn_once(logger, model, f"{_OF_EACH_SIZE} {error}")
    batch_size = options.micro_batch_size
    return export(model, call, batch_size, device, replace(options, is_dynamic=False, is_parted=True)), batch_size


def _build(markers: Sequence[Marker], known: KnownGraph, grouping: Grouping) -> Graph:
    """Builds the record without the cuts that others beat."""
    builder = Builder(known, grouping)
    marks = locate(markers, grouping.blocks, builder, grouping.joins)
    blocks = merge_free_blocks(
        grouping.blocks,
        crossing_sizes(builder.values(), len(grouping.blocks)),
        lambda index: all(known.facts[name].is_view for name in grouping.blocks[index]),
        [mark.block - 1 for mark in marks if mark.block > 0],
    )
    starts = {names[0]: index for index, names in enumerate(blocks)}
    marks = [replace(mark, block=starts[grouping.blocks[mark.block][0]]) if mark.block > 0 else mark for mark in marks]
    return Builder(known, replace(grouping, blocks=blocks)).build(marks)


def _hint(model: nn.Module, call: CallSpec) -> int:
    """Returns a batch size that no other dimension has, so that the two are never taken for each other."""
    taken = {length for spec in call.inputs for length in spec.shape[1 if spec.is_batch else 0 :]}
    taken |= {length for parameter in model.parameters() if not is_lazy(parameter) for length in parameter.shape}
    return next((hint for hint in _HINTS if hint not in taken), _HINTS[-1])


def _sizes(exported: Exported, call: CallSpec, batch_size: int) -> Sizes:
    if not exported.is_dynamic:
        return Sizes(None, batch_size, exported.lengths)
    pairs = zip(exported.module.graph.find_nodes(op="placeholder"), call.inputs, strict=True)
    symbol = next(node.meta["val"].shape[0] for node, spec in pairs if spec.is_batch).node.expr
    assert isinstance(symbol, sympy.Symbol)
    return Sizes(symbol, batch_size, exported.lengths)


def _check_computes(exported: Exported, name: str) -> None:
    if any(node.op == "call_function" for node in exported.module.graph.nodes):
        return
    hiding = sorted({leaf.type_name for leaf in exported.output_tree.leaves if isinstance(leaf, HidingLeaf)})
    got = "a forward without operations"
    if hiding:
        got = f"a forward that returns nothing but {', '.join(hiding)}, which hides its tensors"
    raise TraceError(
        f"{name} computes nothing: got {got}. Expected a model with something to split over ranks; "
        f"{'return the tensors that it is made of' if hiding else 'call it without AutoVaruna'}."
    )


def _only_held(known: KnownGraph) -> set[str]:
    """Returns the attributes of modules kept whole that count as changed, but were not when these were tried out."""
    calls = [(opaque_module_of(node), node) for node in known.module.graph.nodes]
    held = [node for kept, node in calls if kept is not None and not kept.returned.changes_state]
    return {str(each.target) for node in held for each in node.all_input_nodes if each.op == "get_attr"}


def _say_what_follows_samples(names: Collection[str], model: nn.Module) -> None:
    """Warns of statistics of the samples that are none of a normalisation's, of which everybody knows."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    if found := sorted(name for name, owner in owners.items() if not isinstance(owner, NormBase)):
        flags = [model.get_buffer(name) for name in found if name in dict(model.named_buffers())]
        if any(each.dtype is torch.bool and not each.is_meta and not each.all() for each in flags):
            raise TraceError(
                f"forward sets {', '.join(found)} by its first batch: got a flag that is not set yet, and each "
                "micro-batch would find what the one before has set. Expected a model that has seen a batch: run one "
                "through it before it is wrapped."
            )
        text = (
            f"forward changes {', '.join(found)} by the numbers of its samples, or in a module that is kept whole: "
            "each micro-batch changes it in turn by its own, as with a batch normalisation, where plain PyTorch does "
            "so once by the whole batch. To have that, compute it from outputs outside of the model, or pass "
            "num_micro_batches=1, on several ranks together with inputs='replicated'. If only the first call sets it, "
            "run one batch through the model before it is wrapped."
        )
        warn_once(logger, model, text)


def _first_names(named: dict[str, Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named.items()}

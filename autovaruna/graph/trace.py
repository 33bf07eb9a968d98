"""Traces a model: `nn.Module` in, `TracedModel` out."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from threading import Lock

import sympy
import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from autovaruna._torch import NormBase, warn_of_untried
from autovaruna.errors import TraceError
from autovaruna.graph.batch.mixing import refuse_mixing
from autovaruna.graph.batch.state import steady_state
from autovaruna.graph.batch.totals import NO_TOTALS, take_totals
from autovaruna.graph.build import Builder
from autovaruna.graph.call import CallSpec
from autovaruna.graph.cuts import crossing_sizes, locate, merge_free_blocks
from autovaruna.graph.export.errors import BatchSizeError, warn_once
from autovaruna.graph.export.exported import PREFIX, Exported
from autovaruna.graph.export.run import export
from autovaruna.graph.export.watchers import marked, script_hooks, untouched
from autovaruna.graph.facts import Fact, learn
from autovaruna.graph.grouping import Grouping, group
from autovaruna.graph.lengths import Places
from autovaruna.graph.opaque.infer_reduction import infer_function_reductions
from autovaruna.graph.opaque.run import run_opaque
from autovaruna.graph.outputs import classify
from autovaruna.graph.records import Graph
from autovaruna.graph.sizes import Sizes
from autovaruna.graph.traced import TracedModel, is_same_graph
from autovaruna.graph.tree import Opaque

logger = logging.getLogger(__name__)


def learn_written(
    exported: Exported, model: nn.Module, call: CallSpec, batch_size: int, device: torch.device
) -> dict[str, Fact]:
    """Returns what each operation does, by its node's name, where none writes into what is not the graph's to change.

    Raises:
        TraceError: forward writes into an argument, or into a tensor of the model that is no buffer.
    """
    facts = learn(exported, model, call, batch_size, device)
    _refuse_writing(exported, facts, model)
    return facts


def changed_state(module: fx.GraphModule, facts: dict[str, Fact], state: dict[str, str]) -> frozenset[str]:
    """Returns the attributes that are parameters and buffers, and that forward changes."""
    written = {storage for fact in facts.values() for storage in fact.writes}
    attributes = module.graph.find_nodes(op="get_attr")
    return frozenset(
        str(node.target) for node in attributes if str(node.target) in state and facts[node.name].makes & written
    )


def _refuse_writing(exported: Exported, facts: dict[str, Fact], model: nn.Module) -> None:
    """Refuses a forward that writes into a tensor of its own that is no buffer, which ranks would not share.

    So it does one that writes into an argument: stages share it, and the caller's tensor would stay as it was.
    """
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


ONE_AT_A_TIME = Lock()  # torch.export keeps state of its own that threads share
_OF_EACH_SIZE = "There is one micro-batch, so the model is traced for its size alone, and anew for each other size."
_HINTS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def trace(
    model: nn.Module,
    call: CallSpec,
    device: torch.device,
    *,
    is_dynamic: bool = True,
    micro_batch_size: int = 0,
    loss_mode: str = "auto",
    has_totals: bool = True,
    is_added: bool = False,
    is_parted: bool = True,
    free: Places = frozenset(),
) -> TracedModel:
    """Traces one call of a model in its present mode, without running it or holding its numbers.

    Forward hooks of the script that change what the model computes are traced with it; others watch its steps.

    Args:
        model: The model; its parameters may be on ``meta``.
        call: The call, from `describe`.
        device: Where the graph will run.
        is_dynamic: Whether the graph serves every batch size, as far as the model lets it.
        micro_batch_size: The one size that it serves if not.
        loss_mode: ``auto``, ``loss`` or ``outputs``.
        has_totals: Whether micro-batches use what was counted over the whole batch; else, over their own samples.
        is_added: Whether losses of micro-batches are added up, rather than averaged.
        is_parted: Whether there may be several micro-batches, for which samples must not meet. If not, a model that
            fixes its batch size is traced for `micro_batch_size` samples.
        free: Dimensions of inputs, besides the batch, whose lengths the graph need not fix.

    Raises:
        TraceError: the model cannot be traced.
    """
    warn_of_untried()
    options = is_dynamic, micro_batch_size, loss_mode, has_totals, is_added, is_parted, free
    if not script_hooks(model):
        return _trace(model, call, device, *options)
    watched = error = None
    try:
        with marked(model):
            watched = _trace(model, call, device, *options)
    except TraceError as found:  # forward may use what a hook leaves
        error = found
    try:
        with untouched(model):
            can_keep = watched is None or _num_kept(watched) > 0  # else hooks alone would ask for it
            whole = _trace(model, call, device, *options, can_keep)
    except TraceError:
        if watched is None:
            raise
        whole = watched
    is_kept = watched is not None and _num_kept(whole) > _num_kept(watched)  # for the sake of hooks alone
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


def _num_kept(traced: TracedModel) -> int:
    """Returns how many calls of modules and functions are kept whole."""
    graphs = [each.graph for each in traced.module.modules() if isinstance(each, fx.GraphModule)]
    return sum(len(graph.find_nodes(op="call_function", target=run_opaque)) for graph in graphs)


def _refuse_watching(traced: TracedModel) -> None:
    """Refuses hooks that see a tensor which a later operation writes into: they would see it as it is in the end.

    Raises:
        TraceError: there is one.
    """
    written = {storage for fact in traced.facts.values() for storage in fact.writes}
    for call in traced.watched:
        for name in call.names[call.num_given :]:
            if name not in traced.facts or traced.facts[name].makes & written:
                raise TraceError(
                    f"A forward hook of {call.path or 'the model'} watches what cannot be shown: its result is changed "
                    "in place later (by inplace=True, say), or made in a region of its own, as under no_grad(). "
                    "Expected a result that stays as it is; pass inplace=False to the module that follows, or register "
                    "the hook on another module."
                )


def _trace(
    model: nn.Module,
    call: CallSpec,
    device: torch.device,
    is_dynamic: bool,
    micro_batch_size: int,
    loss_mode: str,
    has_totals: bool,
    is_added: bool,
    is_parted: bool,
    free: Places,
    can_keep: bool = True,
) -> TracedModel:
    with ONE_AT_A_TIME:
        exported, batch_size = _export(model, call, device, is_dynamic, micro_batch_size, is_parted, free, can_keep)
        sizes = _sizes(exported, call, batch_size)
        facts = learn_written(exported, model, call, batch_size, device)
        module = exported.module
        placeholders = module.graph.find_nodes(op="placeholder")
        batch = frozenset(node.name for node, spec in zip(placeholders, call.inputs, strict=True) if spec.is_batch)
        parameters = _first_names(dict(model.named_parameters(remove_duplicate=False)))
        totals = take_totals(module.graph, facts, sizes, batch, parameters, is_added) if has_totals else NO_TOTALS
        infer_function_reductions(module.graph, facts, batch, device)
        joining = refuse_mixing(model, call, module.graph, facts, sizes, batch) if is_parted else []
        _check_computes(exported, type(model).__qualname__)
        grouping = group(module.graph, facts, sizes.is_given, sizes.depends_on_data, parameters)
        buffers = _first_names(dict(model.named_buffers(remove_duplicate=False)))
        graph = _build(exported, facts, sizes, grouping, parameters, buffers)
        state = parameters | buffers
        changed = changed_state(module, facts, state)
        steady = frozenset(state[name] for name in steady_state(module, facts, batch, parameters, changed))
        if is_parted:
            _say_what_follows_samples({state[name] for name in changed} - steady, model)
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
            steady_state=steady,
            totals=totals,
            joins_counts=tuple(node.name for node in joining),
            asks_for_one=exported.asks_for_one,
            watched=exported.watched,
            fixes_lengths=exported.fixes_lengths,
        )


def _export(
    model: nn.Module,
    call: CallSpec,
    device: torch.device,
    is_dynamic: bool,
    micro_batch_size: int,
    is_parted: bool,
    free: Places,
    can_keep: bool,
) -> tuple[Exported, int]:
    """Returns what torch.export makes of a call, and the number that stands for the batch in it."""
    batch_size = _hint(model, call) if is_dynamic else micro_batch_size
    try:
        return export(model, call, batch_size, is_dynamic, device, is_parted, can_keep, free), batch_size
    except BatchSizeError as error:
        if is_parted:
            raise
        warn_once(logger, model, f"{_OF_EACH_SIZE} {error}")
    return export(model, call, micro_batch_size, False, device, can_keep=can_keep, free=free), micro_batch_size


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
        return Sizes(None, batch_size, exported.lengths)
    length = next(
        node.meta["val"].shape[0] for node, spec in zip(placeholders, call.inputs, strict=True) if spec.is_batch
    )
    symbol = length.node.expr
    assert isinstance(symbol, sympy.Symbol)
    return Sizes(symbol, batch_size, exported.lengths)


def _check_computes(exported: Exported, name: str) -> None:
    """Refuses a graph without operations."""
    if any(node.op == "call_function" for node in exported.module.graph.nodes):
        return
    hiding = sorted({leaf.type_name for leaf in exported.output_tree.leaves if isinstance(leaf, Opaque)})
    got = "a forward without operations"
    if hiding:
        got = f"a forward that returns nothing but {', '.join(hiding)}, which hides its tensors"
    raise TraceError(
        f"{name} computes nothing: got {got}. Expected a model with something to split over ranks; "
        f"{'return the tensors that it is made of' if hiding else 'call it without AutoVaruna'}."
    )


def _say_what_follows_samples(names: Collection[str], model: nn.Module) -> None:
    """Warns of statistics of the samples that are none of a normalisation's, of which everybody knows."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    if found := sorted(name for name, owner in owners.items() if not isinstance(owner, NormBase)):
        text = (
            f"forward changes {', '.join(found)} by the numbers of its samples, or in a module that is kept whole: "
            "each micro-batch changes it in turn by its own, as with a batch normalisation, where plain PyTorch does "
            "so once by the whole batch. Compute it from outputs outside of the model, or pass num_micro_batches=1, to "
            "have that."
        )
        warn_once(logger, model, text)


def _first_names(named: dict[str, Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named.items()}

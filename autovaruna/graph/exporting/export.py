"""Runs torch.export and tidies its graph: `nn.Module` in, `torch.fx.GraphModule` with plain names out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autovaruna.errors import InputError, TraceError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.cutpoint import Marker, named_cut_points, take_markers
from autovaruna.graph.explain import explain, is_about_batch, of_batch_size, own_error
from autovaruna.graph.exporting.checks import noted_checks, take_checks
from autovaruna.graph.exporting.culprit import outermost
from autovaruna.graph.exporting.deferred import compile_regions, deferred_compilation
from autovaruna.graph.exporting.detached import traced_data
from autovaruna.graph.exporting.fake import TracingMode, faked
from autovaruna.graph.exporting.fixed_size import noted_sizes
from autovaruna.graph.exporting.flat_call import FlatCall
from autovaruna.graph.exporting.free_regions import open_free_regions
from autovaruna.graph.exporting.guards import hooked, watched, with_own_backward
from autovaruna.graph.exporting.idioms import idioms
from autovaruna.graph.exporting.idle_operations import drop_idle
from autovaruna.graph.exporting.otherwise import KeepMoreError, Kept, try_otherwise
from autovaruna.graph.exporting.padding import padded_encoders
from autovaruna.graph.exporting.program import example_inputs, program_of
from autovaruna.graph.exporting.quiet import quiet_failure
from autovaruna.graph.exporting.size_guards import tried_guards
from autovaruna.graph.exporting.stack import short_stacks
from autovaruna.graph.exporting.stopped_functions import stopped_functions
from autovaruna.graph.exporting.thresholds import find_threshold
from autovaruna.graph.exporting.tidy import PREFIX, tidy
from autovaruna.graph.exporting.unlift import unlift
from autovaruna.graph.kept_whole.draws import noted_draws
from autovaruna.graph.kept_whole.functions import take_functions
from autovaruna.graph.kept_whole.keeping import is_of_keeper, take_modules
from autovaruna.graph.kept_whole.packed import kept_or_packed
from autovaruna.graph.kept_whole.scripts import shells
from autovaruna.graph.precision import in_precision, noted_precision, switch_in_regions
from autovaruna.graph.random import python_generators
from autovaruna.graph.refused import check_layouts, check_operations
from autovaruna.graph.tree import Tree
from autovaruna.graph.watching.as_before import as_before
from autovaruna.graph.watching.hidden_state import Changes, compare_calls
from autovaruna.graph.watching.left_tensors import say_what_is_left

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """What torch.export made of a call.

    Attributes:
        module: flat graph; placeholders are the input tensors, attributes have the model's own names.
        output_tree: structure of what the model returns; its tensors are the graph's outputs.
        constants: tensors that are neither parameters nor buffers, by attribute name.
        is_dynamic: whether the batch size is a symbol in the graph.
        markers: where the user's cut points were.
        reads: attributes of modules that the model has read, as ``path.of.module.attribute``.
        changes: the Python state that forward has changed.
        greatest: the batch size up to which the trace has taken this way; None: there is no such size.
        asks_for_one: where the model does something else for a batch of one sample; empty: nowhere.
        goes_backward: whether forward goes backward itself.
    """

    module: fx.GraphModule
    output_tree: Tree
    constants: dict[str, Tensor]
    is_dynamic: bool
    markers: tuple[Marker, ...] = ()
    reads: frozenset[str] = frozenset()
    changes: Changes = field(default_factory=Changes)
    greatest: int | None = None
    asks_for_one: str = ""
    goes_backward: bool = False


def export(model: nn.Module, call: CallSpec, batch_size: int, is_dynamic: bool, device: torch.device) -> Exported:
    """Traces one call of a model in its present mode, without running it.

    A submodule in which that fails is kept whole.

    Args:
        model: The model; its parameters may be on ``meta``.
        call: The call to trace.
        batch_size: The number that stands for the batch while tracing.
        is_dynamic: Whether the graph must serve every batch size.
        device: Where the graph will run.

    Raises:
        TraceError: the model cannot be traced; says which line and what to do.
    """
    check_layouts(model)
    first = Kept(modules=hooked(model))
    kept: Kept | None = first
    while kept is not None:
        try:
            with quiet_failure():
                found = _attempt(model, call, batch_size, is_dynamic, device, kept)
            if found.changes.names:
                _check_next(found, partial(_attempt, model, call, batch_size, is_dynamic, device, kept))
            if found.greatest is not None:
                _check_larger(found, model, call, device, kept)
            say_what_is_left(found.changes.tensors, model)
            return found
        except KeepMoreError as stopped:
            kept = stopped.kept
            for name in kept.imported:
                import_module(name)
        except TraceError as error:
            first = replace(first, integers=kept.integers, imported=kept.imported)
            is_first = kept == replace(first, functions=kept.functions, notes_draws=kept.notes_draws)
            if is_first or not is_of_keeper(error):
                raise
            kept = None
    with quiet_failure():  # fails again, and says why: nobody has asked for what was kept whole
        return _attempt(model, call, batch_size, is_dynamic, device, replace(first, can_grow=False, notes_draws=True))


def _attempt(
    model: nn.Module,
    call: CallSpec,
    batch_size: int,
    is_dynamic: bool,
    device: torch.device,
    kept: Kept,
    least: int = 1,
) -> Exported:
    """Traces a call for batch sizes from `least` on; raises `KeepMoreError` if another attempt may do better."""
    mode = TracingMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    output_trees: list[Tree] = []
    reads: set[str] = set()
    changes = Changes()
    flat = FlatCall(model, call, output_trees, reads, changes, kept.is_told)
    dimension = torch.export.Dim("batch", min=1)
    shapes = [{0: dimension} if spec.is_batch and is_dynamic else None for spec in call.inputs]
    with (
        as_before(model),
        torch.compiler.set_stance("force_eager"),  # torch.compile has nothing to compile on fake tensors
        shells(model) as scripts,
        kept_or_packed(model, outermost([*kept.modules, *scripts]), kept.operations, device) as keeper,
        faked(model, mode, device),
        named_cut_points(model),
        watched(kept.functions, kept.num_gradients or 0) as function_calls,
        noted_sizes() as (fixing, lone),
        tried_guards(least) as bounds,
        traced_data(),
        noted_checks(),
        noted_draws(model, kept.notes_draws) as draws,
        in_precision(call.precision),
        python_generators(0),
        idioms(kept.integers) as other_integers,
        padded_encoders(),
        noted_precision(call.precision),
        _noted_stops(kept.notes_functions) as stopped,
    ):
        flat.note_batch = keeper.note_batch
        inputs = example_inputs(call, batch_size, mode, device)
        draws.start()
        try:
            with warnings.catch_warnings():  # recurrent modules keep their weights twice; torch.export warns of it
                warnings.filterwarnings("ignore", message="The tensor attribute")
                program = program_of(flat, inputs, shapes, changes, recalls=not kept.num_gradients)
            with deferred_compilation():
                graph_module = unlift(program)
                take_modules(graph_module)
                take_checks(graph_module)
            check_operations(graph_module)
            draws.check()
        except InputError:
            raise
        except Exception as error:
            if other_integers and kept.can_grow:
                raise KeepMoreError(replace(kept, integers=kept.integers | other_integers)) from error
            if draws.are_hidden():
                raise KeepMoreError(replace(kept, notes_draws=True)) from error
            refusal = own_error(flat, example_inputs(call, call.batch_size, mode, device), mode)
            drawn = draws.error()
            if kept.can_grow and (drawn or not (is_dynamic and refusal is None and is_about_batch(error))):
                try_otherwise(drawn or error, model, kept, stopped)
            if isinstance(error, TraceError):
                raise
            raise explain(error, model, call, is_dynamic, fixing, refusal) from error
    if torch.is_grad_enabled() and (found := with_own_backward(function_calls)):
        raise KeepMoreError(replace(kept, functions=kept.functions | found))
    assert output_trees
    parameters = {PREFIX + name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = parameters | {PREFIX + name for name, _ in model.named_buffers(remove_duplicate=False)}
    with deferred_compilation():
        drop_idle(graph_module)
        open_free_regions(graph_module, parameters, [spec.needs_gradient for spec in call.inputs])
        switch_in_regions(graph_module)
        take_functions(graph_module)
        constants = tidy(graph_module, [spec.name for spec in call.inputs], state)
        markers = take_markers(graph_module)
    compile_regions(graph_module)
    reached = min(bounds, default=None) if is_dynamic else None
    return Exported(
        graph_module,
        output_trees[-1],
        constants,
        is_dynamic,
        markers,
        frozenset(reads),
        changes,
        reached,
        next(iter(lone), ""),
        bool(kept.num_gradients),
    )


@contextmanager
def _noted_stops(notes_functions: bool) -> Iterator[list[str]]:
    """Notes where a trace stops: lines of the model, and functions of torch."""
    with short_stacks(), stopped_functions(notes_functions) as stopped:
        yield stopped


def _check_next(found: Exported, trace_again: Callable[[], Exported]) -> None:
    """Makes sure that the model's next call gives the same graph, after what this one has changed."""
    try:
        with quiet_failure(), found.changes.as_left():
            again = trace_again()
    except Exception as error:  # what is kept for later calls are tensors of the first trace
        logger.debug("forward cannot be traced a second time: %s", error)
        return
    compare_calls(found.changes, found.module, again.module, again.constants)


def _check_larger(found: Exported, model: nn.Module, call: CallSpec, device: torch.device, kept: Kept) -> None:
    """Makes sure that a graph holds for the batch sizes for which the model takes another way, too."""

    def attempt(least: int, batch_size: int) -> tuple[fx.GraphModule, int | None]:
        try:
            with quiet_failure():
                larger = _attempt(model, call, batch_size, True, device, kept, least)
        except KeepMoreError as stopped:
            raise TraceError("larger batches need other modules kept whole") from stopped
        return larger.module, larger.greatest

    greatest = find_threshold(found.module, found.greatest, attempt)
    if greatest is not None:
        raise of_batch_size(type(model).__qualname__, "", f"it holds for batch <= {greatest} alone")

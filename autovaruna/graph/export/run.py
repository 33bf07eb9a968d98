"""Exports a call by as many attempts as it takes: `nn.Module` in, `torch.fx.GraphModule` with plain names out.

The submodule or function that stopped an attempt is kept opaque in the next one.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autovaruna._torch import FakeTensorMode, call_impl, hide_tracing, mended_lstm
from autovaruna.errors import InputError, TraceError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.cuts import Marker, named_cut_points, take_markers
from autovaruna.graph.export.advice import advice
from autovaruna.graph.export.assertions import take_checks
from autovaruna.graph.export.batch_size import SizeWatch
from autovaruna.graph.export.errors import (
    DRAWN,
    TRANSFORMS,
    BatchSizeError,
    InModuleError,
    check_layouts,
    check_operations,
    explain,
    is_about_batch,
    of_batch_size,
    own_error,
    quiet_failure,
    refuse_backward,
)
from autovaruna.graph.export.exported import (
    PREFIX,
    Exported,
    allow_cudnn,
    detach_views,
    drop_idle,
    open_free_regions,
    tidy,
    unlift,
)
from autovaruna.graph.export.idioms import Idioms
from autovaruna.graph.export.patches import hide_fakes, modules_followed, padded_encoders
from autovaruna.graph.export.watchers import restart, take_watched
from autovaruna.graph.fakes import example_inputs, faked, without_cudnn
from autovaruna.graph.lengths import Places, find_lengths
from autovaruna.graph.opaque.functions import Function, watched, with_own_backward
from autovaruna.graph.opaque.keep import OpaqueCalls, hooked, is_of_keeper, kept_whole, take_modules
from autovaruna.graph.opaque.packed import packed_sequences
from autovaruna.graph.operators import run_opaque
from autovaruna.graph.precision import compiling_nothing, in_precision, noted_precision, regions, switch_in_regions
from autovaruna.graph.random import noted_draws, python_generators
from autovaruna.graph.side_effects import StateError, as_before, check_state, left_tensors, plain_state, warn_of_left
from autovaruna.graph.source_lines import chain_of, first_line
from autovaruna.graph.tree import Tree, flatten
from autovaruna.log import warn_once

_FAR = 2**16 - 1
"""The largest batch that batch normalisations take on a GPU, one by one, when a model is evaluated."""
_HOLDERS = {"torch.nn.functional": nn.functional, "torch.functional": torch}


def failing_modules(error: BaseException, model: nn.Module, kept: Collection[str]) -> frozenset[str]:
    """Returns the paths of the modules to keep whole after a trace has stopped; empty: the model itself stopped it.

    Modules of one class stop a trace for one reason, as a rule, so all of the class are kept. If one that is kept stops
    it, the module that called it is next.
    """
    paths = _paths_of(model)
    for path in [error.path] if isinstance(error, InModuleError) else _running(error, paths):
        if path and path not in kept:
            kind = type(model.get_submodule(path))
            alike = {name for name, module in model.named_modules() if type(module) is kind and name}
            is_own = not kind.__module__.startswith("torch.") and not any(_is_inside(each, path) for each in kept)
            wanted = alike if is_own else {path}
            return outermost({*kept, *wanted})
        if not path:
            break
    return frozenset()


def _paths_of(model: nn.Module) -> dict[int, str]:
    """Returns the first path of each module, by what holds its attributes: torch.export may have made a copy of it."""
    return {id(module.__dict__): path for path, module in reversed(list(model.named_modules()))}


def fixing_module(sizes: SizeWatch, model: nn.Module, kept: Collection[str]) -> InModuleError | None:
    """Returns the error of the innermost module that fixes the batch size and is not kept; None: the model does."""
    paths = _paths_of(model)
    running = [paths.get(id(module.__dict__)) for module in sizes.fixed_in]
    path = next((path for path in running if path is not None and path not in kept), "")
    return InModuleError(path, f"it fixes the batch size{sizes.fixed_at}") if path else None


def failing_function(error: BaseException) -> str:
    """Returns the name of torch's function in which a trace stopped, as the model calls it; empty: there is none."""
    for link in reversed(list(chain_of(error))):
        called = ""
        for frame, _ in traceback.walk_tb(link.__traceback__):
            holder = _HOLDERS.get(frame.f_globals.get("__name__", ""))
            if frame.f_code is call_impl.__code__:
                called = ""
            elif holder is not None and not called and callable(getattr(holder, frame.f_code.co_name, None)):
                called = f"{holder.__name__}.{frame.f_code.co_name}"
        if called:
            return called
    return ""


def _running(error: BaseException, paths: dict[int, str]) -> list[str]:
    """Returns the paths of the modules that were running when an error was raised, the innermost first.

    Those that run in a function transform do not count: what they return has no place in a trace.
    """
    for link in reversed(list(chain_of(error))):
        found: list[str] = []
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if frame.f_code.co_filename.endswith(TRANSFORMS):
                break
            if frame.f_code is call_impl.__code__:
                path = paths.get(id(frame.f_locals["self"].__dict__))
                found += [] if path is None else [path]
        if found:
            return found[::-1]
    return []


def outermost(paths: Collection[str]) -> frozenset[str]:
    return frozenset(path for path in paths if not any(_is_inside(path, other) for other in paths))


def _is_inside(path: str, other: str) -> bool:
    return path.startswith(f"{other}.")


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptWhole:
    """What is kept whole.

    Attributes:
        operations: names of functions of torch; the way that ``cdist`` takes depends on the batch size, and ``istft``
            looks at the numbers of its window.
        can_grow: whether a submodule that stops the trace joins them.
        is_told: whether the model is told that it is traced, for which libraries have ways of their own.
        can_tell: whether that is still to be tried.
        untold: what stopped the trace when the model was not told.
    """

    functions: frozenset[Function] = frozenset()
    operations: frozenset[str] = frozenset({"torch.cdist", "torch.istft"})
    modules: frozenset[str] = frozenset()
    can_grow: bool = True
    is_told: bool = False
    can_tell: bool = True
    untold: str = ""


class RetryError(Exception):
    """Says what the next trace has to keep whole."""

    def __init__(self, kept: KeptWhole) -> None:
        super().__init__()
        self.kept = kept


def retry(error: Exception, model: nn.Module, kept: KeptWhole, stopped: Sequence[str]) -> None:
    """Asks for another attempt: first one that does what stopped this one in another way, then without that."""
    if kept.can_tell and not isinstance(error, InModuleError):
        raise RetryError(replace(kept, is_told=True, can_tell=False, untold=str(error))) from error
    is_other = kept.is_told and str(error) != kept.untold  # a library's own way has failed, and says nothing of ours
    kept = replace(kept, is_told=False, can_tell=False)
    modules = failing_modules(error, model, kept.modules)
    if modules and is_other:
        raise RetryError(kept) from error
    if modules:
        _warn(model, sorted(modules - kept.modules), error)
        raise RetryError(replace(kept, modules=modules)) from error
    function = failing_function(error) or next(iter(stopped), "")
    if function and function not in kept.operations:
        _warn(model, [function], error)
        raise RetryError(replace(kept, operations=kept.operations | {function})) from error


def _warn(model: nn.Module, new: list[str], error: Exception) -> None:
    warn_once(logger, model, f"{', '.join(new)} cannot be traced and is kept whole, never cut ({first_line(error)})")


class FlatCall(nn.Module):
    """Calls the model on a flat list of tensors and returns a flat tuple of them."""

    def __init__(self, attempt: ExportAttempt, keeper: OpaqueCalls, idioms: Idioms) -> None:
        super().__init__()
        self.model, self.attempt, self.keeper, self.idioms = attempt.model, attempt, keeper, idioms

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        attempt, call = self.attempt, self.attempt.call
        sizes = [each.shape[0] for each, spec in zip(tensors, call.inputs, strict=True) if spec.is_batch]
        assert all(size == sizes[0] for size in sizes)  # the trace has one symbol for them from now on
        self.keeper.batch = sizes
        attempt.sizes.note_free([tensors[i].shape[d] for i, d in sorted(attempt.options.free)])
        restart()
        args, kwargs = call.arguments(tensors)
        before = [(module, dict(module._buffers)) for module in self.model.modules()]
        numbers = plain_state(self.model)
        with ExitStack() as stack:
            for hide in () if attempt.kept.is_told else (hide_tracing, hide_fakes):
                stack.enter_context(hide())
            stack.enter_context(self.idioms.entered())
            returned = call.of(self.model)(*args, **kwargs)
        if any(each.grad is not None for each in self.model.parameters()):
            raise refuse_backward("torch.autograd.backward")
        outputs, tree = flatten(returned, "output")
        check_state(numbers, plain_state(self.model))
        left = left_tensors(self.model)
        for module, buffers in before:
            _write_back(module, buffers)
        attempt.reports.append((tree, left))
        return tuple(outputs)


def _write_back(module: nn.Module, before: dict[str, Tensor | None]) -> None:
    """Turns assignments to buffers into copies into them; torch.export sees those of the root module alone."""
    for name, new in list(module._buffers.items()):
        old = before.get(name)
        if new is old:
            continue
        if old is None or new is None or new.shape != old.shape or new.dtype != old.dtype:
            raise TraceError(
                f"{type(module).__qualname__}.forward replaces its buffer {name!r} by one of another kind: got "
                f"{_kind(new)}, expected {_kind(old)}. Keep the shape and dtype of a buffer that forward assigns, or "
                "run one batch through the model before it is wrapped."
            )
        old.copy_(new.detach())
        module._buffers[name] = old


def _kind(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


@dataclass(frozen=True)
class TraceOptions:
    """What a graph is to serve.

    Attributes:
        is_dynamic: whether it serves every batch size, as far as the model lets it.
        micro_batch_size: the one size that it serves if not.
        loss_mode: ``auto``, ``loss`` or ``outputs``.
        has_totals: whether micro-batches use what was counted over the whole batch; else, over their own samples.
        is_added: whether losses of micro-batches are added up, rather than averaged.
        is_parted: whether there may be several micro-batches, for which samples must not meet. If not, the first line
            that fixes the batch size stops a trace for all of them, even inside of a submodule that could be kept
            whole, and the model is traced for `micro_batch_size` samples.
        free: dimensions of inputs, besides the batch, whose lengths it need not fix; nothing is kept whole then.
        can_keep: whether what stops the trace is kept whole.
    """

    is_dynamic: bool = True
    micro_batch_size: int = 0
    loss_mode: str = "auto"
    has_totals: bool = True
    is_added: bool = False
    is_parted: bool = True
    free: Places = frozenset()
    can_keep: bool = True


PLAIN = TraceOptions()


@dataclass(frozen=True)
class ExportAttempt:
    """One trace of a call.

    Attributes:
        reports: what the model has returned in each run of it, and where it has left tensors.
    """

    model: nn.Module
    call: CallSpec
    batch_size: int
    device: torch.device
    options: TraceOptions
    kept: KeptWhole
    sizes: SizeWatch = field(default_factory=SizeWatch)
    reports: list[tuple[Tree, list[str]]] = field(default_factory=list)

    def run(self) -> Exported:
        """Traces the call.

        Raises:
            RetryError: another attempt may do better.
            TraceError: none will.
        """
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        model, kept, sizes, is_dynamic = self.model, self.kept, self.sizes, self.options.is_dynamic
        with (
            as_before(model),
            compiling_nothing(),  # torch.compile has nothing to compile on fake tensors
            torch.jit.optimized_execution(False),  # type: ignore[attr-defined]  # it would ask for sizes as numbers
            kept_whole(model, outermost(kept.modules), kept.operations, self.device) as keeper,
            packed_sequences(model, keeper),
            faked(model, mode, self.device),
            named_cut_points(model),
            watched(kept.functions, keeper.call_own) as function_calls,
            sizes.entered(),
            noted_draws(model) as drawn,
            in_precision(self.call.precision),
            python_generators(0),
            padded_encoders(),
            noted_precision(self.call.precision),
            modules_followed(),
            without_cudnn() as has_cudnn,
        ):
            idioms = Idioms(keeper.functions)
            flat = FlatCall(self, keeper, idioms)
            try:
                graph_module = self._graph(flat, example_inputs(self.call, self.batch_size, mode, self.device))
                if drawn:
                    raise InModuleError(drawn[0], DRAWN)
            except InputError:
                raise
            except Exception as error:
                self._stop(error, flat, mode, drawn, idioms.stopped)
        if torch.is_grad_enabled() and (found := with_own_backward(function_calls)):
            raise RetryError(replace(kept, functions=kept.functions | found))
        output_tree, left = self.reports[-1]
        constants, markers = self._tidy(graph_module)
        allow_cudnn(graph_module, has_cudnn)
        watched_calls, lengths = take_watched(graph_module), None
        if self.options.free:
            if any(node.target is run_opaque for region in regions(graph_module) for node in region.graph.nodes):
                raise TraceError(_KEPT)
            lengths = find_lengths(graph_module, self.call, is_dynamic, sizes.conditions)
        return Exported(
            module=graph_module,
            output_tree=output_tree,
            constants=constants,
            is_dynamic=is_dynamic,
            markers=markers,
            watched=watched_calls,
            left=tuple(left),
            greatest=self._greatest() if is_dynamic else None,
            asks_for_one=sizes.asks_for_one,
            lengths=lengths,
            fixes_lengths=sizes.fixed_at,
        )

    def _graph(self, flat: FlatCall, inputs: list[Tensor]) -> fx.GraphModule:
        """Returns torch.export's graph, with parameters, buffers and what is kept whole as attributes."""
        dimension = torch.export.Dim("batch", min=1)
        shapes: list[dict[int, Any]] = [
            {0: dimension} if spec.is_batch and self.options.is_dynamic else {} for spec in self.call.inputs
        ]
        for index, place in self.options.free:
            shapes[index][place] = torch.export.Dim.AUTO
        with warnings.catch_warnings():  # recurrent modules keep their weights twice; torch.export warns of it
            warnings.filterwarnings("ignore", message="The tensor attribute")
            program = torch.export.export(
                flat, (inputs,), dynamic_shapes=([shape or None for shape in shapes],), strict=False
            )
        graph_module = unlift(program)
        take_modules(graph_module)
        take_checks(graph_module)
        check_operations(graph_module)
        return graph_module

    def _stop(
        self, error: Exception, flat: FlatCall, mode: FakeTensorMode, drawn: Sequence[str], stopped: Sequence[str]
    ) -> NoReturn:
        """Asks for another attempt if one may do better than this one, which an error has stopped; else explains it."""
        kept = self.kept
        if isinstance(error, BatchSizeError) and not (self.options.is_parted or kept.can_tell):
            raise error
        if isinstance(error, StateError) and is_of_keeper(error):
            raise error
        refusal = own_error(flat, example_inputs(self.call, self.call.batch_size, mode, self.device), mode)
        cause: Exception | None = InModuleError(drawn[0], DRAWN) if drawn else error
        if not drawn and self.options.is_dynamic and refusal is None and is_about_batch(error):
            cause = fixing_module(self.sizes, self.model, kept.modules) if self.options.is_parted else None
        if kept.can_grow and cause is not None:
            retry(cause, self.model, kept, stopped)
        if isinstance(error, BatchSizeError):
            raise BatchSizeError(f"{error} {advice(self.model, self.call)}") from error
        if isinstance(error, TraceError):
            raise error
        raise explain(error, self.model, self.call, self.options.is_dynamic, self.sizes.fixed_at, refusal) from error

    def _greatest(self) -> int | None:
        """Returns the batch size up to which a graph holds, which is far away; None: it holds for all."""
        bounds = self.sizes.greatest
        size = min((size for size, _ in bounds), default=None)
        if size is not None and size < _FAR:
            line = next((line for _, line in sorted(bounds) if line), "")
            raise of_batch_size(self.model, self.call, line, f"it holds for batch <= {size} alone")
        return size

    def _tidy(self, graph_module: fx.GraphModule) -> tuple[dict[str, Tensor], tuple[Marker, ...]]:
        """Gives a graph plain names and regions; returns tensors beside the model's, and cut points."""
        inputs = self.call.inputs
        parameters = {PREFIX + name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        state = parameters | {PREFIX + name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        drop_idle(graph_module)
        open_free_regions(graph_module, parameters, [spec.needs_gradient for spec in inputs])
        detach_views(graph_module)
        switch_in_regions(graph_module)
        constants = tidy(graph_module, [spec.name for spec in inputs], state)
        return constants, take_markers(graph_module)


_KEPT = "what is kept whole is tried for one length alone"


_OF_HOOKS = (
    "{} have hooks of backward, and are kept whole, never cut. Each hook runs once a micro-batch, on the gradients of "
    "its samples alone: where it goes by all samples of a batch (a norm over them, say), pass num_micro_batches=1"
)


def export(model: nn.Module, call: CallSpec, batch_size: int, device: torch.device, options: TraceOptions) -> Exported:
    """Traces one call of a model in its present mode, without running it; submodules that fail are kept whole.

    Raises:
        BatchSizeError: the graph would hold for one batch size alone.
        TraceError: the model cannot be traced; says which line and what to do.
    """
    check_layouts(model)
    first = KeptWhole(modules=hooked(model), can_grow=options.can_keep)
    if first.modules:
        warn_once(logger, model, _OF_HOOKS.format(", ".join(sorted(first.modules))))
    kept: KeptWhole | None = first
    not_kept: list[BaseException] = []
    while kept is not None:
        try:
            with quiet_failure(), mended_lstm():
                found = ExportAttempt(model, call, batch_size, device, options, kept).run()
            warn_of_left(found.left, model)
            return found
        except RetryError as stopped:
            kept = stopped.kept
            not_kept += [each for each in [stopped.__cause__] if each is not None and is_of_keeper(each)]
            if options.free and (kept.modules or kept.functions):
                raise TraceError(_KEPT) from stopped
        except StateError:
            raise
        except TraceError as error:
            if options.free or (isinstance(error, BatchSizeError) and not options.is_parted):
                raise
            is_first = kept == replace(first, functions=kept.functions)
            if is_first or not is_of_keeper(error):
                raise
            kept, not_kept = None, [*not_kept, error]
    try:  # fails again, and says why: nobody has asked for what was kept whole
        with quiet_failure(), mended_lstm():
            last, options = replace(first, can_grow=False), replace(options, is_parted=True, free=frozenset())
            return ExportAttempt(model, call, batch_size, device, options, last).run()
    except TraceError as error:
        if error.own is not None:
            raise
        raise type(error)(f"{error} {not_kept[0]}") from error

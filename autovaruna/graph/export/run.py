"""Exports a call by as many attempts as it takes: `nn.Module` in, `torch.fx.GraphModule` with plain names out.

The submodule or function that stopped an attempt is kept opaque in the next one.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autovaruna._torch import FakeTensorMode, buffer_table, call_impl, hide_tracing, mended_lstm
from autovaruna.errors import InputError, TraceError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.cuts import Marker, named_cut_points, pop_markers
from autovaruna.graph.export.assertions import place_checks
from autovaruna.graph.export.batch_size import SizeWatch
from autovaruna.graph.export.errors import (
    DRAWN,
    TRANSFORMS,
    BatchSizeError,
    InModuleError,
    advice,
    check_model,
    check_operations,
    explain,
    is_about_batch,
    model_error,
    quiet_failure,
    refuse_backward,
    refuse_batch_size,
    refuse_loose,
)
from autovaruna.graph.export.exported import (
    PREFIX,
    Exported,
    allow_cudnn,
    detach_without_gradients,
    drop_idle,
    tidy,
    unlift,
)
from autovaruna.graph.export.idioms import (
    Idioms,
    conversions,
    hide_fakes,
    modules_followed,
    padded_encoders,
    refused_seeds,
    varying_lengths,
)
from autovaruna.graph.export.watchers import pop_watched, restart
from autovaruna.graph.guards import attributes_of, full_name
from autovaruna.graph.lengths import Places, find_lengths
from autovaruna.graph.module_state import (
    example_inputs,
    places_of,
    unchecked_distributions,
    with_fake_state,
    without_cudnn,
)
from autovaruna.graph.opaque.functions import opaque_functions
from autovaruna.graph.opaque.keep import NamedFunction, OpaqueCalls, is_of_keeper, opaque_calls, place_modules
from autovaruna.graph.operators import run_opaque
from autovaruna.graph.outside import OutsidePlace
from autovaruna.graph.precision import compiling_nothing, in_precision, recorded_modes
from autovaruna.graph.random import python_generators, recorded_draws
from autovaruna.graph.side_effects import (
    NumberChange,
    StateError,
    check_state,
    constants_set,
    hidden_state,
    left_outside,
    left_tensors,
    numbers_in,
    plain_state,
    refused_draws,
    restored_attributes,
    warn_of_left,
)
from autovaruna.graph.source_lines import chain_of, first_line
from autovaruna.graph.tree import Tree, flatten
from autovaruna.log import warn_once

_FAR = 2**16 - 1
"""The largest batch that batch normalisations take on a GPU, one by one, when a model is evaluated."""
logger = logging.getLogger(__name__)
_OF_ONE_LENGTH = "what is kept whole is tried for one length alone"


def failing_modules(error: BaseException, model: nn.Module, opaque: Collection[str]) -> frozenset[str]:
    """Returns the paths of the modules to keep whole after a trace has stopped; empty: the model itself stopped it.

    Modules of one class stop a trace for one reason, as a rule, so all of the class are kept. If one that is kept stops
    it, the module that called it is next.
    """
    paths = _paths_of(model)
    for path in [error.path] if isinstance(error, InModuleError) else _running(error, paths):
        if path and path not in opaque:
            kind = type(model.get_submodule(path))
            alike = {name for name, module in model.named_modules() if type(module) is kind and name}
            is_own = not kind.__module__.startswith("torch.") and not any(_is_inside(each, path) for each in opaque)
            wanted = alike if is_own else {path}
            return outermost({*opaque, *wanted})
        if not path:
            break
    return frozenset()


def _paths_of(model: nn.Module) -> dict[int, str]:
    """Returns the first path of each module, by what holds its attributes: torch.export may have made a copy of it."""
    return {id(module.__dict__): path for path, module in reversed(list(model.named_modules()))}


def fixing_module(sizes: SizeWatch, model: nn.Module, opaque: Collection[str]) -> InModuleError | None:
    """Returns the error of the innermost module that fixes the batch size and is not kept; None: the model does."""
    paths = _paths_of(model)
    running = [paths.get(id(module.__dict__)) for module in sizes.fixed_in]
    path = next((path for path in running if path is not None and path not in opaque), "")
    return InModuleError(path, f"it fixes the batch size{sizes.fixed_at}") if path else None


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


@dataclass(frozen=True)
class OpaqueParts:
    """What is opaque: kept whole, as one operation that runs as it is.

    Attributes:
        operations: functions of torch and of TorchScript, with names; ``cdist`` chooses its algorithm by the batch
            size, and ``istft`` looks at the numbers of its window.
        shows_tracing: whether ``torch.compiler.is_compiling()`` says yes, for which libraries have code of their own.
        may_show_tracing: whether that is still to be tried.
        hidden_error: what stopped the trace while it said no.
        counted: numbers of modules, by path and name, that forward changes, and must not read.
    """

    operations: frozenset[NamedFunction] = frozenset({("torch.cdist", torch.cdist), ("torch.istft", torch.istft)})
    modules: frozenset[str] = frozenset()
    shows_tracing: bool = False
    may_show_tracing: bool = True
    hidden_error: str = ""
    counted: frozenset[tuple[str, str]] = frozenset()


class RetryError(Exception):
    """Says what the next trace has to keep whole, and how to refuse the model if that is not possible either."""

    def __init__(self, opaque: OpaqueParts, refusal: TraceError | None = None) -> None:
        super().__init__()
        self.opaque, self.refusal = opaque, refusal


def next_attempt(
    error: Exception, model: nn.Module, opaque: OpaqueParts, function: NamedFunction | None
) -> OpaqueParts | None:
    """Returns what to try after an error: first to show that it is a trace, then to keep what stopped it whole."""
    if opaque.may_show_tracing and not isinstance(error, InModuleError):
        return replace(opaque, shows_tracing=True, may_show_tracing=False, hidden_error=str(error))
    is_other = opaque.shows_tracing and str(error) != opaque.hidden_error  # it is an error of the library's own path
    opaque = replace(opaque, shows_tracing=False, may_show_tracing=False)
    if modules := failing_modules(error, model, opaque.modules):
        if is_other:
            return opaque
        _warn(model, sorted(modules - opaque.modules), error)
        return replace(opaque, modules=modules)
    if function and function not in opaque.operations:
        _warn(model, [function[0]], error)
        return replace(opaque, operations=opaque.operations | {function})
    return None


def _warn(model: nn.Module, new: list[str], error: Exception) -> None:
    warn_once(logger, model, f"{', '.join(new)} cannot be traced and is kept whole, never cut ({first_line(error)})")


class FlatCall(nn.Module):
    """Calls the model on a flat list of tensors and returns a flat tuple of them."""

    def __init__(
        self, attempt: ExportAttempt, keeper: OpaqueCalls, idioms: Idioms, outside: list[OutsidePlace]
    ) -> None:
        super().__init__()
        self.outside = outside
        self.model, self.attempt, self.keeper, self.idioms = attempt.model, attempt, keeper, idioms

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        attempt, call = self.attempt, self.attempt.call
        sizes = [each.shape[0] for each, spec in zip(tensors, call.inputs, strict=True) if spec.is_batch]
        assert all(size == sizes[0] for size in sizes)  # the trace has one symbol for them from now on
        self.keeper.batch = sizes
        attempt.sizes.record_free_lengths([tensors[i].shape[d] for i, d in sorted(attempt.options.free)])
        restart()
        for place, attributes in attempt.attributes:  # torch.export has put tensors of its own there
            vars(getattr(*place)).update(attributes)
        args, kwargs = call.arguments(tensors)
        before = [(module, dict(buffer_table(module))) for module in self.model.modules()]
        numbers = plain_state(self.model) | numbers_in(self.outside)
        held = [(path, module, dict(vars(module))) for path, module in self.model.named_modules()]
        with hidden_state(self.model, attempt.opaque.counted, self.outside) as changes, self._as_on_numbers():
            returned = call.of(self.model)(*args, **kwargs)
        if any(each.grad is not None for each in self.model.parameters()):
            raise refuse_backward("torch.autograd.backward")
        outputs, tree = flatten(returned, "output", opens_caches=call.tree.has_caches)
        check_state(numbers, plain_state(self.model) | numbers_in(self.outside))
        left, sets = [*left_tensors(self.model), *left_outside(self.outside)], constants_set(held)
        if not attempt.options.is_dynamic:  # sizes of the batch are numbers like others
            left, sets = list(dict.fromkeys([*left, *(full_name(each.path, each.name) for each in sets)])), []
        for module, buffers in before:
            _write_back(module, buffers)
        attempt.reports.append((tree, left, changes, sets))
        parameters = set(map(id, self.model.parameters()))  # one that is returned as it is would be in no block
        return tuple(each.clone() if id(each) in parameters else each for each in outputs)

    @contextmanager
    def _as_on_numbers(self) -> Iterator[None]:
        """Has the code of the model run as on numbers: what asks for them leaves nodes, or is refused."""
        hidden = () if self.attempt.opaque.shows_tracing else (hide_tracing(), hide_fakes())
        idioms = self.idioms, self.idioms.scripted_functions()
        with refused_draws(self.model, self.outside), ExitStack() as stack:
            for each in (
                *hidden,
                unchecked_distributions(),
                conversions(),
                varying_lengths(),
                refused_seeds(),
                *idioms,
            ):
                stack.enter_context(each)
            yield


def _write_back(module: nn.Module, before: dict[str, Tensor | None]) -> None:
    """Turns assignments to buffers into copies; torch.export sees assignments in the root module alone."""
    for name, new in list(buffer_table(module).items()):
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
        buffer_table(module)[name] = old


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
        counted: numbers of modules, by path and name, that a forward changes, and must not read.
    """

    is_dynamic: bool = True
    micro_batch_size: int = 0
    loss_mode: str = "auto"
    has_totals: bool = True
    is_added: bool = False
    is_parted: bool = True
    free: Places = frozenset()
    can_keep: bool = True
    counted: frozenset[tuple[str, str]] = frozenset()


DEFAULTS = TraceOptions()


@dataclass(frozen=True)
class ExportAttempt:
    """One trace of a call.

    Attributes:
        reports: what the model has returned in each run of it, where it has left tensors, and numbers it has changed.
    """

    model: nn.Module
    call: CallSpec
    batch_size: int
    device: torch.device
    options: TraceOptions
    opaque: OpaqueParts
    sizes: SizeWatch = field(default_factory=SizeWatch)
    reports: list[tuple[Tree, list[str], list[NumberChange], list[NumberChange]]] = field(default_factory=list)
    attributes: list[tuple[tuple[nn.Module, str], dict[str, Any]]] = field(default_factory=list)  # of tensors

    def run(self) -> Exported:
        """Traces the call.

        Raises:
            RetryError: another attempt may do better.
            TraceError: none will.
        """
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        sizes, is_dynamic = self.sizes, self.options.is_dynamic
        own = {id(getattr(*places[0])): places[0] for places in places_of(self.model)}
        self.attributes.extend((place, attributes_of(getattr(*place))) for place in own.values())
        with self._fake_model(mode) as (outside, keeper, drawn), sizes.entered(), self._plain_torch() as has_cudnn:
            flat = FlatCall(self, keeper, Idioms(keeper.functions, own), outside)
            try:
                graph_module, held = self._graph(flat, example_inputs(self.call, self.batch_size, mode, self.device))
                if drawn:
                    raise InModuleError(drawn[0], DRAWN)
            except InputError:
                raise
            except Exception as error:
                self._stop(error, flat, mode, drawn)
        output_tree, left, changes, sets = self.reports[-1]
        constants, markers = self._tidy(graph_module, held)
        allow_cudnn(graph_module, has_cudnn)
        watched_calls, lengths = pop_watched(graph_module), None
        if self.options.free:
            if graph_module.graph.find_nodes(op="call_function", target=run_opaque):
                raise TraceError(_OF_ONE_LENGTH)
            lengths = find_lengths(graph_module, self.call, is_dynamic, sizes.conditions)
        return Exported(
            module=graph_module,
            output_tree=output_tree,
            constants=constants,
            is_dynamic=is_dynamic,
            markers=markers,
            watched=watched_calls,
            left=tuple(left),
            changes=tuple(changes),
            sets=tuple(sets),
            greatest=self._greatest() if is_dynamic else None,
            asks_for_one=sizes.asks_for_one,
            asks_for_layout=flat.idioms.asks_for_layout,
            lengths=lengths,
            fixes_lengths=sizes.fixed_at,
        )

    @contextmanager
    def _fake_model(self, mode: FakeTensorMode) -> Iterator[tuple[list[OutsidePlace], OpaqueCalls, list[str]]]:
        """Takes the numbers and opaque parts out; yields places outside of it, who keeps these parts, and who draws."""
        model, opaque = self.model, self.opaque
        with (
            restored_attributes(model) as outside,
            opaque_calls(model, outermost(opaque.modules), opaque.operations, self.device) as keeper,
            with_fake_state(model, mode, self.device),
            named_cut_points(model),
            opaque_functions(keeper.call_function),
            recorded_draws(model) as drawn,
        ):
            yield outside, keeper, drawn

    @contextmanager
    def _plain_torch(self) -> Iterator[bool]:
        """Has torch trace on this thread alone what it would compute; yields whether cuDNN was on."""
        with (
            compiling_nothing(),  # torch.compile has nothing to compile on fake tensors
            torch.jit.optimized_execution(False),  # type: ignore[attr-defined]  # it would ask for sizes as numbers
            in_precision(self.call.precision),
            python_generators(0),
            padded_encoders(),
            recorded_modes(self.call.precision),
            modules_followed(),
            without_cudnn() as has_cudnn,
        ):
            yield has_cudnn

    def _graph(self, flat: FlatCall, inputs: list[Tensor]) -> tuple[fx.GraphModule, dict[str, Any]]:
        """Returns torch.export's graph, and what it holds beside parameters and buffers."""
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
        place_modules(graph_module)
        place_checks(graph_module)
        check_operations(graph_module, program.constants)
        return graph_module, program.constants

    def _stop(self, error: Exception, flat: FlatCall, mode: FakeTensorMode, drawn: Sequence[str]) -> NoReturn:
        """Asks for another attempt if one may do better than this one, which an error has stopped; else explains it."""
        opaque, function = self.opaque, flat.idioms.function_of(error)
        if isinstance(error, BatchSizeError) and not (self.options.is_parted or opaque.may_show_tracing):
            raise error
        if isinstance(error, StateError):
            counted = (error.changed & plain_state(self.model).keys()) - opaque.counted
            if counted and not is_of_keeper(error):
                raise RetryError(replace(opaque, counted=opaque.counted | counted), error)
            if is_of_keeper(error) or not opaque.may_show_tracing:
                raise error
        own = model_error(flat, example_inputs(self.call, self.call.batch_size, mode, self.device), mode)
        cause: Exception | None = InModuleError(drawn[0], DRAWN) if drawn else error
        if not drawn and self.options.is_dynamic and own is None and is_about_batch(error):
            cause = fixing_module(self.sizes, self.model, opaque.modules) if self.options.is_parted else None
        refusal = error if isinstance(error, TraceError) else None
        if isinstance(error, BatchSizeError):
            refusal = BatchSizeError(f"{error} {advice(self.model, self.call)}")
        refusal = refusal or explain(error, self.model, self.call, self.options.is_dynamic, self.sizes.places(), own)
        new = next_attempt(cause, self.model, opaque, function) if self.options.can_keep and cause is not None else None
        if new and new != opaque:
            raise RetryError(new, refusal) from cause
        if refusal is error:
            raise error
        raise refusal from error

    def _greatest(self) -> int | None:
        """Returns the batch size up to which a graph holds, which is far away; None: it holds for all."""
        bounds = self.sizes.greatest
        size = min((size for size, _ in bounds), default=None)
        if size is not None and size < _FAR:
            line = next((line for _, line in sorted(bounds) if line), "")
            raise refuse_batch_size(self.model, self.call, line, f"it holds for batch <= {size} alone")
        return size

    def _tidy(
        self, graph_module: fx.GraphModule, held: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], tuple[Marker, ...]]:
        """Gives a graph plain names and one mode of gradients; returns tensors beside the model's, and cut points."""
        inputs = self.call.inputs
        parameters = {PREFIX + name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        state = parameters | {PREFIX + name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        loose = {name for name, each in held.items() if isinstance(each, Tensor) and each.requires_grad} - parameters
        drop_idle(graph_module)
        detach_without_gradients(graph_module, parameters | loose, [spec.needs_gradient for spec in inputs])
        if torch.is_grad_enabled():
            refuse_loose(graph_module, loose)
        constants = tidy(graph_module, [spec.name for spec in inputs], state, held)
        return constants, pop_markers(graph_module)


def export(model: nn.Module, call: CallSpec, batch_size: int, device: torch.device, options: TraceOptions) -> Exported:
    """Traces one call of a model in its present mode, without running it; submodules that fail are kept whole.

    Raises:
        BatchSizeError: the graph would hold for one batch size alone.
        TraceError: the model cannot be traced; says which line and what to do.
    """
    check_model(model)
    opaque, refusal, not_opaque = OpaqueParts(counted=options.counted), None, None
    while True:
        try:
            with quiet_failure(), mended_lstm():
                found = ExportAttempt(model, call, batch_size, device, options, opaque).run()
            warn_of_left(found.left, model)
            return found
        except RetryError as stopped:
            opaque, refusal = stopped.opaque, refusal or stopped.refusal
            if not_opaque is None and stopped.__cause__ is not None and is_of_keeper(stopped.__cause__):
                not_opaque = stopped.__cause__
            if options.free and opaque.modules:
                raise TraceError(_OF_ONE_LENGTH) from stopped
        except StateError:
            raise
        except TraceError as error:
            is_refused = options.free or (isinstance(error, BatchSizeError) and not options.is_parted)
            if is_refused or refusal is None or not is_of_keeper(error):
                raise
            if refusal.own is not None or str(not_opaque or error) == str(refusal):
                raise refusal from error
            raise type(refusal)(f"{refusal} {not_opaque or error}") from error  # nobody has asked for what was kept

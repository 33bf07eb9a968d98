"""Defines `AutoVaruna`: the one line that turns a training script into a pipeline- and data-parallel one.

The wrapper shows the modules, parameters and attributes of the model as its own, and hands the work on: calls to
`Session`, states and checkpoints to `Persistence`. What these share is the `WrappedModel`, its `WrappedOptimizer` and
the `Run`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn

from autovaruna._torch import replaced
from autovaruna.checkpoint.folder import has_checkpoints
from autovaruna.checkpoint.load import CheckpointInfo
from autovaruna.checkpoint.save import SaveOptions
from autovaruna.checkpoint.source import choose, open_source
from autovaruna.checkpoint.state import Content
from autovaruna.config.settings import Settings, resolve, whole_number
from autovaruna.elastic.snapshot import HasPosition
from autovaruna.errors import CheckpointError, InputError, OrderError, TraceError
from autovaruna.graph.facts import tensors_in
from autovaruna.graph.guards import is_constant
from autovaruna.graph.methods import OwnMethods, is_own_method
from autovaruna.interception.gradients import record_scalers
from autovaruna.interception.installed import ProcessPiece
from autovaruna.interception.modules import watch_registrations
from autovaruna.planner.records import Plan
from autovaruna.ranks.environment import promise
from autovaruna.ranks.world import World, on_first
from autovaruna.runtime.clipping import clip_grad_norm, total_norm
from autovaruna.runtime.metrics import Metrics
from autovaruna.runtime.remote_parameter import RemoteTensor
from autovaruna.runtime.weights import SplitModel
from autovaruna.session.generation import calls_together, has_encoder
from autovaruna.session.manager_link import refuse_several
from autovaruna.session.model import WrappedModel, WrappedOptimizer, parallel_kinds, refuse_parallel_wrapper
from autovaruna.session.persistence import Persistence
from autovaruna.session.preparation import GivenPlan, Prepared, settings_with
from autovaruna.session.run import Run
from autovaruna.session.session import Copies, Session

if TYPE_CHECKING:
    from typing_extensions import Self


class _AsOwn:
    """Shows a wrapper's ``forward`` as the model's: libraries go by its signature."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, wrapper: AutoVaruna | None, _: type) -> Callable[..., Any]:
        return self._method if wrapper is None else wraps(wrapper.module.forward)(partial(self._method, wrapper))


def _refuse_around(module: nn.Module, _: str, inner: nn.Module | None) -> None:
    """Refuses classes of torch's that train over the ranks around a wrapper, which they register as their module."""
    if inner is not None and parallel_kinds(type(module)):
        within = [inner, *(child for each in inner.modules() for child in each.children())]
        if any(isinstance(each, AutoVaruna) for each in within):
            refuse_parallel_wrapper(type(module), "The model that AutoVaruna wraps")


_WRAPPERS_OF_TORCH = ProcessPiece(partial(watch_registrations, _refuse_around))


class AutoVaruna(nn.Module):
    """Trains a model over all ranks of ``mpirun`` or ``torchrun``, split as the planner finds best.

    The first call traces the model, measures it, plans, and gives each rank its part. On one process the model is
    called as it is, unless a setting asks for micro-batches, stages or recomputation.

    Args:
        model: Any model that torch.export can trace.
        optimizer: Its optimizer; each rank steps over the parameters whose numbers it has.
        scaler: The loop's GradScaler, if it has one; None: the program's own, if there is one.
        plan: A `Plan` to run, as that of another wrapper of such a model, or a function that makes one of the traced
            model's `Graph`; None: it is found. With it nothing is measured, and no deployment file is read or written.
        **settings: See ``python -m autovaruna config``.

    Raises:
        ConfigError: a setting is unknown or of the wrong kind.
        PlanError: in the first call; the given plan does not fit the model, the ranks or the batch.
    """

    module: nn.Module

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        plan: GivenPlan | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(model, AutoVaruna) or not isinstance(model, nn.Module):
            raise InputError(f"AutoVaruna wraps a torch.nn.Module that is not wrapped yet: got {type(model).__name__}.")
        if any(isinstance(parameter, RemoteTensor) for parameter in model.parameters()):
            raise InputError(
                "The model has been split over the ranks by an earlier AutoVaruna: other ranks hold parameters of it. "
                "Expected a model that is whole: go on with the first wrapper, or wrap a new model and load the "
                "state_dict() of the first into it."
            )
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"The second argument is the optimizer: got {type(optimizer).__name__}, expected a "
                "torch.optim.Optimizer (of several, the one of most parameters alone); settings are keywords."
            )
        if optimizer is not None and scaler is None:
            record_scalers()
        self._wrap(model, settings_with(resolve(settings), plan), Copies(plan), optimizer=optimizer, scaler=scaler)
        self._training_run.installed.callback(_WRAPPERS_OF_TORCH.acquire())
        promise()

    def __init_subclass__(cls) -> None:
        refuse_parallel_wrapper(cls, "The model that AutoVaruna wraps")  # fully_shard() makes a class of its own

    def _wrap(
        self,
        module: nn.Module,
        settings: Settings,
        copies: Copies,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Puts the parts together."""
        super().__init__()
        self.__dict__["module"] = module  # not registered: names must stay the module's own
        self.training = module.training
        self._training_run = run = Run(settings)
        self._wrapped = model = WrappedModel(module, optimizer, run)
        self._wrapped_optimizer = own = WrappedOptimizer(optimizer, model, run)
        run.install()
        finalize(self, run.installed.close).atexit = False
        self._methods = OwnMethods(module, model.guards)
        self._persistence = Persistence(model, own, run)
        self._session = Session(model, own, run, self._persistence, scaler=scaler, copies=copies)

    # what it is

    @property
    def settings(self) -> Settings:
        """The settings."""
        return self._training_run.settings

    @property
    def world(self) -> World:
        """The ranks; the first use starts MPI."""
        return self._training_run.world

    @property
    def plan(self) -> Plan | None:
        """The plan; None before the first call, and on one process that runs the model as it is."""
        return self._wrapped.engine.plan if self._wrapped.engine is not None else None

    @property
    def preparation(self) -> Prepared:
        """How the model and its copies were planned."""
        return self._session.prepared

    @property
    def metrics(self) -> Metrics:
        """The last step that went backward, in numbers: ``print(model.metrics)``, ``model.metrics.to_dict()``."""
        return self._training_run.metrics

    @property
    def loss_mode(self) -> str | None:
        """What calls do: ``loss`` (the whole step), ``outputs`` (forwards; backwards in backward), None: not known."""
        traces = self._session.traces
        if traces is None or traces.latest is None:
            return None
        return "loss" if traces.latest.loss is not None else "outputs"

    @property
    def num_traces(self) -> int:
        """How often the model has been traced: once, and again for each call that no graph serves."""
        return 0 if self._session.traces is None else self._session.traces.num_traced

    def save_deployment(self, path: str) -> None:
        """Writes the plan, with what it is valid for, to a file; InputError if there is no plan yet."""
        if self._session.copies.prepared is None:
            raise InputError("There is no plan to save: got no call of the model yet, or one process that needs none.")
        self.preparation.save(path)

    # steps

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Plans and splits the model now, from a sample of the calls to come, of which no number is used. Collective.

        The first call does the same; after this, an optimizer can be made from what ``parameters()`` yields on each
        rank, and given to `adopt`.
        """
        self._session.prepare(args, kwargs)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the optimizer of a model that has been split, made from ``parameters()`` of this rank. Collective.

        Raises:
            InputError: it has parameters that this rank does not hold, or its steps join numbers of several.
            OrderError: the model has not been split.
        """
        if self._wrapped.engine is None and not self._session.is_plain:
            raise OrderError("adopt() is for a model that has been split: got no prepare(), nor a call, before it.")
        record_scalers()
        self._wrapped_optimizer.adopt(optimizer, self._wrapped.device)

    @_AsOwn
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model on this rank's mini-batch; returns the global batch's loss, and outputs of own samples."""
        if torch.compiler.is_dynamo_compiling():  # torch.compile around the wrapper: there is nothing in it to compile
            return torch.compiler.disable(self._session.call)(args, kwargs)  # type: ignore[no-untyped-call]
        return self._session.call(args, kwargs)

    def _call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the model: on all ranks if what it returns follows from weights, else as it is.

        What such a method calls of the model itself, or of a split one's modules, is a call of the wrapper.
        """
        plain = getattr(self.module, name)
        if self._session.is_plain:
            return plain(*args, **kwargs)
        may_follow = self._counts and tensors_in((args, kwargs))
        device, is_split = self._wrapped.device, self._wrapped.is_split
        if not (may_follow and self._methods.follow_weights(name, args, kwargs, device, is_split)):
            return self._call_together(name, *args, **kwargs)
        try:
            return self._session.call(args, kwargs, name)
        except TraceError as error:
            if not is_split:
                raise
            with self._methods.without_trace(name, error):
                return self._call_together(name, *args, **kwargs)

    def _call_together(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the model as it is, on all ranks; calls of the model and its modules in it are theirs."""
        counts = partial(getattr, self, "_counts_in_methods")
        with calls_together(self.module, self, self._parts, counts, self._training_run) as loop:
            return getattr(self.module, name)(*args, **loop.options(name, kwargs, self.plan))

    def call_part(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the model, or a module of it, by its path, on all ranks. Collective."""
        return self._session.call(args, kwargs, path)

    @property
    def is_plain(self) -> bool:
        """Whether calls need no other rank, and nothing else of the library."""
        return self._session.is_plain

    @property
    def is_split(self) -> bool:
        """Whether some ranks lack a parameter."""
        return self._wrapped.is_split

    @property
    def _parts(self) -> dict[nn.Module, Callable[..., Any]]:
        """What calls of the modules of a split model are, of those that have weights or buffers."""
        named = self.module.named_modules() if self.is_split else ()
        return {
            each: partial(self.call_part, path) for path, each in named if path and [*each.state_dict(keep_vars=True)]
        }

    @property
    def _counts(self) -> bool:
        """Whether the other ranks are needed for what uses the weights now."""
        return torch.is_grad_enabled() or self.is_split

    @property
    def _counts_in_methods(self) -> bool:
        """Whether calls in methods count: without an optimizer, or with weights not here yet, evaluation is split."""
        is_evaluated = self._wrapped_optimizer.raw is None or any(each.is_meta for each in self.module.parameters())
        return self._counts or (is_evaluated and not has_encoder(self.module))

    def no_sync(self) -> AbstractContextManager[None]:
        """Keeps gradients on each rank back; the next backward outside, or `allreduce_grads`, sums all of them."""
        return replaced(self._training_run, "is_synchronising", False)

    def delay_grad_allreduce(self, is_delayed: bool) -> None:
        """Keeps gradients back from now on (RaNNC's name), until `allreduce_grads`."""
        self._training_run.is_synchronising = not is_delayed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the model, those that are kept back included."""
        super().zero_grad(set_to_none)
        if self._wrapped.engine is not None:
            self._wrapped.engine.rank.backwards.drop_kept(set(self._wrapped.parameter_names))

    def allreduce_grads(self) -> None:
        """Sums the gradients that were kept back and adds them to ``.grad``. Collective."""
        if self._wrapped.engine is not None:
            self._wrapped.engine.rank.backwards.synchronise()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scales the gradients so that the norm of all of them, on all ranks, is at most `max_norm`. Collective.

        Returns the norm before, the same on every rank and for every plan.
        """
        self._training_run.metrics.before_clipping()
        if self._wrapped.engine is None:
            return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
        what = f"clip_grad_norm_{self._training_run.of_model}"
        return clip_grad_norm(self._split_model(), max_norm, norm_type, error_if_nonfinite, what)

    def _split_model(self) -> SplitModel:
        return SplitModel(ref(self._wrapped.state), self._wrapped.placement, self._training_run.world)

    def should_stop(self, wants_stop: bool = False) -> bool:
        """Says whether the loop is to end: the same on every rank, after the same call of the model.

        Signals are heard from the first use on: SIGTERM and SIGUSR1 then no longer end this process by themselves. A
        rank learns of those that others have heard with the next call of the model.

        Args:
            wants_stop: Whether this rank's script wants to end for a reason of its own, such as its clock; it stays so.
        """
        self._training_run.listen()
        run = self._training_run
        run.is_stop_wanted |= wants_stop
        return run.is_stop_wanted_here if run.world.num_ranks == 1 else run.is_stop_agreed

    def parameter_norm(self, norm_type: float = 2.0) -> Tensor:
        """Returns the norm of all parameters, on all ranks: the same number for every plan. Collective."""
        model = self._split_model()
        options, what = {"norm_type": f"{float(norm_type):g}"}, f"parameter_norm{self._training_run.of_model}"
        parameters = list(model.parameters().values())
        return total_norm(parameters, model.names(), model, norm_type, False, options, what)

    # state

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the whole model's state under its own names, on every rank. Collective after the first call.

        Each rank then has memory for the whole model; `save_checkpoint` writes it without, each rank its own part.
        """
        return self._persistence.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a whole model's state, of which this rank takes its part; `assign` is for a model not called yet."""
        if assign and self._wrapped.engine is not None:
            raise InputError(
                "Got load_state_dict(assign=True) after the first call: plain PyTorch's optimizer would not step over "
                "what it puts there. Expected load_state_dict(state), which copies the numbers; or assign before the "
                "first call, and make the optimizer after it."
            )
        return self._persistence.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads what a module around the wrapper hands down, as PyTorch asks each module to."""
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        is_assigned = local_metadata.get("assign_to_params_buffers", False)
        try:
            result = self.load_state_dict(own, strict=False, assign=is_assigned)
        except RuntimeError as error:
            error_msgs.append(str(error))
            return
        missing_keys += [prefix + name for name in result.missing_keys]
        if strict:
            unexpected_keys += [prefix + name for name in result.unexpected_keys]

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Returns the state of the whole optimizer, in the form of plain PyTorch, on every rank. Collective."""
        return self._persistence.optimizer_state_dict()

    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of a whole optimizer, of which this rank takes its part."""
        self._persistence.load_optimizer_state_dict(state_dict)

    # checkpoints

    def save_checkpoint(
        self,
        dir: str | PathLike[str],
        *,
        step: int,
        data_position: Any = None,
        extra: Any = None,
        keep: int | None = None,
        tempdir: str | None = None,
        background: bool = False,
        shard: bool = True,
        scaler: Any = None,
        lr_scheduler: Any = None,
    ) -> None:
        """Saves model, optimizer and the state of the run in a folder ``dir/step-...`` of its own. Collective.

        The weights are safetensors files with an index, under the names of the plain model. The folder appears when
        it is complete; rank 0 gives what is the same on all ranks (`data_position`, `extra`, `scaler`, ...).

        Args:
            dir: A folder that all ranks share.
            step: Number of the checkpoint; the same one again replaces it.
            data_position: Where the data go on: numbers, texts, tensors, lists, tuples and dicts of them.
            extra: More of the same kind.
            keep: How many checkpoints stay, this one included; None: all.
            tempdir: A local folder where files are written first.
            background: Whether training goes on while files are written, from a copy that is made first, in memory of
                the host that is kept for the next one; where that is short, a warning says so, and training waits for
                the files. What goes wrong is raised by the next call of the model, `wait_checkpoint`, or the end of
                the program.
            shard: Whether the replicas of a stage share the writing; false: the first of them writes all.

        Raises:
            CheckpointError: it cannot be saved; the same on every rank. Earlier ones are as they were.
        """
        step, keep = whole_number("step", step, 0), None if keep is None else whole_number("keep", keep)
        content = Content(step, data_position, extra, scaler, lr_scheduler)
        self._persistence.save(dir, content, SaveOptions(keep, tempdir, shard, background))
        self._training_run.set_step(step)

    def wait_checkpoint(self) -> None:
        """Waits until the checkpoint in the background is complete; CheckpointError if it failed. Collective."""
        self._persistence.wait()

    def load_checkpoint(
        self,
        dir: str | PathLike[str],
        step: int | str = "latest",
        *,
        scaler: Any = None,
        lr_scheduler: Any = None,
        strict: bool = True,
    ) -> CheckpointInfo:
        """Loads this rank's part of a checkpoint, saved by any number of ranks, whatever their plan. Collective.

        Before the first call, what needs the plan (weights on ``meta``, the optimizer's state) is read with it.

        Args:
            dir: A folder of checkpoints, one of them, a Hugging Face folder, or a safetensors file.
            step: The step, or ``"latest"``: the newest that is intact.
            strict: Whether every name of the model, and no other, must be there.

        Returns:
            What was saved beside the weights.

        Raises:
            CheckpointError: there is none that is intact, or it does not fit; nothing has been changed.
        """
        return self._persistence.load(partial(choose, self.world, dir, step), strict, scaler, lr_scheduler)

    def resume(
        self,
        dir: str | PathLike[str] | None = None,
        *,
        scaler: Any = None,
        lr_scheduler: Any = None,
        sampler: HasPosition | None = None,
        extra: Callable[[], Any] | None = None,
    ) -> CheckpointInfo:
        """Goes on where the run was: from memory of its hosts, else from the newest checkpoint, else from the start.

        Under ``autovaruna run`` the state of the newest steps is kept in memory of hosts from now on: model, optimizer
        and what is given here. Collective; called once, before the loop.

        Args:
            dir: A folder of checkpoints, for when no host has the state; None: that of ``autovaruna run
                --checkpoints``. Without any, the run begins.
            sampler: An `ElasticSampler`: its samples go on, too.
            extra: Returns what else belongs to a state, at the beginning of a call: numbers, texts, tensors, lists,
                tuples and dicts of them. It comes back as `extra` of what this returns.

        Returns:
            What belongs to the state; its `step` says how many steps of the optimizer are done, 0 at the start.

        Raises:
            CheckpointError: there are checkpoints, but none that is intact and fits.
            ConfigError: the script has several models.
        """
        refuse_several(self._session.num_models)
        if dir is None and self._training_run.manager is not None:
            dir = self._training_run.manager.place.checkpoints
        info = self.load_from_hosts(scaler=scaler, lr_scheduler=lr_scheduler)
        world, what = self._training_run.world, "looking for checkpoints"
        if info is None and on_first(world, lambda: has_checkpoints(dir), what, fails_as=CheckpointError):
            assert dir is not None
            info = self.load_checkpoint(dir, scaler=scaler, lr_scheduler=lr_scheduler)
        info = info or CheckpointInfo(Path(dir or "."), step=0)
        if sampler is not None and info.data_position is not None:
            sampler.load_state_dict(info.data_position)
        self.keep_on_hosts(info.step or 0, scaler=scaler, lr_scheduler=lr_scheduler, sampler=sampler, extra=extra)
        return info

    def load_from_hosts(
        self, step: int | None = None, scaler: Any = None, lr_scheduler: Any = None
    ) -> CheckpointInfo | None:
        """Loads what hosts have in memory of the run before, as `resume` does first. Collective.

        Returns what belongs to the state, as `load_checkpoint`; None: there is nothing, or it is not of this `step`.
        """
        manager = self._training_run.manager
        if manager is None or manager.place.step is None or step not in (None, manager.place.step):
            return None
        with manager.loading_state():
            return self._persistence.load(lambda _: open_source(manager.place.restore), True, scaler, lr_scheduler)

    def keep_on_hosts(self, step: int, **parts: Any) -> None:
        """Has the state, now that of `step`, kept in memory of hosts under ``autovaruna run``; `resume` does so last.

        `parts` are `scaler`, `lr_scheduler`, `sampler` and `extra` of `resume`.
        """
        run = self._training_run
        if run.manager is not None:
            run.listen()
            run.set_step(step)
            run.manager.keep_state(self._wrapped_optimizer.proxy, **parts)

    # the module that it shows

    def train(self, mode: bool = True) -> Self:
        """Sets training mode on the model."""
        self.training = mode
        self.module.train(mode)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of the model, under its own names; those that other ranks hold are `RemoteTensor`."""
        self._wrapped.borrowed.write_back()
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers of the model, under its own names."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules of the model, under its own names."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the direct children of the model."""
        yield from self.module.named_children()

    def extra_repr(self) -> str:
        """Returns the wrapped model's print."""
        return repr(self.module)

    def __getattr__(self, name: str) -> Any:
        """Finds what the wrapper does not define on the wrapped model (``model.config``); methods count as calls."""
        if "module" not in self.__dict__ or name == "module":
            raise AttributeError(name)
        value = getattr(self.module, name)
        return wraps(value)(partial(self._call_method, name)) if is_own_method(self.module, value, name) else value

    def __getitem__(self, place: Any) -> Any:
        """Returns what the wrapped model has there, as a `Sequential` its layers."""
        return self.module[place]  # type: ignore[index]

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets numbers on the wrapped model (``model.temperature = 0.5``), and what it has and the wrapper does not."""
        module = self.__dict__.get("module")
        is_own = module is None or name in self.__dict__ or hasattr(type(self), name)
        is_number = not name.startswith("_") and (is_constant(value) or isinstance(value, Tensor))
        is_own = is_own or not (is_number or hasattr(module, name))
        super().__setattr__(name, value) if is_own else setattr(module, name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Moves or casts the model, as ``to``, ``half`` and the like ask; after the split, where nothing changes."""
        if self._wrapped.engine is not None:
            self._wrapped.refuse_changes(fn)
            return self
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._wrapped.move_to_device()
        self._wrapped.read_state()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoVaruna:
        """Returns a model of its own, without an optimizer, of which each rank holds what it holds of this one."""
        if self._persistence.pending is not None and self._persistence.pending.weights:
            raise self._persistence.too_early("a copy of the model")
        made = memo[id(self)] = self.wrap_copy(copy.deepcopy(self.module, memo))
        own = vars(self).keys() - vars(made).keys()
        made.__dict__.update({name: copy.deepcopy(vars(self)[name], memo) for name in own})
        return made

    def wrap_copy(self, module: nn.Module) -> AutoVaruna:
        """Returns a wrapper of a copy of the module, which is split like this one."""
        made = type(self).__new__(type(self))
        made._wrap(module, self.settings, self._session.copies)
        made.training = self.training
        if self._wrapped.engine is not None:
            made._session.run_part()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to pickle the wrapper: a rank may have but a part of the model."""
        raise InputError(
            "The wrapper belongs to the ranks of this run: got a pickle (torch.save(model), for example), or a shallow "
            "copy, of it. Expected one of its state: state_dict() (on every rank), or save_checkpoint(); or "
            "copy.deepcopy(model)."
        )

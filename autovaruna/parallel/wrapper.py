"""Defines `AutoVaruna`: the one line that turns a training script into a pipeline- and data-parallel one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.config import resolve
from autovaruna.errors import InputError, RankError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.traced import TracedModel
from autovaruna.parallel.acts import Digest
from autovaruna.parallel.calls import Report, SharedCall, compare_settings, input_groups, share_call
from autovaruna.parallel.own_device import on_own_gpu
from autovaruna.parallel.same_inputs import SameInputs
from autovaruna.parallel.splittable import SplittableModule
from autovaruna.parallel.totals import BatchValues, Totals, ValuesOfBatch
from autovaruna.parallel.weights import micro_batch_weights
from autovaruna.planner.records import Plan
from autovaruna.runtime.batch import GlobalBatch, cut_batch, weigh
from autovaruna.runtime.optimizers.norm import clip_grad_norm
from autovaruna.runtime.weights.elsewhere import Elsewhere
from autovaruna.runtime.worlds.environment import promise
from autovaruna.runtime.worlds.on_all import gather_on_all

logger = logging.getLogger(__name__)


class AutoVaruna(SplittableModule):
    """Trains a model over all ranks of ``mpirun``, split as the planner finds best.

    The first call traces the model, measures it, plans, and gives each rank its part. On one process the model is
    called as it is, unless a setting asks for micro-batches, stages or recomputation.

    Args:
        model: Any model that torch.export can trace.
        optimizer: Its optimizer; each rank steps over the parameters whose numbers it has.
        scaler: The loop's GradScaler, if it has one; None: the program's own, if there is one.
        **settings: See ``python -m autovaruna config``.

    Raises:
        ConfigError: a setting is unknown or of the wrong kind.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(model, AutoVaruna) or not isinstance(model, nn.Module):
            raise InputError(f"AutoVaruna wraps a torch.nn.Module that is not wrapped yet: got {type(model).__name__}.")
        if any(isinstance(parameter, Elsewhere) for parameter in model.parameters()):
            raise InputError(
                "The model has been split over the ranks by an earlier AutoVaruna: other ranks hold parameters of it. "
                "Expected a model that is whole: go on with the first wrapper, or wrap a new model and load the "
                "state_dict() of the first into it."
            )
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"The second argument is the optimizer: got {type(optimizer).__name__}, expected a "
                "torch.optim.Optimizer; settings are keywords."
            )
        super().__init__(model, optimizer, scaler, resolve(settings))
        promise()

    @property
    def plan(self) -> Plan | None:
        """The plan; None before the first call, and on one process that runs the model as it is."""
        return self._engine.plan if self._engine is not None else None

    @property
    def loss_mode(self) -> str | None:
        """What calls do: ``loss`` (the whole step), ``outputs`` (forwards; backwards in backward), None: not known."""
        latest = self._traces.latest if self._traces is not None else None
        if latest is None:
            return None
        return "loss" if latest.loss is not None else "outputs"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model on this rank's mini-batch; returns what the model returns, for the global batch."""
        if torch.compiler.is_dynamo_compiling():  # torch.compile around the wrapper: there is nothing in it to compile
            return torch.compiler.disable(self.forward)(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._persistence.poll()
        self._lent.settle()
        if self._is_plain:
            return self.module(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # what a call prepares is for later steps, too
                return self.forward(*args, **kwargs)
        if self._engine is None:
            compare_settings(self.settings, self.world)
        shared = self._share(args, kwargs)
        num_known = 0 if self._traces is None else self._traces.num_known
        engine = self._engine or self._start(shared)
        batch = self._cut(shared, engine.plan)
        assert self._traces is not None
        traced = self._traces.of(shared, batch)
        vars(self)["_num_calls"] += 1  # a module takes long to set an attribute
        returned = engine.run(traced, shared, batch, self._values_of_batch(traced, shared, batch))
        if self._traces.num_known > num_known:
            self._guards.start()
        if self._traces.num_known > num_known or traced.has_kept_modules:  # both may set attributes
            self._guards.settle()
        return returned

    def _share(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SharedCall:
        """Tells all ranks of this rank's call. Collective."""
        error: Exception | None = None
        report = None
        try:
            mode = self._guards.words()
            self._check_parameters()
            tensors, call = self._reader.read(args, kwargs, mode)
            tensors = on_own_gpu(tensors, self._device)
            passed = self._same_inputs.digests(self._num_calls, tensors)
            totals = self._own_totals(call.key(), tensors, call.batch_size)
            report = call.key(), call.batch_size, self._digest(), passed, totals
        except Exception as caught:
            error = caught
        reports = self.world.agree(error, f"reading the model's inputs{self.of_model}", report)
        if self._leave_out(call, reports):
            return self._share(args, kwargs)
        try:
            shared = share_call(call, tensors, self._num_calls, self._groups, self.world, reports, self._doings)
        except RankError:  # on every rank; parameters() gives a caller those of this rank alone to freeze
            if self._engine is None or not self._state.follow_frozen(self._engine.placement, self.world):
                raise
            return self._share(args, kwargs)
        if self.world.rank == 0 and reports[0][3]:
            self._same_inputs.compare(call, [digests for *_, digests, _ in reports])
        return shared

    def _leave_out(self, call: CallSpec, reports: Sequence[Report]) -> bool:
        """Looks, where a call is new, for attributes that the script has set and no trace depends on. Collective then.

        Returns:
            Whether there are any; they do not count any more.
        """
        traces, keys = self._traces, {key for key, *_ in reports}
        if self._engine is None or traces is None or (len(keys) == 1 and traces.knows(call.key())):
            return False
        found = self.world.gather_objects(self._guards.doubtful(), "comparing changed attributes")
        names = set().union(*found)
        if not names:
            return False
        trials = self.world.gather_objects(traces.try_without(names, call, self._guards), "comparing trials")
        unread = set.intersection(*(unread for unread, _ in trials))
        self._guards.note_trial(names, unread, set().union(*(read for _, read in trials)))
        if unread and self.world.rank == 0:
            text = "no trace depends on %s, which the script sets between calls: calls do not differ by it from now on"
            logger.info(text, ", ".join(sorted(unread)))
        return bool(unread)

    def _own_totals(self, key: str, tensors: Sequence[Tensor], num_samples: int) -> Totals | None:
        """Returns the totals of this rank's mini-batch; None: the graph is not known yet."""
        traced = None if self._traces is None else self._traces.known(key)
        if traced is None:
            return None
        return self._values_in(traced).of_samples(tensors, num_samples) if traced.totals else []

    def _values_of_batch(self, traced: TracedModel, shared: SharedCall, batch: GlobalBatch) -> ValuesOfBatch:
        """Returns what micro-batches are given of the whole batch. Collective if the graph is new."""
        if not traced.totals:
            return {}
        values = self._values_in(traced)
        reported: Sequence[Totals | None] = shared.totals
        if None in reported:  # on every rank
            own = partial(values.of_samples, shared.tensors, shared.call.batch_size)
            reported = gather_on_all(self.world, own, f"counting over the batch{self.of_model}")
        first = [ranks[0] for ranks in shared.groups]
        totals = [reported[rank] or [] for rank in first]
        return values.of_batch(totals, [shared.sizes[rank] for rank in first], shared.tensors, batch)

    def _values_in(self, traced: TracedModel) -> BatchValues:
        if traced.key not in self._batch_values:
            device = self.preparation.device
            self._batch_values[traced.key] = BatchValues(traced, lambda: self._state.buffers(), device)
        return self._batch_values[traced.key]

    def _digest(self) -> Digest:
        """Returns what is short, and equal for ranks whose scripts have done the same since the start."""
        return self._acts.digest() if self._engine is None else self._acts.digest() + self._engine.doings

    def _doings(self) -> dict[str, str]:
        """Returns what this rank's script has done since the start, in words."""
        return self._acts.words() | ({} if self._engine is None else self._engine.words)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether the model is called as it is: one process, and no setting that asks for more."""
        if self.world.num_ranks > 1:
            return False
        settings = self.settings
        asks = (
            settings.num_micro_batches,
            settings.micro_batch_size,
            settings.num_stages > 1,
            settings.recompute == "all",
            settings.memory_limit_bytes,
            settings.cuts,
            settings.stage_ranks,
        )
        return not any(asks)

    @cached_property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that pass the same mini-batch."""
        return input_groups(self.settings, self.world.num_ranks)

    @cached_property
    def _same_inputs(self) -> SameInputs:
        return SameInputs(self._groups)

    def _cut(self, shared: SharedCall, plan: Plan) -> GlobalBatch:
        batch = cut_batch(shared.sizes, plan.num_micro_batches, shared.groups)
        weights = micro_batch_weights(self.settings.micro_batch_weight, self.module, shared, batch, self.world)
        return weigh(batch, weights, self.settings.reduction == "sum")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps gradients on each rank back; the next call outside, or `allreduce_grads`, sums them with its own."""
        before = self._is_synchronising
        self.delay_grad_allreduce(True)
        try:
            yield
        finally:
            self.delay_grad_allreduce(not before)

    def delay_grad_allreduce(self, is_delayed: bool) -> None:
        """Keeps gradients back from now on (RaNNC's name), until `allreduce_grads`."""
        self._is_synchronising = not is_delayed
        if self._engine is not None:
            self._engine.is_synchronising = not is_delayed

    def allreduce_grads(self) -> None:
        """Sums the gradients that were kept back and adds them to ``.grad``. Collective."""
        if self._engine is not None:
            self._engine.synchronise()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scales the gradients so that the norm of all of them, on all ranks, is at most `max_norm`. Collective.

        Returns:
            The norm before, the same on every rank and for every plan.
        """
        if self._engine is None:
            return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
        return clip_grad_norm(
            self._state,
            self._engine.placement,
            self._parameter_names,
            self.world,
            max_norm,
            norm_type,
            error_if_nonfinite,
            f"clip_grad_norm_{self.of_model}",
        )

    def save_deployment(self, path: str) -> None:
        """Writes the plan, with what it is valid for, to a file.

        Raises:
            InputError: there is no plan yet.
        """
        if self._copies.preparation is None:
            raise InputError("There is no plan to save: got no call of the model yet, or one process that needs none.")
        self._copies.preparation.save(path)

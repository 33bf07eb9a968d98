"""Keeps the graph of every kind of call; one that is not known yet is traced, by all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.config.settings import Settings
from autovaruna.errors import InputError, RankError
from autovaruna.graph.batch.losses import refuse_other_losses
from autovaruna.graph.batch.state import refuse_single_values
from autovaruna.graph.call import CallSpec
from autovaruna.graph.export.errors import ChangedStateError
from autovaruna.graph.guards import GONE, Guards, Unusable, UsedError
from autovaruna.graph.module_state import settle
from autovaruna.graph.trace import ONE_AT_A_TIME, trace
from autovaruna.graph.traced import TracedModel, is_same_graph
from autovaruna.graph.verify.by_parts import Parts, warn_untried
from autovaruna.graph.verify.eager_vs_graph import compare
from autovaruna.runtime.batch import GlobalBatch
from autovaruna.runtime.weights.remote_parameter import RemoteTensor
from autovaruna.runtime.world import World, differences, on_all
from autovaruna.session.calls import SharedCall

logger = logging.getLogger(__name__)
_OTHERS: tuple[Callable[[str], Any], ...] = (Unusable, lambda name: GONE)
"""What is put in the place of an attribute."""
_MOST_SAMPLES = 4
"""Samples on which a graph is compared with its model."""
_MOST_IN_PARTS = 16
"""Samples of which two parts are compared with all of them."""


class Traces:
    """The graphs of one model.

    Args:
        model: The model.
        settings: The settings.
        world: The ranks.
        device: Where this rank computes.
    """

    def __init__(self, model: nn.Module, settings: Settings, world: World, device: torch.device) -> None:
        self._model = model
        self._settings = settings
        self._world = world
        self._device = device
        self._known: dict[str, TracedModel] = {}
        self._checked: set[tuple[str, frozenset[int], bool]] = set()
        self.latest: TracedModel | None = None

    @property
    def num_known(self) -> int:
        """How many graphs there are."""
        return len(self._known)

    def known(self, key: str) -> TracedModel | None:
        """Returns the graph of the calls of a key; None: it is not known yet, or depends on the micro-batches."""
        return self._known.get(key)

    def knows(self, key: str) -> bool:
        """Whether calls of a key have been traced."""
        return any(each.partition("/")[0] == key for each in self._known)

    def try_without(self, names: Collection[str], call: CallSpec, guards: Guards) -> tuple[set[str], set[str]]:
        """Traces a call without attributes, and with something in their place that cannot be used.

        Args:
            names: The attributes.
            call: The call.
            guards: Guards the model's attributes.

        Returns:
            The attributes without which the graph is the one of the latest call that is like this one but for
            attributes; and those that forward uses.
        """
        likes = [each for each in self._known.values() if _without_attributes(each.call) == _without_attributes(call)]
        unread, read = set(names), set[str]()
        while likes and unread:
            try:
                others = [{name: kind(name) for name in unread} for kind in _OTHERS]
                is_unread = all(self._is_same(likes[-1], call, guards, each) for each in others)
                return (unread if is_unread else set()), read
            except UsedError as used:
                read.add(used.name)
                unread.discard(used.name)
        return set(), read

    def _is_same(self, known: TracedModel, call: CallSpec, guards: Guards, others: Mapping[str, Any]) -> bool:
        """Whether a model has the same graph with other values of attributes."""
        try:
            with guards.with_others(others):
                return is_same_graph(self._act(call, known.sizes.batch_size)(), known)
        except Exception as error:
            logger.debug("the model cannot be traced without %s: %s", ", ".join(others), error)
            return False

    def first(self, shared: SharedCall) -> TracedModel:
        """Returns the graph of the call that is to be planned, whose micro-batches are not known yet. Collective."""
        if self._settings.num_micro_batches != 1:
            self._refuse_synchronised_norms()
        return self._find(shared, -(-max(shared.sizes) // self._expected_parts(shared)))

    def of(self, shared: SharedCall, batch: GlobalBatch) -> TracedModel:
        """Returns the graph of a call. Collective if it is not known yet.

        Raises:
            InputError: the graph serves one micro-batch size alone, and micro-batches differ; one is too small; or
                losses that are sums, or no means at all, would be averaged.
        """
        sizes = batch.sizes
        if not self._settings.dynamic_batch and len(sizes) > 1:
            raise InputError(
                f"dynamic_batch=False needs micro-batches of one size: got {sorted(sizes)} samples. Pass batches that "
                "num_micro_batches divides, or leave out the last batch of an epoch."
            )
        traced = self._find(shared, max(sizes))
        is_parted = len(batch.micro_batches) > 1
        if (traced.key, sizes, is_parted) not in self._checked:
            refuse_single_values(traced, sizes)
            if is_parted:
                self._refuse_synchronised_norms()
                self._check_parts(traced)
            self._checked.add((traced.key, sizes, is_parted))
        return traced

    def _refuse_synchronised_norms(self) -> None:
        """Refuses normalisations by the samples of all ranks, where a micro-batch sees its own alone.

        Raises:
            InputError: there is one in training mode.
        """
        for path, module in self._model.named_modules():
            if isinstance(module, nn.SyncBatchNorm) and module.training:
                raise InputError(
                    f"{path or 'The model'} is a SyncBatchNorm, which asks for the statistics of the global batch: got "
                    "micro-batches, each of which has its own. Expected one micro-batch: pass num_micro_batches=1 and "
                    "inputs='replicated', the same batch on every rank; or make it a BatchNorm, which counts over a "
                    "micro-batch, and pass batch_norm_samples."
                )

    def _check_parts(self, traced: TracedModel) -> None:
        """Makes sure that the losses of micro-batches make up that of the batch, unless the user weighs them."""
        if not self._settings.micro_batch_weight:
            refuse_other_losses(traced, is_added=self._settings.reduction == "sum")

    def _expected_parts(self, shared: SharedCall) -> int:
        """Returns the micro-batches that a mini-batch will have if the planner keeps to the settings."""
        if self._settings.micro_batch_size:
            return max(1, -(-max(shared.sizes) // self._settings.micro_batch_size))
        total = self._settings.num_micro_batches or self._world.num_ranks
        return max(1, total // len(shared.groups))

    def _find(self, shared: SharedCall, micro_batch_size: int) -> TracedModel:
        fixed = f"{shared.key}/{micro_batch_size}"
        key = next((each for each in (shared.key, fixed) if each in self._known), "")
        if not key:
            traced = self._trace(shared, micro_batch_size)
            key = shared.key if traced.sizes.symbol is not None else fixed
            self._known[key] = traced
        if self._known[key].asks_for_one and shared.global_batch_size == 1:
            key = f"{key}/alone"
            if key not in self._known:
                self._known[key] = self._trace(shared, 1, is_alone=True)
        self.latest = self._known[key]
        return self.latest

    def _trace(self, shared: SharedCall, micro_batch_size: int, is_alone: bool = False) -> TracedModel:
        """Traces a call, for one sample and no other size if that `is_alone` in the global batch."""
        act = self._act(shared.call, micro_batch_size, is_alone)
        traced = on_all(self._world, partial(self._settled, act, shared), "tracing")
        self._compare(traced)
        if self._settings.check_trace:
            self._check(traced, shared, micro_batch_size)
        return traced

    def _act(self, call: CallSpec, micro_batch_size: int, is_alone: bool = False) -> Callable[[], TracedModel]:
        return partial(
            trace,
            self._model,
            call,
            self._device,
            is_dynamic=self._settings.dynamic_batch and not is_alone and not self.knows(call.key()),
            micro_batch_size=micro_batch_size,
            loss_mode=self._settings.loss_mode,
            has_totals=not (self._settings.micro_batch_weight or is_alone),
            is_added=self._settings.reduction == "sum",
            is_parted=self._settings.num_micro_batches != 1 and not is_alone,
        )

    def _settled(self, act: Callable[[], TracedModel], shared: SharedCall) -> TracedModel:
        """Traces the model; one that keeps something from its first call on, as it is after that."""
        try:
            return act()
        except ChangedStateError:
            half = shared.sizes[self._world.rank] // 2
            if self._known or not half or not self._is_whole():
                raise
            samples = [shared.samples(0, min(half, _MOST_SAMPLES)), shared.samples(half, _MOST_SAMPLES)]
            with ONE_AT_A_TIME:
                is_settled = settle(self._model, shared.call, samples, self._device)
            if not is_settled:
                raise
        return act()

    def _check(self, traced: TracedModel, shared: SharedCall, micro_batch_size: int) -> None:
        """Makes sure that the graph computes what the model does, on the first rank that has it whole. Collective.

        After the split no rank has, as a rule: the traces of later kinds of calls are not compared then.
        """
        size = micro_batch_size if traced.sizes.symbol is None else min(micro_batch_size, _MOST_SAMPLES)
        can = shared.sizes[self._world.rank] >= size and self._is_whole()
        able = self._world.gather_objects(can, "finding who has the whole model")
        is_chosen = any(able) and able.index(True) == self._world.rank

        joins = bool(traced.joins_counts) and self._settings.num_micro_batches != 1

        def compare_here() -> None:
            if is_chosen:
                samples = shared.samples(0, size) if not traced.asks_for_one else self._repeated(shared, max(2, size))
                compare(traced, self._model, samples, self._device)
                if joins:
                    self._compare_parts(traced, shared)
            elif joins and self._world.rank == 0 and not any(able):
                warn_untried(traced, self._model, "no rank has all of the model and some samples")

        on_all(self._world, compare_here, "comparing the trace with the model")

    def _compare_parts(self, traced: TracedModel, shared: SharedCall) -> None:
        """Makes sure that counts of several samples do not go into what the graph gives for each.

        This rank's samples are repeated until they are as many as the global batch has, which may be more than it has.
        """
        size = min(shared.global_batch_size, _MOST_IN_PARTS)
        if size < 2:
            return
        tensors = self._repeated(shared, size)
        Parts(traced, self._model, tensors, size, self._device, self._share_of_loss(traced)).compare()

    def _repeated(self, shared: SharedCall, size: int) -> list[Tensor]:
        """Returns this rank's tensors with its first samples, repeated until they are `size`."""
        own = min(size, shared.sizes[self._world.rank])
        places = torch.arange(size) % own
        pairs = zip(shared.samples(0, own), shared.call.inputs, strict=True)
        return [tensor[places.to(tensor.device)] if spec.is_batch else tensor for tensor, spec in pairs]

    def _share_of_loss(self, traced: TracedModel) -> Callable[[float], float] | None:
        """Returns the weight of a micro-batch's loss by its part of the samples; None: there is none."""
        if self._settings.micro_batch_weight:
            return None
        try:
            self._check_parts(traced)
        except InputError:  # there may turn out to be one micro-batch
            return None
        return (lambda part: 1.0) if self._settings.reduction == "sum" else (lambda part: part)

    def _is_whole(self) -> bool:
        """Whether this rank has all numbers of the model where it computes."""
        state = [*self._model.parameters(), *self._model.buffers()]
        return not any(isinstance(each, RemoteTensor) or each.is_meta for each in state) and all(
            each.device.type == self._device.type for each in state
        )

    def _compare(self, traced: TracedModel) -> None:
        """Makes sure that every rank traced the same model."""
        prints = self._world.gather_objects(traced.graph.fingerprint, "comparing graphs")
        if len(set(prints)) > 1:
            own = {f"parameter {name}": f"{tuple(p.shape)} {p.dtype}" for name, p in self._model.named_parameters()}
            own |= {"the number of operations": str(len(traced.nodes))}
            found = differences(self._world.gather_objects(own, "comparing models"))
            raise RankError(
                f"The ranks built different models: {found or f'the fingerprints of their graphs are {prints}'}. "
                "Expected the same model, built with the same arguments, on every rank; weights may differ, "
                "operations and shapes may not."
            )


def _without_attributes(call: CallSpec) -> str:
    return replace(call, mode=call.mode.partition(" attributes=")[0]).key()

"""Keeps the graph of every kind of call; one that is not known yet is traced, by all ranks together.

Warnings say what a script can do where calls ask for ever more traces: for lengths, kinds of calls, numbers.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.config.settings import Settings
from autovaruna.errors import AutoVarunaError, InputError, RankError
from autovaruna.evidence.verify import compare
from autovaruna.graph.batch.refusals import refuse_other_losses, refuse_single_values
from autovaruna.graph.batch.thresholds import refuse_thresholds
from autovaruna.graph.call import CallSpec
from autovaruna.graph.export.run import TraceOptions
from autovaruna.graph.guards import GONE, Guards, Unusable, UsedError
from autovaruna.graph.lengths import Places
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel, is_same_graph
from autovaruna.log import TRYING, phase, warn_once
from autovaruna.ranks.exchange import differences
from autovaruna.ranks.world import World, gather_on_all, on_all
from autovaruna.runtime.batch import GlobalBatch
from autovaruna.runtime.remote_parameter import RemoteTensor
from autovaruna.session.shared_call import SharedCall

logger = logging.getLogger(__name__)
_REPLACEMENTS: tuple[Callable[[str], Any], ...] = (Unusable, lambda name: GONE)  # of an attribute that is left out
_MOST_SAMPLES = 4  # samples on which a graph is compared with its model
MOST_GRAPHS = 32  # graphs that are kept
_MOST_TRIED = 2  # traces that try to leave a dimension free
_MOST_VALUES = 2  # traces for one number alone, after the first one
_ARGUMENT = "argument "


class Traces:
    """The graphs of one model."""

    def __init__(self, model: nn.Module, settings: Settings, world: World, device: torch.device) -> None:
        self._model, self._settings, self._world, self.device = model, settings, world, device
        self._known: OrderedDict[str, TracedModel] = OrderedDict()
        self._checked: set[tuple[str, frozenset[int], bool]] = set()
        self._fixed_lengths: Counter[tuple[str, int, int]] = Counter()
        self._counted = frozenset[tuple[str, str]]()  # numbers that a forward changes; a graph that reads one is none
        self._dropped: list[str] = []  # keys of graphs that may read such a number, while the engine has them
        self.latest: TracedModel | None = None
        self.num_traced = 0

    def find(self, call: CallSpec) -> TracedModel | None:
        """Returns the graph of a call; None: it is not known yet, or depends on the micro-batches."""
        return self._known.get(self._serving(call, 0))

    def knows(self, call: CallSpec) -> bool:
        """Whether there is a graph that serves a call, at least for some size of micro-batches."""
        return any(traced.lengths_of(call) is not None for traced in self._known.values())

    def _serving(self, call: CallSpec, micro_batch_size: int) -> str:
        """Returns the key of the graph that serves a call; empty: there is none."""
        for key in (call.key, f"{call.key}/{micro_batch_size}"):
            if key in self._known:
                return key
        for key, traced in self._known.items():
            sizes = traced.sizes
            fits = sizes.lengths is not None and (sizes.symbol is not None or sizes.batch_size == micro_batch_size)
            if fits and traced.lengths_of(call) is not None:
                return key
        return ""

    def try_without(self, names: Collection[str], call: CallSpec, guards: Guards) -> tuple[set[str], set[str]]:
        """Traces a call without attributes, and with something in their place that cannot be used.

        Returns the attributes without which the graph is the one of the latest call that is like this one but for
        attributes; and those that forward uses.
        """

        def like(one: CallSpec) -> tuple[str, str]:
            return one.kind, one.mode.partition(" attributes=")[0]

        likes = [each for each in self._known.values() if like(each.call) == like(call)]
        unread, read = set(names), set[str]()
        while likes and unread:
            try:
                others = [{name: kind(name) for name in unread} for kind in _REPLACEMENTS]
                is_unread = all(self._is_same(likes[-1], guards, each) for each in others)
                return (unread if is_unread else set()), read
            except UsedError as used:
                read.add(used.name)
                unread.discard(used.name)
        return set(), read

    def _is_same(self, known: TracedModel, guards: Guards, others: Mapping[str, Any]) -> bool:
        """Whether a model has the same graph with other values of attributes."""
        try:
            with guards.with_others(others):
                return is_same_graph(self.retrace(known), known)
        except Exception as error:
            logger.debug("the model cannot be traced without %s: %s", ", ".join(others), error)
            return False

    def retrace(self, known: TracedModel) -> TracedModel:
        """Returns the graph that the model has now for a call of which another one is known."""
        sizes = known.sizes
        free = sizes.lengths.places if sizes.lengths else frozenset()
        return self._tracing(known.call, sizes.batch_size, sizes.symbol is not None, free)()

    def first(self, shared: SharedCall) -> TracedModel:
        """Returns the graph of the call that is to be planned, if its losses can be parted. Collective."""
        if self._settings.num_micro_batches != 1:
            self._refuse_synchronised_norms()
        traced = self._find(shared, -(-max(shared.sizes) // self._expected_parts(shared)))
        num_passed = sum(shared.sizes[ranks[0]] > 0 for ranks in shared.groups)
        if max(num_passed, min(self._settings.num_micro_batches, shared.global_batch_size)) > 1:
            self._refuse_other_losses(traced)
        return traced

    def of(self, shared: SharedCall, batch: GlobalBatch) -> TracedModel:
        """Returns the graph of a call, if it can serve the micro-batches. Collective if it is not known yet."""
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
            if traced.greatest is not None and batch.num_samples > traced.greatest:
                raise InputError(
                    f"The model may do something else for more than {traced.greatest} samples: got a global batch of "
                    f"{batch.num_samples}. Expected no more than that; pass smaller batches."
                )
            if is_parted:
                self._refuse_synchronised_norms()
                self._refuse_other_losses(traced)
                is_exact = self._settings.batch_statistics == "exact" and not self._settings.micro_batch_weight
                refuse_thresholds(traced, batch.num_samples, type(self._model).__qualname__, is_exact)
            self._checked.add((traced.key, sizes, is_parted))
        return traced

    def _refuse_synchronised_norms(self) -> None:
        """Refuses normalisations by the samples of all ranks, where a micro-batch sees its own alone."""
        for path, module in self._model.named_modules():
            if isinstance(module, nn.SyncBatchNorm) and module.training:
                raise InputError(
                    f"{path or 'The model'} is a SyncBatchNorm, which asks for the statistics of the global batch: got "
                    "micro-batches, each of which has its own. Expected one micro-batch: pass num_micro_batches=1 and "
                    "inputs='replicated', the same batch on every rank; or make it a BatchNorm, which counts over a "
                    "micro-batch, and pass batch_norm_samples."
                )

    def _refuse_other_losses(self, traced: TracedModel) -> None:
        """Refuses a loss that is not the mean, or sum, of its micro-batches' losses, unless the user weighs them."""
        mark, settings = (traced.key, frozenset[int](), True), self._settings
        if mark not in self._checked and not settings.micro_batch_weight:
            refuse_other_losses(traced, settings.reduction == "sum", settings.batch_statistics == "exact")
        self._checked.add(mark)  # each graph is checked once

    def _expected_parts(self, shared: SharedCall) -> int:
        """Returns the micro-batches that a mini-batch will have if the planner keeps to the settings."""
        if self._settings.micro_batch_size:
            return max(1, -(-max(shared.sizes) // self._settings.micro_batch_size))
        total = self._settings.num_micro_batches or self._world.num_ranks
        return max(1, total // len(shared.groups))

    def _find(self, shared: SharedCall, micro_batch_size: int) -> TracedModel:
        key = self._serving(shared.call, micro_batch_size)
        if not key:
            traced = self._trace_free(shared, micro_batch_size) or self._trace(shared, micro_batch_size)
            key = traced.key
            self._known[key] = traced
            self.num_traced += 1
        if self._known[key].asks_for_one and shared.global_batch_size == 1:
            key = f"{shared.call.key}/alone"
            if key not in self._known:
                self._known[key] = self._trace(shared, 1, is_alone=True)
                self.num_traced += 1
        self._known.move_to_end(key)
        self.latest = self._known[key]
        return self.latest

    def forget_oldest(self) -> list[str]:
        """Drops the graphs that were used longest ago, where there are too many; returns the keys of all dropped."""
        forgotten, self._dropped = self._dropped, []
        while len(self._known) > MOST_GRAPHS:
            _, traced = self._known.popitem(last=False)
            self._checked = {each for each in self._checked if each[0] != traced.key}
            forgotten.append(traced.key)
            text = (
                f"the model was traced for more than {MOST_GRAPHS} kinds of calls: the graphs that were used longest "
                "ago are dropped. Each kind is traced once, which takes long: pad inputs to a few lengths, and pass "
                "what varies as tensors, not as numbers"
            )
            warn_once(logger, self._model, text)
        return forgotten

    def _trace_free(self, shared: SharedCall, micro_batch_size: int) -> TracedModel | None:
        """Traces a call for other lengths, too, that have varied; None: none have, or it cannot be. Collective."""
        call, places = shared.call, self._varying(shared.call)
        if not places:
            return None
        act = self._tracing(call, micro_batch_size, self._is_dynamic(call), places)

        def attempt() -> tuple[TracedModel | None, str]:
            try:
                return act(), ""
            except AutoVarunaError as error:
                return None, str(error)

        traced, reason = on_all(self._world, attempt, "tracing")
        lengths = None if traced is None else traced.sizes.lengths
        for place in places - (frozenset() if lengths is None else lengths.places):
            self._record_fixed_length(call, place, reason if traced is None else traced.fixes_lengths)
        if not all(self._world.gather_objects(traced is not None, "tracing")):
            return None
        assert traced is not None
        return self._checked_on_all(traced, shared, micro_batch_size)

    def _varying(self, call: CallSpec) -> Places:
        """Returns the dimensions that differ in earlier calls of the kind, but for those that the model fixes."""
        found: set[tuple[int, int]] = set()
        for traced in self._known.values():
            if traced.call.kind == call.kind:
                found |= _differing(traced.call, call)
                found |= traced.sizes.lengths.places if traced.sizes.lengths else frozenset()
        return frozenset(
            (index, dimension)
            for index, dimension in found
            if call.inputs[index].shape[dimension] > 1
            and self._fixed_lengths[call.kind, index, dimension] < _MOST_TRIED
        )

    def _record_fixed_length(self, call: CallSpec, place: tuple[int, int], reason: str) -> None:
        """Counts traces that could not leave a dimension free: there are two, for the first may fail by chance."""
        index, dimension = place
        self._fixed_lengths[call.kind, index, dimension] += 1
        if self._fixed_lengths[call.kind, index, dimension] == _MOST_TRIED and self._world.rank == 0:
            spec = call.inputs[index]
            text = (
                f"the model fixes dimension {spec.place(dimension)} of {spec.name} {spec.passed_shape}, and is traced "
                "anew for each other length, which takes long: pad inputs to a few lengths "
                f"({reason.strip() or 'at a line not known'})"
            )
            warn_once(logger, self._model, text)

    def _trace(self, shared: SharedCall, micro_batch_size: int, is_alone: bool = False) -> TracedModel:
        """Traces a call, for one sample and no other size if that `is_alone` in the global batch."""
        is_dynamic = not is_alone and self._is_dynamic(shared.call)
        act = self._tracing(shared.call, micro_batch_size, is_dynamic, is_alone=is_alone)
        with phase(logger, "tracing the model"):
            traced = on_all(self._world, act, "tracing")
        return self._checked_on_all(traced, shared, micro_batch_size)

    def _checked_on_all(self, traced: TracedModel, shared: SharedCall, micro_batch_size: int) -> TracedModel:
        self._compare(traced)
        if changed := frozenset((each.path, each.name) for each in traced.changes) - self._counted:
            self._counted |= changed
            self._dropped += self._known
            self._known.clear()
        has_numbers = not any(spec.is_kept for spec in traced.call.inputs)  # else stages have them
        if has_numbers and self._settings.check_trace:
            with phase(logger, TRYING):
                self._check(traced, shared, micro_batch_size)
        return traced

    def _is_dynamic(self, call: CallSpec) -> bool:
        """Whether a graph of a call is to serve all batch sizes; not if one could not."""
        return self._settings.dynamic_batch and not self.knows(call)

    def _tracing(
        self,
        call: CallSpec,
        micro_batch_size: int,
        is_dynamic: bool,
        free: Places = frozenset(),
        is_alone: bool = False,
    ) -> Callable[[], TracedModel]:
        options = TraceOptions(
            is_dynamic=is_dynamic,
            micro_batch_size=micro_batch_size,
            loss_mode=self._settings.loss_mode,
            has_totals=not (self._settings.micro_batch_weight or is_alone),
            is_added=self._settings.reduction == "sum",
            is_parted=self._settings.num_micro_batches != 1 and not is_alone,
            free=free,
            counted=self._counted,
        )
        return partial(trace, self._model, call, self.device, options)

    def _check(self, traced: TracedModel, shared: SharedCall, micro_batch_size: int) -> None:
        """Makes sure that the graph computes what the model does. Collective.

        The first rank that has the model whole compares it with the graph (after the split no rank has, as a rule).
        Whether parts of a batch give what the whole does is seen in the first step: see `runtime/witness.py`.
        """
        size = micro_batch_size if traced.sizes.symbol is None else min(micro_batch_size, _MOST_SAMPLES)
        own = shared.sizes[self._world.rank]
        able = self._world.gather_objects(own >= size and self._is_whole(), "finding who has the whole model")

        def check_here() -> None:
            if able.index(True) == self._world.rank:
                traced.check_layouts(shared.tensors)
                samples = shared.samples(0, size) if not traced.asks_for_one else self._repeated(shared, max(2, size))
                compare(traced, self._model, samples, self.device)

        if any(able):
            gather_on_all(self._world, check_here, "comparing the trace with the model")

    def _repeated(self, shared: SharedCall, size: int) -> list[Tensor]:
        """Returns this rank's tensors with its first samples, repeated until they are `size`."""
        own = min(size, shared.sizes[self._world.rank])
        places = torch.arange(size) % own
        pairs = zip(shared.samples(0, own), shared.call.inputs, strict=True)
        return [tensor[places.to(tensor.device)] if spec.is_batch else tensor for tensor, spec in pairs]

    def _is_whole(self) -> bool:
        """Whether this rank has all numbers of the model where it computes."""
        state = (*self._model.parameters(), *self._model.buffers())
        return not any(isinstance(each, RemoteTensor) or each.device.type != self.device.type for each in state)

    def _compare(self, traced: TracedModel) -> None:
        """Makes sure that every rank traced the same model."""
        prints = self._world.gather_objects(traced.graph.fingerprint, "comparing graphs")
        if len(set(prints)) > 1:
            own = {f"parameter {name}": f"{tuple(p.shape)} {p.dtype}" for name, p in self._model.named_parameters()}
            own |= {"the number of operations": str(len(traced.nodes))}
            found = differences(self._world.gather_objects(own, "comparing models"))
            raise RankError(
                f"The ranks trace different models: {found or f'the fingerprints of their graphs are {prints}'}. "
                "Expected the same model, built with the same arguments, on every rank; weights may differ, "
                "operations and shapes may not. Where it draws from Python's random or numpy's, as it is built or in "
                "forward, seed that alike on all ranks first (random.seed(0)), or draw from torch in forward. Where it "
                "goes over a set of strings, their order is another one in each process: go over sorted(...)."
            )


def _differing(one: CallSpec, other: CallSpec) -> set[tuple[int, int]]:
    """Returns the dimensions, besides the batch, in which calls of one kind differ."""
    return {
        (index, dimension)
        for index, (mine, its) in enumerate(zip(one.inputs, other.inputs, strict=True))
        for dimension, pair in enumerate(zip(mine.shape, its.shape, strict=True))
        if pair[0] != pair[1] and not (mine.is_batch and dimension == 0)
    }


class VaryingNumbers:
    """What calls that were traced had beside tensors, on one rank."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._latest: dict[tuple[Any, ...], dict[str, str]] = {}  # by what calls are beside their values
        self._seconds: dict[str, list[float]] = {}

    def record(self, call: CallSpec, attributes: Mapping[str, str], seconds: float) -> None:
        """Records that a call took so long, for it was traced; warns if again nothing but a number was another one."""
        arguments = call.plain_arguments(self._model)
        inputs = tuple(each.words() for each in call.inputs)
        like = (call.method, str(call.tree.spec), inputs, call.mode.partition(" attributes=")[0])
        now = {**attributes, **{f"{_ARGUMENT}{name}": value for name, value in arguments.items()}}
        before = self._latest.get(like)
        self._latest[like] = now
        names = [] if before is None else [name for name in {**now, **before} if now.get(name) != before.get(name)]
        if len(names) == 1 and _is_number(now.get(names[0], "")):
            spent = self._seconds.setdefault(names[0], [])
            spent.append(seconds)
            if len(spent) == _MOST_VALUES:
                self._warn(names[0], sum(spent))

    def _warn(self, name: str, seconds: float) -> None:
        what, own = name.removeprefix(_ARGUMENT), name.rpartition(".")[2]
        kept = f"self.register_buffer({own!r}, torch.tensor(value), persistent=False) in __init__"
        advice = f"Keep it as a tensor, {kept}, and set it by {what}.fill_(value)"
        text = (
            f"{name} is another number in each call, and each one asks for a new trace: {seconds:.1f} s so far. "
            f"{advice if what == name else f'Pass it as a tensor, {what}=torch.tensor(value)'}: one trace serves all. "
            "Where forward needs the number itself (an if, a shape, float(), item()), let it have few different values"
        )
        warn_once(logger, self._model, text)


def _is_number(words: str) -> bool:
    try:
        float(words)
    except ValueError:
        return False
    return True

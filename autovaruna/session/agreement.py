"""Defines `Agreement`: has the ranks agree on each call, and on all that scripts have done but for the samples.

`agree` joins the reports of all ranks to a `SharedCall`; `find` says what serves it: graph, micro-batches, values.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autovaruna.config.settings import Settings, input_groups
from autovaruna.errors import InputError, RankError
from autovaruna.graph.call import CallReader, CallSpec
from autovaruna.graph.operators import reached
from autovaruna.graph.traced import TracedModel
from autovaruna.ranks.exchange import ALIKE, BLOCK, differences
from autovaruna.ranks.world import World
from autovaruna.runtime.batch import GlobalBatch, cut_batch, weight_micro_batches
from autovaruna.session.batch_values import ValuesOfBatch, WholeBatch, micro_batch_weights
from autovaruna.session.model import WrappedModel, on_own_gpu
from autovaruna.session.recheck import TraceRecheck
from autovaruna.session.run import Run
from autovaruna.session.shared_call import BatchNumbers, SharedCall, digest
from autovaruna.session.traces import Traces

logger = logging.getLogger(__name__)
_NUM_FIRST_CALLS, _CALLS_BETWEEN = 8, 64  # calls whose inputs are compared
_NUM_WHOLE_CALLS = 2  # calls of which all numbers are
_OF_ONE_RANK = {"memory_limit_bytes", "memory_margin", "device", "deployment_file", "profile_cache", "dump_graph"}
_OF_ONE_RANK |= {"trace_events_file", "progress", "full_tracebacks", "show_settings", "seed"}
"""Settings that may differ between ranks; all others must be the same."""
_TEXTS = (
    " What is another one for each sample, as its name, is no constant: leave it out of what the model is given, as in "
    "model({name: each for name, each in batch.items() if torch.is_tensor(each)})."
)
_SCHEDULE = (
    " A schedule by a loss (ReduceLROnPlateau) goes by its mean over the ranks: autovaruna.init_process_group(), then "
    "torch.distributed.all_reduce(loss) and loss /= autovaruna.get_world_size()."
)
_EVALUATION = " Evaluate on every rank, each on samples of its own, and not on one of them alone."
_FLAGS = {"t": "train()", "e": "eval()", "g": "trained", "f": "frozen"}
Digest = tuple[Hashable, ...]
STOP_WANTED, SNAPSHOT_LACKS, TO_LEAVE, NORM_WANTED = 2, 4, 8, 16
"""Flags of a report: the script is to end; this rank cannot take a snapshot for the manager; it is to leave its job; it
wants the norm of gradients."""


class Report(NamedTuple):
    """What a rank reports of its call, in one exchange."""

    alike: tuple[str, str]  # the same on all ranks: the key of the call, and what the script has done since the start
    flags: int
    numbers: BatchNumbers


class Known(NamedTuple):
    """What is known of calls of a model that has been split."""

    traces: Traces
    values: WholeBatch
    recheck: TraceRecheck | None  # None: that is turned off

    def forget(self, key: str) -> None:
        """Forgets a graph that has been dropped."""
        self.values.forget(key)
        if self.recheck is not None:
            self.recheck.kinds.pop(key, None)


class Found(NamedTuple):
    """What serves a call: graph, micro-batches, the lengths that vary, and what is told of the whole batch."""

    traced: TracedModel
    batch: GlobalBatch
    lengths: tuple[int, ...]
    of_batch: ValuesOfBatch


class Agreement:
    """The ranks' agreement on calls of one model."""

    def __init__(self, model: WrappedModel, run: Run) -> None:
        self._model, self._run = model, run
        self._reader = CallReader(model.module, run.settings.batch_inputs, run.settings.batch_dims)

    @cached_property
    def same_inputs(self) -> SameInputs:
        settings = self._run.settings
        return SameInputs(input_groups(settings, self._run.world.num_ranks), has_names=bool(settings.batch_inputs))

    def agree(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "forward", known: Known | None = None
    ) -> SharedCall:
        """Exchanges the ranks' reports of their calls, and joins these to one. Collective.

        Ranks ask again as long as they find attributes to leave out of the keys of calls, or parameters that some of
        them alone could freeze.
        """
        world, what = self._run.world, f"reading the model's inputs{self._run.of_model}"
        while True:
            try:
                call, tensors = self._read(args, kwargs, method, known)
                own = self._report(call, tensors, known)
            except Exception as error:
                world.exchange(what, error)  # raises on all ranks
                raise
            alike, numbers = self._exchange(own, what)
            if self._leaves_out_attributes(call, {key for key, _ in alike}, known):
                continue
            shared = SharedCall(call, tensors, self._run.num_calls, self.same_inputs.groups, numbers)
            try:
                check_alike(shared, alike, self._words, world)
            except RankError:  # on every rank; parameters() gives a caller those of this rank alone to freeze
                if known is None or not self._model.state.follow_frozen(self._model.placement, world):
                    raise
                continue
            return shared

    def find(self, shared: SharedCall, known: Known, num_micro_batches: int) -> Found:
        """Finds what serves a call of a model that has been split. Collective, if its graph is new."""
        run, settings = self._run, self._run.settings
        batch = cut_batch(shared.sizes, num_micro_batches, shared.groups)
        weights = micro_batch_weights(settings.micro_batch_weight, self._model.module, shared, batch, run.world)
        batch = weight_micro_batches(batch, weights, settings.reduction == "sum")
        traced = known.traces.of(shared, batch)
        self.same_inputs.refuse_tables(traced)
        lengths, what = traced.lengths_of(shared.call) or (), f"counting over the batch{run.of_model}"
        return Found(traced, batch, lengths, known.values.of_batch(traced, shared, batch, lengths, what))

    def _read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str, known: Known | None
    ) -> tuple[CallSpec, list[Tensor]]:
        """Returns what this rank calls the model with, and its tensors; looks at the model that the call is of."""
        mode = self._model.guards.words(method)
        self._model.check_parameters()
        tensors, call = self._reader.read(args, kwargs, mode, method)
        if known is not None and known.recheck is not None and torch.is_grad_enabled():
            traced = known.traces.find(call)
            if traced is not None and known.recheck.recheck(traced):
                self._model.guards.settle()
        return call, on_own_gpu(tensors, self._model.device)

    def _report(self, call: CallSpec, tensors: Sequence[Tensor], known: Known | None) -> Report:
        run, manager, engine = self._run, self._run.manager, self._model.engine
        flags = STOP_WANTED * run.is_stop_wanted_here
        if manager is not None:
            flags |= SNAPSHOT_LACKS * (not manager.is_snapshot_ready) | TO_LEAVE * manager.is_to_leave
        inputs = self.same_inputs.digests(call, run.num_calls, tensors)
        wants_norm, metrics = run.metrics.report()
        flags |= NORM_WANTED * wants_norm
        actions = (*run.actions.digest(), *(engine.script_actions.values() if engine else ()), run.is_synchronising)
        traced = None if known is None else known.traces.find(call)
        if traced is not None:
            traced.check_layouts(tensors)
        totals = None if known is None or traced is None else known.values.of_own(traced, call, tensors)
        return Report((call.key, repr(actions)), flags, BatchNumbers(call.batch_size, inputs, totals, metrics))

    def _exchange(self, own: Report, what: str) -> tuple[list[tuple[str, str]], list[BatchNumbers]]:
        """Returns what is to be alike of all ranks' reports, or of one if no two differ, and numbers of each rank."""
        run, world = self._run, self._run.world
        found = world.exchange(what, None, repr(own.alike).encode(), own.flags, own.numbers.to_bytes())
        run.is_stop_agreed |= bool(found.flags & STOP_WANTED)
        if run.manager is not None:
            run.manager.agree(not found.flags & SNAPSHOT_LACKS, bool(found.flags & TO_LEAVE))
        numbers = [own.numbers] * world.num_ranks
        if found.differs(ALIKE):
            return world.gather_objects(own.alike, what), numbers
        if found.differs(BLOCK):
            numbers = list(map(BatchNumbers.of_bytes, found.blocks()))
        run.metrics.collect(bool(found.flags & NORM_WANTED), [each.metrics for each in numbers])
        return [own.alike], numbers

    def _words(self) -> dict[str, str]:
        """Returns what this rank's script has done since the start, in words."""
        engine = {} if self._model.engine is None else self._model.engine.script_actions
        return {**self._run.actions.words(), **engine, "no_sync()": "off" if self._run.is_synchronising else "on"}

    def _leaves_out_attributes(self, call: CallSpec, keys: Collection[str], known: Known | None) -> bool:
        """Leaves attributes that no trace reads out of keys of new calls; says whether there were any. Collective."""
        world, guards = self._run.world, self._model.guards
        if known is None or (len(keys) == 1 and known.traces.knows(call)):
            return False
        found = world.gather_objects((guards.doubtful(), guards.filled), "comparing changed attributes")
        filled = set().union(*(each for _, each in found))
        names = set().union(*(each for each, _ in found)) - filled
        guards.filled = set()
        if filled:
            guards.record_trial((), filled, ())
        if not names:
            return bool(filled)
        trials = world.gather_objects(known.traces.try_without(names, call, guards), "comparing trials")
        unread = set.intersection(*(unread for unread, _ in trials))
        guards.record_trial(names, unread, set().union(*(read for _, read in trials)))
        if unread and world.rank == 0:
            text = "no trace depends on %s, which the script sets between calls: calls do not differ by it from now on"
            logger.info(text, ", ".join(sorted(unread)))
        return bool(unread or filled)


def compare_settings(settings: Settings, world: World, *, has_plan: bool) -> None:
    """Raises RankError unless the ranks were given the same settings, and all or none `has_plan`. Collective."""
    own = {name: repr(value) for name, value in settings.as_dict().items() if name not in _OF_ONE_RANK}
    own["micro_batch_weight"] = "None" if settings.micro_batch_weight is None else "a function"
    own["plan"] = "given" if has_plan else "None"
    if differing := differences(world.gather_objects(own, "comparing settings")):
        raise RankError(f"The ranks have different settings: {differing}. Expected the same ones on every rank.")


def check_alike(
    shared: SharedCall, alike: Sequence[tuple[str, str]], actions: Callable[[], Mapping[str, str]], world: World
) -> None:
    """Raises RankError, which says how, if the calls of ranks do not fit together. Collective then.

    `alike` is what reports have of that, by rank, or that of one if no two differ; `actions` returns in words what this
    rank's script has done since the start.
    """
    call, sizes, groups = shared.call, shared.sizes, shared.groups
    if len({done for _, done in alike}) > 1:
        strays = differences(world.gather_objects(actions(), "comparing what the ranks did"))
        raise RankError(
            f"The ranks did different things before call {shared.number + 1} of the model: {strays}. Every rank must "
            "make the same calls with the same options, and go backward from the same loss; their copies of the "
            f"weights would differ.{_SCHEDULE if 'lr of the optimizer' in strays else ''}"
        )
    if len({key for key, _ in alike}) > 1:
        differing = differences(world.gather_objects(_words(call), "comparing calls")) or "they nest otherwise"
        kinds = set(world.gather_objects((call.kind, call.mode), "comparing calls"))
        pad = " Where samples have lengths of their own, pad them to one length on all ranks."
        texts = _TEXTS if re.search(r"constant [\w ]*\[", differing) else ""
        advice = pad if len(kinds) == 1 else _EVALUATION if re.search("grad mode|model's mode", differing) else texts
        raise RankError(
            f"The ranks call the model with inputs that do not fit together: {differing}. Expected the same names, "
            f"dtypes, constants, modes and shapes on every rank, but for the size of the batch.{advice}"
        )
    for ranks in groups:
        passed = [sizes[rank] for rank in ranks]
        if len(set(passed)) > 1:
            who, mode = ("the ranks", "replicated") if len(groups) == 1 else (f"ranks {list(ranks)}", "per_replica")
            raise RankError(
                f"inputs='{mode}', but {who} pass batches of {passed} samples. Expected the same batch on each of "
                "them; pass inputs='per_rank' if each rank has samples of its own."
            )
    if not any(sizes[ranks[0]] for ranks in groups):
        raise InputError("Every rank passed an empty batch; expected at least one sample on one rank.")


def _words(call: CallSpec) -> dict[str, str]:
    """Returns everything that a trace depends on, in words, by what it is."""
    words = {f"input {spec.name}": spec.words() for spec in call.inputs}
    words["the method"] = call.method
    words |= {f"constant {_name(path)}": value for path, value in call.tree.constants()}
    words |= dict(re.findall(r"(\w+)=(\S+)", call.mode))
    training, trained = words.pop("training", ""), words.pop("parameters", "")
    words |= {"the number of modules": str(len(training)), "the number of parameters": str(len(trained))}
    words["the model's mode"] = _flags(training)
    words["grad mode"] = words.pop("gradient", "")
    words["every parameter"] = _flags(trained)
    return words


def _name(path: str) -> str:
    """Turns ``[1]['scale']`` into ``scale``, and ``[0][2]['name']`` into ``argument 2['name']``."""
    is_keyword, rest = path.startswith("[1]"), path[3:]
    return re.sub(r"^\['(\w+)'\]", r"\1", rest) if is_keyword else f"argument {rest[1:].replace(']', '', 1)}"


def _flags(letters: str) -> str:
    """Returns ``train()`` for ``tttt``; letters that differ stay, one a module or parameter."""
    return _FLAGS[letters[0]] if len(set(letters)) == 1 else f"mixed ({letters})"


class SameInputs:
    """Whether ranks pass the same mini-batch where they are to, and others where they are to, in a few calls."""

    def __init__(self, groups: tuple[tuple[int, ...], ...], *, has_names: bool) -> None:
        self.groups, self._has_names = groups, has_names
        self._trained: list[list[Digest]] = []  # digests of the first calls that train, by group
        self._tables = frozenset[str]()  # inputs that may be none of the samples'

    def digests(self, call: CallSpec, number: int, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Returns a digest of each tensor, or of some of its numbers; nothing in most calls, and without samples."""
        is_due = number < _NUM_FIRST_CALLS or (number % _CALLS_BETWEEN == 0 and all(each.is_cpu for each in tensors))
        is_due &= any(len(ranks) > 1 for ranks in self.groups)
        is_whole = number < _NUM_WHOLE_CALLS or self._may_see_copies
        found = tuple(digest(each, is_whole) for each in tensors if is_due or self._may_see_copies)
        return found if call.batch_size else ()

    @property
    def _may_see_copies(self) -> bool:
        return len(self.groups) > 1 and len(self._trained) < _NUM_WHOLE_CALLS and torch.is_grad_enabled()

    def compare(self, shared: SharedCall, *, warns: bool) -> None:
        """Raises RankError if a mini-batch that ranks share differs; if it `warns`, of one that they do not share."""
        inputs, digests = shared.call.inputs, [each.inputs for each in shared.numbers]
        if not any(digests):
            return
        for ranks in self.groups:
            pairs = [zip(inputs, digests[ranks[0]], digests[rank], strict=False) for rank in ranks]
            if odd := sorted({spec.name for spec, first, own in chain(*pairs) if own != first}):
                mode = "replicated" if len(self.groups) == 1 else "per_replica"
                raise RankError(
                    f"inputs={mode!r}, but ranks {list(ranks)} pass other numbers in {', '.join(odd)}: a step would "
                    "join inputs and labels of several batches. Expected the same batch on each of them (seed their "
                    "loaders alike, or broadcast what is drawn); with samples of its own on each rank, pass "
                    "inputs='per_rank'."
                )
        if self._may_see_copies:
            firsts = [zip(inputs, digests[ranks[0]], strict=False) for ranks in self.groups]
            self._trained.append([tuple(own for spec, own in each if spec.is_batch) for each in firsts])
            if len(self._trained) == 1:
                self._find_tables(shared, warns=warns)
            if warns and len(self._trained) == _NUM_WHOLE_CALLS:
                self._warn_of_copies()

    def _find_tables(self, shared: SharedCall, *, warns: bool) -> None:
        """Finds real numbers that all ranks have alike, one row for each of their samples, where no samples are."""
        pairs = [pair for pair in zip(shared.call.inputs, shared.tensors, strict=True) if pair[0].is_batch]
        by_input = list(zip(pairs, *self._trained[0], strict=False))
        alike = [(spec, tensor) for (spec, tensor), *found in by_input if len(set(found)) == 1]
        tables = [spec.name for spec, tensor in alike if tensor.is_floating_point() and (tensor != tensor[:1]).any()]
        self._tables = frozenset(tables if len(alike) < len(pairs) else ())
        if self._tables and warns:
            others = tuple(spec.name for spec, _ in pairs if spec.name not in tables)
            logger.warning(
                "%s is as long as the batch, and every rank passes the same numbers: it is cut into micro-batches, for "
                "its rows are taken for those of the samples. If they are not (a table, say), name the inputs that "
                "have samples: batch_inputs=%s",
                *(", ".join(tables), others),
            )

    def refuse_tables(self, traced: TracedModel) -> None:
        """Refuses a table, of no samples, of which forward adds rows up: over all ranks, each of which has it."""
        nodes = [traced.nodes[name] for name in traced.totals.merges]
        added = {node.name: node for node in reached(nodes, lambda node: node.all_input_nodes)}.keys() & self._tables
        if added and not self._has_names:
            named = [spec.name for spec in traced.call.inputs if spec.is_batch]
            raise InputError(
                f"{min(added)} is as long as the batch, every rank passes the same numbers, and forward counts or adds "
                "them up over the batch, which is that of all ranks. Expected the names of the inputs that have "
                f"samples: batch_inputs={[each for each in named if each not in added]}, or, where they are weights of "
                f"samples that are alike by chance, {named}."
            )

    def _warn_of_copies(self) -> None:
        """Warns of ranks that pass the same samples; of a batch that never changes nothing is said."""
        by_group = list(zip(*self._trained, strict=True))
        alike = [
            rank
            for ranks, (one, other) in zip(self.groups, by_group, strict=True)
            for rank in ranks
            if one != other and () not in (one, other) and by_group.count((one, other)) > 1
        ]
        if alike:
            logger.warning(
                "ranks %s pass the same samples, so that each of these is trained on more than once. Give every rank "
                "samples of its own: DataLoader(..., batch_sampler=ElasticSampler(...)), or sampler=DistributedSampler("
                "...) of torch. If they are to pass one batch, which is then cut among them, pass inputs='replicated'",
                alike,
            )

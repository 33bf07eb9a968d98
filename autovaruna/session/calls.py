"""Describes a call of the model on all ranks, which must agree on everything but the number of samples.

What the script does on a rank between calls must be the same on every rank, too, and is kept account of. What a graph
uses of the whole batch is computed from the inputs of all ranks, before its micro-batches run: the totals of each
rank's mini-batch travel with what it says of its call, in one exchange.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import ChainMap, Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autovaruna.config.settings import Settings, replicas_of
from autovaruna.errors import InputError, RankError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.guards import is_plain
from autovaruna.graph.lengths import free_value
from autovaruna.graph.operators import Merge
from autovaruna.graph.pieces import Argument, ArgumentSource, Piece, direct, extract
from autovaruna.graph.precision import is_autocast, without_autocast
from autovaruna.graph.traced import TracedModel
from autovaruna.interception.optimizer_proxy import OptimizerProxy
from autovaruna.profiler.optimizer_trial import asks_for_closure
from autovaruna.runtime.batch import GlobalBatch
from autovaruna.runtime.world import World, differences, gather_on_all
from autovaruna.session.borders import Wishes

logger = logging.getLogger(__name__)
_NUM_FIRST_CALLS, _CALLS_BETWEEN, _NUM_NUMBERS = 8, 64, 64  # calls whose inputs are compared, and their numbers
_NUM_WHOLE_CALLS = 2  # calls of which all numbers are

Digest = tuple[Hashable, ...]
Totals = list[Any]
"""Of a rank's mini-batch: a number, or nested lists of them, for each total; empty: it has no samples."""
_STEP, _ZERO = "steps of the optimizer", "calls of its zero_grad()"


class ScriptActions:
    """What a script has done with a model and its optimizer, none of which the ranks do together.

    Ranks that do other things would train copies of the weights that differ, without another sign of it.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter({_STEP: 0, _ZERO: 0})
        self._optimizer: Optimizer | None = None
        self._groups: list[str] = []
        self._raw: list[Any] | None = None  # options none of which can change by itself; None: some can
        self._digest = 0
        self._loss = "none"

    def note(self, act: str) -> None:
        """Counts an act."""
        self._counts[act] += 1

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer so far."""
        return self._counts[_STEP]

    def watch(self, proxy: OptimizerProxy, optimizer: Optimizer, groups: Sequence[Sequence[str]]) -> None:
        """Counts what is done with an optimizer from now on; `groups` are names of the whole optimizer's parameters."""
        self._optimizer = optimizer
        self._groups = [f"{len(names)} from {names[0]} to {names[-1]}" if names else "none" for names in groups]
        proxy.after.append(partial(self.note, _STEP))
        proxy.on_clear = partial(self.note, _ZERO)
        if asks_for_closure(optimizer):
            proxy.on_loss = self._note_loss

    def _note_loss(self, loss: Any) -> None:
        """Takes the loss that a closure has returned: steps go by it."""
        self._loss = repr(loss.item() if isinstance(loss, Tensor) else loss)

    def digest(self) -> Digest:
        """Returns what is short, and equal for ranks that have done the same."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        raw = [value for group in groups for name, value in group.items() if name != "params"]
        if self._raw is None or len(raw) != len(self._raw) or not all(map(is_, raw, self._raw)):
            self._raw = raw if all(map(is_plain, raw)) else None
            self._digest = crc32(repr(list(self._options())).encode())
        return *sorted(self._counts.items()), type(self._optimizer).__name__, self._digest, self._loss

    def words(self) -> dict[str, str]:
        """Returns all of it in words."""
        words = {"the optimizer": "none" if self._optimizer is None else type(self._optimizer).__name__}
        words |= {f"the number of {act}": str(count) for act, count in self._counts.items()}
        words[f"the loss by which {words['the optimizer']} goes, which is to be what forward returns,"] = self._loss
        return words | {
            f"{name} of the optimizer's group {place}": repr(value) for place, name, value in self._options()
        }

    def _options(self) -> Iterator[tuple[int, str, Any]]:
        """Yields group, name and value of each option that the optimizer's class declares, and the parameters."""
        if self._optimizer is not None:
            yield from ((place, "parameters", names) for place, names in enumerate(self._groups))
            for place, group in enumerate(self._optimizer.param_groups):
                for name in self._optimizer.defaults:
                    yield place, name, _plain(group.get(name))


def _plain(value: object) -> object:
    """Returns an option as a number or a text; what is neither says nothing, for it may differ between processes."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value if is_plain(value) else None


_OF_ONE_RANK = {"memory_limit_bytes", "memory_margin", "device", "deployment_file", "profile_cache", "dump_graph"}
_OF_ONE_RANK |= {"trace_events_file", "progress", "full_tracebacks", "show_settings", "seed"}
"""Settings that may differ between ranks; all others must be the same."""
_FLAGS = {"t": "train()", "e": "eval()", "g": "trained", "f": "frozen"}


Report = tuple[str, int, Digest, tuple[int, ...], bool, Wishes, Totals | None]
"""What a rank says of its call: key, samples, a digest of what its script has done since the start, digests of its
tensors (in few calls), whether it wants the run to end, what it can do for the manager of the job, and the totals of
its mini-batch (None: the graph is not known yet)."""


@dataclass(frozen=True)
class SharedCall:
    """One call of the model, of which every rank has its own samples."""

    call: CallSpec
    tensors: Sequence[Tensor]
    sizes: tuple[int, ...]
    number: int
    groups: tuple[tuple[int, ...], ...]  # the ranks that pass the same mini-batch
    totals: tuple[Totals | None, ...]  # those of each rank's mini-batch; None: not known yet
    digests: tuple[tuple[int, ...], ...]  # of each rank's tensors, as `SameInputs` makes them

    @property
    def global_batch_size(self) -> int:
        """Samples of all groups together."""
        return sum(self.sizes[ranks[0]] for ranks in self.groups)

    @property
    def key(self) -> str:
        """Digest that is equal for calls that one trace serves."""
        return self.call.key()

    def samples(self, start: int, size: int) -> list[Tensor]:
        """Returns this rank's tensors, the batch first in each, with some of its samples alone."""
        pairs = zip(self.tensors, self.call.inputs, strict=True)
        return [tensor[start : start + size] if spec.is_batch else tensor for tensor, spec in pairs]


def input_groups(settings: Settings, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks that pass the same mini-batch: each alone, all, or those of a replica."""
    if settings.inputs == "replicated":
        return (tuple(range(num_ranks)),)
    if settings.inputs == "per_replica":
        return replicas_of(settings.stage_ranks)
    return tuple((rank,) for rank in range(num_ranks))


def compare_settings(settings: Settings, world: World) -> None:
    """Raises RankError unless the ranks were given the same settings. Collective."""
    own = {name: repr(value) for name, value in settings.as_dict().items() if name not in _OF_ONE_RANK}
    own["micro_batch_weight"] = "None" if settings.micro_batch_weight is None else "a function"
    found = differences(world.gather_objects(own, "comparing settings"))
    if found:
        raise RankError(f"The ranks have different settings: {found}. Expected the same ones on every rank.")


def share_call(
    call: CallSpec,
    tensors: Sequence[Tensor],
    number: int,
    groups: tuple[tuple[int, ...], ...],
    world: World,
    reports: Sequence[Report],
    doings: Callable[[], Mapping[str, str]],
) -> SharedCall:
    """Joins the calls of all ranks to one. Collective if they do not fit together: a RankError says how they differ.

    `groups` pass the same mini-batch; `doings` returns in words what this rank's script has done since the start.
    """
    if len({digest for _, _, digest, *_ in reports}) > 1:
        strays = differences(world.gather_objects(doings(), "comparing what the ranks did"))
        raise RankError(
            f"The ranks did different things before call {number + 1} of the model: {strays}. Every rank must make the "
            "same calls with the same options, and go backward from the same loss; their copies of the weights would "
            "differ."
        )
    if len({key for key, *_ in reports}) > 1:
        found = differences(world.gather_objects(_words(call), "comparing calls")) or "they nest otherwise"
        kinds = set(world.gather_objects((call.kind(), call.mode), "comparing calls"))
        pad = " Where samples have lengths of their own, pad them to one length on all ranks."
        advice = pad if len(kinds) == 1 else ""
        raise RankError(
            f"The ranks call the model with inputs that do not fit together: {found}. Expected the same names, dtypes, "
            f"constants, modes and shapes on every rank, but for the size of the batch.{advice}"
        )
    sizes = tuple([size for _, size, *_ in reports])
    if not any(sizes):
        raise InputError("Every rank passed an empty batch; expected at least one sample on one rank.")
    for ranks in groups:
        passed = [sizes[rank] for rank in ranks]
        if len(set(passed)) > 1:
            who, mode = ("the ranks", "replicated") if len(groups) == 1 else (f"ranks {list(ranks)}", "per_replica")
            raise RankError(
                f"inputs='{mode}', but {who} pass batches of {passed} samples. Expected the same batch on each of "
                "them; pass inputs='per_rank' if each rank has samples of its own."
            )
    totals, digests = tuple([totals for *_, totals in reports]), tuple([each for _, _, _, each, *_ in reports])
    return SharedCall(call, tensors, sizes, number, groups, totals, digests)


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
    """Turns ``[1]['scale']`` into ``scale`` and ``[0][2]`` into ``argument 2``."""
    is_keyword, rest = path.startswith("[1]"), path[3:]
    return re.sub(r"^\['(\w+)'\]", r"\1", rest) if is_keyword else f"argument {rest.strip('[]')}"


def _flags(letters: str) -> str:
    """Returns ``train()`` for ``tttt``; letters that differ stay, one a module or parameter."""
    return _FLAGS[letters[0]] if len(set(letters)) == 1 else f"mixed ({letters})"


class SameInputs:
    """Whether ranks pass the same mini-batch where they are to, and others where they are to, in a few of their calls.

    With other samples on a rank of a group, a step would join the inputs of some samples with the labels of others.
    """

    def __init__(self, groups: tuple[tuple[int, ...], ...]) -> None:
        self.groups = groups
        self._trained: list[list[Digest]] = []  # digests of the first calls that train, by group

    def digests(self, call: CallSpec, number: int, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Returns a digest of each tensor, or of some of its numbers; nothing in most calls, and without samples."""
        is_due = number < _NUM_FIRST_CALLS or (number % _CALLS_BETWEEN == 0 and all(each.is_cpu for each in tensors))
        is_due &= any(len(ranks) > 1 for ranks in self.groups)
        is_whole = number < _NUM_WHOLE_CALLS or self._may_see_copies
        found = tuple(_digest(each, is_whole) for each in tensors if is_due or self._may_see_copies)
        return found if call.batch_size else ()

    @property
    def _may_see_copies(self) -> bool:
        return len(self.groups) > 1 and len(self._trained) < _NUM_WHOLE_CALLS and torch.is_grad_enabled()

    def compare(self, shared: SharedCall, *, is_told: bool) -> None:
        """Raises RankError if a mini-batch that ranks share differs between them.

        If `is_told`, a warning says so, once, where it is the same on ranks that do not share it.
        """
        inputs, digests = shared.call.inputs, shared.digests
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
            if is_told and len(self._trained) == _NUM_WHOLE_CALLS:
                self._warn_of_copies()

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


def _digest(tensor: Tensor, is_whole: bool) -> int:
    flat = tensor.detach().reshape(-1)
    step = 1 if is_whole else len(flat) // _NUM_NUMBERS | 1  # an odd one comes by all columns of a picture
    return crc32(flat[::step].contiguous().view(torch.uint8).cpu().numpy().tobytes())


def micro_batch_weights(
    weigh: Callable[..., float] | None, model: nn.Module, shared: SharedCall, batch: GlobalBatch, world: World
) -> tuple[float, ...]:
    """Returns a weight for each micro-batch, in order; empty without a function of the user's. Collective."""
    if weigh is None:
        return ()

    signature = inspect.signature(getattr(model, shared.call.method))

    def weights_of_own() -> dict[int, float]:
        found = {}
        for part in batch.owned_by(world.rank):
            args, kwargs = shared.call.arguments(shared.samples(part.start, part.size))
            weight: Any = weigh(dict(signature.bind(*args, **kwargs).arguments))
            if not float(weight) >= 0:
                raise InputError(f"micro_batch_weight returned {weight!r}; expected a number of at least zero.")
            found[part.index] = float(weight)
        return found

    known = dict(ChainMap(*gather_on_all(world, weights_of_own, "weighing micro-batches")))
    return tuple(known[index] for index in batch.micro_batches)


ValuesOfBatch = Mapping[float, dict[str, Tensor]]
"""By the weight of a micro-batch's loss, what it is given for each call of `of_batch`, by the name of the node."""


class BatchValues:
    """The values of the whole batch of one graph; `buffers` returns the model's, by first name, as they are now."""

    def __init__(self, traced: TracedModel, buffers: Callable[[], Mapping[str, Tensor]], device: torch.device) -> None:
        self._traced = traced
        self._totals = traced.totals
        self._buffers = buffers
        self._device = device
        made_of = [name for name, _ in self._totals.values.values()]
        before = extract(traced, self._totals.before, list(self._totals.merges), is_bare=True)
        after = extract(traced, self._totals.after, list(dict.fromkeys(made_of)), is_bare=True)
        self._before, self._after = ((piece, direct(piece.module)) for piece in (before, after))

    def of_samples(self, tensors: Sequence[Tensor], num_samples: int, lengths: tuple[int, ...]) -> Totals:
        """Returns the totals of a mini-batch; `lengths` are those that vary, in this call."""
        if not num_samples:
            return []
        found = self._run(self._before, tensors, (num_samples, lengths), {})
        return [total.tolist() if isinstance(total, Tensor) else total for total in found.values()]

    def of_batch(
        self,
        reported: Sequence[Totals],
        sizes: Sequence[int],
        tensors: Sequence[Tensor],
        batch: GlobalBatch,
        lengths: tuple[int, ...],
    ) -> ValuesOfBatch:
        """Returns what micro-batches are given, by the totals and sizes that each rank has reported of its mini-batch.

        `tensors` are this rank's; those that are no batch are the same on all ranks.
        """
        parts = [(totals, size) for totals, size in zip(reported, sizes, strict=True) if size]
        counts = [size for _, size in parts]
        made: dict[str, Any] = {
            name: self._merged(name, [each[place] for each, _ in parts], counts)
            for place, name in enumerate(self._totals.merges)
        }
        if self._totals.after:
            totals = {name: self._as_traced(name, total) for name, total in made.items()}
            found = self._run(self._after, tensors, (batch.num_samples, lengths), totals)
            made = found | {name: total for name, total in made.items() if name in found}  # it may be changed in place
        return {
            share: {
                name: torch.as_tensor(use.of_share(made[source], share)).to(self._device, self._dtype(name))
                for name, (source, use) in self._totals.values.items()
            }
            for share in {part.share for part in batch.micro_batches.values()}
        }

    def _merged(self, name: str, totals: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Returns a total of all mini-batches, of `sizes` samples each: a number, or a tensor of them."""
        is_number = not isinstance(totals[0], list)
        parts = totals if is_number else torch.tensor(totals, dtype=_widest(self._dtype(name)))
        match self._totals.merges[name]:
            case Merge.SUM:
                return sum(parts)
            case Merge.MEAN:
                return sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)
            case Merge.LARGEST:
                return max(parts) if is_number else torch.as_tensor(parts).amax(0)
            case Merge.SMALLEST:
                return min(parts) if is_number else torch.as_tensor(parts).amin(0)

    def _as_traced(self, name: str, total: Any) -> Any:
        """Returns a merged total as the operation would that computes it."""
        is_tensor = isinstance(self._traced.nodes[name].meta["val"], Tensor)
        return torch.as_tensor(total).to(self._device, self._dtype(name), copy=True) if is_tensor else total

    def _dtype(self, name: str) -> torch.dtype:
        return self._traced.nodes[name].meta["val"].dtype  # type: ignore[no-any-return]

    def _run(
        self,
        code: tuple[Piece, Callable[..., Sequence[Any]]],
        tensors: Sequence[Tensor],
        size: tuple[int, tuple[int, ...]],
        totals: Mapping[str, Any],
    ) -> dict[str, Any]:
        piece, run = code
        inputs = dict(zip(self._traced.inputs, tensors, strict=True))
        given = [self._argument(argument, inputs, size, totals) for argument in piece.arguments]
        with torch.no_grad(), without_autocast() if is_autocast() else nullcontext():  # it enters it as its nodes say
            return dict(zip(piece.outputs, run(*given), strict=True))

    def _argument(
        self,
        argument: Argument,
        inputs: Mapping[str, Tensor],
        size: tuple[int, tuple[int, ...]],
        totals: Mapping[str, Any],
    ) -> Any:
        match argument.source:
            case ArgumentSource.INPUT:
                return inputs[argument.name].detach().to(self._device).contiguous()  # as micro-batches are
            case ArgumentSource.SIZE:
                return self._traced.sizes.in_call(free_value(self._traced.nodes[argument.name]), *size)
            case ArgumentSource.BUFFER:
                return self._buffers()[argument.name]
            case ArgumentSource.CONSTANT:
                return self._traced.constants[argument.name].to(self._device)
            case _:
                return totals[argument.name]


def _widest(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64

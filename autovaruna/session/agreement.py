"""Describes a call of the model and what scripts have done: ranks must agree on everything but the samples."""

from __future__ import annotations

import logging
import re
import struct
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from autovaruna.config.settings import Settings, replicas_of
from autovaruna.errors import InputError, RankError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.guards import is_constant
from autovaruna.graph.key_values import KeptTensor
from autovaruna.interception.optimizer_proxy import OptimizerProxy
from autovaruna.profiler.optimizer_trial import asks_for_closure
from autovaruna.ranks.exchange import differences
from autovaruna.ranks.world import World

logger = logging.getLogger(__name__)
_NUM_FIRST_CALLS, _CALLS_BETWEEN, _NUM_NUMBERS = 8, 64, 64  # calls whose inputs are compared, and their numbers
_NUM_WHOLE_CALLS = 2  # calls of which all numbers are
_OF_ONE_RANK = {"memory_limit_bytes", "memory_margin", "device", "deployment_file", "profile_cache", "dump_graph"}
_OF_ONE_RANK |= {"trace_events_file", "progress", "full_tracebacks", "show_settings", "seed"}
"""Settings that may differ between ranks; all others must be the same."""
_COMPLEX = struct.Struct("<dd")
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda value: msgspec.msgpack.Ext(0, _COMPLEX.pack(value.real, value.imag)))
_FLAGS = {"t": "train()", "e": "eval()", "g": "trained", "f": "frozen"}
_STEP, _ZERO = "steps of the optimizer", "calls of its zero_grad()"
_OF_STRANGERS = (
    "the digest of what {} steps by, gradients of this rank's samples for parameters of no wrapped model (compute what "
    "they are for in the wrapped model's forward, or sum them over the ranks),"
)
Digest = tuple[Hashable, ...]
Totals = list[Any]
"""Of a rank's mini-batch: a number, or nested lists of them, for each total; empty: it has no samples."""
STOP_WANTED, SNAPSHOT_LACKS, TO_LEAVE, NORM_WANTED = 2, 4, 8, 16
"""Flags of a report: the script is to end; this rank cannot take a snapshot for the manager; it is to leave its job; it
wants the norm of gradients."""


class Report(NamedTuple):
    """What a rank reports of its call, in one exchange."""

    alike: tuple[str, str]  # the same on all ranks: the key of the call, and what the script has done since the start
    flags: int
    numbers: BatchNumbers


class BatchNumbers(NamedTuple):
    """What a rank reports that may differ: of its mini-batch."""

    batch_size: int
    inputs: tuple[int, ...]  # digests of its tensors, in few calls
    totals: Totals | None  # None: the graph is not known yet
    metrics: tuple[float, ...] = ()  # what others are to show of it

    def to_bytes(self) -> bytes:
        return _ENCODER.encode(self)

    @staticmethod
    def of_bytes(data: bytes) -> BatchNumbers:
        return msgspec.msgpack.decode(
            data, type=BatchNumbers, ext_hook=lambda _, content: complex(*_COMPLEX.unpack(content))
        )


@dataclass(frozen=True)
class SharedCall:
    """One call of the model, of which every rank has its own samples."""

    call: CallSpec
    tensors: Sequence[Tensor]
    number: int
    groups: tuple[tuple[int, ...], ...]  # the ranks that pass the same mini-batch
    numbers: Sequence[BatchNumbers]  # of each rank's mini-batch

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each rank's mini-batch."""
        return tuple([each.batch_size for each in self.numbers])

    @property
    def global_batch_size(self) -> int:
        """Samples of all groups together."""
        return sum(self.sizes[ranks[0]] for ranks in self.groups)

    @property
    def num_tokens(self) -> int:
        """Tokens of all groups together; 0: the samples have none."""
        shapes = ((each.shape, each.dtype) for each in self.call.inputs if each.is_batch)
        return self.global_batch_size * tokens_of(shapes)

    def samples(self, start: int, size: int) -> list[Tensor]:
        """Returns this rank's tensors, the batch first in each, with some of its samples alone."""
        pairs = zip(self.tensors, self.call.inputs, strict=True)
        return [tensor[start : start + size] if spec.is_batch else tensor for tensor, spec in pairs]


def tokens_of(inputs: Iterable[tuple[Sequence[int], torch.dtype]]) -> int:
    """Returns the tokens of a sample: the length of the first input of whole numbers (batch, length); 0: none."""
    return next((shape[1] for shape, dtype in inputs if len(shape) == 2 and dtype in (torch.int64, torch.int32)), 0)


def input_groups(settings: Settings, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks that pass the same mini-batch: each alone, all, or those of a replica."""
    if settings.inputs == "replicated":
        return (tuple(range(num_ranks)),)
    if settings.inputs == "per_replica":
        return replicas_of(settings.stage_ranks)
    return tuple((rank,) for rank in range(num_ranks))


def compare_settings(settings: Settings, world: World, *, has_plan: bool) -> None:
    """Raises RankError unless the ranks were given the same settings, and all or none `has_plan`. Collective."""
    own = {name: repr(value) for name, value in settings.as_dict().items() if name not in _OF_ONE_RANK}
    own["micro_batch_weight"] = "None" if settings.micro_batch_weight is None else "a function"
    own["plan"] = "given" if has_plan else "None"
    if differing := differences(world.gather_objects(own, "comparing settings")):
        raise RankError(f"The ranks have different settings: {differing}. Expected the same ones on every rank.")


class ScriptActions:
    """What a script has done with a model and its optimizer: ranks that do other things would train other weights."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter({_STEP: 0, _ZERO: 0})
        self.optimizer: Optimizer | None = None  # the one that is watched
        self._groups: list[str] = []
        self._raw: list[Any] | None = None  # options none of which can change by itself; None: some can
        self._digest = 0
        self._loss = "none"
        self._num_of_strangers = Counter[int]()
        self._strangers: dict[str, int] = {}  # digests of gradients, by the class of what steps by them

    def record(self, act: str) -> None:
        self._counts[act] += 1

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer so far."""
        return self._counts[_STEP]

    def watch(self, proxy: OptimizerProxy, optimizer: Optimizer, groups: Sequence[Sequence[str]]) -> None:
        """Counts what is done with an optimizer from now on; `groups` are names of the whole optimizer's parameters."""
        self.optimizer = optimizer
        self._groups = [f"{len(names)} from {names[0]} to {names[-1]}" if names else "none" for names in groups]
        proxy.after.append(partial(self.record, _STEP))
        proxy.on_clear.append(partial(self.record, _ZERO))
        if asks_for_closure(optimizer):
            proxy.on_loss = self._record_loss

    def _record_loss(self, loss: Any) -> None:
        """Records the loss that a closure has returned: steps go by it."""
        self._loss = repr(loss.item() if isinstance(loss, Tensor) else loss)

    def records_gradients(self, optimizer: Optimizer) -> bool:
        """Whether a step of another optimizer is one of few whose gradients are to be the same on all ranks."""
        self._num_of_strangers[id(optimizer)] += optimizer is not self.optimizer
        return optimizer is not self.optimizer and self._num_of_strangers[id(optimizer)] <= _NUM_FIRST_CALLS

    def record_gradients(self, kind: str, gradients: Sequence[Tensor]) -> None:
        """Records gradients, of parameters of no wrapped model, by which an optimizer of some `kind` steps."""
        if gradients:
            self._strangers[kind] = crc32(repr([digest(each) for each in gradients]).encode())

    def digest(self) -> Digest:
        """Returns what is short, and equal for ranks that have done the same."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        raw = [value for group in groups for name, value in group.items() if name != "params"]
        if self._raw is None or len(raw) != len(self._raw) or not all(map(is_, raw, self._raw)):
            self._raw = raw if all(map(is_constant, raw)) else None
            self._digest = crc32(repr(list(self._options())).encode())
        return (
            *sorted(self._counts.items()),
            type(self.optimizer).__name__,
            self._digest,
            self._loss,
            *self._strangers.items(),
        )

    def words(self) -> dict[str, str]:
        words = {"the optimizer": "none" if self.optimizer is None else type(self.optimizer).__name__}
        words |= {f"the number of {act}": str(count) for act, count in self._counts.items()}
        words[f"the loss by which {words['the optimizer']} goes, which is to be what forward returns,"] = self._loss
        words |= {_OF_STRANGERS.format(kind): str(each) for kind, each in self._strangers.items()}
        return words | {
            f"{name} of the optimizer's group {place}": repr(value) for place, name, value in self._options()
        }

    def _options(self) -> Iterator[tuple[int, str, Any]]:
        """Yields group, name and value of each option that the optimizer's class declares, and the parameters."""
        if self.optimizer is not None:
            yield from ((place, "parameters", names) for place, names in enumerate(self._groups))
            for place, group in enumerate(self.optimizer.param_groups):
                for name in self.optimizer.defaults:
                    yield place, name, _plain(group.get(name))


def _plain(value: object) -> object:
    """Returns an option as a number or a text; what is neither says nothing, for it may differ between processes."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value if is_constant(value) else None


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
            "weights would differ."
        )
    if len({key for key, _ in alike}) > 1:
        differing = differences(world.gather_objects(_words(call), "comparing calls")) or "they nest otherwise"
        kinds = set(world.gather_objects((call.kind, call.mode), "comparing calls"))
        pad = " Where samples have lengths of their own, pad them to one length on all ranks."
        advice = pad if len(kinds) == 1 else ""
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
    """Turns ``[1]['scale']`` into ``scale`` and ``[0][2]`` into ``argument 2``."""
    is_keyword, rest = path.startswith("[1]"), path[3:]
    return re.sub(r"^\['(\w+)'\]", r"\1", rest) if is_keyword else f"argument {rest.strip('[]')}"


def _flags(letters: str) -> str:
    """Returns ``train()`` for ``tttt``; letters that differ stay, one a module or parameter."""
    return _FLAGS[letters[0]] if len(set(letters)) == 1 else f"mixed ({letters})"


class SameInputs:
    """Whether ranks pass the same mini-batch where they are to, and others where they are to, in a few calls."""

    def __init__(self, groups: tuple[tuple[int, ...], ...]) -> None:
        self.groups = groups
        self._trained: list[list[Digest]] = []  # digests of the first calls that train, by group

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
            if warns and len(self._trained) == 1:
                self._warn_of_tables(shared)
            if warns and len(self._trained) == _NUM_WHOLE_CALLS:
                self._warn_of_copies()

    def _warn_of_tables(self, shared: SharedCall) -> None:
        """Warns of real numbers that all ranks have alike, one row for each of their samples, where no samples are."""
        pairs = [pair for pair in zip(shared.call.inputs, shared.tensors, strict=True) if pair[0].is_batch]
        by_input = list(zip(pairs, *self._trained[0], strict=False))
        alike = [(spec, tensor) for (spec, tensor), *found in by_input if len(set(found)) == 1]
        tables = [spec.name for spec, tensor in alike if tensor.is_floating_point() and (tensor != tensor[:1]).any()]
        if tables and len(alike) < len(pairs):
            others = tuple(spec.name for spec, _ in pairs if spec.name not in tables)
            logger.warning(
                "%s is as long as the batch, and every rank passes the same numbers: it is cut into micro-batches, for "
                "its rows are taken for those of the samples. If they are not (a table, say), name the inputs that "
                "have samples: batch_inputs=%s",
                *(", ".join(tables), others),
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


def digest(tensor: Tensor, is_whole: bool = True) -> int:
    """Returns a number that equal tensors have alike; of some of their numbers, unless it `is_whole`."""
    if isinstance(tensor, KeptTensor):
        return 0
    flat = tensor.detach().reshape(-1)
    step = 1 if is_whole else len(flat) // _NUM_NUMBERS | 1  # an odd one comes by all columns of a picture
    return crc32(flat[::step].contiguous().view(torch.uint8).cpu().numpy().tobytes())

"""Describes a call of the model on all ranks, which must agree on everything but the number of samples.

Ranks that are to pass the same mini-batch are compared in a few calls: each stage takes what it needs from its own
rank's copy, and with other samples there a step would join the inputs of some samples with the labels of others.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from autovaruna.config.settings import Settings, replicas_of
from autovaruna.errors import InputError, RankError
from autovaruna.graph.call import CallSpec
from autovaruna.runtime.batch import GlobalBatch, MicroBatch
from autovaruna.runtime.world import World, differences, gather_on_all
from autovaruna.session.batch_values import Totals
from autovaruna.session.script_actions import Digest

_OF_ONE_RANK = {
    "memory_limit_bytes",
    "memory_margin",
    "device",
    "deployment_file",
    "profile_cache",
    "dump_graph",
    "trace_events_file",
    "progress",
    "full_tracebacks",
    "show_settings",
    "seed",
}
"""Settings that may differ between ranks; all others must be the same."""
_FLAGS = {"t": "train()", "e": "eval()", "g": "trained", "f": "frozen"}


Report = tuple[str, int, Digest, tuple[int, ...], bool, Totals | None]
"""What a rank says of its call: key, samples, a digest of what its script has done since the start, digests of its
tensors (in few calls), whether it wants the run to end, and the totals of its mini-batch (None: the graph is not known
yet)."""


@dataclass(frozen=True)
class SharedCall:
    """One call of the model, of which every rank has its own samples.

    Attributes:
        call: the description on this rank.
        tensors: this rank's tensors, in order.
        sizes: samples of each rank's mini-batch.
        number: how many calls there were before.
        groups: the ranks that pass the same mini-batch.
        totals: those of each rank's mini-batch; None: not known yet.
    """

    call: CallSpec
    tensors: Sequence[Tensor]
    sizes: tuple[int, ...]
    number: int
    groups: tuple[tuple[int, ...], ...]
    totals: tuple[Totals | None, ...]

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
    """Makes sure that the ranks were given the same settings. Collective.

    Raises:
        RankError: a setting differs.
    """
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
    """Joins the calls of all ranks to one. Collective if they do not fit together.

    Args:
        call: This rank's call.
        tensors: Its tensors.
        number: How many calls there were before.
        groups: The ranks that pass the same mini-batch.
        world: The ranks.
        reports: What each rank says of its call.
        doings: Returns in words what this rank's script has done since the start.

    Raises:
        InputError: no rank passed a sample.
        RankError: the ranks' calls do not fit together; says how they differ.
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
        kinds = world.gather_objects((call.kind(), call.mode), "comparing calls")
        advice = " Where samples have lengths of their own, pad them to one length on all ranks." * (
            len(set(kinds)) == 1
        )
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
    return SharedCall(call, tensors, sizes, number, groups, tuple([totals for *_, totals in reports]))


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


_NUM_FIRST_CALLS, _CALLS_BETWEEN = 8, 64
_NUM_NUMBERS = 64

logger = logging.getLogger(__name__)


class SameInputs:
    """What the ranks of each group have passed, in a few of their calls.

    Args:
        groups: The ranks that pass the same mini-batch.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = [ranks for ranks in groups if len(ranks) > 1]
        self._has_told = False

    def digests(self, number: int, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Returns a digest of some numbers of each tensor; nothing in most calls.

        Args:
            number: How many calls there were before.
            tensors: Those of the call.
        """
        is_due = number < _NUM_FIRST_CALLS or (number % _CALLS_BETWEEN == 0 and all(each.is_cpu for each in tensors))
        return tuple(map(_digest, tensors)) if self._groups and is_due and not self._has_told else ()

    def compare(self, call: CallSpec, digests: Sequence[tuple[int, ...]]) -> None:
        """Warns, once, of inputs that differ.

        Args:
            call: The call.
            digests: What `digests` returned on each rank.
        """
        for ranks in self._groups:
            odd = {
                spec.name
                for rank in ranks
                for spec, first, own in zip(call.inputs, digests[ranks[0]], digests[rank], strict=False)
                if own != first
            }
            if odd and not self._has_told:
                self._has_told = True
                logger.warning(
                    "ranks %s are to pass the same samples, but %s differ there: a step then joins inputs and labels "
                    "of several batches. Give each of them the same batch (seed their loaders alike); with samples of "
                    "its own on each rank, pass inputs='per_rank'",
                    list(ranks),
                    ", ".join(sorted(odd)),
                )


def _digest(tensor: Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // _NUM_NUMBERS)].contiguous()
    return crc32(some.view(torch.uint8).cpu().numpy().tobytes())


def micro_batch_weights(
    weigh: Callable[..., float] | None, model: nn.Module, shared: SharedCall, batch: GlobalBatch, world: World
) -> tuple[float, ...]:
    """Returns a weight for each micro-batch, in order; empty without a function. Collective.

    Args:
        weigh: The user's ``micro_batch_weight``: gets the arguments of the model by name, cut to one micro-batch.
        model: The model, whose signature names positional arguments.
        shared: The call.
        batch: Its micro-batches.
        world: The ranks.
    """
    if weigh is None:
        return ()

    def weights_of_own() -> dict[int, float]:
        return {part.index: _weight(weigh, model, shared, part) for part in batch.owned_by(world.rank)}

    known: dict[int, float] = {}
    for found in gather_on_all(world, weights_of_own, "weighing micro-batches"):
        known |= found
    return tuple(known[index] for index in batch.micro_batches)


def _weight(weigh: Callable[..., float], model: nn.Module, shared: SharedCall, part: MicroBatch) -> float:
    args, kwargs = shared.call.arguments(shared.samples(part.start, part.size))
    weight: Any = weigh(dict(inspect.signature(getattr(model, shared.call.method)).bind(*args, **kwargs).arguments))
    number = float(weight)
    if not number >= 0:
        raise InputError(f"micro_batch_weight returned {weight!r}; expected a number of at least zero.")
    return number

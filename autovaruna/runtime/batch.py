"""Describes one call: its micro-batches, what each instruction sends, and what a rank keeps meanwhile.

`GlobalBatch` and `BatchJob` are alike on all ranks, `Traffic` is what one rank makes of them; `OwnSamples`, `InFlight`
and `ChangedState` hold its samples, stages between forward and backward, and state that forwards change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from autovaruna._torch import preserve_version_counter
from autovaruna.errors import InputError
from autovaruna.graph.pieces import Deferred
from autovaruna.graph.traced import TracedModel
from autovaruna.planner.records import Plan
from autovaruna.runtime.mail import MessageKind, Parcel, Stream
from autovaruna.runtime.transport.layout import empty_on_host, is_dense
from autovaruna.runtime.weights import OwnedState, Placement
from autovaruna.runtime.world import World
from autovaruna.schedule.pipeline import Instruction, slices
from autovaruna.schedule.pipeline import Kind as Work
from autovaruna.stage.module import StageModule
from autovaruna.stage.split import Split, StageEdge, StagePart


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch: samples ``start`` to ``start + size`` of rank ``origin``'s group, and its weight in the loss."""

    index: int
    origin: int
    start: int
    size: int
    share: float


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The micro-batches of one call, without empty ones.

    `groups` are the ranks that pass the same mini-batch, each with the rank that speaks for it first; a rank in none of
    them passes nothing that counts. Calls of the same sizes have the same object: what follows from it is kept.
    """

    micro_batches: dict[int, MicroBatch]
    groups: tuple[tuple[int, ...], ...]
    _owned: dict[int, list[MicroBatch]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def owned_by(self, rank: int) -> list[MicroBatch]:
        """Returns the micro-batches whose outputs belong to a rank, in the order of its mini-batch."""
        if rank not in self._owned:
            self._owned[rank] = [part for part in self.micro_batches.values() if self.has(rank, part)]
        return self._owned[rank]

    def has(self, rank: int, micro_batch: MicroBatch) -> bool:
        return rank in self.receivers(micro_batch)

    def receivers(self, micro_batch: MicroBatch) -> tuple[int, ...]:
        """Returns the ranks that passed a micro-batch and get its outputs."""
        return self.groups[micro_batch.index % len(self.groups)]

    def num_samples_of(self, rank: int) -> int:
        """Returns the samples that a rank passed: the end of its last micro-batch."""
        mine = self.owned_by(rank)
        return mine[-1].start + mine[-1].size if mine else 0

    @cached_property
    def sizes(self) -> frozenset[int]:
        return frozenset(part.size for part in self.micro_batches.values())

    @cached_property
    def num_samples(self) -> int:
        return sum(part.size for part in self.micro_batches.values())


@lru_cache(maxsize=64)  # steps differ in their numbers, rarely in their sizes
def cut_batch(
    mini_batch_sizes: tuple[int, ...], num_micro_batches: int, groups: tuple[tuple[int, ...], ...]
) -> GlobalBatch:
    """Cuts the mini-batches of all groups into micro-batches of as equal a size as can be, which count by samples.

    Micro-batch m is a slice of the mini-batch of group m mod G, whose ranks all passed it.

    Raises:
        InputError: no rank passed a sample, or there are fewer micro-batches than groups that passed some.
    """
    sizes = [mini_batch_sizes[ranks[0]] for ranks in groups]
    total = sum(sizes)
    if total == 0:
        raise InputError("Every rank passed an empty batch; expected at least one sample on one rank.")
    for ranks, size in zip(groups[num_micro_batches:], sizes[num_micro_batches:], strict=True):
        if size:
            raise InputError(
                f"num_micro_batches is {num_micro_batches}, but rank {ranks[0]} of {len(mini_batch_sizes)} "
                f"passes {size} samples of its own: expected at least {len(groups)} micro-batches, or "
                "inputs='replicated'."
            )
    parts = {
        m: MicroBatch(m, groups[m % len(groups)][0], start, size, size / total)
        for m, (start, size) in enumerate(slices(sizes, num_micro_batches))
        if size
    }
    return GlobalBatch(parts, groups)


@lru_cache(maxsize=64)
def weigh(batch: GlobalBatch, weights: tuple[float, ...], is_sum: bool) -> GlobalBatch:
    """Gives each micro-batch its share of the loss: one if losses are added, else a weight, or what samples it has."""
    if is_sum:
        shares = [1.0] * len(batch.micro_batches)
    elif not weights:
        return batch
    else:
        total = sum(weights)
        if not total > 0:
            raise InputError(f"micro_batch_weight gave {list(weights)}; expected numbers with a sum above zero.")
        shares = [weight / total for weight in weights]
    parts = zip(batch.micro_batches.items(), shares, strict=True)
    return replace(batch, micro_batches={index: replace(part, share=share) for (index, part), share in parts})


@dataclass(eq=False, slots=True)
class BatchJob:
    """One call of the model, as every rank sees it.

    Attributes:
        seed, step: what random nodes depend on.
        graph_key: digest of the graph and of the lengths that vary, in this call.
        recomputing: stages that run forward again before backward; `offload`: what they keep is on the host meanwhile.
        splitting: stages whose backward leaves weight gradients for later.
        of_batch: what micro-batches are given of the whole batch, by the weight of their loss and the name of the node.
        name: what to call it in errors.
    """

    split: Split
    plan: Plan
    batch: GlobalBatch
    needs_gradient: bool
    seed: int
    step: int
    graph_key: str
    is_sum: bool
    recomputing: frozenset[int]
    splitting: frozenset[int] = frozenset()
    offload: bool = False
    lengths: tuple[int, ...] = ()
    of_batch: Mapping[float, dict[str, Tensor]] = field(default_factory=dict)
    name: str = "the call"

    def rank_weight(self, rank: int) -> float:
        """Returns the weight of a rank's own loss in that of the global batch: its share of samples, or one."""
        if self.is_sum:
            return 1.0
        return self.batch.num_samples_of(rank) / self.batch.num_samples

    def weight_of_origin(self, rank: int) -> float:
        """Returns `rank_weight`, shared out over the ranks that pass the same mini-batch."""
        own = sum(part.size for part in self.batch.micro_batches.values() if part.origin == rank)
        return self.rank_weight(rank) * own / max(self.batch.num_samples_of(rank), 1)

    def maker_of(self, output: int, micro_batch: int) -> int:
        return self.plan.rank_of(self.split.makers[output], micro_batch)


@dataclass(frozen=True, slots=True)
class Act:
    """An instruction with what it needs to know of its micro-batch.

    `own` are inputs of a forward that are this rank's own; `ends_stage`: the stage has its last gradients here then.
    """

    instruction: Instruction
    part: MicroBatch
    receives: tuple[Parcel, ...]
    sends: tuple[Parcel, ...]
    own: tuple[str, ...]
    ends_stage: bool


@dataclass(eq=False, repr=False)
class Traffic:
    """The messages of one kind of call, as one rank sees them.

    Attributes:
        wanted: what each stage receives whose gradient is wanted.
        handed_out: this rank's own samples that other ranks compute with, and whose samples they are.
    """

    split: Split
    plan: Plan
    rank: int
    instructions: Sequence[Instruction]
    batch: GlobalBatch
    graph_key: str

    def __post_init__(self) -> None:
        split, batch, rank = self.split, self.batch, self.rank
        self._factor: float | None = None
        self._seeds: dict[float, Tensor] = {}
        self._programs: dict[tuple[tuple[Work, ...], str], list[Act]] = {}
        self._travelling = [
            tuple(name for name in stage.inputs if name in split.traced.batch_inputs) for stage in split.stages
        ]
        self.wanted = [{name for edge in stage.arriving for name in edge.gradients} for stage in split.stages]
        for name, holder in split.input_gradients.items():
            self.wanted[holder].add(name)
        self.handed_out = [
            (part, self._inputs(stage, part))
            for part in batch.owned_by(rank)
            for stage in (split.stages if part.origin == rank else ())
            if self._travelling[stage.index] and not batch.has(self.plan.rank_of(stage.index, part.index), part)
        ]

    def seeds(self, factor: float) -> dict[float, Tensor]:
        """Returns the gradient of each micro-batch's loss, by its share, for a backward from `factor`."""
        if self._factor != factor:
            self._factor, loss = factor, self.split.traced.loss
            assert loss is not None, "a step goes backward from a loss"
            value: Tensor = self.split.traced.nodes[loss.node].meta["val"]
            shares = {part.share for part in self.batch.micro_batches.values()}
            self._seeds = {
                share: torch.full((), share * factor, dtype=value.dtype, device=value.device) for share in shares
            }
        return self._seeds

    def program(self, kinds: tuple[Work, ...], origin: str = "") -> list[Act]:
        """Returns this rank's instructions of some kinds, without those of empty micro-batches.

        `origin` names the outputs that have a gradient, where calls differ in that: then messages back differ, too.
        """
        known = self._programs.get((kinds, origin))
        if known is None:
            full = self.batch.micro_batches
            chosen = [step for step in self.instructions if step.kind in kinds and step.micro_batch in full]
            last = {step.stage: step for step in chosen if step.kind in (Work.BACKWARD, Work.WEIGHT)}
            known = [self._act(step, origin, last.get(step.stage) is step) for step in chosen]
            self._programs[kinds, origin] = known
        return known

    def _act(self, step: Instruction, origin: str, ends_stage: bool) -> Act:
        part, stage = self.batch.micro_batches[step.micro_batch], self.split.stages[step.stage]
        receives: list[Parcel] = []
        sends: list[Parcel] = []
        own: tuple[str, ...] = ()
        if step.kind is Work.FORWARD:
            receives, own = self._received(stage, part)
            sends = [self._activations(edge, part) for edge in stage.leaving]
        elif step.kind is Work.BACKWARD:
            receives = [self._gradients(edge, part, origin) for edge in stage.leaving if edge.gradients]
            sends = [self._gradients(edge, part, origin) for edge in stage.arriving if edge.gradients]
        return Act(step, part, tuple(receives), tuple(sends), own, ends_stage)

    def _received(self, stage: StagePart, part: MicroBatch) -> tuple[list[Parcel], tuple[str, ...]]:
        """Returns the messages that a forward waits for, and the inputs that it takes from this rank's own."""
        parcels = [self._activations(edge, part) for edge in stage.arriving]
        if self._travelling[stage.index] and not self.batch.has(self.rank, part):
            parcels.append(self._inputs(stage, part))
        come = {name for parcel in parcels for name in parcel.names}
        return parcels, tuple(name for name in stage.inputs if name not in come)

    def _inputs(self, stage: StagePart, part: MicroBatch) -> Parcel:
        """Returns the parcel that takes inputs to a stage; those that are no batches are the same on all ranks."""
        route = Stream(part.origin, self.plan.rank_of(stage.index, part.index), 4 * stage.index + 2)
        return Parcel(MessageKind(self.graph_key, route, part.size), self._travelling[stage.index])

    def _activations(self, edge: StageEdge, part: MicroBatch) -> Parcel:
        route = Stream(*self._ends(edge, part), 4 * edge.index)
        return Parcel(MessageKind(self.graph_key, route, part.size), edge.values)

    def _gradients(self, edge: StageEdge, part: MicroBatch, origin: str) -> Parcel:
        source, destination = self._ends(edge, part)
        route = Stream(destination, source, 4 * edge.index + 1)
        return Parcel(MessageKind(self.graph_key + origin, route, part.size), edge.gradients)

    def _ends(self, edge: StageEdge, part: MicroBatch) -> tuple[int, int]:
        return self.plan.rank_of(edge.source, part.index), self.plan.rank_of(edge.destination, part.index)


class OwnSamples:
    """The mini-batch of this rank, by input name."""

    def __init__(self, inputs: Mapping[str, Tensor], job: BatchJob, rank: int) -> None:
        self._inputs, self._job, self._rank = inputs, job, rank
        self._slices: dict[str, Mapping[int, Tensor]] = {}

    def of(self, part: MicroBatch, name: str) -> Tensor:
        """Returns a micro-batch's part of an input; all of one that is no batch."""
        slices = self._slices.get(name)
        if slices is None:
            whole = self._inputs[name].detach()
            if name not in self._job.split.traced.batch_inputs:
                return whole
            parts = self._job.batch.owned_by(self._rank)
            pieces = torch.unsafe_split_with_sizes(whole, [each.size for each in parts])
            slices = self._slices[name] = {  # strides of dimensions of one element tell torch of an order in memory
                each.index: piece.contiguous().view(-1).view(piece.shape) if 1 in piece.shape else piece
                for each, piece in zip(parts, pieces, strict=True)
            }
        return slices[part.index].contiguous()


class Stash:
    """Tensors of a micro-batch between its forward and its recompute; those on a GPU may go to the host meanwhile.

    Copies run on the current stream in pinned memory, and nobody waits for them: the memory that a tensor had on the
    GPU is given to later work of the same stream alone, which comes after the copy.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, is_offloaded: bool) -> None:
        self._devices = {name: tensor.device for name, tensor in tensors.items()}
        self._tensors = {
            name: _on_host(tensor) if is_offloaded and tensor.is_cuda else tensor for name, tensor in tensors.items()
        }

    def take(self) -> dict[str, Tensor]:
        """Returns the tensors where they were, and lets go of them."""
        tensors, self._tensors = self._tensors, {}
        return {name: tensor.to(self._devices[name], non_blocking=True) for name, tensor in tensors.items()}


def _on_host(tensor: Tensor) -> Tensor:
    """Returns a copy in pinned memory, of the same strides; of a tensor with holes or repeats, the tensor itself."""
    if not is_dense(tensor):
        return tensor
    host = empty_on_host(tensor)
    with torch.no_grad():
        host.copy_(tensor, non_blocking=True)
    return host


NOTHING: Mapping[str, Tensor] = {}


class InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward.

    Attributes:
        tensors: what it has received, until the forward has ended.
        returned: what the forward returned, with its graph.
        gradients: those of what it has received.
        before: state that the forward found and changed.
        stash: what it has received, if it runs forward again.
        deferred: weight gradients that the backward leaves for later.
    """

    __slots__ = ("before", "deferred", "gradients", "returned", "stash", "tensors")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.returned = NOTHING
        self.gradients: dict[str, Tensor] = {}
        self.before = NOTHING
        self.stash: Stash | None = None
        self.deferred: Deferred | None = None


class ChangedState:
    """The state of this rank's stages that the forwards of one call change.

    If it `is_steady`, micro-batches must `start_alike`: some of it changes whatever their samples are, which is once a
    call in plain PyTorch.
    """

    def __init__(self, traced: TracedModel, num_micro_batches: int) -> None:
        self.is_steady = num_micro_batches > 1 and bool(traced.steady_state)
        self._traced = traced
        self._found_first: dict[int, dict[str, Tensor]] = {}

    def start_alike(self, stage: StageModule) -> None:
        """Gives a micro-batch what the first one found of the state that changes once a call."""
        steady = stage.changed_state(self._traced.steady_state)
        if stage.index in self._found_first:
            _overwrite(steady, self._found_first[stage.index])
        else:
            self._found_first[stage.index] = _copies(steady)

    def copy(self, stage: StageModule) -> dict[str, Tensor]:
        """Returns what a forward finds now, for when it runs again."""
        return _copies(stage.changed_state(self._traced.changed_state))

    @contextmanager
    def as_before(self, stage: StageModule, before: Mapping[str, Tensor]) -> Iterator[None]:
        """Puts back what a forward has found, as long as it runs again."""
        changed = stage.changed_state(self._traced.changed_state)
        now = _copies(changed)
        _overwrite(changed, before)
        yield
        _overwrite(changed, now)


def _copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def _overwrite(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Puts values back into what forward changes; no backward reads that, so autograd need not know."""
    for name, value in values.items():
        with preserve_version_counter(state[name]):
            state[name].copy_(value)


def share_state(changed: Collection[str], state: OwnedState, placement: Placement, world: World) -> None:
    """Overwrites changed buffers everywhere, and parameters where held, by those of the first holder. Collective."""
    every = tuple(range(world.num_ranks))
    groups: dict[tuple[int, tuple[int, ...], torch.dtype], list[Tensor]] = {}
    for name in sorted(changed):
        tensor, holders = state.tensor(name), placement.ranks_of(name)
        ranks = holders if isinstance(tensor, nn.Parameter) else every
        groups.setdefault((holders[0], ranks, tensor.dtype), []).append(tensor.detach())
    for (root, ranks, _), tensors in sorted(groups.items(), key=lambda group: str(group[0])):
        if len(ranks) > 1 and world.rank in ranks:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            world.broadcast(flat, root, ranks)
            parts = torch.split(flat, [each.numel() for each in tensors])
            for tensor, part in zip(tensors, parts, strict=True) if world.rank != root else ():
                tensor.data.copy_(part.view(tensor.shape))  # autograd may have kept it

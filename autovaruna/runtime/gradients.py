"""Collects the gradients of a step: sums them over the uses of a parameter and over the ranks that hold it.

A parameter that several blocks use has one accumulator for each of them. They are summed from the last use to the
first, the order in which autograd meets them on one process, whatever stages the uses are on: a partial sum travels
from the last stage that holds the parameter to the first, each adding its own, and the total goes back to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autovaruna.planner.records import Plan
from autovaruna.runtime.world import World
from autovaruna.stage.module import ParameterUse, StageModule
from autovaruna.stage.split import Split

_BUCKET_BYTES = 16 << 20
_CHAIN_TAG = 1 << 19


@dataclass(frozen=True)
class Use:
    """One use of a parameter: the block, its stage, and the ranks of that stage."""

    block: int
    stage: int
    ranks: tuple[int, ...]


class GradientSum:
    """Sums gradients for one split.

    Args:
        split: The stages.
        plan: Their ranks.
        world: The ranks' way to talk.
        parameters: This rank's parameters by first name.
    """

    def __init__(self, split: Split, plan: Plan, world: World, parameters: Mapping[str, nn.Parameter]) -> None:
        self._world = world
        self._parameters = parameters
        self._uses: dict[str, list[Use]] = {}
        for parameter in split.traced.graph.parameters:
            if parameter.needs_gradient:
                self._uses[parameter.name] = [_use(split, plan, block) for block in reversed(parameter.blocks)]
        self._agreed: dict[str, set[ParameterUse]] = {}

    def total(self, accumulators: Mapping[ParameterUse, Tensor], origin: str | None) -> dict[str, Tensor]:
        """Sums the accumulators of all ranks. Collective for the ranks that hold a stage.

        Args:
            accumulators: This rank's, by use; they are overwritten.
            origin: What the backward started from; None: several, so that ranks must agree anew.

        Returns:
            For each parameter of this rank that has a gradient, the gradient of the global batch.
        """
        agreed = self._agree(accumulators, origin)
        totals: dict[str, Tensor] = {}
        together: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        for name, uses in self._uses.items():
            live = [use for use in uses if (name, use.block) in agreed]
            if not live or not any(self._world.rank in use.ranks for use in live):
                continue
            parts = [self._accumulator(name, use, accumulators) for use in live if self._world.rank in use.ranks]
            if len({use.stage for use in live}) > 1:
                totals[name] = self._chain(name, live, parts)
            else:
                totals[name] = _add_all(parts)
                if len(live[0].ranks) > 1:
                    together.setdefault((live[0].ranks, totals[name].dtype), []).append(totals[name])
        self._reduce(together)
        self._spread(totals, agreed)
        return totals

    def _agree(self, accumulators: Mapping[ParameterUse, Tensor], origin: str | None) -> set[ParameterUse]:
        """Returns the uses that get a gradient on any rank; asked for once an origin, since a graph does not change."""
        known = None if origin is None else self._agreed.get(origin)
        if known is None:
            known = set().union(*self._world.gather_objects(set(accumulators), "agreeing on gradients"))
        if origin is not None:
            self._agreed[origin] = known
        return known

    def _accumulator(self, name: str, use: Use, accumulators: Mapping[ParameterUse, Tensor]) -> Tensor:
        """Returns an accumulator; a replica that had no micro-batch adds zeros."""
        found = accumulators.get((name, use.block))
        return found if found is not None else torch.zeros_like(self._parameters[name])

    def _chain(self, name: str, uses: list[Use], parts: list[Tensor]) -> Tensor:
        """Sums a parameter that several stages use."""
        stages = list(dict.fromkeys(use.stage for use in uses))
        heads = {use.stage: use.ranks[0] for use in uses}
        mine = [use for use in uses if self._world.rank in use.ranks]
        for use, part in zip(mine, parts, strict=True):
            if len(use.ranks) > 1:
                self._world.all_reduce(part, use.ranks)
        total: Tensor | None = None
        for place, stage in enumerate(stages):
            if heads[stage] != self._world.rank:
                continue
            before = heads[stages[place - 1]] if place else self._world.rank
            if before != self._world.rank:
                total = torch.empty_like(parts[0])
                self._world.receive([total], before, _CHAIN_TAG).wait()
            own = [part for use, part in zip(mine, parts, strict=True) if use.stage == stage]
            total = _add_all(own if total is None else [total, *own])
            after = heads[stages[place + 1]] if place + 1 < len(stages) else self._world.rank
            if after != self._world.rank:
                self._world.send([total], after, _CHAIN_TAG).wait()
        return total if total is not None else torch.empty_like(parts[0])

    def _spread(self, totals: Mapping[str, Tensor], agreed: set[ParameterUse]) -> None:
        """Gives the sum of a parameter of several stages to every rank that holds it."""
        for name, uses in self._uses.items():
            live = [use for use in uses if (name, use.block) in agreed]
            if len({use.stage for use in live}) > 1 and name in totals:
                ranks = tuple(sorted({rank for use in live for rank in use.ranks}))
                if len(ranks) > 1:
                    self._world.broadcast(totals[name], live[-1].ranks[0], ranks)

    def _reduce(self, together: Mapping[tuple[tuple[int, ...], torch.dtype], list[Tensor]]) -> None:
        """All-reduces gradients of replicated stages, many in one message."""
        started = []
        for (ranks, _), tensors in together.items():
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                started.append((self._world.start_all_reduce(flat, ranks), flat, bucket))
        for pending, flat, bucket in started:
            pending.wait()
            for tensor, value in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(value.view(tensor.shape))


class GradientBook:
    """Takes gradients from the leaves of a graph's stages, and keeps back what is not to be summed yet.

    Args:
        total: Sums over ranks.
        stages: This rank's stages.
        world: The ranks' way to talk.
    """

    def __init__(self, total: GradientSum, stages: Sequence[StageModule], world: World) -> None:
        self._sum = total
        self._stages = stages
        self._world = world
        self._kept: dict[ParameterUse, Tensor] = {}
        self._may_have_kept = False

    def keeps_back(self) -> None:
        """Notes that gradients of this step will be kept back; every rank of the step does."""
        self._may_have_kept = True

    def take(self) -> dict[ParameterUse, Tensor]:
        """Takes the gradients of the last step away from the leaves, by use."""
        taken: dict[ParameterUse, Tensor] = {}
        for stage in self._stages:
            for use, leaf in stage.leaves.items():
                if leaf.grad is not None:
                    taken[use], leaf.grad = leaf.grad, None
        return taken

    def keep(self, accumulators: Mapping[ParameterUse, Tensor]) -> None:
        """Keeps gradients of this rank back until the next `take_kept`."""
        for use, gradient in accumulators.items():
            self._kept[use] = self._kept[use].add_(gradient) if use in self._kept else gradient

    def total(self, accumulators: Mapping[ParameterUse, Tensor], origin: str) -> dict[str, Tensor]:
        """Sums gradients over uses and ranks; see `GradientSum.total`."""
        return self._sum.total(accumulators, origin)

    def take_kept(self) -> dict[str, Tensor]:
        """Sums what was kept back. Collective."""
        if not self._may_have_kept:
            return {}
        kept, self._kept, self._may_have_kept = self._kept, {}, False
        is_any = any(self._world.gather_objects(bool(kept), "summing kept gradients"))
        return self._sum.total(kept, None) if is_any else {}


def _use(split: Split, plan: Plan, block: int) -> Use:
    node = split.traced.graph.blocks[block].nodes[0]
    stage = split.assignment.stage_of[node]
    return Use(block, stage, plan.stages[stage].ranks)


def _add_all(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not buckets or size > room:
            buckets.append([])
            room = _BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= size
    return buckets

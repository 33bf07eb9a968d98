"""Puts costs of parts together: `TracedModel` and measured costs in, `Profile` out.

Seconds: a block costs what was measured of it alone, times what its layer costs as a whole over the sum of the layer's
blocks; so blocks of a layer add up to the layer. What splitting its backward adds is measured of a layer, too. The
repeated operations are counted with the first block that uses them.

Bytes: memory that a block saves and that another block made is counted with the block that made it, and once, so that
blocks of a stage add up to what the stage keeps. Of memory that repeated operations made, each block that saves it
counts it: a stage may begin anywhere, and must not hold more than was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from autovaruna.graph.traced import TracedModel
from autovaruna.profiler.bytes import Bytes
from autovaruna.profiler.measure import Key, PartCost, measure, merge
from autovaruna.profiler.parts import Part, block_parts, layer_parts, repeated_part
from autovaruna.profiler.records import BlockCost, Profile


def profile(
    traced: TracedModel,
    model: nn.Module,
    micro_batch_sizes: Sequence[int],
    device: torch.device,
    *,
    iterations: int = 5,
    budget_seconds: float = 10.0,
    known: Mapping[Key, PartCost] | None = None,
    inputs: Sequence[Tensor] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Measures all of a model on this rank; the arguments are those of `measure`, and `known` is not measured again."""
    costs = measure(
        traced,
        model,
        micro_batch_sizes,
        device,
        iterations=iterations,
        budget_seconds=budget_seconds,
        known=known or {},
        inputs=inputs,
        on_progress=on_progress,
    )
    return to_profile(traced, merge([known or {}, costs]), device)


def to_profile(
    traced: TracedModel, costs: Mapping[Key, PartCost], device: torch.device, *, has_layers: bool = True
) -> Profile:
    """Returns the profile of a graph from the costs of all its parts.

    Args:
        traced: The traced model.
        costs: Of every part.
        device: Where they were measured.
        has_layers: Whether layers are among them; without, they take what their blocks take.
    """
    sizes, blocks = tuple(sorted({size for _, size in costs})), block_parts(traced)
    layers = layer_parts(traced) if has_layers else []
    return Profile(
        fingerprint=traced.graph.fingerprint,
        device=device_name(device),
        micro_batch_sizes=sizes,
        costs=tuple(
            _block_costs(traced, blocks, layers, {name: cost for (name, at), cost in costs.items() if at == size})
            for size in sizes
        ),
    )


def device_name(device: torch.device) -> str:
    """Returns what a profile is valid for: the kind of device, and the threads of a CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type}, {torch.get_num_threads()} threads"


def _block_costs(
    traced: TracedModel, blocks: Sequence[Part], layers: Sequence[Part], costs: Mapping[str, PartCost]
) -> tuple[BlockCost, ...]:
    own = [costs[part.signature] for part in blocks]
    forward, backward, added = _seconds(traced, blocks, layers, costs)
    saved, work = _bytes(traced, blocks, [cost.num_bytes for cost in own])
    weights = [_share(cost) * seconds for cost, seconds in zip(own, backward, strict=True)]
    columns = forward, backward, saved, work, weights, added, [cost.deferred_bytes for cost in own]
    return tuple(BlockCost(*cost) for cost in zip(*columns, strict=True))


def _share(cost: PartCost) -> float:
    """Returns the share of a backward that weight gradients take; measured apart, it may come out as more than all."""
    return min(cost.weight_seconds / cost.backward_seconds, 1.0) if cost.backward_seconds > 0 else 0.0


def _seconds(
    traced: TracedModel, blocks: Sequence[Part], layers: Sequence[Part], costs: Mapping[str, PartCost]
) -> tuple[list[float], list[float], list[float]]:
    """Returns the seconds of each block: forward, backward, and what splitting it adds."""
    forward = [costs[part.signature].forward_seconds for part in blocks]
    backward = [costs[part.signature].backward_seconds for part in blocks]
    added = [costs[part.signature].split_seconds for part in blocks]
    for layer in layers:
        whole = costs[layer.signature]
        _scale(forward, layer, whole.forward_seconds)
        _scale(backward, layer, whole.backward_seconds)
        _scale(added, layer, whole.split_seconds)
    if traced.repeated and blocks:
        forward[_first_user(traced, blocks)] += costs[repeated_part(traced).signature].forward_seconds
    return forward, backward, added


def _scale(seconds: list[float], layer: Part, whole: float) -> None:
    places = [block.index for block in layer.blocks]
    total = sum(seconds[k] for k in places)
    for k in places:
        seconds[k] *= whole / total if total > 0 else 1.0


def _first_user(traced: TracedModel, blocks: Sequence[Part]) -> int:
    return next((k for k, part in enumerate(blocks) if traced.repeated.keys() & part.values), 0)


def _bytes(traced: TracedModel, blocks: Sequence[Part], measured: Sequence[Bytes]) -> tuple[list[int], list[int]]:
    """Returns what each block saves, by the rule above, and what it needs on top."""
    asked = {
        part.storage(part.values[place])
        for part, each in zip(blocks, measured, strict=True)
        for place, _ in each.saved_values
    }
    roots = [node.name for node in traced.module.graph.nodes if node.op in ("placeholder", "get_attr")]
    lasting = {storage for name in roots for storage in traced.facts[name].makes}
    saved, work = [], []
    for part, each in zip(blocks, measured, strict=True):
        kept = [made for made in each.made if made.is_saved or part.storage(part.outputs[made.place]) in asked]
        repeated = {
            part.storage(part.values[place]): num_bytes
            for place, num_bytes in each.saved_values
            if part.values[place] in traced.repeated
        }
        saved.append(
            each.inside
            + sum(made.num_bytes for made in kept)
            + sum(num_bytes for storage, num_bytes in repeated.items() if storage not in lasting)
        )
        passing = sum(made.num_bytes for made in each.made if made not in kept)
        work.append(max(each.forward_work + passing, each.work))
    return saved, work

"""Puts costs of parts together: `TracedModel` and measured costs in, `Profile` out.

Seconds: a block costs what was measured of it alone, times what its layer costs as a whole over the sum of the layer's
blocks; so blocks of a layer add up to the layer. What splitting its backward adds is measured of a layer, too. The
repeated operations are counted with the first block that uses them.

Bytes: memory that a block saves and that another block made is counted with the block that made it, and once, so that
blocks of a stage add up to what the stage keeps. Of memory that repeated operations made, each block that saves it
counts it: a stage may begin anywhere, and must not hold more than was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from autovaruna.graph.traced import TracedModel
from autovaruna.profiler.measure import Key, PartCost, measure, merge
from autovaruna.profiler.memory import Bytes
from autovaruna.profiler.parts import Part, block_parts, layer_parts, repeated_part
from autovaruna.profiler.records import BlockCost, Profile, Sequences


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
    deferred, running = [cost.deferred_bytes for cost in own], [cost.num_bytes.forward_work for cost in own]
    sequences = _in_order_of_graph(traced, blocks, [cost.num_bytes.sequences for cost in own])
    columns = forward, backward, saved, work, weights, added, deferred, running, sequences
    return tuple(BlockCost(*cost) for cost in zip(*columns, strict=True))


def _in_order_of_graph(traced: TracedModel, blocks: Sequence[Part], recorded: Iterable[Sequences]) -> list[Sequences]:
    """Returns what was recorded of blocks, with gradients in the order of the graph, not in that of the parts."""
    made: list[list[str]] = [[] for _ in blocks]
    read: list[list[str]] = [[] for _ in blocks]
    for value in traced.graph.values:
        made[value.producer].append(value.name)
        for k in value.consumers if value.needs_gradient else ():
            read[k].append(value.name)
    return [_renumbered(*each) for each in zip(blocks, recorded, made, read, strict=True)]


def _renumbered(part: Part, sequences: Sequences, made: Sequence[str], read: Iterable[str]) -> Sequences:
    """Returns what was recorded of a part; `made` and `read` are its values in the order of the graph."""
    if not sequences.read:
        return sequences
    places = {0: 0} | {-place: -1 - made.index(name) for place, name in enumerate(part.outputs, 1) if name in made}
    lie = {
        name: (number if number > 0 else places.get(number, 0), span)
        for name, number, span in zip(part.values, sequences.read, sequences.spans, strict=True)
    }
    found = [lie.get(name, (0, 0)) for name in read]
    return replace(sequences, read=tuple(number for number, _ in found), spans=tuple(span for _, span in found))


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

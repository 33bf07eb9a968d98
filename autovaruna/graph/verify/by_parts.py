"""Runs a graph on a batch and on parts of it: does what it counts over several samples change what it gives for them?

What a graph counts over its samples cannot be followed as their numbers are (`mixing.py`): experts sort and count their
samples, and sequences are sorted by length, without a sample's result depending on the others. So where a graph joins
counts of several samples, it is tried out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import OpOverload
from autovaruna.errors import TraceError
from autovaruna.graph.advice import FOR_COUNTS
from autovaruna.graph.batch.values import is_of_batch
from autovaruna.graph.export.errors import first_line
from autovaruna.graph.opaque.infer_reduction import reduction_of
from autovaruna.graph.opaque.run import Reduction
from autovaruna.graph.outputs import OutputKind, joined, opened
from autovaruna.graph.source_lines import origin
from autovaruna.graph.traced import TracedModel
from autovaruna.graph.verify.eager_vs_graph import (
    BY_ROUNDING,
    CLEAR,
    SEEDS,
    EagerVsGraph,
    Rounded,
    Run,
    distance,
    tolerance,
)

logger = logging.getLogger(__name__)
_MOST_LINES = 3
_UNTRIED = "it changes buffers by its samples, or has modules that are kept whole and draw numbers"
_PARTS = (2, 3, 5)
"""The first part of the batch is its half, then its third and so on."""
_AS_IN_EVALUATION: Mapping[str, Any] = {"training": False, "train": False, "dropout_p": 0.0}
"""Arguments of operations that draw numbers or have statistics of a batch, with which they do neither."""


@dataclass(frozen=True)
class Parts:
    """A graph, and a batch that goes through it whole and in two parts.

    Args:
        traced: The graph.
        model: Its model, all of whose numbers are on `device`.
        tensors: Samples, in the order of the call's inputs.
        num_samples: How many; two at least.
        device: Where it runs.
        share: Returns the weight of a part's loss for its part of the samples; None: the loss does not count.
    """

    traced: TracedModel
    model: nn.Module
    tensors: Sequence[Tensor]
    num_samples: int
    device: torch.device
    share: Callable[[float], float] | None
    _known: dict[str, Any] = field(default_factory=dict)

    def compare(self) -> None:
        """Makes sure that parts of the batch give what all of it gives.

        Raises:
            TraceError: they do not; says which lines join counts.
        """
        if not self._can_run():
            return warn_untried(self.traced, self.model, _UNTRIED)
        try:
            allowed = tolerance(self.traced)
            whole = self._whole()
            worst = max(self._off(whole, parts) for parts in self._cuts())
            if worst <= allowed:
                return None
            noise = [self._distance(self._whole(Rounded(self.device, seed)), whole) for seed in SEEDS]
        except Exception as error:  # the step will say so, if it is one of the model
            return warn_untried(self.traced, self.model, f"{type(error).__name__}: {first_line(error)}")
        if worst > max(CLEAR * allowed, BY_ROUNDING * max(noise)):
            self._refuse(worst)

    def _off(self, whole: Sequence[Tensor], parts: Sequence[Sequence[int]]) -> float:
        """Returns how far what parts of the batch give is from what all of it gives."""
        order = torch.tensor([sample for part in parts for sample in part]).argsort()
        runs = [self._run(part) for part in parts]
        shares = [1.0 if self.share is None else self.share(len(part) / self.num_samples) for part in parts]
        joined = [self._joined(place, [run[place] for run in runs], shares, order) for place in self._counting]
        return self._distance(joined, whole)

    def _whole(self, around: Rounded | None = None) -> list[Tensor]:
        """Returns what counts of the outputs for the batch."""
        outputs = self._run(range(self.num_samples), around)
        return [outputs[place] for place in self._counting]

    def _cuts(self) -> list[Sequence[Sequence[int]]]:
        """Returns ways to cut the batch in two: one alone may give the same by chance."""
        samples = range(self.num_samples)
        places = {max(1, self.num_samples // part) for part in _PARTS}
        cuts: list[Sequence[Sequence[int]]] = [(samples[:place], samples[place:]) for place in sorted(places)]
        return [*cuts, (samples[::2], samples[1::2])]

    @cached_property
    def _counting(self) -> list[int]:
        """Places of the outputs that say something: those of each sample, and a loss."""
        kinds = (OutputKind.SAMPLES,) if self.share is None else (OutputKind.SAMPLES, OutputKind.LOSS)
        return [place for place, spec in enumerate(self.traced.outputs) if spec.kind in kinds]

    def _joined(self, place: int, parts: Sequence[Tensor], shares: Sequence[float], order: Tensor) -> Tensor:
        spec = self.traced.outputs[place]
        if spec.kind is OutputKind.SAMPLES:
            assert spec.dimension is not None
            outer = self.traced.outer(spec, self.traced.lengths_of(self.traced.call) or ())
            whole = opened(joined(parts, spec.dimension, outer), spec.dimension, outer)
            made = _of_samples(whole, spec.dimension + 1, self.num_samples, order)
            return made.flatten(spec.dimension, spec.dimension + 1)
        return sum((part * share for part, share in zip(parts[1:], shares[1:], strict=True)), parts[0] * shares[0])

    def _distance(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        return max((distance(one, other) for one, other in zip(found, expected, strict=True)), default=0.0)

    def _run(self, samples: Sequence[int], around: Rounded | None = None) -> list[Tensor]:
        pairs = zip(self.tensors, self.traced.call.inputs, strict=True)
        tensors = [tensor[list(samples)] if spec.is_batch else tensor for tensor, spec in pairs]
        both = EagerVsGraph(self.traced, self.model, tensors, self.device)
        part = _Part(self.traced, self._known, samples, self.num_samples, self.share)
        return both.trace(each=part, around=around)

    def _can_run(self) -> bool:
        """Whether nothing but counts can make parts differ."""
        nodes = list(self.traced.nodes.values())
        if any(reduction_of(node) is Reduction.UNKNOWN for node in nodes if node.op == "call_function"):
            return False
        facts = self.traced.facts
        names = {**self.traced.parameters, **self.traced.buffers}
        follows = self.traced.changed_state - self.traced.steady_state
        state = [node for node in nodes if node.op == "get_attr" and names.get(str(node.target)) in follows]
        memory = {storage for node in state for storage in facts[node.name].makes}
        return all(
            _in_training(node.target) for node in nodes if node.name in facts and facts[node.name].writes & memory
        )

    def _refuse(self, worst: float) -> None:
        raise TraceError(
            f"{type(self.model).__qualname__} mixes the samples of a batch: what it counts over them at "
            f"{_lines(self.traced)} goes into what it gives for each. Got other numbers for two parts of "
            f"{self.num_samples} samples than for all of them (they differ by {worst:.1e} of the largest). "
            f"{FOR_COUNTS}"
        )


def warn_untried(traced: TracedModel, model: nn.Module, reason: str) -> None:
    """Says that nobody knows whether what a graph counts over its samples changes what it gives for each."""
    logger.warning(
        "%s counts over the samples of a batch at %s; whether what it gives for each depends on that could not be "
        "tried out (%s). Micro-batches count over their own samples.",
        *(type(model).__qualname__, _lines(traced), reason),
    )


def _lines(traced: TracedModel) -> str:
    """Returns the lines that join counts, the first ones of them."""
    nodes = [traced.nodes[name] for name in traced.joins_counts]
    return ", ".join(list(dict.fromkeys(origin(node) or node.name for node in nodes))[:_MOST_LINES])


@dataclass(frozen=True)
class _Part:
    """Runs the nodes of a graph for a part of a batch, with what the whole batch has drawn and counted."""

    traced: TracedModel
    known: dict[str, Any]
    samples: Sequence[int]
    num_samples: int
    share: Callable[[float], float] | None

    def __call__(self, run: Run, node: fx.Node) -> Any:
        is_drawn = node.name in self.traced.facts and self.traced.facts[node.name].is_random
        if _in_training(node.target):
            return self._evaluated(run, node)
        if is_of_batch(node):
            return self._of_batch(run, node)
        return self._drawn(run, node) if is_drawn and isinstance(node.target, OpOverload) else run.plain(node)

    def _evaluated(self, run: Run, node: fx.Node) -> Any:
        args, kwargs = run.fetch_args_kwargs_from_env(node)
        target: Any = node.target
        names = [argument.name for argument in target._schema.arguments]
        args = tuple(_AS_IN_EVALUATION.get(name, value) for name, value in zip(names, args, strict=False))
        kwargs = {name: _AS_IN_EVALUATION.get(name, value) for name, value in kwargs.items()}
        return target(*args, **kwargs)

    def _of_batch(self, run: Run, node: fx.Node) -> Any:
        (value, use, dtype), _ = run.fetch_args_kwargs_from_env(node)
        value = self.known.setdefault(node.name, value)
        part = len(self.samples) / self.num_samples
        return torch.as_tensor(use.of_share(value, part if self.share is None else self.share(part))).to(dtype)

    def _drawn(self, run: Run, node: fx.Node) -> Any:
        if node.name not in self.known:
            self.known[node.name] = run.plain(node)
        drawn: Tensor = self.known[node.name]
        dimension = self.traced.sizes.batch_dimension(node.meta["val"])
        if dimension is None:
            return drawn.clone()
        return _of_samples(drawn, dimension, self.num_samples, torch.tensor(self.samples))


def _of_samples(tensor: Tensor, dimension: int, num_samples: int, samples: Tensor) -> Tensor:
    """Returns what a tensor has of some samples, each of which may have several places of a dimension."""
    before, after = tensor.shape[:dimension], tensor.shape[dimension + 1 :]
    by_sample = tensor.reshape(*before, num_samples, -1, *after).index_select(dimension, samples.to(tensor.device))
    return by_sample.flatten(dimension, dimension + 1)


def _in_training(target: Any) -> bool:
    """Whether an operation does something else in training."""
    if not isinstance(target, OpOverload):
        return False
    return any(argument.name in _AS_IN_EVALUATION for argument in target._schema.arguments)

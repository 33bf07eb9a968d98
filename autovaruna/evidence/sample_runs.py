"""Runs a stage forward and backward on samples of a micro-batch, as they have trained, and leaves nothing behind.

What the whole draws and counts is cut with its samples, dropout is off, and normalisations take the statistics of the
whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna._torch import OpOverload, preserve_version_counter, schema_of
from autovaruna.evidence.stage_rows import Observed, StageRows, Terms, UntriedError
from autovaruna.graph.evaluate import call, evaluate
from autovaruna.graph.lengths import free_value
from autovaruna.graph.opaque.run import profiling_mode
from autovaruna.graph.operators import (
    BY_SAMPLES,
    NORMS,
    STATISTICS,
    arguments,
    changed_by,
    is_differentiable,
    is_of_batch,
    run_opaque,
)
from autovaruna.graph.pieces import normalize
from autovaruna.graph.precision import compiling_nothing, without_autocast
from autovaruna.graph.random import OwnGenerators, RandomStream, python_generators
from autovaruna.graph.rounding import distance
from autovaruna.graph.traced import OutputKind

_AS_IN_EVALUATION: Mapping[str, Any] = {"training": False, "train": False, "dropout_p": 0.0}
"""Arguments of operations that draw numbers or have statistics of a batch, with which they do neither."""
_VARIED = 0.25
"""How much larger a number of samples is for the first part than for the whole, where it comes from another stage."""
_MOST_NUMBERS = 1 << 17
"""How many numbers of a weight's gradient are compared, or somewhat more."""


@dataclass(frozen=True)
class Source:
    """A weight, or what the stage received, of which there is a gradient."""

    name: str
    is_weight: bool

    def __str__(self) -> str:
        return f"the gradient of {self.name}"


@dataclass(eq=False)
class SampleRun:
    """A forward of some samples, and the gradients that a backward from its results gives.

    `share` is their part of the micro-batch; `state` what changes whatever the samples are; `chances` what is drawn by,
    of the operation and the node that makes it; `ends` where a backward begins if losses do not count. `values`, with
    their gradients, and `arguments` of operations that choose are those of nodes, where they are asked for.
    """

    samples: Sequence[int]
    share: float
    sources: dict[Source, Tensor] = field(default_factory=dict)
    returned: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    chances: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    ends: dict[fx.Node, Tensor] = field(default_factory=dict)
    gradients: dict[Source, Tensor] = field(default_factory=dict)
    values: dict[fx.Node, Tensor] = field(default_factory=dict)
    arguments: dict[fx.Node, tuple[Any, Any]] = field(default_factory=dict)
    of_values: dict[fx.Node, Tensor] = field(default_factory=dict)


class SampleRuns:
    """Runs one stage on the samples of one micro-batch, of which the first ones are the whole.

    Attributes:
        stream: what random operations draw from.
        scaled: what is another for a part, where it goes between stages.
        goes_back: whether there is a backward.
    """

    def __init__(
        self, rows: StageRows, observed: Observed, terms: Terms, size: int, device: torch.device, allowed: float
    ) -> None:
        self._of, self._observed, self._terms, self._size = rows, observed, terms, size
        self._traced, self._device, self._allowed = rows.traced, device, allowed
        self._known: dict[Any, Any] = {}  # what the whole has drawn and counted, by node
        self.stream, self.scaled, self.goes_back = observed.stream, frozenset[str](), bool(observed.gradients)

    def whole(self, around: AbstractContextManager[Any] | None = None, *, records: bool = False) -> SampleRun:
        run = self._forward(range(self._size), around, records=records, is_whole=True)
        self._backward(run, run, around)
        return run

    def parts(self, cut: Sequence[Sequence[int]], whole: SampleRun, *, records: bool = False) -> list[SampleRun]:
        runs = [self._forward(part, records=records) for part in cut]
        for run in runs:
            self._backward(run, whole, parts=runs)
        return runs

    def redrawn(self, seed: int) -> SampleRun:
        """Returns the whole with other draws."""
        self.stream = RandomStream(seed, 0, 0, self._device)
        try:
            return self.whole()
        finally:
            self.stream = self._observed.stream

    def _rows(self, name: str, whole: Tensor, num_samples: int, samples: Sequence[int]) -> Tensor:
        return self._of.rows(name, whole, num_samples, samples, self._terms.lengths)

    def _forward(
        self,
        samples: Sequence[int],
        around: AbstractContextManager[Any] | None = None,
        *,
        records: bool = False,
        is_whole: bool = False,
    ) -> SampleRun:
        observed, of, traced = self._observed, self._of, self._traced
        size, share = len(samples), len(samples) / observed.size
        run = SampleRun(samples, share)
        given = dict(observed.of_batch)
        if not self._terms.is_sum and size < observed.size:
            given = of.given(given, share)
        state = self._state(run)
        with torch.set_grad_enabled(self.goes_back):
            received = {name: self._received(run, name, tensor, is_whole) for name, tensor in observed.tensors.items()}

        def value_of(node: fx.Node) -> Any:
            if node in state:
                return state[node]
            if node.name in received:
                return received[node.name]
            if is_of_batch(node):
                return given[node.name]
            if node.op == "get_attr":
                return getattr(traced.module, str(node.target))
            if traced.sizes.is_given(node):
                return traced.sizes.in_call(free_value(node), size, self._terms.lengths)
            raise UntriedError(f"{node.name} is not known here")

        runs = partial(self._run, run, given, state, is_whole)
        if records:
            runs = partial(self._recorded, run, runs)
        with around or nullcontext(), torch.set_grad_enabled(self.goes_back):
            returned = evaluate(of.nodes, value_of, of.outputs.values(), runs)
        run.returned = {
            name: returned[node] * share if name in self.scaled else returned[node] for name, node in of.outputs.items()
        }
        run.state = {name: state[node] for node, name in of.state.items() if name in traced.steady_state}
        return run

    def _received(self, run: SampleRun, name: str, tensor: Tensor, is_whole: bool) -> Tensor:
        """Returns the samples of a run of what the stage received, of a leaf if there is a gradient of it."""
        value = self._rows(name, tensor.detach(), self._observed.size, run.samples).clone()
        if name in self._terms.wanted and is_differentiable(value):
            run.sources[Source(name, False)] = value.requires_grad_()
        factor = run.share if self._of.dimension(name) is None else 1 / run.share
        factor = factor if name in self.scaled else 1.0
        factor *= 1.0 if is_whole or name not in self._varied else self._variation(run.samples)
        return value * factor if factor != 1.0 else value[...]

    @cached_property
    def _varied(self) -> set[str]:
        """What comes from other stages, is made of several samples and goes into the loss: of each part it is another.

        What is made of it must grow with it, or the loss would be none of the samples' that parts have.
        """
        names = () if self._terms.is_free else self._observed.tensors
        return {name for name in names if self._of.is_reduced(name) and not self._of.meets_samples(name)}

    def _variation(self, samples: Sequence[int]) -> float:
        """Returns by what such numbers of a part are multiplied; together they are those of the whole."""
        size = len(samples)
        return 1.0 + _VARIED if samples[0] == 0 else 1.0 - _VARIED * (self._size - size) / size

    def _state(self, run: SampleRun) -> dict[fx.Node, Tensor]:
        """Returns parameters and buffers, as leaves and copies; what the forward changed is what it found."""
        of, traced, found = self._of, self._traced, dict[str, Tensor]()
        held, state = of.stage.held(), dict[fx.Node, Tensor]()
        for node, name in of.state.items():
            if name not in held:  # it is kept whole
                continue
            if name not in found:
                value = self._before(node)
                if name in traced.changed_state:
                    value = value.clone()
                if traced.facts[node.name].needs_gradient and name in of.parameters:
                    value = run.sources[Source(name, True)] = value.detach().requires_grad_()
                found[name] = value
            state[node] = found[name]
        return state

    def _run(
        self,
        run: SampleRun,
        given: Mapping[str, Tensor],
        state: dict[fx.Node, Tensor],
        is_whole: bool,
        node: fx.Node,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        target: Any = node.target
        if node in self._of.written:
            return state[self._of.written[node]].clone()
        if is_of_batch(node):
            return given[node.name]
        if _has_chance_or_statistics(node):
            value = _settled_value(node, args, kwargs, self._known)
        elif target is run_opaque and self._traced.facts[node.name].is_random:
            value = self.stream.draw(self._traced.places[node.name], args[0], *args[1:], **kwargs)
        elif isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
            value = self._drawn(node, args, kwargs, run)
        else:
            value = call(node, args, kwargs)
        self._hold(node, state, is_whole)
        if self._terms.is_free and node in self._of.ends and value.requires_grad:
            run.ends[node] = value.clone()
        return value

    def _recorded(self, run: SampleRun, runs: Any, node: fx.Node, args: Any, kwargs: Any) -> Any:
        value = runs(node, args, kwargs)
        if isinstance(value, Tensor):
            run.values[node] = value
            if not is_differentiable(value):
                run.arguments[node] = args, kwargs
        return value

    def _drawn(self, node: fx.Node, args: Any, kwargs: Any, run: SampleRun) -> Any:
        """Returns what the whole has drawn, for the samples of a part; the same for all if nothing says whose it is."""
        target: Any = node.target
        place = self._traced.places[node.name]
        pairs = zip((each for each in node.args if isinstance(each, fx.Node)), filter(_is_tensor, args), strict=False)
        filled = set(map(id, changed_by(target, args, kwargs)))  # what was there before does not count
        for source, value in pairs:
            if id(value) not in filled and is_differentiable(value) and self._of.dimension(source.name) is not None:
                run.chances[node.name, source.name] = value.detach().clone()
        made = self.stream.draw(place, target, *args, **kwargs)
        if not isinstance(made, Tensor):
            return made
        whole: Tensor = self._known.setdefault(node, made.detach().clone())
        dimension = self._traced.sizes.batch_dimension(node.meta["val"])
        is_ordered = any(isinstance(each.meta["val"], Tensor) for each in node.all_input_nodes)
        with torch.no_grad():
            if dimension is not None and whole.shape[dimension] > self._size and not is_ordered:
                own = whole.narrow(dimension, 0, 1).repeat_interleave(made.shape[dimension], dimension)
            else:
                own = self._rows(node.name, whole, self._size, run.samples).clone()
            return made.copy_(own) if schema_of(target).is_mutable else own

    def _hold(self, node: fx.Node, state: Mapping[fx.Node, Tensor], is_whole: bool) -> None:
        """Puts state that follows from samples back after a node that has changed it."""
        writes = self._traced.facts[node.name].writes
        for source, memory in self._of.following.items() if writes else ():
            if memory & writes:
                now, found = state[source], self._before(source)
                if node.target is run_opaque:
                    changed = self._known.setdefault((node, source), now.detach().clone()) if is_whole else now
                    if distance(now, self._known.get((node, source), changed)) > self._allowed:
                        raise UntriedError("it changes state by what the samples are")
                with torch.no_grad(), preserve_version_counter(now):
                    now.copy_(found)

    def _before(self, node: fx.Node) -> Tensor:
        """Returns state as the forward found it; what follows from samples is not zero, as later in training."""
        name = self._of.state[node]
        value = self._observed.before.get(name, self._of.stage.held()[name]).detach()
        is_started = node in self._of.following and is_differentiable(value) and not value.any()
        return torch.ones_like(value) if is_started else value

    def _backward(
        self,
        run: SampleRun,
        whole: SampleRun,
        around: AbstractContextManager[Any] | None = None,
        parts: Sequence[SampleRun] = (),
    ) -> None:
        """Goes backward from the results, by the gradients of the step."""
        roots: list[tuple[Tensor, Tensor]] = []
        for name, gradient in self._observed.gradients.items() if self.goes_back else ():
            value, is_rows = run.returned[name], self._of.dimension(name) is not None
            if value.requires_grad and (is_rows or not self._terms.is_free):
                roots.append((value, self._root(name, gradient, run, whole, parts)))
        for node, value in run.ends.items():
            gradient = self._known.setdefault((node, "gradient"), torch.randn_like(value))
            roots.append((value, self._rows(node.name, gradient, self._size, run.samples)))
        run.returned = {name: each.detach() for name, each in run.returned.items()}
        run.ends.clear()
        if not roots:
            return
        noted = {node: each for node, each in run.values.items() if each.requires_grad}
        with around or nullcontext():
            if noted:
                with suppress(RuntimeError):  # one may have been changed in place
                    run.of_values = _gradients(roots, noted)
            run.gradients = _gradients_of_leaves(roots, run.sources)

    def _root(
        self, name: str, gradient: Tensor, run: SampleRun, whole: SampleRun, parts: Sequence[SampleRun]
    ) -> Tensor:
        """Returns the gradient of a result of some samples, from that of the micro-batch."""
        if self._of.dimension(name) is not None:
            return self._rows(name, gradient, self._observed.size, run.samples)
        spec = self._of.specs.get(name)
        if spec is not None and spec.kind is not OutputKind.SAME:
            return gradient if self._terms.is_sum else gradient * run.share
        others = (averaged(name, whole, parts), alike(name, whole, parts)) if spec is None and parts else ()
        if others and added(name, whole, parts) < min(others):
            return gradient * (self._size / self._observed.size)
        return gradient * run.share


def added(name: str, whole: SampleRun, runs: Sequence[SampleRun]) -> float:
    """Returns how far the sum of what parts return is from what the whole does."""
    return far(sum(run.returned[name].detach() for run in runs), whole.returned[name])


def averaged(name: str, whole: SampleRun, runs: Sequence[SampleRun]) -> float:
    """Returns how far the mean over samples is."""
    total = sum(run.share for run in runs)
    return far(sum(run.returned[name].detach() * (run.share / total) for run in runs), whole.returned[name])


def alike(name: str, whole: SampleRun, runs: Sequence[SampleRun]) -> float:
    """Returns how far each part is."""
    return max(distance(run.returned[name], whole.returned[name]) for run in runs)


def far(one: Any, other: Tensor, least: float = 0.0) -> float:
    return distance(one.to(other.dtype), other, least) if isinstance(one, Tensor) else torch.inf


@contextmanager
def settled() -> Iterator[None]:
    """Leaves generators, of which the script's other threads draw meanwhile, and autocast as they are outside."""
    with (
        OwnGenerators(0),
        python_generators(0),
        compiling_nothing(),
        without_autocast(),
        profiling_mode(),
    ):
        yield


def _has_chance_or_statistics(node: fx.Node) -> bool:
    """Whether a node normalises by the batch, or drops numbers by chance."""
    return node.target in NORMS or not _AS_IN_EVALUATION.keys().isdisjoint(arguments(node))


def _settled_value(node: fx.Node, args: Any, kwargs: Any, known: dict[Any, Any]) -> Any:
    """Runs a node without chance, and with the statistics of the whole batch, which it adds to what is `known`."""
    target: Any = node.target
    run = partial(normalize, target) if target in NORMS else target  # as a stage does
    if target is torch.ops.aten.batch_norm.default and args[BY_SAMPLES]:
        held = next((each for each in (args[3], args[1]) if each is not None), args[0])
        by_channel = args[0].detach().to(torch.promote_types(args[0].dtype, torch.float32)).transpose(0, 1).flatten(1)
        statistics = [each.to(held.dtype) for each in (by_channel.mean(1), by_channel.var(1, correction=0))]
        statistics = known.setdefault(node, statistics)
        return run(*args[: STATISTICS.start], *statistics, False, *args[BY_SAMPLES + 1 :])
    names = [argument.name for argument in schema_of(target).arguments]
    args = tuple(_AS_IN_EVALUATION.get(name, value) for name, value in zip(names, args, strict=False))
    return run(*args, **{name: _AS_IN_EVALUATION.get(name, value) for name, value in kwargs.items()})


def _gradients(roots: Sequence[tuple[Tensor, Tensor]], values: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """Returns the gradients of values that have one; a backward goes from each root with its own."""
    given = [each for each, _ in roots], list(values.values()), [each for _, each in roots]
    found = torch.autograd.grad(*given, retain_graph=True, allow_unused=True) if values else ()
    return {key: each for key, each in zip(values, found, strict=True) if each is not None}


def _gradients_of_leaves(
    roots: Sequence[tuple[Tensor, Tensor]], leaves: Mapping[Source, Tensor]
) -> dict[Source, Tensor]:
    """Returns the gradients of what a stage has received, and numbers out of those of its weights, one after the other.

    So the gradients of all weights are never there together.
    """
    found = dict[Source, Tensor]()

    def take(source: Source, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        found[source] = _numbers_out_of(gradient) if source.is_weight else gradient

    for source, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(partial(take, source))  # type: ignore[no-untyped-call]
    if leaves:
        given = [each for each, _ in roots], [each for _, each in roots]
        torch.autograd.backward(*given, inputs=list(leaves.values()))
    return found


def _numbers_out_of(gradient: Tensor) -> Tensor:
    """Returns some of the numbers of a large gradient; of a small one all."""
    step = gradient.numel() // _MOST_NUMBERS | 1  # an odd one comes by all columns
    return gradient if step == 1 else gradient.reshape(-1)[::step].clone()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)

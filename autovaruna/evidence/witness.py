"""Runs a stage again on the samples of a micro-batch that has trained, whole and in two parts; both must agree.

The samples, what came back for them, weights, state and precision are those of the step. What the whole draws and
counts is cut with its samples, dropout is off, normalisations take the statistics of the whole, and nothing is left
behind. So no other rank is needed, and no trial of drawn numbers says more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import OpOverload, preserve_version_counter, pytree, schema_of
from autovaruna.errors import AutoVarunaError
from autovaruna.evidence.evaluate import NodeError, evaluate
from autovaruna.graph.batch.order import SampleOrders
from autovaruna.graph.lengths import free_value
from autovaruna.graph.opaque.run import profiling_mode
from autovaruna.graph.operators import is_differentiable, is_of_batch, reached, run_opaque
from autovaruna.graph.pieces import ArgumentSource, nodes_of
from autovaruna.graph.precision import compiling_nothing, without_autocast
from autovaruna.graph.random import RandomStream, python_generators, untouched_generator
from autovaruna.graph.source_lines import first_line, origin
from autovaruna.graph.traced import OutputKind, TracedModel, joined, opened
from autovaruna.graph.trial import evaluated, fits, is_evaluated, refusal, written_states
from autovaruna.graph.verify import BY_ROUNDING, CLEAR, SEEDS, Rounded, distance, tolerance
from autovaruna.stage.module import StageModule

logger = logging.getLogger(__name__)
_MOST_TOLERANCE = 0.03
"""The relative difference from which on that of rounding is measured, at most: in low precision it is large."""
_SMALL, _SMALL_IN_LOW_PRECISION = 0.01, 0.3
"""A gradient that is less than this share of the largest is compared with that share: its terms may cancel out."""
_MOST_SCALED = 3
_MOST_NUMBERS = 1 << 17
"""How many numbers of a weight's gradient are compared, or somewhat more."""
_FLIPS, _FLIP_STEPS, _LEAST_FLIP = 32, 4.0, 1e-5
"""How often, and by how many roundings, or how much, a choice is shaken to see whether it is one of rounding."""


class UntriedError(Exception):
    """A stage cannot be run on parts of a micro-batch."""


class _OrderError(UntriedError):
    """Nobody knows which samples rows are of."""


@dataclass(eq=False)
class Observed:
    """What a stage has met of one micro-batch in a step.

    Attributes:
        stream: What its random operations drew from.
        tensors: What it received, inputs among them.
        of_batch: What it was given of the whole batch, by node.
        before: State that the forward found and changed.
        gradients: Those that came back for what it returned.
    """

    size: int
    stream: RandomStream
    tensors: Mapping[str, Tensor]
    of_batch: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Terms:
    """How micro-batches make up a step.

    Attributes:
        is_sum: whether their losses are added up; else they are averaged by samples.
        is_free: whether the script says otherwise what becomes of numbers over samples, which then do not count.
        wanted: what the stage receives whose gradient is wanted.
        lengths: those that vary in the graph.
    """

    is_sum: bool
    is_free: bool
    wanted: frozenset[str]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class _Source:
    """A weight, or what the stage received, of which there is a gradient."""

    name: str
    is_weight: bool


@dataclass(eq=False)
class _Pass:
    """A forward of some samples, and the gradients that a backward from its results gives.

    `share` is their part of the micro-batch; `state` what changes whatever the samples are; `chances` what is drawn by,
    of the operation and the node that makes it. `values`, with their gradients, and `arguments` of operations that
    choose are those of nodes, where they are asked for.
    """

    samples: Sequence[int]
    share: float
    sources: dict[_Source, Tensor] = field(default_factory=dict)
    returned: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    chances: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    gradients: dict[_Source, Tensor] = field(default_factory=dict)
    values: dict[fx.Node, Tensor] = field(default_factory=dict)
    arguments: dict[fx.Node, tuple[Any, Any]] = field(default_factory=dict)
    of_values: dict[fx.Node, Tensor] = field(default_factory=dict)


class StageWitness:
    """Tells whether one stage of a graph gives the same for samples together and apart."""

    def __init__(self, stage: StageModule, traced: TracedModel, model: nn.Module, device: torch.device) -> None:
        self._stage, self.traced, self._model, self._device = stage, traced, model, device
        piece = stage.part.piece
        self._nodes = nodes_of(traced, stage.part.nodes, traced.repeated, piece.outputs)
        self._outputs = {name: traced.nodes[name] for name in piece.outputs}
        self._specs = {name: traced.outputs[place] for place, name in stage.part.outputs}
        self._parameters = {each.name for each in piece.arguments if each.source is ArgumentSource.PARAMETER}
        self._nodes_of_state = {
            node: self._first(node)
            for node in dict.fromkeys(source for each in self._nodes for source in each.all_input_nodes)
            if node.op == "get_attr"
        }
        self._following = {
            node: traced.facts[node.name].makes
            for node, name in self._nodes_of_state.items()
            if name in traced.changed_state - traced.steady_state
        }
        written = written_states(traced, {str(node.target) for node in self._following})
        by_target = {str(node.target): node for node in self._following}
        self._written = {node: by_target[name] for node, name in written.items()}

    def refusal(self, observed: Observed, terms: Terms) -> AutoVarunaError | None:
        """Returns why the stage cannot run in micro-batches: they make other numbers; None: they do not.

        Raises:
            UntriedError: it is not known.
        """
        error = UntriedError("it has one sample")
        for size, first in _cuts(observed.size):
            try:
                with _settled(self._device):
                    return _ComparedSamples(self, observed, terms, size, first).refusal()
            except UntriedError as untried:
                error = untried
            except NodeError as failed:
                place = origin(failed.node) or failed.node.name
                error = UntriedError(f"{failed.node.name}, at {place}, {first_line(failed)}")
            except Exception as failed:
                error = UntriedError(f"{type(failed).__name__}: {first_line(failed)}")
        raise error

    def join(self, one: Observed, other: Observed, is_sum: bool) -> Observed:
        """Returns two micro-batches as one.

        Raises:
            UntriedError: nobody knows how.
        """

        def both(name: str, first: Tensor, second: Tensor) -> Tensor:
            dimension = self.traced.sizes.batch_dimension(self.traced.nodes[name].meta["val"])
            if dimension is not None and name not in self._whole_inputs:
                return joined([first, second], dimension, self.outer(name, first, one.size, ()))
            if not torch.equal(first, second):
                raise UntriedError(f"{name} is another for each micro-batch of one sample")
            return first

        gradients = dict[str, Tensor]()
        for name in one.gradients.keys() & other.gradients.keys():
            pair, node = (one.gradients[name], other.gradients[name]), self.traced.nodes[name]
            is_rows = self.traced.sizes.batch_dimension(node.meta["val"]) is not None
            if not is_rows and name not in self._specs:
                raise UntriedError(f"{name} is a number for each micro-batch of one sample")
            gradients[name] = both(name, *pair) if is_rows else pair[0] if is_sum else pair[0] + pair[1]
        return Observed(
            one.size + other.size,
            one.stream,
            {name: both(name, each, other.tensors[name]) for name, each in one.tensors.items()},
            one.of_batch if is_sum else self.given(one.of_batch, 2.0),
            one.before,
            gradients,
        )

    def given(self, of_batch: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        """Returns what a part is given of the whole batch."""
        uses = self.traced.totals.values
        return {
            name: torch.as_tensor(uses[name][1].of_share(value, share)).to(value.device, value.dtype)
            for name, value in of_batch.items()
        }

    @cached_property
    def _whole_inputs(self) -> set[str]:
        return {name for name, spec in self.traced.inputs.items() if not spec.is_batch}

    def dimension(self, name: str) -> int | None:
        """Returns the dimension of samples in what the stage receives or returns; None: it has none."""
        if name in self._whole_inputs:
            return None
        return self.traced.sizes.batch_dimension(self.traced.nodes[name].meta["val"])

    def follows_from_batch(self, name: str) -> bool:
        """Whether a value is made of what is given of the whole batch."""
        return any(map(is_of_batch, reached([self.traced.nodes[name]], lambda node: node.all_input_nodes)))

    def meets_samples(self, name: str) -> bool:
        """Whether something with a row for each sample is made of a value."""
        sizes = self.traced.sizes
        values = (node.meta.get("val") for node in reached([self.traced.nodes[name]], lambda node: node.users))
        return any(isinstance(each, Tensor) and sizes.batch_dimension(each) is not None for each in values)

    def outer(self, name: str, value: Tensor, num_samples: int, lengths: tuple[int, ...]) -> int:
        """Returns how often all samples come one after the other in a value's dimension of samples."""
        dimension = self.dimension(name)
        assert dimension is not None
        if value.shape[dimension] % num_samples:
            raise UntriedError(f"{name} has no equal number of rows for each sample")
        if value.shape[dimension] == num_samples:
            return 1
        outer = self._orders.outer(self.traced.nodes[name])
        if outer is None:
            raise _OrderError(f"nothing tells which samples the rows of {name} are of")
        return 1 if outer == 1 else int(self.traced.sizes.in_call(outer, 1, lengths))

    @cached_property
    def _orders(self) -> SampleOrders:
        return SampleOrders(self.traced)

    def _first(self, node: fx.Node) -> str:
        name = str(node.target)
        return self.traced.parameters.get(name) or self.traced.buffers.get(name) or name


class _ComparedSamples:
    """One micro-batch, or its first samples, whole and in two parts."""

    def __init__(self, stage: StageWitness, observed: Observed, terms: Terms, size: int, first: int) -> None:
        self._of, self._observed, self._terms, self._size = stage, observed, terms, size
        self._traced, self._device = stage.traced, stage._device
        self._known: dict[Any, Any] = {}
        samples = range(size)
        self._cut = samples[:first], samples[first:]
        self._scaled = frozenset[str]()  # what is another for a part, where it goes between stages
        self._has_gradients = not terms.is_free
        self._allowed = min(CLEAR * tolerance(self._traced), _MOST_TOLERANCE)
        self._small = _SMALL if self._allowed < _MOST_TOLERANCE else _SMALL_IN_LOW_PRECISION

    def refusal(self) -> AutoVarunaError | None:
        """Returns why the parts make other numbers; None: they do not, or rounding explains it."""
        try:
            return self._refusal()
        except _OrderError:  # results tell, at least, in whatever order their rows are
            self._has_gradients = False
            if (error := self._refusal()) is not None:
                return error
            raise

    def _refusal(self) -> AutoVarunaError | None:
        whole = self._whole()
        if not all(_is_finite(each) for each in whole.gradients.values()):
            return None  # the step says so itself
        wrong: dict[str, float] = {}
        for scaled in self._ways_to_scale():
            self._scaled = scaled
            off = self._distances(whole, self._parts(whole))
            wrong = {name: far for name, far in off.items() if far > self._allowed}
            if not wrong:
                return None
        self._scaled = frozenset()
        off = self._distances(whole, self._parts(whole))
        noise = [self._distances(whole, [run]) for run in self._shaken()]
        wrong = {
            name: far
            for name, far in off.items()
            if far > max(self._allowed, BY_ROUNDING * max(each.get(name, 0.0) for each in noise))
        }
        return self._explained(wrong) if wrong else None

    def _whole(self, around: AbstractContextManager[Any] | None = None, *, records: bool = False) -> _Pass:
        run = self._forward(range(self._size), around, records=records, is_whole=True)
        self._backward(run, run, around)
        return run

    def _shaken(self) -> Iterator[_Pass]:
        """Yields the whole with other roundings, and other draws where only a kept module knows what it draws."""
        for seed in SEEDS:
            yield self._whole(Rounded(self._device, seed))
        if any(node.target is run_opaque and self._traced.facts[node.name].is_random for node in self._of._nodes):
            stream = self._observed.stream
            for seed in SEEDS:
                self._observed.stream = RandomStream(seed, 0, 0, self._device)
                yield self._whole()
            self._observed.stream = stream

    def _parts(self, whole: _Pass, *, records: bool = False) -> list[_Pass]:
        runs = [self._forward(part, records=records) for part in self._cut]
        for run in runs:
            self._backward(run, whole, parts=runs)
        return runs

    def _ways_to_scale(self) -> Iterator[frozenset[str]]:
        """Yields what is another for a part, where it goes between stages: nothing, first.

        Numbers that come may be sums over the micro-batch; rows that come or go, shares in what is of the whole batch.
        """
        of = self._of
        coming = {name for name in self._observed.tensors if name not in self._traced.inputs}
        numbers = [name for name in sorted(coming) if of.dimension(name) is None]
        rows = [
            name for name in sorted(coming | (of._outputs.keys() - of._specs.keys())) if of.dimension(name) is not None
        ]
        scalable = [*numbers, *filter(of.follows_from_batch, rows)]
        numbers = [name for name in scalable if self._traced.nodes[name].meta["val"].is_floating_point()]
        for count in range(min(len(numbers), _MOST_SCALED) + 1):
            yield from map(frozenset, combinations(numbers, count))

    # a pass

    def _rows(self, name: str, whole: Tensor, num_samples: int, samples: Sequence[int]) -> Tensor:
        """Returns what a value has of some samples; all of it if it is none of samples."""
        dimension = self._of.dimension(name)
        if dimension is None or len(samples) == num_samples:
            return whole
        outer = self._of.outer(name, whole, num_samples, self._terms.lengths)
        return self._taken(whole, dimension, outer, num_samples, samples)

    def _taken(self, whole: Tensor, dimension: int, outer: int, num_samples: int, samples: Sequence[int]) -> Tensor:
        per_sample = whole.shape[dimension] // (outer * num_samples)
        places = slice(samples[0] * per_sample, (samples[-1] + 1) * per_sample)
        cut = opened(whole, dimension, outer)
        index = (slice(None),) * (dimension + 1) + (places,)
        return cut[index].flatten(dimension, dimension + 1).contiguous()

    def _forward(
        self,
        samples: Sequence[int],
        around: AbstractContextManager[Any] | None = None,
        *,
        records: bool = False,
        is_whole: bool = False,
    ) -> _Pass:
        observed, of, traced = self._observed, self._of, self._traced
        size, share = len(samples), len(samples) / observed.size
        run = _Pass(samples, share)
        given = dict(observed.of_batch)
        if not self._terms.is_sum and size < observed.size:
            given = of.given(given, share)
        received, state = dict[str, Tensor](), self._state(run)
        for name, tensor in observed.tensors.items():
            value = self._rows(name, tensor.detach(), observed.size, samples).clone()
            if name in self._terms.wanted and is_differentiable(value):
                run.sources[_Source(name, False)] = value.requires_grad_()
            factor = share if self._of.dimension(name) is None else 1 / share
            received[name] = value * factor if name in self._scaled else value[...]

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
        with around or nullcontext():
            returned = evaluate(of._nodes, value_of, runs, frozenset(of._outputs.values()))
        run.returned = {
            name: returned[node] * share if name in self._scaled else returned[node]
            for name, node in of._outputs.items()
        }
        run.state = {name: state[node] for node, name in of._nodes_of_state.items() if name in traced.steady_state}
        return run

    def _state(self, run: _Pass) -> dict[fx.Node, Tensor]:
        """Returns parameters and buffers, as leaves and copies; what the forward changed is what it found."""
        of, traced, found = self._of, self._traced, dict[str, Tensor]()
        held, state = of._stage.held(), dict[fx.Node, Tensor]()
        for node, name in of._nodes_of_state.items():
            if name not in held:  # it is kept whole
                continue
            if name not in found:
                value = self._observed.before.get(name, held[name]).detach()
                if name in traced.changed_state:
                    value = value.clone()
                if traced.facts[node.name].needs_gradient and name in of._parameters:
                    value = run.sources[_Source(name, True)] = value.detach().requires_grad_()
                found[name] = value
            state[node] = found[name]
        return state

    def _run(
        self,
        run: _Pass,
        given: Mapping[str, Tensor],
        state: dict[fx.Node, Tensor],
        is_whole: bool,
        node: fx.Node,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        target: Any = node.target
        if node in self._of._written:
            return state[self._of._written[node]].clone()
        if is_of_batch(node):
            return given[node.name]
        if is_evaluated(node):
            value = evaluated(node, args, kwargs, self._known)
        elif target is run_opaque and self._traced.facts[node.name].is_random:
            value = self._observed.stream.draw(self._traced.places[node.name], args[0], *args[1:], **kwargs)
        elif isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
            value = self._drawn(node, args, kwargs, run)
        else:
            value = target(*args, **kwargs)
        self._hold(node, state, is_whole)
        return value

    def _recorded(self, run: _Pass, runs: Any, node: fx.Node, args: Any, kwargs: Any) -> Any:
        value = runs(node, args, kwargs)
        if isinstance(value, Tensor):
            run.values[node] = value
            if not is_differentiable(value):
                run.arguments[node] = args, kwargs
        return value

    def _drawn(self, node: fx.Node, args: Any, kwargs: Any, run: _Pass) -> Any:
        """Returns what the whole has drawn, for the samples of a part; the same for all if nothing says whose it is."""
        target: Any = node.target
        place = self._traced.places[node.name]
        pairs = zip((each for each in node.args if isinstance(each, fx.Node)), filter(_is_tensor, args), strict=False)
        for source, value in pairs:
            if is_differentiable(value) and self._of.dimension(source.name) is not None:
                run.chances[node.name, source.name] = value.detach().clone()
        made = self._observed.stream.draw(place, target, *args, **kwargs)
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
        for source, memory in self._of._following.items() if writes else ():
            if memory & writes:
                now, found = state[source], self._before(source)
                if node.target is run_opaque:
                    changed = self._known.setdefault((node, source), now.detach().clone()) if is_whole else now
                    if distance(now, self._known.get((node, source), changed)) > self._allowed:
                        raise UntriedError("it changes state by what the samples are")
                with torch.no_grad(), preserve_version_counter(now):
                    now.copy_(found)

    def _before(self, node: fx.Node) -> Tensor:
        name = self._of._nodes_of_state[node]
        return self._observed.before.get(name, self._of._stage.held()[name]).detach()

    def _backward(
        self,
        run: _Pass,
        whole: _Pass,
        around: AbstractContextManager[Any] | None = None,
        parts: Sequence[_Pass] = (),
    ) -> None:
        """Goes backward from the results, by the gradients of the step."""
        roots: list[tuple[Tensor, Tensor]] = []
        for name, gradient in self._observed.gradients.items() if self._has_gradients else ():
            value = run.returned[name]
            if value.requires_grad:
                roots.append((value, self._root(name, gradient, run, whole, parts)))
        run.returned = {name: each.detach() for name, each in run.returned.items()}
        if not roots:
            return
        noted = {node: each for node, each in run.values.items() if each.requires_grad}
        with around or nullcontext():
            if noted:
                with suppress(RuntimeError):  # one may have been changed in place
                    run.of_values = _gradients(roots, noted)
            run.gradients = _gradients_of_leaves(roots, run.sources)

    def _root(self, name: str, gradient: Tensor, run: _Pass, whole: _Pass, parts: Sequence[_Pass]) -> Tensor:
        """Returns the gradient of a result of some samples, from that of the micro-batch."""
        if self._of.dimension(name) is not None:
            return self._rows(name, gradient, self._observed.size, run.samples)
        spec = self._of._specs.get(name)
        if spec is not None and spec.kind is not OutputKind.SAME:
            return gradient if self._terms.is_sum else gradient * run.share
        if (
            spec is None
            and parts
            and self._added(name, whole, parts)
            < min(self._averaged(name, whole, parts), self._alike(name, whole, parts))
        ):
            return gradient * (self._size / self._observed.size)
        return gradient * run.share

    # what differs

    def _added(self, name: str, whole: _Pass, runs: Sequence[_Pass]) -> float:
        return _far(sum(run.returned[name].detach() for run in runs), whole.returned[name])

    def _averaged(self, name: str, whole: _Pass, runs: Sequence[_Pass]) -> float:
        total = sum(run.share for run in runs)
        return _far(sum(run.returned[name].detach() * (run.share / total) for run in runs), whole.returned[name])

    def _alike(self, name: str, whole: _Pass, runs: Sequence[_Pass]) -> float:
        return max(distance(run.returned[name], whole.returned[name]) for run in runs)

    def _joined(self, name: str, whole: _Pass, runs: Sequence[_Pass]) -> float:
        """Returns how far what the stage returns of parts is from what it returns of the whole."""
        value, dimension = whole.returned[name], self._of.dimension(name)
        if dimension is not None:
            return self._by_rows(name, [run.returned[name] for run in runs], value)
        spec = self._of._specs.get(name)
        if self._terms.is_free:
            return 0.0
        if spec is None:
            if not value.is_floating_point() or self._of.follows_from_batch(name):
                return 0.0
            ways = self._alike, self._averaged, self._added  # what meets samples later must be alike
            return min(way(name, whole, runs) for way in (ways[:1] if self._of.meets_samples(name) else ways))
        if spec.kind is OutputKind.SAME:
            return self._alike(name, whole, runs)
        if not spec.needs_gradient:
            return 0.0
        return (self._added if self._terms.is_sum else self._averaged)(name, whole, runs)

    def _by_rows(self, name: str, parts: Sequence[Tensor], whole: Tensor, least: float = 0.0) -> float:
        dimension = self._of.dimension(name)
        assert dimension is not None
        if len(parts) == 1:
            return distance(parts[0], whole, least)
        per_sample = whole.shape[dimension] // self._size
        spec = self._of._specs.get(name)
        outers = [outer for outer in range(1, per_sample + 1) if per_sample % outer == 0]
        if spec is not None:
            outers = [self._traced.outer(spec, self._terms.lengths)]
        sizes = [each.shape[dimension] / len(part) for each, part in zip(parts, self._cut, strict=True)]
        if whole.shape[dimension] / self._size != sizes[0] or sizes[0] != sizes[1]:
            return torch.inf
        return min(distance(joined(parts, dimension, outer), whole, least) for outer in outers)

    def _distances(self, whole: _Pass, runs: Sequence[_Pass]) -> dict[str, float]:
        """Returns how far what parts give is from what the whole gives, by what it is."""
        off = {self._path(name): self._joined(name, whole, runs) for name in whole.returned}
        for (drawn, name), value in whole.chances.items():
            off[f"what {drawn} draws by"] = self._by_rows(name, [run.chances[drawn, name] for run in runs], value)
        for name, state in whole.state.items():
            off[name] = max(distance(run.state[name], state) for run in runs)
        largest = [float(each.abs().max()) for each in whole.gradients.values() if each.numel()]
        least = self._small * max(largest, default=0.0)
        for key in dict.fromkeys([*whole.gradients, *(key for run in runs for key in run.gradients)]):
            found = [run.gradients.get(key) for run in (whole, *runs)]
            some = next(each for each in found if each is not None)
            is_rows = not key.is_weight and self._of.dimension(key.name) is not None
            if is_rows and any(each is None for each in found):
                continue
            one, *others = (torch.zeros_like(some) if each is None else each for each in found)
            far = self._by_rows(key.name, others, one, least) if is_rows else _far(sum(others), one, least)
            off[f"the gradient of {key.name}"] = far
        return off

    def _path(self, name: str) -> str:
        spec = self._of._specs.get(name)
        return name if spec is None else spec.path

    def _explained(self, wrong: Mapping[str, float]) -> AutoVarunaError | None:
        """Says where parts begin to give something else than the whole does; None: a choice fell by rounding."""
        whole = self._whole(records=True)
        runs = [whole, *self._parts(whole, records=True)]
        ends = [node for name, node in self._of._outputs.items() if self._path(name) in wrong]
        ends = ends or list(self._of._outputs.values())
        leading = set(reached(ends, lambda node: node.all_input_nodes))
        sizes, shares = [len(part) for part in self._cut], [len(part) / self._size for part in self._cut]
        join = partial(fits, self._traced, sizes=sizes, shares=shares, allowed=self._allowed)
        bad = [
            node
            for node in whole.values
            if node in leading
            and (is_differentiable(whole.values[node]) or self._of.dimension(node.name) is not None)
            and not join(node, [run.values.get(node) for run in runs], is_gradient=False)
        ]
        if bad and bad[0] in whole.arguments and self._fell_by_rounding(bad[0], runs):
            return None
        back = [
            node
            for node in reversed(whole.of_values)
            if not join(node, [run.of_values.get(node) for run in runs], is_gradient=True)
        ]
        kind = None if self._terms.is_free else "sum" if self._terms.is_sum else "mean"
        return refusal(self._traced, self._of._model, self._size, wrong, (bad, back, ends), kind)

    def _fell_by_rounding(self, node: fx.Node, runs: Sequence[_Pass]) -> bool:
        """Whether the choices in which parts differ from the whole differ by rounding, too."""
        whole, *parts = runs
        dimension = self._traced.sizes.batch_dimension(node.meta["val"])
        args, kwargs = whole.arguments[node]
        value = whole.values[node]
        if dimension is None or value.shape[dimension] != self._size:
            return False
        differs = torch.cat([run.values[node] for run in parts], dimension) != value
        if not differs.any():
            return False
        generator = torch.Generator(self._device).manual_seed(0)

        def shaken(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            noise = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float32)
            step = max(_FLIP_STEPS * torch.finfo(tensor.dtype).eps, _LEAST_FLIP)
            size = tensor.abs() + _SMALL * tensor.abs().max()
            return tensor + size * (step * noise).to(tensor.dtype)

        operation: Any = node.target
        with torch.no_grad():
            for _ in range(_FLIPS):
                given = pytree.tree_map_only(Tensor, shaken, (args, kwargs))
                differs &= operation(*given[0], **given[1]) == value
        return not differs.any()


def _cuts(size: int) -> list[tuple[int, int]]:
    """Returns how many samples are tried, and how many of them are the first part: two unequal parts, then halves."""
    cuts = [(size, max(1, size // 3)), (size, size // 2), (size // 2, size // 4)]
    return list(dict.fromkeys((num, first) for num, first in cuts if 0 < first < num))


@contextmanager
def _settled(device: torch.device) -> Iterator[None]:
    """Leaves generators, autocast and what is kept whole as they are outside."""
    with (
        untouched_generator(device),
        python_generators(0),
        compiling_nothing(),
        without_autocast(),
        profiling_mode(),
        torch.enable_grad(),
    ):
        yield


def _gradients(roots: Sequence[tuple[Tensor, Tensor]], values: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """Returns the gradients of values that have one; a backward goes from each root with its own."""
    given = [each for each, _ in roots], list(values.values()), [each for _, each in roots]
    found = torch.autograd.grad(*given, retain_graph=True, allow_unused=True) if values else ()
    return {key: each for key, each in zip(values, found, strict=True) if each is not None}


def _gradients_of_leaves(
    roots: Sequence[tuple[Tensor, Tensor]], leaves: Mapping[_Source, Tensor]
) -> dict[_Source, Tensor]:
    """Returns the gradients of what a stage has received, and numbers out of those of its weights, one after the other.

    So the gradients of all weights are never there together.
    """
    found = dict[_Source, Tensor]()

    def take(source: _Source, leaf: Tensor) -> None:
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


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _far(one: Any, other: Tensor, least: float = 0.0) -> float:
    return distance(one.to(other.dtype), other, least) if isinstance(one, Tensor) else torch.inf

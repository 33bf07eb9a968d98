"""Compares what a stage gives for samples of a micro-batch that has trained, whole and in two parts; both must agree.

The samples, what came back for them, weights, state and precision are those of the step. So no other rank is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, reduce
from itertools import combinations
from math import gcd
from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import pytree
from autovaruna.errors import AutoVarunaError
from autovaruna.evidence.refusal import fits, refusal
from autovaruna.evidence.sample_runs import SampleRun, SampleRuns, Source, added, alike, averaged, far, settled
from autovaruna.evidence.stage_rows import Observed, StageRows, Terms, UnknownOrderError, UntriedError, by_rows
from autovaruna.graph.evaluate import NodeError
from autovaruna.graph.operators import is_differentiable, reached, run_opaque
from autovaruna.graph.rounding import BY_ROUNDING, SEEDS, SMALL, Rounded, clear_tolerance, distance, small_share
from autovaruna.graph.source_lines import first_line, origin
from autovaruna.graph.traced import OutputKind, TracedModel
from autovaruna.stage.module import StageModule

_MOST_SCALED = 3
_TURNS = 6
"""Numbers may go by each of its divisors in turns: by every second or third place in the batch."""
_FLIPS, _FLIP_STEPS, _LEAST_FLIP = 32, 4.0, 1e-5
"""How often, and by how many roundings, or how much, a choice is shaken to see whether it is one of rounding."""


class StageWitness:
    """Tells whether one stage of a graph gives the same for samples together and apart."""

    def __init__(self, stage: StageModule, traced: TracedModel, model: nn.Module, device: torch.device) -> None:
        self.rows = StageRows(stage, traced)
        self._traced, self._model, self._device = traced, model, device
        self._num_looks = 0

    def refusal(self, parts: Sequence[Observed], terms: Terms) -> AutoVarunaError | None:
        """Returns why the stage cannot run in micro-batches: they make other numbers; None: they do not.

        Args:
            parts: Micro-batches, of which the last one is looked at if it can be tried, or all together.

        Raises:
            UntriedError: it is not known.
        """
        with _told():
            try:
                if self._traced.joins_counts:
                    return self._with_counts(parts, terms)
            except UntriedError:  # so many samples may not fit into memory
                if (found := self._of_any(parts, terms)) is not None:
                    return found
                raise
            return self._of_any(parts, terms)

    def _of_any(self, parts: Sequence[Observed], terms: Terms) -> AutoVarunaError | None:
        """Looks at what can be tried of them."""
        error = UntriedError("it has one sample")
        for given in self._given(parts, terms):
            for size, first in _cuts(given.size):
                try:
                    found = self._tried(given, terms, size, first)
                    if found is None:  # so few may be in order by chance
                        with suppress(UntriedError):
                            return self._tried(self.rows.taken(given, range(size)[::-1], terms), terms, size, first)
                    return found
                except UntriedError as untried:
                    error = untried
        raise error

    def _given(self, parts: Sequence[Observed], terms: Terms) -> Iterator[Observed]:
        """Yields what is looked at: where one cannot be tried, the next one is."""
        yield parts[-1]
        if parts == parts[-1:] and parts[0].size == 1:
            yield self.rows.doubled(parts[0], terms)
        for num in sorted({2, len(parts)}):
            if 1 < num <= len(parts):
                yield self._joined(parts[-num:], terms)

    def _joined(self, parts: Sequence[Observed], terms: Terms) -> Observed:
        return reduce(partial(self.rows.join, terms=terms), parts)

    def _with_counts(self, parts: Sequence[Observed], terms: Terms) -> AutoVarunaError | None:
        """Looks at several cuts, later at one in turn: counts may make up those of the whole by chance, or so far."""
        every = self._joined(parts, terms)
        size, own = min(terms.num_samples, terms.most_at_once), every.size
        if own < size:
            every = self.rows.taken(every, [place % own for place in range(size)], terms)
        size, error = every.size, None
        places = sorted({max(1, size // part) for part in (2, 3, 5)})
        cuts = [*((range(size), place) for place in places), ([*range(0, size, 2), *range(1, size, 2)], places[-1])]
        if 1 < own < size:  # the order of samples that are there twice is one of chance
            cuts.insert(0, (range(own), own // 2))
        is_first, self._num_looks = not self._num_looks, self._num_looks + 1
        for order, place in cuts if is_first else [cuts[self._num_looks % len(cuts)]]:
            with nullcontext() if order == range(size) else suppress(UntriedError):  # it may not take another order
                error = error or self._tried(self.rows.taken(every, order, terms), terms, len(order), place)
        return error

    def _tried(self, observed: Observed, terms: Terms, size: int, first: int) -> AutoVarunaError | None:
        """Compares samples with their parts, of which the first has some."""
        with _told(), settled():
            return _ComparedSamples(self.rows, observed, terms, (size, first), self._model, self._device).refusal()


@contextmanager
def _told() -> Iterator[None]:
    """Makes an `UntriedError` of whatever cannot be run."""
    try:
        yield
    except UntriedError:
        raise
    except NodeError as failed:
        if isinstance(failed.error, UntriedError):
            raise failed.error from failed
        place = origin(failed.node) or failed.node.name
        raise UntriedError(f"{failed.node.name}, at {place}, {first_line(failed)}") from failed
    except Exception as failed:
        raise UntriedError(f"{type(failed).__name__}: {first_line(failed)}") from failed


class _ComparedSamples:
    """One micro-batch, or its first samples, whole and in two parts."""

    def __init__(
        self,
        rows: StageRows,
        observed: Observed,
        terms: Terms,
        sizes: tuple[int, int],
        model: nn.Module,
        device: torch.device,
    ) -> None:
        self._of, self._observed, self._terms, self._model, self._device = rows, observed, terms, model, device
        self._traced, (self._size, first) = rows.traced, sizes
        samples = range(self._size)
        self._cut = samples[:first], samples[first:]
        self._allowed = clear_tolerance(self._traced.values())
        self._small = small_share(self._allowed)
        self._runs = SampleRuns(rows, observed, terms, self._size, device, self._allowed)

    def refusal(self) -> AutoVarunaError | None:
        """Returns why the parts make other numbers; None: they do not, or rounding explains it."""
        try:
            return self._refusal()
        except UnknownOrderError:  # results tell, at least, in whatever order their rows are
            self._runs.goes_back = False
            if (error := self._refusal()) is not None:
                return error
            raise

    def _refusal(self) -> AutoVarunaError | None:
        whole = self._runs.whole()
        if not all(each.isfinite().all() for each in whole.gradients.values()):
            return None  # the step says so itself
        found: list[dict[str | Source, float]] = []
        for scaled in self._ways_to_scale():
            self._runs.scaled = scaled
            found.append(self._distances(whole, self._runs.parts(self._cut, whole)))
            if not any(size > self._allowed for size in found[-1].values()):
                return None
        self._runs.scaled, off = frozenset(), found[0]  # what nothing was scaled for
        noise = [self._distances(whole, [run]) for run in self._shaken()]
        wrong = {
            name: size
            for name, size in off.items()
            if size > max(self._allowed, BY_ROUNDING * max(each.get(name, 0.0) for each in noise))
        }
        return self._explained(wrong) if wrong else None

    def _shaken(self) -> Iterator[SampleRun]:
        """Yields the whole with other roundings, and other draws where only a kept module knows what it draws."""
        for seed in SEEDS:
            yield self._runs.whole(Rounded(self._device, seed))
        if any(node.target is run_opaque and self._traced.facts[node.name].is_random for node in self._of.nodes):
            yield from map(self._runs.redrawn, SEEDS)

    def _ways_to_scale(self) -> Iterator[frozenset[str]]:
        """Yields what is another for a part, where it goes between stages: nothing, first.

        Numbers that come may be sums over the micro-batch; rows that come or go, shares in what is of the whole batch.
        """
        of = self._of
        coming = {name for name in self._observed.tensors if name not in self._traced.inputs}
        numbers = [name for name in sorted(coming) if of.dimension(name) is None]
        rows = [
            name for name in sorted(coming | (of.outputs.keys() - of.specs.keys())) if of.dimension(name) is not None
        ]
        scalable = [*numbers, *filter(of.follows_from_batch, rows)]
        numbers = [name for name in scalable if self._traced.nodes[name].meta["val"].is_floating_point()]
        for count in range(min(len(numbers), _MOST_SCALED) + 1):
            yield from map(frozenset, combinations(numbers, count))

    def _joined(self, name: str, whole: SampleRun, runs: Sequence[SampleRun]) -> float:
        """Returns how far what the stage returns of parts is from what it returns of the whole."""
        value, dimension = whole.returned[name], self._of.dimension(name)
        if dimension is not None:
            return self._by_rows(name, [run.returned[name] for run in runs], value)
        spec = self._of.specs.get(name)
        if self._terms.is_free:
            return 0.0
        if spec is None:
            if not value.is_floating_point() or self._of.follows_from_batch(name):
                return 0.0
            ways = alike, averaged, added  # what meets samples later must be alike
            return min(way(name, whole, runs) for way in (ways[:1] if self._of.meets_samples(name) else ways))
        if spec.kind is OutputKind.SAME:
            return alike(name, whole, runs)
        if not spec.needs_gradient:
            return 0.0
        return (added if self._terms.is_sum else averaged)(name, whole, runs)

    def _by_rows(self, name: str, parts: Sequence[Tensor], whole: Tensor, least: float = 0.0) -> float:
        if len(parts) == 1:
            return distance(parts[0], whole, least)
        dimension, spec = self._of.dimension(name), self._of.specs.get(name)
        assert dimension is not None
        outers = [] if spec is None else [self._traced.outer(spec, self._terms.lengths)]
        return by_rows(parts, whole, dimension, [len(part) for part in self._cut], outers, least)

    def _distances(self, whole: SampleRun, runs: Sequence[SampleRun]) -> dict[str | Source, float]:
        """Returns how far what parts give is from what the whole gives, by what it is, or of what the gradient."""
        off: dict[str | Source, float] = {self._path(name): self._joined(name, whole, runs) for name in whole.returned}
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
            off[key] = self._by_rows(key.name, others, one, least) if is_rows else far(sum(others), one, least)
        return off

    def _path(self, name: str) -> str:
        spec = self._of.specs.get(name)
        return name if spec is None else spec.path

    def _explained(self, wrong: Mapping[str | Source, float]) -> AutoVarunaError | None:
        """Says where parts begin to give something else than the whole does; None: a choice fell by rounding."""
        whole = self._runs.whole(records=True)
        runs = [whole, *self._runs.parts(self._cut, whole, records=True)]
        ends = [node for name, node in self._of.outputs.items() if self._path(name) in wrong]
        ends = ends or list(self._of.outputs.values())
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
        if not back:
            back = [node for node, name in self._of.state.items() if Source(name, True) in wrong]
        kind = None if self._terms.is_free else "sum" if self._terms.is_sum else "mean"
        return refusal(self._traced, self._model, self._size, wrong, (bad, back, ends), kind)

    def _fell_by_rounding(self, node: fx.Node, runs: Sequence[SampleRun]) -> bool:
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
            size = tensor.abs() + SMALL * tensor.abs().max()
            return tensor + size * (step * noise).to(tensor.dtype)

        operation: Any = node.target
        with torch.no_grad():
            for _ in range(_FLIPS):
                given = pytree.tree_map_only(Tensor, shaken, (args, kwargs))
                differs &= operation(*given[0], **given[1]) == value
        return not differs.any()


def _cuts(size: int) -> list[tuple[int, int]]:
    """Returns how many samples are tried, and how many of them are the first part: two unequal parts, then halves.

    The second part begins within a turn of each, so that its numbers are others than those of the first part.
    """
    uneven = next(first for first in range(max(1, size // 2), 0, -1) if gcd(first, _TURNS) == 1)
    cuts = [(size, uneven), (size, size // 2), (size // 2, size // 4)]
    return list(dict.fromkeys((num, first) for num, first in cuts if 0 < first < num))

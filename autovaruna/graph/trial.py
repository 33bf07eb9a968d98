"""Tries a graph on a small batch and on its parts, whatever the analysis believes: both must give the same numbers.

The parts go through as micro-batches do: outputs of samples are put together, losses and gradients weighted and added
up. Chance and statistics of the batch are taken out: what the whole batch draws is cut with its samples, dropout is
off, normalisations take the statistics of the whole, and state that follows from samples stays as it is. Where that
takes long, layers like the one before are left out; where a rank has no numbers of a weight, they are drawn.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import OpOverload, preserve_version_counter, schema_of
from autovaruna.errors import AutoVarunaError, InputError, TraceError
from autovaruna.graph.batch.order import SampleOrders
from autovaruna.graph.export.errors import FOR_COUNTS, advice
from autovaruna.graph.grouping import signature
from autovaruna.graph.opaque.infer import reduction_of
from autovaruna.graph.opaque.run import OpaqueModule, ReductionKind, opaque_module_of, profiling_mode
from autovaruna.graph.operators import Dependence, arguments, is_differentiable, is_of_batch, reached
from autovaruna.graph.pieces import NORMS, normalize
from autovaruna.graph.precision import compiling_nothing, without_autocast
from autovaruna.graph.random import python_generators, untouched_generator
from autovaruna.graph.records import Block
from autovaruna.graph.source_lines import first_line, modules_of, origin
from autovaruna.graph.traced import OutputKind, TracedModel, joined, opened
from autovaruna.graph.verify import BY_ROUNDING, CLEAR, SEEDS, GraphRun, Rounded, distance, state_of, tolerance

logger = logging.getLogger(__name__)
_AS_IN_EVALUATION: Mapping[str, Any] = {"training": False, "train": False, "dropout_p": 0.0}
"""Arguments of operations that draw numbers or have statistics of a batch, with which they do neither."""
_TRAINING, _STATISTICS = 5, slice(3, 5)
"""Places among the arguments of ``aten.batch_norm``."""
_MOST_FLOPS = 5e9
"""Floating-point operations of a trial from which on layers that are alike are tried once."""
_SMALL = 0.01
"""What is less than this share of the largest gradient is compared with that share."""
_NUMBERS, _SEED, _BACKWARD = 0.05, 0, 3.0
_COPIES, _FEWEST = 4, 2
_MOST_NAMES = 3
_GRADIENT = "the gradient of "

Weigh = Callable[[float], float]
"""Returns the weight of a part's loss by its part of the samples."""
Values = Callable[[Sequence[list[Tensor]], Sequence[float]], Sequence[Mapping[str, Tensor]]]
"""Returns what each part is given of the whole batch, as a step does, by the tensors of parts and their weights."""


@dataclass(frozen=True)
class _Part:
    """Some samples of the batch, the weight of their loss, and what they are given of the whole (None: they are it)."""

    samples: Sequence[int]
    share: float = 1.0
    of_batch: Mapping[str, Tensor] | None = None


@dataclass
class _Results:
    """What a part gives: numbers of each sample, shape ``(samples, ...)``, those to be added up, and those alike."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    same: dict[str, Tensor] = field(default_factory=dict)
    values: dict[fx.Node, Tensor] = field(default_factory=dict)
    gradients: dict[fx.Node, Tensor] = field(default_factory=dict)
    ends: dict[fx.Node, Tensor] = field(default_factory=dict)


class PartsTrial:
    """A batch that goes through a graph whole and in parts.

    Args:
        tensors: Those of two samples or more.
        weigh: None: the loss does not count; a backward begins where samples end, see `ends`.
        values: What parts are given of the whole batch.
        first: Samples of the first of two parts.
    """

    def __init__(
        self,
        traced: TracedModel,
        model: nn.Module,
        tensors: Sequence[Tensor],
        device: torch.device,
        weigh: Weigh | None,
        values: Values,
        first: int = 1,
    ) -> None:
        self.untried = ""  # why it could not be tried out
        self._fails = False  # on the samples themselves and all of them: the step will say so
        self._first_size = first
        self.traced, self.model, self.device = traced, model, device
        self._tensors, self._weigh, self._values = tensors, weigh, values
        place = next(place for place, spec in enumerate(traced.call.inputs) if spec.is_batch)
        self.num_samples = len(tensors[place])
        self.known: dict[Any, Any] = {}  # what the whole batch has drawn and counted, by node
        is_quick = self._is_quick()
        self.module = traced.module if is_quick else _with_layers_once(traced)
        if not is_quick and first == 1 and not traced.joins_counts:
            self._tensors, self.num_samples = self._of(tensors, range(_FEWEST)), _FEWEST
        self.nodes = {node.name: node for node in self.module.graph.nodes}

    def refusal(self) -> AutoVarunaError | None:
        """Returns why the graph cannot run in micro-batches: they make other numbers; None: nothing is known of it."""
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # a GPU says itself when there is none
        if self.device.type == "cpu" and self._num_drawn_bytes() > free:
            self.untried = "its weights, which are elsewhere, do not fit here"
            return None
        varied = [
            _varied(tensor) if spec.is_batch else tensor
            for tensor, spec in zip(self._tensors, self.traced.call.inputs, strict=True)
        ]
        num = max(1, self.num_samples // 4)  # the others are alike: what counts have not changed so far, they may now
        uneven = self._of(varied, [*range(self.num_samples)][: -num - 1 : -1] + [0] * (self.num_samples - num))
        for tensors in (varied, self._tensors):
            try:
                found, self.untried = self._compare(tensors), ""
                with suppress(Exception):  # it may not take them
                    found = found or (self._compare(uneven) if self.traced.joins_counts else None)
                return found
            except Exception as error:
                self.untried = f"{type(error).__name__}: {first_line(error)}"
        return None

    def log_untried(self) -> None:
        """Says that nobody knows whether parts give the same, loud where counts may go into what is given for each."""
        text = "the trace was not compared with itself on parts of the batch: it could not be tried out (%s)"
        if not self.traced.joins_counts:
            return logger.log(logging.DEBUG if self._fails else logging.INFO, text, self.untried)
        lines, name = _lines(self.traced), type(self.model).__qualname__
        text += "; %s counts over the samples of a batch at %s, and micro-batches count over their own"
        return logger.warning(text, self.untried, name, lines)

    def _compare(self, tensors: Sequence[Tensor]) -> AutoVarunaError | None:
        self.known.clear()
        every, allowed = _Part(range(self.num_samples)), tolerance(self.traced)
        self._fails = tensors is self._tensors
        whole = self._run(tensors, every)
        self._fails = False
        if tensors is not self._tensors and not all(
            each.isfinite().all() for each in (*whole.rows.values(), *whole.sums.values())
        ):
            raise ArithmeticError("numbers that are not finite")
        for parts in self._cuts(tensors):
            runs = [self._run(tensors, part) for part in parts]
            off = _distances(whole, _join(parts, runs), runs)
            off = {name: each for name, each in off.items() if each > CLEAR * allowed}
            again = [self._run(tensors, every, Rounded(self.device, seed)) for seed in SEEDS if off]
            again += [self._run(tensors, every, seed=seed) for seed in SEEDS if off and self.unknown]  # they may draw
            noise = [_distances(whole, run, [run]) for run in again]
            wrong = {k: far for k, far in off.items() if far > BY_ROUNDING * max(each[k] for each in noise)}
            if wrong:
                return self._explained(tensors, parts, wrong)
        return None

    def _cuts(self, tensors: Sequence[Tensor]) -> Iterator[Sequence[_Part]]:
        """Yields ways to cut the batch in two; several where counts of samples meet: one may do by chance."""
        samples, joins = range(self.num_samples), self.traced.joins_counts
        places = {max(1, self.num_samples // part) for part in (2, 3, 5)} if joins else {self._first_size}
        cuts: list[tuple[Sequence[int], ...]] = [(samples[:place], samples[place:]) for place in sorted(places)]
        for cut in [*cuts, (samples[::2], samples[1::2])] if joins else cuts:
            sizes = [len(part) / self.num_samples for part in cut]
            shares = list(map(self._weigh, sizes)) if self._weigh else sizes
            values = self._values([self._of(tensors, part) for part in cut], shares) if self.traced.totals else None
            yield [
                _Part(part, share, {} if values is None else values[place])
                for place, (part, share) in enumerate(zip(cut, shares, strict=True))
            ]

    def _of(self, tensors: Sequence[Tensor], samples: Sequence[int]) -> list[Tensor]:
        pairs = zip(tensors, self.traced.call.inputs, strict=True)
        return [tensor[list(samples)] if spec.is_batch else tensor for tensor, spec in pairs]

    def _run(
        self,
        tensors: Sequence[Tensor],
        part: _Part,
        around: AbstractContextManager[Any] | None = None,
        records_values: bool = False,
        seed: int = _SEED,
    ) -> _Results:
        specs, results = self.traced.call.inputs, _Results()
        inputs = [
            each.detach().to(self.device, copy=True).requires_grad_(spec.needs_gradient)
            for each, spec in zip(self._of(tensors, part.samples), specs, strict=True)
        ]
        state = {name: self.started(name) if name in self._changed else each for name, each in self.state.items()}
        run = _TrialPass(self, state, part, results, records_values, seed)
        with (
            around or nullcontext(),
            untouched_generator(self.device),
            python_generators(seed),
            compiling_nothing(),
            without_autocast(),
            profiling_mode(),
            torch.set_grad_enabled(self.traced.needs_gradient),
        ):
            outputs = run.run(*inputs, enable_io_processing=False)
            roots = dict(self._collect_roots(outputs, part, results))
            wanted = {f"{_GRADIENT}{name}": each for name, each in self._weights.items()}
            wanted |= {
                f"{_GRADIENT}{spec.name}": each for spec, each in zip(specs, inputs, strict=True) if each.requires_grad
            }
            noted = {node: each for node, each in results.values.items() if each.requires_grad}
            results.sums |= _gradients(roots, wanted)
            results.gradients |= _gradients(roots, noted)
        for spec in specs:
            if spec.is_batch and (name := f"{_GRADIENT}{spec.name}") in results.sums:
                results.rows[name] = results.sums.pop(name)
        results.same |= {name: state[name] for name in state if self._first(name) in self.traced.steady_state}
        return results

    def started(self, name: str) -> Tensor:
        """Returns a copy of state that forward changes; what follows from samples is not zero, as later in training."""
        tensor = self.state[name]
        made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return made.fill_(1) if name in self.following and is_differentiable(made) and not made.any() else made

    def _collect_roots(
        self, outputs: Sequence[Tensor], part: _Part, results: _Results
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Puts what counts of the outputs to the results; yields where a backward begins, and from what."""
        loss, samples = self.traced.loss if self._weigh else None, list(part.samples)
        begins: dict[fx.Node | str, Tensor | None] = {
            node: self.rows(node, value, len(samples)) for node, value in results.ends.items()
        }
        for spec, output in zip(self.traced.outputs, outputs, strict=True):
            if spec.kind is OutputKind.SAMPLES:
                rows = self._rows(output, spec.dimension, spec.outer, len(samples))
                results.rows[spec.path] = rows.detach()
                if loss is None:
                    begins[spec.path] = rows
            elif spec is loss:
                results.sums[spec.path] = output.detach() * part.share
                yield output, torch.full_like(output, part.share)
        for end, value in begins.items():
            if value is not None and value.requires_grad and len(value) == len(samples):
                yield value, self.known.setdefault((end, _GRADIENT), torch.randn_like(value.detach()))[samples]

    @cached_property
    def ends(self) -> set[fx.Node]:
        """The last values of samples before what joins them, where a backward begins if the loss does not count."""
        if self._weigh is not None or self.traced.loss is None:
            return set()
        values, known = self._orders.values, self.traced.nodes
        depends = {node: values[known[node.name]].dependence for node in self.module.graph.nodes}
        of_samples = (node for node, each in depends.items() if each is Dependence.SAMPLES)
        return {node for node in of_samples if any(depends[user] is Dependence.ALL for user in node.users)}

    def _rows(self, tensor: Tensor, dimension: int, outer: Any, num_samples: int) -> Tensor:
        """Returns a value of samples with these first; if their number does not divide it, as it is."""
        times = 1 if outer in (1, None) else int(self.traced.sizes.in_call(outer, 1, self._lengths))
        if tensor.shape[dimension] % (times * num_samples):
            return tensor.movedim(dimension, 0)
        by_sample = opened(tensor, dimension, times).movedim(dimension + 1, 0)
        return by_sample.reshape(num_samples, -1, *by_sample.shape[1:])

    def rows(self, node: fx.Node, value: Tensor, num_samples: int) -> Tensor | None:
        """Returns a node's value of some samples with these first; None: it is none of samples."""
        dimension = self.traced.sizes.batch_dimension(node.meta["val"])
        return None if dimension is None else self._rows(value, dimension, self._outer(node), num_samples)

    def rows_of(self, node: fx.Node, whole: Tensor, samples: Sequence[int]) -> Tensor:
        """Returns what a value of the whole batch has of some samples."""
        dimension = self.traced.sizes.batch_dimension(node.meta["val"])
        if dimension is None:
            return whole.clone()
        per_sample = whole.shape[dimension] // self.num_samples
        if per_sample > 1 and not any(isinstance(each.meta["val"], Tensor) for each in node.all_input_nodes):
            first = whole.narrow(dimension, 0, 1)  # nothing says in which order the samples are
            return first.repeat_interleave(per_sample * len(samples), dimension)
        rows = self._rows(whole, dimension, self._outer(node), self.num_samples)[list(samples)]
        before, after = whole.shape[:dimension], whole.shape[dimension + 1 :]
        return rows.flatten(0, 1).movedim(0, dimension + 1).reshape(*before, -1, *after)

    @cached_property
    def _orders(self) -> SampleOrders:
        return SampleOrders(self.traced)

    def _outer(self, node: fx.Node) -> Any:
        known = self.traced.nodes.get(node.name)
        return 1 if known is None else self._orders.outer(known)

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return self.traced.lengths_of(self.traced.call) or ()

    @cached_property
    def unknown(self) -> list[OpaqueModule]:
        """The modules that are kept whole, and of which nobody knows how parts make up what they return."""
        results = [node for node in self.nodes.values() if node.op == "call_function" and node.args]
        kept = [opaque_module_of(node.args[0]) for node in results if reduction_of(node) is ReductionKind.UNKNOWN]
        return [each for each in kept if each is not None]

    # state

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The tensors of the model that the graph reads, by attribute; one of several names is one tensor."""
        named, first = state_of(self.model), dict[str, Tensor]()
        for node in self.module.graph.find_nodes(op="get_attr"):
            name = self._first(str(node.target))
            if node.users and name in named and name not in first:
                value: Tensor = self.traced.facts[node.name].value
                first[name] = self._numbers(name, named[name], value).requires_grad_(value.requires_grad)
        names = dict.fromkeys(str(node.target) for node in self.module.graph.find_nodes(op="get_attr"))
        held = {name: each.to(self.device) for name, each in self.traced.constants.items()}
        return held | {name: first[self._first(name)] for name in names if self._first(name) in first}

    def _numbers(self, name: str, tensor: Tensor, like: Tensor) -> Tensor:
        """Returns a parameter or buffer; one whose numbers are elsewhere is drawn."""
        if tensor.device.type == self.device.type:
            return tensor.detach()
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little")
        made = torch.ones(like.shape, dtype=like.dtype, device=self.device)
        if name not in self.traced.parameters.values() or not like.is_floating_point():
            return made
        return made.normal_(0.0, _NUMBERS, generator=torch.Generator(self.device).manual_seed(seed))

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        return {self._first(name): each for name, each in self.state.items() if each.requires_grad}

    def _first(self, name: str) -> str:
        return self.traced.parameters.get(name) or self.traced.buffers.get(name) or name

    @cached_property
    def _changed(self) -> set[str]:
        return {name for name in self.state if self._first(name) in self.traced.changed_state}

    @cached_property
    def following(self) -> dict[str, frozenset[int]]:
        """The memory of state that follows from samples, or from chance: each micro-batch changes it in turn."""
        nodes = self.traced.module.graph.find_nodes(op="get_attr")
        names = self._changed - {name for name in self._changed if self._first(name) in self.traced.steady_state}
        return {str(node.target): self.traced.facts[node.name].makes for node in nodes if str(node.target) in names}

    @cached_property
    def becoming(self) -> dict[fx.Node, str]:
        """What is written into such state as a whole, and the state that it becomes."""
        found = written_states(self.traced, self.following)
        return {self.nodes[node.name]: name for node, name in found.items() if node.name in self.nodes}

    def _num_drawn_bytes(self) -> int:
        """Returns the bytes of weights that are drawn, and of their gradients for the whole and two parts."""
        named, nodes = state_of(self.model), self.module.graph.find_nodes(op="get_attr")
        first = {self._first(str(node.target)): self.traced.facts[node.name].value for node in nodes}
        away = [name for name in first.keys() & named.keys() if named[name].device.type != self.device.type]
        return _COPIES * sum(int(first[name].nbytes) for name in away)

    def _is_quick(self) -> bool:
        """Whether the whole graph is tried: its numbers are here, and it does not take long."""
        blocks, state = self.traced.graph.blocks, state_of(self.model).values()
        num_flops = sum(block.num_flops_per_sample for block in blocks) * 2 * self.num_samples * _BACKWARD
        return num_flops <= _MOST_FLOPS and all(each.device.type == self.device.type for each in state)

    # what differs

    def _explained(
        self, tensors: Sequence[Tensor], parts: Sequence[_Part], wrong: Mapping[str, float]
    ) -> AutoVarunaError:
        """Says where parts of the batch begin to give something else than all of it does."""
        every = _Part([sample for part in parts for sample in part.samples])
        runs = [self._run(tensors, part, records_values=True) for part in (every, *parts)]
        outputs: Any = self.module.graph.output_node().args[0]
        made = {spec.path: node for spec, node in zip(self.traced.outputs, outputs, strict=True)}
        ends = [made[name] for name in wrong if name in made] or list(outputs)
        leading = set(reached(ends, lambda node: node.all_input_nodes))
        bad = [node for node in runs[0].values if node in leading and not self._fits(node, "values", parts, runs)]
        back = [node for node in reversed(runs[0].gradients) if not self._fits(node, "gradients", parts, runs)]
        kind = None if self._weigh is None else "sum" if self._weigh(0.5) == 1.0 else "mean"
        return refusal(self.traced, self.model, self.num_samples, wrong, (bad, back, ends), kind)

    def _fits(self, node: fx.Node, kind: str, parts: Sequence[_Part], runs: Sequence[_Results]) -> bool:
        found = [getattr(run, kind).get(node) for run in runs]
        sizes = [len(part.samples) for part in parts]
        shares, allowed = [part.share for part in parts], CLEAR * tolerance(self.traced)
        return fits(self.traced, node, found, sizes, shares, allowed, is_gradient=kind == "gradients")


def fits(
    traced: TracedModel,
    node: fx.Node,
    found: Sequence[Tensor | None],
    sizes: Sequence[int],
    shares: Sequence[float],
    allowed: float,
    *,
    is_gradient: bool,
) -> bool:
    """Whether what parts have of a value makes up that of the batch, the first, in whatever order its samples are."""
    known = [each.detach() for each in found if each is not None]
    if len(known) < len(found):
        return True
    (whole, *others), dimension = known, traced.sizes.batch_dimension(node.meta["val"])
    if dimension is None:
        if any(each.shape != whole.shape for each in others):
            return False
        weighted = [each * share for each, share in zip(others, shares, strict=True)]
        added = [torch.stack(each).sum(0) for each in (others, weighted)]
        return any(distance(made, whole) <= allowed for made in added) or all(
            distance(each, whole) <= allowed for each in others
        )
    rows = whole.shape[dimension] // sum(sizes)
    before, after = whole.shape[:dimension], whole.shape[dimension + 1 :]
    if [each.shape for each in others] != [(*before, rows * size, *after) for size in sizes]:
        return False
    scaled = [others]
    if is_differentiable(whole) and not is_gradient:  # by the size of the batch, or by what is counted over it
        scaled += [[each * share**power for each, share in zip(others, shares, strict=True)] for power in (1, -1)]
    divisors = [outer for outer in range(1, rows + 1) if rows % outer == 0]
    return any(distance(joined(each, dimension, outer), whole) <= allowed for each in scaled for outer in divisors)


class _TrialPass(GraphRun):
    """Runs a graph for a part of the batch, with what the whole has drawn and counted."""

    def __init__(
        self, trial: PartsTrial, state: dict[str, Tensor], part: _Part, results: _Results, records: bool, seed: int
    ) -> None:
        super().__init__(trial.module, state, trial.device, None, seed)
        self._trial, self._state, self._part, self._results = trial, state, part, results
        self._records = records

    def value(self, node: fx.Node) -> Any:
        trial, target = self._trial, node.target
        if node in trial.becoming:
            value: Any = self._state[trial.becoming[node]].clone()
        elif is_of_batch(node) and self._part.of_batch is not None:
            value = self._part.of_batch[node.name]
        elif is_evaluated(node):
            value = self._evaluated(node)
        elif isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
            value = self._drawn(node)
        else:
            value = super().value(node)
        self._hold(node)
        if node in trial.ends and isinstance(value, Tensor):
            self._results.ends[node] = value.clone()
        if self._records and isinstance(value, Tensor) and is_differentiable(value):
            self._results.values[node] = value
        return value

    def _hold(self, node: fx.Node) -> None:
        """Puts state that follows from samples back after a node that has changed it."""
        writes = self._trial.traced.facts[node.name].writes if node.op == "call_function" else frozenset()
        for name, memory in self._trial.following.items() if writes else ():
            if memory & writes:
                state, started = self._state[name], self._trial.started(name)
                if opaque_module_of(node) in self._trial.unknown and not torch.equal(state, started):
                    raise ArithmeticError("it has modules that are kept whole and change state")
                with torch.no_grad(), preserve_version_counter(state):
                    state.copy_(started)

    def _evaluated(self, node: fx.Node) -> Any:
        return evaluated(node, *self.fetch_args_kwargs_from_env(node), self._trial.known)

    def _drawn(self, node: fx.Node) -> Any:
        """Returns what the whole batch has drawn for the samples of the part; records what it draws by."""
        trial, num_samples = self._trial, len(self._part.samples)
        for source in node.all_input_nodes:
            if isinstance(value := self.env[source], Tensor) and is_differentiable(value):
                rows = trial.rows(source, value.detach().clone(), num_samples)
                self._results.rows |= {} if rows is None else {f"what {node.name} draws by": rows}
        made = super().value(node)
        if not isinstance(made, Tensor):
            return made
        whole = trial.known.setdefault(node, made.detach().clone())
        with torch.no_grad():
            own = trial.rows_of(node, whole, self._part.samples)
            return made.copy_(own) if schema_of(node.target).is_mutable else own


def refusal(
    traced: TracedModel,
    model: nn.Module,
    num_samples: int,
    wrong: Mapping[str, float],
    places: tuple[Sequence[fx.Node], Sequence[fx.Node], Sequence[fx.Node]],
    reduction: str | None,
) -> AutoVarunaError:
    """Says where parts of a batch begin to give something else than all of it does.

    Args:
        wrong: How far results are off, by what they are.
        places: The values that are others; those whose gradient is, the last first; and the results.
        reduction: How the losses of parts are joined; None: the loss does not count.
    """
    bad, back, ends = places
    far = f"they differ by {max(wrong.values()):.1e} of the largest"
    name, first = type(model).__qualname__, [*bad, *(next(iter(node.users)) for node in back), *ends][0]
    place, loss, by_name = origin(first) or first.name, traced.loss, {node.name: node for node in first.graph.nodes}
    counts = {by_name.get(each) for each in traced.joins_counts}
    if bad and any(node in counts for node in reached([first], lambda node: node.all_input_nodes)):
        return TraceError(
            f"{name} mixes the samples of a batch: what it counts over them at {_lines(traced)} goes into "
            f"what it gives for each. Got other numbers for parts of {num_samples} samples than for all of "
            f"them ({far}). {FOR_COUNTS}"
        )
    is_of_loss = reduction is not None and (bad or (loss is not None and loss.path in wrong))
    if loss is not None and is_of_loss and not any(traced.sizes.has_samples(node) for node in bad):
        first = [*bad, by_name.get(loss.node, ends[0])][0]
        return InputError(
            f"The loss of the model is no {reduction} over its samples: {first.name}, at {place}, makes it another for "
            f"{num_samples} samples than parts of them, joined by reduction={reduction!r}, have ({far}). Expected "
            f"a {reduction}; return what the loss is computed from, and compute it outside of the model, from the "
            "outputs of the whole batch; or pass num_micro_batches=1, with inputs='replicated' on several ranks."
        )
    what = first.name if bad or not back else f"the gradient that goes back through {first.name}"
    return TraceError(
        f"{name} mixes the samples of a batch: {what} is another for {num_samples} samples together than for "
        f"parts of them, at {place} ({', '.join(list(wrong)[:_MOST_NAMES])}: {far}). "
        f"{advice(model, traced.call, modules_of(first))}"
    )


def is_evaluated(node: fx.Node) -> bool:
    """Whether a node normalises by the batch, or drops numbers by chance: see `evaluated`."""
    return node.target in NORMS or not _AS_IN_EVALUATION.keys().isdisjoint(arguments(node))


def evaluated(node: fx.Node, args: Any, kwargs: Any, known: dict[Any, Any]) -> Any:
    """Runs a node without chance, and with the statistics of the whole batch, which it adds to what is `known`."""
    target: Any = node.target
    run = partial(normalize, target) if target in NORMS else target  # as a stage does
    if target is torch.ops.aten.batch_norm.default and args[_TRAINING]:
        held = next((each for each in (args[3], args[1]) if each is not None), args[0])
        by_channel = args[0].detach().to(torch.promote_types(args[0].dtype, torch.float32)).transpose(0, 1).flatten(1)
        statistics = [each.to(held.dtype) for each in (by_channel.mean(1), by_channel.var(1, correction=0))]
        statistics = known.setdefault(node, statistics)
        return run(*args[: _STATISTICS.start], *statistics, False, *args[_TRAINING + 1 :])
    names = [argument.name for argument in schema_of(target).arguments]
    args = tuple(_AS_IN_EVALUATION.get(name, value) for name, value in zip(names, args, strict=False))
    return run(*args, **{name: _AS_IN_EVALUATION.get(name, value) for name, value in kwargs.items()})


def written_states(traced: TracedModel, following: Collection[str]) -> dict[fx.Node, str]:
    """Returns what is written as a whole into state that follows from samples, with that state's attribute."""
    found: dict[fx.Node, str] = {}
    for node in traced.module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        state, source = node.args[0], node.args[1]
        while isinstance(source, fx.Node) and source.op == "call_function" and traced.facts[source.name].is_view:
            source = source.args[0]
        if isinstance(state, fx.Node) and state.target is torch.ops.aten.detach.default:  # under no_grad
            state = state.args[0]
        if isinstance(state, fx.Node) and isinstance(source, fx.Node) and str(state.target) in following:
            found[source] = str(state.target)
    return found


def _with_layers_once(traced: TracedModel) -> fx.GraphModule:
    """Returns the graph without layers that are like the one before, whose values stand for theirs."""
    facts, made = traced.facts, dict[fx.Node, fx.Node]()
    stand_in: dict[str, str] = {}
    first: list[str] = []
    known = ""
    for layer, blocks in groupby(traced.graph.blocks, key=_layer_of):
        names = [name for block in blocks for name in block.nodes]
        mark = signature([traced.nodes[name] for name in names], facts, traced.sizes) if layer else ""
        if mark and mark == known:
            stand_in |= dict(zip(names, first, strict=True))
        else:
            first, known = names, mark
    graph = fx.Graph()
    for node in traced.module.graph.nodes:
        place = stand_in.get(node.name)
        made[node] = made[traced.nodes[place]] if place else graph.node_copy(node, made.__getitem__)
    module = fx.GraphModule({}, fx.Graph())
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
        elif (held := getattr(traced.module, str(node.target), None)) is not None:  # it is kept whole
            setattr(module, str(node.target), held)
    module.graph = graph
    return module


def _varied(tensor: Tensor) -> Tensor:
    """Returns samples of which no two are alike: one like an earlier one has its numbers in another order."""
    rows, generator = list(tensor.detach().clone()), torch.Generator().manual_seed(_SEED)
    for place, row in enumerate(rows):
        if not any(torch.equal(row, other) for other in rows[:place]):
            continue
        if len(row.unique()) > 1:
            row.copy_(row.flatten()[torch.randperm(row.numel(), generator=generator).to(row.device)].view(row.shape))
        elif is_differentiable(row):
            row.add_(torch.randn(row.shape, generator=generator).to(row) * _NUMBERS)
    return torch.stack(rows)


def _gradients(roots: Mapping[Tensor, Tensor], values: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """Returns the gradients of values that have one; a backward goes from each root with its own."""
    if not roots or not values:
        return {}
    given = list(roots), list(values.values()), list(roots.values())
    found = torch.autograd.grad(*given, retain_graph=True, allow_unused=True)
    return {name: each for name, each in zip(values, found, strict=True) if each is not None}


def _join(parts: Sequence[_Part], runs: Sequence[_Results]) -> _Results:
    """Returns what parts of the batch give together, as a step joins them."""
    order = torch.tensor([sample for part in parts for sample in part.samples]).argsort()
    made = _Results()
    for name in {name for run in runs for name in run.rows}:
        rows = [run.rows[name] for run in runs]
        if len({each.shape[1:] for each in rows}) > 1:
            made.rows[name] = rows[0]
        else:
            whole = torch.cat(rows)
            made.rows[name] = whole[order.to(whole.device)] if len(whole) == len(order) else whole
    for name in {name for run in runs for name in run.sums}:
        made.sums[name] = torch.stack([run.sums[name] for run in runs if name in run.sums]).sum(0)
    return made


def _distances(whole: _Results, joined: _Results, runs: Sequence[_Results]) -> dict[str, float]:
    """Returns how far what parts give is from what the whole gives, by the largest number there."""
    gradients = [each for name, each in whole.sums.items() if name.startswith(_GRADIENT)]
    least = _SMALL * max((float(each.abs().max()) for each in gradients if each.numel()), default=0.0)
    off = {name: distance(joined.rows[name], each) for name, each in whole.rows.items()}
    for name in whole.sums.keys() | joined.sums.keys():
        pair = [each.sums.get(name) for each in (joined, whole)]
        found = next(each for each in pair if each is not None)
        one, other = (torch.zeros_like(found) if each is None else each for each in pair)
        off[name] = distance(one, other, least if name.startswith(_GRADIENT) else 0.0)
    return off | {name: max(distance(run.same[name], each) for run in runs) for name, each in whole.same.items()}


def _layer_of(block: Block) -> str:
    match = re.match(r"(?:.*?\.)?\d+(?=\.|$)", block.module)
    return match[0] if match else ""


def _lines(traced: TracedModel) -> str:
    nodes = [traced.nodes[name] for name in traced.joins_counts]
    return ", ".join(list(dict.fromkeys(origin(node) or node.name for node in nodes))[:_MOST_NAMES])

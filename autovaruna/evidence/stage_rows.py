"""Says what one stage of a graph receives, returns and holds, and which of its rows are of which samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, fx

from autovaruna.graph.batch.order import SampleOrders
from autovaruna.graph.operators import is_differentiable, is_of_batch, reached
from autovaruna.graph.pieces import ArgumentSource, nodes_of
from autovaruna.graph.random import RandomStream
from autovaruna.graph.rounding import distance
from autovaruna.graph.traced import TracedModel, joined
from autovaruna.stage.module import StageModule

_NOISE = 0.05


class UntriedError(Exception):
    """A stage cannot be run on parts of a micro-batch."""


class UnknownOrderError(UntriedError):
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
        num_samples: how many samples the step has, on all ranks; `most_at_once`: how many a rank has memory for.
        is_sum: whether their losses are added up; else they are averaged by samples.
        is_free: whether the script says otherwise what becomes of numbers over samples, which then do not count.
        wanted: what the stage receives whose gradient is wanted.
        lengths: those that vary in the graph.
    """

    num_samples: int
    most_at_once: int
    is_sum: bool
    is_free: bool
    wanted: frozenset[str]
    lengths: tuple[int, ...]


class StageRows:
    """What a stage of a graph has to do with samples.

    Attributes:
        nodes: its operations, in order; `outputs`: what it returns, by name.
        specs: those of them that the model returns.
        parameters: what it receives that is a parameter.
        state: parameters, buffers and constants that it reads, with their first names.
        following: the memory of state that follows from samples, or from chance: each micro-batch changes it in turn.
        written: what is written into such state as a whole, and the state that it becomes.
    """

    def __init__(self, stage: StageModule, traced: TracedModel) -> None:
        self.stage, self.traced = stage, traced
        piece = stage.part.piece
        self.nodes = nodes_of(traced, stage.part.nodes, traced.repeated, piece.outputs)
        self.outputs = {name: traced.nodes[name] for name in piece.outputs}
        self.specs = {name: traced.outputs[place] for place, name in stage.part.outputs}
        self.parameters = {each.name for each in piece.arguments if each.source is ArgumentSource.PARAMETER}
        self.state = {
            node: self._first(node)
            for node in dict.fromkeys(source for each in self.nodes for source in each.all_input_nodes)
            if node.op == "get_attr"
        }
        self.following = {
            node: traced.facts[node.name].makes
            for node, name in self.state.items()
            if name in traced.changed_state - traced.steady_state
        }
        by_target = {str(node.target): node for node in self.following}
        self.written = {node: by_target[name] for node, name in _written_states(traced, by_target).items()}

    @cached_property
    def ends(self) -> frozenset[fx.Node]:
        """The last values of samples before what joins them."""

        def is_joint(node: fx.Node) -> bool:
            value = node.meta.get("val")
            is_number = isinstance(value, Tensor) and is_differentiable(value)
            return is_number and self.dimension(node.name) is None and node.op == "call_function"

        of_samples = (
            node
            for node in self.nodes
            if isinstance(node.meta.get("val"), Tensor) and self.dimension(node.name) is not None
        )
        return frozenset(node for node in of_samples if any(map(is_joint, node.users)))

    def dimension(self, name: str) -> int | None:
        """Returns the dimension of samples in a value; None: it has none."""
        if name in self._whole_inputs:
            return None
        return self.traced.sizes.batch_dimension(self.traced.nodes[name].meta["val"])

    @cached_property
    def _whole_inputs(self) -> set[str]:
        return {name for name, spec in self.traced.inputs.items() if not spec.is_batch}

    def follows_from_batch(self, name: str) -> bool:
        """Whether a value is made of what is given of the whole batch."""
        return any(map(is_of_batch, reached([self.traced.nodes[name]], lambda node: node.all_input_nodes)))

    def is_reduced(self, name: str) -> bool:
        """Whether a value comes from another stage, and is a real number of several samples, not counted in inputs."""
        node = self.traced.nodes[name]
        if name in self.traced.inputs or self.dimension(name) is not None or not node.meta["val"].is_floating_point():
            return False
        sources = {each.name for each in reached([node], lambda node: node.all_input_nodes)}
        return not sources.isdisjoint(self.traced.batch_inputs) and not self.follows_from_batch(name)

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
            raise UnknownOrderError(f"nothing tells which samples the rows of {name} are of")
        return 1 if outer == 1 else int(self.traced.sizes.in_call(outer, 1, lengths))

    @cached_property
    def _orders(self) -> SampleOrders:
        return SampleOrders(self.traced)

    def places(
        self, name: str, value: Tensor, num_samples: int, samples: Sequence[int], lengths: tuple[int, ...]
    ) -> Tensor:
        """Returns the places of rows of some samples in a value's dimension of samples."""
        outer, length = self.outer(name, value, num_samples, lengths), value.shape[self.dimension(name) or 0]
        by_sample = torch.arange(length, device=value.device).view(outer, num_samples, -1)
        return by_sample[:, list(samples)].flatten()

    def rows(
        self, name: str, value: Tensor, num_samples: int, samples: Sequence[int], lengths: tuple[int, ...]
    ) -> Tensor:
        """Returns what a value has of some samples; all of it if it is none of samples."""
        dimension = self.dimension(name)
        if dimension is None or samples == range(num_samples):
            return value
        return value.index_select(dimension, self.places(name, value, num_samples, samples, lengths))

    def given(self, of_batch: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        """Returns what a part is given of the whole batch."""
        uses = self.traced.totals.values
        return {
            name: torch.as_tensor(uses[name][1].of_share(value, share)).to(value.device, value.dtype)
            for name, value in of_batch.items()
        }

    def join(self, one: Observed, other: Observed, terms: Terms) -> Observed:
        """Returns two micro-batches as one.

        Raises:
            UntriedError: nobody knows how.
        """

        def both(name: str, first: Tensor, second: Tensor) -> Tensor:
            if (dimension := self.dimension(name)) is not None:
                return joined([first, second], dimension, self.outer(name, first, one.size, terms.lengths))
            return first

        gradients = dict[str, Tensor]()
        for name in one.gradients.keys() & other.gradients.keys():
            pair = one.gradients[name], other.gradients[name]
            is_rows = self.dimension(name) is not None
            if not is_rows and name not in self.specs:
                raise UntriedError(f"{name} is a number for each micro-batch")
            gradients[name] = both(name, *pair) if is_rows else pair[0] if terms.is_sum else pair[0] + pair[1]
        size = one.size + other.size
        return replace(
            one,
            size=size,
            tensors={name: both(name, each, other.tensors[name]) for name, each in one.tensors.items()},
            of_batch=one.of_batch if terms.is_sum else self.given(one.of_batch, size / one.size),
            gradients=gradients,
        )

    def taken(self, observed: Observed, samples: Sequence[int], terms: Terms) -> Observed:
        """Returns a micro-batch of its samples in another order, or of each as often as it is named."""
        share = len(samples) / observed.size
        scale = 1.0 if terms.is_sum else share

        def of(name: str, tensor: Tensor) -> Tensor:
            return self.rows(name, tensor.detach(), observed.size, samples, terms.lengths)

        return replace(
            observed,
            size=len(samples),
            tensors={name: of(name, each) for name, each in observed.tensors.items()},
            of_batch=observed.of_batch if scale == 1.0 else self.given(observed.of_batch, share),
            gradients={
                name: each * scale if self.dimension(name) is None else of(name, each)
                for name, each in observed.gradients.items()
            },
        )

    def doubled(self, observed: Observed, terms: Terms) -> Observed:
        """Returns one sample together with another one, that has its numbers in another order."""
        both, generator = self.taken(observed, [0, 0], terms), torch.Generator().manual_seed(0)
        for name, tensor in (*both.tensors.items(), *both.gradients.items()):
            if (dimension := self.dimension(name)) is None:
                continue
            places = self.places(name, tensor, 2, [1], terms.lengths)
            own = tensor.index_select(dimension, places)
            if (own != own.flatten()[0]).any():
                order = torch.randperm(own.numel(), generator=generator).to(own.device)
                own = own.flatten()[order].view_as(own)
            elif is_differentiable(own):
                own = own + _NOISE * torch.randn(own.shape, generator=generator).to(own)
            tensor.index_copy_(dimension, places, own)
        return both

    def _first(self, node: fx.Node) -> str:
        name = str(node.target)
        return self.traced.parameters.get(name) or self.traced.buffers.get(name) or name


def _written_states(traced: TracedModel, following: Collection[str]) -> dict[fx.Node, str]:
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


def by_rows(
    parts: Sequence[Tensor],
    whole: Tensor,
    dimension: int,
    sizes: Sequence[int],
    outers: Sequence[int] = (),
    least: float = 0.0,
) -> float:
    """Returns how far the rows of parts are from those of the whole, if samples come so often, or however often."""
    rows = whole.shape[dimension] // sum(sizes)
    if [each.shape[dimension] for each in parts] != [rows * size for size in sizes]:
        return torch.inf
    outers = outers or [outer for outer in range(1, rows + 1) if rows % outer == 0]
    return min((distance(joined(parts, dimension, outer), whole, least) for outer in outers), default=0.0)

"""Says what the outputs of a traced model are: its loss, tensors of samples, or plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor, fx

from autovaruna.errors import TraceError
from autovaruna.graph.facts import Fact
from autovaruna.graph.sizes import Sizes


class OutputKind(str, Enum):
    """How the outputs of the micro-batches become the output of the global batch."""

    LOSS = "loss"
    """The scalar that the step differentiates: a weighted mean (or a sum)."""
    SAMPLES = "samples"
    """Grows with the batch: each rank gets the part of its own samples."""
    MEAN = "mean"
    """A floating-point tensor without a batch dimension: a weighted mean."""
    TOTAL = "total"
    """An integer tensor without a batch dimension: a sum."""
    SAME = "same"
    """Does not depend on the batch: that of micro-batch 0."""


@dataclass(frozen=True)
class OutputSpec:
    """One tensor that the model returns.

    Attributes:
        node: name of the node that makes it.
        path: where it stands in what the model returns.
        kind: how micro-batches are put together.
        dimension: the batch dimension of an output of samples.
        needs_gradient: whether a backward can start from it.
    """

    node: str
    path: str
    kind: OutputKind
    dimension: int
    needs_gradient: bool


def classify(
    graph: fx.Graph, facts: dict[str, Fact], sizes: Sizes, paths: Sequence[str], loss_mode: str
) -> tuple[OutputSpec, ...]:
    """Classifies the outputs of a graph.

    Args:
        graph: The traced graph.
        facts: What is known of each node.
        sizes: Evaluates shapes.
        paths: Path of each output.
        loss_mode: ``loss`` (there is one loss), ``outputs`` (there is none) or ``auto``.

    Raises:
        TraceError: ``loss`` is asked for and no single output can be it.
    """
    nodes: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    fed = _fed_by_batch(graph)
    specs = [_classify_one(node, path, facts, sizes, fed) for node, path in zip(nodes, paths, strict=True)]
    place = None if loss_mode == "outputs" else _find_loss(specs, facts)
    if place is None and loss_mode == "loss":
        found = {spec.path: spec.kind.value for spec in specs}
        raise TraceError(
            f"loss_mode='loss' needs one differentiable scalar among the outputs: got {found}. Return the loss "
            "alone or under the key 'loss', or pass loss_mode='outputs'."
        )
    if place is not None:
        loss = specs[place]
        specs[place] = OutputSpec(loss.node, loss.path, OutputKind.LOSS, 0, True)
    return tuple(specs)


def _classify_one(node: fx.Node, path: str, facts: dict[str, Fact], sizes: Sizes, fed: set[fx.Node]) -> OutputSpec:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    dimension = sizes.batch_dimension(value)
    if dimension is not None:
        kind = OutputKind.SAMPLES
    elif node not in fed:
        kind = OutputKind.SAME
    else:
        kind = OutputKind.MEAN if value.is_floating_point() or value.is_complex() else OutputKind.TOTAL
    return OutputSpec(node.name, path, kind, dimension or 0, facts[node.name].needs_gradient)


def _fed_by_batch(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that depend on an input."""
    fed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(source in fed for source in node.all_input_nodes):
            fed.add(node)
    return fed


def _find_loss(specs: Sequence[OutputSpec], facts: dict[str, Fact]) -> int | None:
    scalars = [index for index, spec in enumerate(specs) if spec.needs_gradient and facts[spec.node].value.dim() == 0]
    named = [index for index in scalars if specs[index].path.endswith(("['loss']", ".loss"))]
    if len(named) == 1:
        return named[0]
    others = [spec for index, spec in enumerate(specs) if spec.needs_gradient and index not in scalars]
    return scalars[0] if len(scalars) == 1 and not others else None

"""Says where parts of a micro-batch begin to give something else than the whole does, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna.errors import AutoVarunaError, InputError, TraceError
from autovaruna.evidence.stage_rows import by_rows
from autovaruna.graph.export.errors import FOR_COUNTS, advice
from autovaruna.graph.opaque.run import opaque_module_of
from autovaruna.graph.operators import is_differentiable, reached
from autovaruna.graph.rounding import distance
from autovaruna.graph.source_lines import modules_of, origin
from autovaruna.graph.traced import TracedModel

_MOST_NAMES = 3


def refusal(
    traced: TracedModel,
    model: nn.Module,
    num_samples: int,
    wrong: Mapping[Any, float],
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
    place, loss, by_name = _place(first), traced.loss, {node.name: node for node in first.graph.nodes}
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
        other = "mean" if reduction == "sum" else "sum"
        return InputError(
            f"The loss of the model is no {reduction} over its samples: {first.name}, at {place}, makes it another for "
            f"{num_samples} samples than parts of them, joined by reduction={reduction!r}, have ({far}). Expected "
            f"a {reduction}, or the setting reduction={other!r} for a {other}; return what the loss is computed from, "
            "and compute it outside of the model, from the outputs of the whole batch; or pass num_micro_batches=1, "
            "with inputs='replicated' on several ranks."
        )
    what = first.name if bad or not back else f"the gradient that goes back through {first.name}"
    return TraceError(
        f"{name} mixes the samples of a batch: {what} is another for {num_samples} samples together than for "
        f"parts of them, at {place} ({', '.join(list(map(str, wrong))[:_MOST_NAMES])}: {far}). "
        f"{advice(model, traced.call, modules_of(first))}"
    )


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
    around = whole.shape[:dimension] + whole.shape[dimension + 1 :]
    if any(each.shape[:dimension] + each.shape[dimension + 1 :] != around for each in others):
        return False
    scaled = [others]
    if is_differentiable(whole) and not is_gradient:  # by the size of the batch, or by what is counted over it
        scaled += [[each * share**power for each, share in zip(others, shares, strict=True)] for power in (1, -1)]
    return any(by_rows(each, whole, dimension, sizes) <= allowed for each in scaled)


def _place(node: fx.Node) -> str:
    """Returns the user's line of a node, or that which calls a module that is kept whole."""
    kept = opaque_module_of(node) or next(filter(None, map(opaque_module_of, node.all_input_nodes)), None)
    return origin(node) or (kept.line if kept is not None else "") or node.name


def _lines(traced: TracedModel) -> str:
    nodes = [traced.nodes[name] for name in traced.joins_counts]
    return ", ".join(list(dict.fromkeys(origin(node) or node.name for node in nodes))[:_MOST_NAMES])

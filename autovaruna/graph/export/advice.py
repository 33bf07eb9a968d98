"""Says why it is in doubt which dimension is the batch, and which settings together make such a model run."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from autovaruna.graph.call import CallSpec, InputSpec

WHOLE = "inputs='replicated', num_micro_batches=1, dynamic_batch=False"
"""What has every rank pass the same batch, and the model see all of it at once."""
_EXAMPLE = "in an argument {0} (batch_dims={{'{0}': 1}})"
EXAMPLE = _EXAMPLE.format("x")
_OTHERWISE = (
    "Expected a model that treats samples one by one, so that a batch can go through in micro-batches. Pass tensors "
    f"whose first dimension is the batch (batch_first=True), or say which one it is {EXAMPLE}; "
    "move what mixes samples (a contrastive loss, say) out of the model, or "
    f"pass {WHOLE} together: all ranks pass one batch, and the model sees it whole, as in plain PyTorch. "
    "With dynamic_batch=False alone each micro-batch is a batch of its own to the model."
)
FOR_COUNTS = (
    "Expected what follows from each sample's own numbers. Count before the model, and pass the result as an input "
    f"with a row for each sample; or pass {WHOLE} together: all ranks pass one batch, and the model counts over all of "
    "it, as in plain PyTorch. With dynamic_batch=False alone each micro-batch is a batch of its own to the model."
)
"""What to write where counts over the batch go into what a model gives for each sample."""
_MOST_NAMES = 3
_OF_AN_EDGE = 2


def example(name: str) -> str:
    """Returns how to say of an input that its second dimension is the batch."""
    return _EXAMPLE.format(name)


def advice(model: nn.Module, call: CallSpec, paths: Collection[str] | None = None) -> str:
    """Returns what is odd of a call for which a model mixes samples in some modules, and what to write instead."""
    batch = [spec for spec in call.inputs if spec.is_batch]
    others = [spec for spec in call.inputs if not spec.is_batch]
    return _of_graph(batch, others) or _of_time(model, call, others, paths) or _OTHERWISE


def _of_graph(batch: list[InputSpec], others: list[InputSpec]) -> str:
    """Finds lists of edges, which name rows of the batch, and matrices of which rows are joined."""
    first = batch[0]
    whole = [each for each in others if not each.dtype.is_floating_point]
    edges = [each for each in whole if len(each.shape) == 2 and each.shape[0] == _OF_AN_EDGE]
    square = [each for each in batch[1:] if each.shape == (first.shape[0], first.shape[0])]
    if len(first.shape) != 2 or not (edges or square):
        return ""
    return (
        f"{_shown((edges or square)[:1])} joins rows of {_shown([first])}, as the edges of a graph do its nodes, and "
        f"one graph cannot be parted. Expected {WHOLE} together: all ranks pass the one graph, and have the numbers of "
        "plain PyTorch. Or let each rank pass a graph of its own, with dynamic_batch=False: each micro-batch is then a "
        "batch of its own to the model, and with num_micro_batches=the number of ranks so is what each rank passes."
    )


def _of_time(model: nn.Module, call: CallSpec, others: list[InputSpec], paths: Collection[str] | None) -> str:
    """Finds the batch in a later dimension: of another input, or by a module that wants it there."""
    first = next(spec for spec in call.inputs if spec.is_batch)
    elsewhere = [spec for spec in others if _has_elsewhere(spec, first)]
    modules = [(path, each) for path, each in model.named_modules() if getattr(each, "batch_first", True) is False]
    if paths is not None:
        modules = [(path, each) for path, each in modules if path in paths]
    if elsewhere:
        what = f"which {_shown(elsewhere)} {'has' if len(elsewhere) == 1 else 'have'} in another one"
    elif modules and len(first.shape) > 1:
        path, module = modules[0]
        what = (
            f"but {path or 'the model'} ({type(module).__name__} with batch_first=False) takes the first one for time"
        )
    else:
        return ""
    return (
        f"The first dimension of {_shown([first])} is taken for the batch, {what}. "
        f"{naming(batch_dimensions(call)[0])} such modules with batch_first=True and pass tensors whose first "
        f"dimension it is. Or pass {WHOLE} together: all ranks pass one batch, and the model sees it whole, as in "
        "plain PyTorch."
    )


def naming(dimensions: Mapping[str, int]) -> str:
    """Returns the start of a sentence that says what dimensions to name, if there are any."""
    return f"Say which dimension is the batch in each, as batch_dims={dimensions}, or build" if dimensions else "Build"


def batch_dimensions(call: CallSpec) -> list[dict[str, int]]:
    """Returns what dimensions may be the batch, by inputs, where that is not the first one of all.

    Either it is of the first input, and others have it elsewhere; or the second one is, in all that have it of a size.
    """
    shapes = {spec.name: spec.passed_shape for spec in call.inputs}
    first = next(shape for shape in shapes.values() if shape)
    others = {name: shape for name, shape in shapes.items() if first[0] in shape[1:] and shape[0] != first[0]}
    found = [{name: shape.index(first[0], 1) for name, shape in others.items()}]
    found.append({name: 1 for name, shape in shapes.items() if first[1:2] == shape[1:2] != ()})
    return [each for each in found if each] or [{}]


def _has_elsewhere(spec: InputSpec, first: InputSpec) -> bool:
    """Whether an input has the batch size in another dimension, or the second dimension of a batch is its batch."""
    is_hidden = len(spec.shape) == len(("layers", "batch", "width")) and spec.shape[1:2] == first.shape[1:2]
    return first.shape[0] in spec.shape[1:] or spec.shape[:1] in [(length,) for length in first.shape[1:]] or is_hidden


def _shown(specs: list[InputSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.shape}" for spec in specs[:_MOST_NAMES])

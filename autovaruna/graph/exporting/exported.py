"""Defines `Exported`: what torch.export made of a call."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, fx

from autovaruna.graph.cutpoint import Marker
from autovaruna.graph.tree import Tree
from autovaruna.graph.watching.hidden_state import Changes


@dataclass(frozen=True)
class Exported:
    """What torch.export made of a call.

    Attributes:
        module: flat graph; placeholders are the input tensors, attributes have the model's own names.
        output_tree: structure of what the model returns; its tensors are the graph's outputs.
        constants: tensors that are neither parameters nor buffers, by attribute name.
        is_dynamic: whether the batch size is a symbol in the graph.
        markers: where the user's cut points were.
        reads: attributes of modules that the model has read, as ``path.of.module.attribute``.
        changes: the Python state that forward has changed.
        greatest: the batch size up to which the trace has taken this way; None: there is no such size.
        asks_for_one: where the model does something else for a batch of one sample; empty: nowhere.
    """

    module: fx.GraphModule
    output_tree: Tree
    constants: dict[str, Tensor]
    is_dynamic: bool
    markers: tuple[Marker, ...] = ()
    reads: frozenset[str] = frozenset()
    changes: Changes = field(default_factory=Changes)
    greatest: int | None = None
    asks_for_one: str = ""

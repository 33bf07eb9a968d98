"""Holds what came of a trace by torch.export: the graph, its inputs and constants, and what the trace went by."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx

from autovaruna.graph.cuts import Marker
from autovaruna.graph.tree import Tree


@dataclass(frozen=True)
class Exported:
    """What torch.export made of a call.

    Attributes:
        module: flat graph; placeholders are the input tensors, attributes have the model's own names.
        output_tree: structure of what the model returns; its tensors are the graph's outputs.
        constants: tensors that are neither parameters nor buffers, by attribute name.
        is_dynamic: whether the batch size is a symbol in the graph.
        markers: where the user's cut points were.
        left: where forward leaves tensors beside what it returns.
        greatest: the batch size up to which the trace has taken this way; None: there is no such size.
        asks_for_many: where it may do something else for larger batches; empty: not known.
        asks_for_one: where the model does something else for a batch of one sample; empty: nowhere.
    """

    module: fx.GraphModule
    output_tree: Tree
    constants: dict[str, Tensor]
    is_dynamic: bool
    markers: tuple[Marker, ...] = ()
    left: tuple[str, ...] = ()
    greatest: int | None = None
    asks_for_many: str = ""
    asks_for_one: str = ""

"""Makes of the nodes of a part what runs them; it is the same for every number of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autovaruna.graph.pieces.deferral import SplitPiece, split_backward
from autovaruna.graph.pieces.direct import direct
from autovaruna.graph.pieces.extract import Argument, extract
from autovaruna.graph.traced import TracedModel

aten = torch.ops.aten
_LEFT_TO_CHANCE = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)


@dataclass(frozen=True)
class Code:
    """What runs a part.

    Attributes:
        run: The forward.
        arguments: What it is called with.
        needs_gradient: Whether there is a backward.
        split: The same with a backward that leaves weight gradients for later; None: it has none to leave.
    """

    run: Callable[..., Any]
    arguments: tuple[Argument, ...]
    needs_gradient: bool
    split: SplitPiece | None


def make_code(traced: TracedModel, nodes: Sequence[str], outputs: Sequence[str]) -> Code:
    """Returns what runs some nodes of a traced model, and gives some of their values."""
    piece = extract(traced, nodes, outputs, is_bare=True)
    _fill_memory(piece.module)
    needs_gradient = any(traced.facts[name].needs_gradient for name in outputs)
    return Code(
        direct(piece.module),
        piece.arguments,
        needs_gradient,
        split_backward(piece) if needs_gradient else None,
    )


def _fill_memory(module: fx.GraphModule) -> None:
    """Has a graph fill memory that it leaves to chance.

    A model that writes it all at the places of a permutation, to index with it then, would index with what is there:
    here the permutation is zeros.
    """
    for node in list(module.graph.nodes):
        if node.target in _LEFT_TO_CHANCE:
            with module.graph.inserting_after(node):
                module.graph.call_function(aten.zero_.default, (node,))

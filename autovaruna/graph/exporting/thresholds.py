"""Looks at what a model does from some batch size on: a branch on it that changes nothing fixes none.

Libraries copy a tensor into another order of memory, for one, where a batch is too large for some kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import sympy
import torch
from torch import fx

from autovaruna.errors import TraceError

_ROUNDS = 4
_MANY, _FAR = 2**16, 2**24
"""Above the first, one look is enough, at the second: libraries then ask for each tensor whether it is too large for a
kernel, a size for each; above the second there is no micro-batch."""
Again = Callable[[int, int], tuple[fx.GraphModule, int | None]]


def find_threshold(module: fx.GraphModule, greatest: int | None, again: Again) -> int | None:
    """Returns the greatest batch size for which a graph holds; None: it holds for all.

    Args:
        module: The graph.
        greatest: The batch size up to which the trace has taken this way; None: there is no such size.
        again: Traces again, for batch sizes from its first argument on, the second standing for them; returns as this
            function is given.
    """
    for _ in range(_ROUNDS):
        if greatest is None or greatest >= _FAR:
            return None
        least = greatest + 1 if greatest < _MANY else _FAR
        try:
            larger, next_greatest = again(least, int(sympy.nextprime(least + 5)))
        except TraceError:
            return greatest
        if any(a != b for a, b in itertools.zip_longest(_lines(larger), _lines(module))):
            return greatest
        greatest = next_greatest
    return greatest


def _lines(module: fx.GraphModule) -> Iterator[str]:
    """Yields what a graph computes, and its regions, without copies into another order of memory."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            names: dict[fx.Node, str] = {}
            count = itertools.count()
            for node in part.graph.nodes:
                if node.target is torch.ops.aten.contiguous.default:
                    names[node] = names[node.args[0]]
                else:
                    names[node] = f"_{next(count)}"
                    yield f"{node.op} {node.target} {fx.map_arg((node.args, node.kwargs), names.__getitem__)}"

"""Gives every micro-batch the lengths of the whole batch: numbers that a model takes out of the greatest of its inputs.

``lengths.max().item()`` is how far plain PyTorch goes with each sample, and what means over positions are divided by.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, fx

from autovaruna.graph.batch.additions import Additions
from autovaruna.graph.batch.of_batch import Use, is_of_batch, of_batch


def give_lengths(
    numbers: Sequence[fx.Node], users: Collection[fx.Node], additions: Additions
) -> dict[str, tuple[str, Use]]:
    """Has a graph go on from the lengths of the whole batch; returns the calls of `of_batch` for them.

    The nodes that make them stay as they are: the whole batch's are computed by them.

    Args:
        numbers: The lengths, and what follows from them and from the batch size alone, in order of execution.
        users: What may go on from them.
        additions: Adds nodes to the graph.
    """
    values: dict[str, tuple[str, Use]] = {}
    taken: dict[fx.Node, fx.Node] = {}
    for number in numbers:
        sources = number.all_input_nodes
        if taken.keys().isdisjoint(sources):
            (tensor,) = sources
            given = additions.before(number, of_batch, tensor, Use.PLAIN, tensor.meta["val"].dtype)
            values[given.name] = tensor.name, Use.PLAIN
            taken[tensor] = given
        taken[number] = additions.again(number, taken)
        for user in [user for user in number.users if user in users and not is_of_batch(user)]:
            if isinstance(user.meta.get("val"), Tensor):
                user.replace_input_with(number, taken[number])
    additions.drop_unused(reversed(taken.values()))
    return {name: value for name, value in values.items() if additions.has(name)}

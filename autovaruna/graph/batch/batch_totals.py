"""Finds the values of a graph that are of the whole batch: what was reduced over the batch from the inputs alone.

The number of labels that count is one, and whether any is there. A micro-batch alone would give another. Such a value
is computed before the step, from the samples of all ranks: each computes the first reductions, the *totals*, of its own
samples; they are merged; and what is made of them is computed from the merged ones. Where the model goes on with it,
the graph has a call of `of_batch`, for which stages are given the value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from torch import fx

from autovaruna.graph.batch.additions import Additions
from autovaruna.graph.batch.batch_kinds import DIVISIONS, PRODUCTS, Kind, Kinds, Merge
from autovaruna.graph.batch.batch_size import give_batch_size, linear_tail
from autovaruna.graph.batch.counted_means import part_means
from autovaruna.graph.batch.from_inputs import from_inputs, what_makes
from autovaruna.graph.batch.lengths import give_lengths
from autovaruna.graph.batch.of_batch import Use, is_of_batch, of_batch
from autovaruna.graph.batch.reductions import Reductions
from autovaruna.graph.facts import Fact, outliving_storages
from autovaruna.graph.sizes import Sizes


@dataclass(frozen=True)
class BatchTotals:
    """The values of a graph that are of the whole batch; names are those of nodes.

    Attributes:
        merges: the totals, and how each is merged.
        before: what computes them from the inputs.
        after: what is computed from them, and from nothing else of the batch.
        values: the calls of `of_batch`: the node whose value each stands for, and what becomes of it.
    """

    merges: dict[str, Merge]
    before: tuple[str, ...]
    after: tuple[str, ...]
    values: dict[str, tuple[str, Use]]

    def __bool__(self) -> bool:
        return bool(self.values)


NO_TOTALS: BatchTotals = BatchTotals({}, (), (), {})


def take_totals(
    graph: fx.Graph,
    facts: MutableMapping[str, Fact],
    sizes: Sizes,
    batch: Collection[str],
    parameters: Collection[str],
    is_added: bool,
) -> BatchTotals:
    """Finds the values of a graph that are of the whole batch, and puts calls of `of_batch` where they are used.

    Args:
        graph: The graph; changed.
        facts: What is known of each node; changed with it.
        sizes: Its sizes; those of one fixed batch size have no totals, for each micro-batch is a batch of its own.
        batch: Names of the inputs whose first dimension is the batch.
        parameters: Names of the attributes that are parameters.
        is_added: Whether losses of micro-batches are added up, rather than averaged.
    """
    if sizes.symbol is None:
        return NO_TOTALS
    additions = Additions(graph, facts)
    part_means(graph, from_inputs(graph, facts, parameters), sizes, additions)
    known = from_inputs(graph, facts, parameters)
    kinds = Kinds(graph, known, sizes, batch)
    in_outputs = _in_outputs(graph, facts)
    values = _mark(graph, known, kinds, Reductions(sizes, batch), in_outputs, additions)
    users = in_outputs - {node for node in known if kinds.of[node] <= Kind.WHOLE}
    values |= give_lengths([node for node in known if kinds.is_length(node)], users, additions)
    sized, tensors = give_batch_size(graph, sizes, batch, _in_outputs(graph, facts), additions, is_added)
    values |= sized
    if not values:
        return NO_TOTALS
    sources = {source for source, _ in values.values()}
    needed = what_makes([node for node in known if node.name in sources], known, facts)
    totals = [node for node in needed if node in kinds.merges]
    before = what_makes(totals, known, facts)
    after = [node for node in needed if kinds.of[node] <= Kind.WHOLE and node not in kinds.merges]
    merges = {node.name: kinds.merges[node] for node in totals}
    return BatchTotals(merges, _names(before, sizes), (*tensors, *_names(after, sizes)), values)


def _mark(
    graph: fx.Graph,
    known: Sequence[fx.Node],
    kinds: Kinds,
    reductions: Reductions,
    in_outputs: Collection[fx.Node],
    additions: Additions,
) -> dict[str, tuple[str, Use]]:
    """Puts a call of `of_batch` wherever a graph goes on from a value of the whole batch; returns them."""
    values: dict[str, tuple[str, Use]] = {}
    tail = linear_tail(graph)
    for value in [node for node in known if kinds.of[node] is Kind.WHOLE]:
        for user in [user for user in value.users if user in in_outputs and kinds.goes_on(value, user)]:
            use = _use(value, user, reductions, tail)
            is_cast = use is not Use.PLAIN or kinds.is_number(value)
            dtype = (user if is_cast else value).meta["val"].dtype
            stand_in = additions.before(user, of_batch, value, use, dtype)
            user.replace_input_with(value, stand_in)
            values[stand_in.name] = value.name, use
    return values


def _in_outputs(graph: fx.Graph, facts: Mapping[str, Fact]) -> set[fx.Node]:
    """Returns what micro-batches make the outputs of: not what is computed of the whole batch before.

    Nor is it state: that follows micro-batches, as BatchNorm's does.
    """
    outliving = outliving_storages(graph, facts)
    outputs: set[fx.Node] = set()
    state: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        writes = facts[node.name].writes if node.name in facts else frozenset()
        if writes & outliving or not state.isdisjoint(node.users):
            state.add(node)
        if node.op == "output" or writes or any(user in outputs for user in node.users if not is_of_batch(user)):
            outputs.add(node)
    return outputs - state


def _use(value: fx.Node, user: fx.Node, reductions: Reductions, tail: Collection[fx.Node]) -> Use:
    """Returns what becomes of a value of the whole batch in a node that goes on from it."""
    first, second = (*user.args, None, None)[:2]
    is_divided = user.target in DIVISIONS and second is value
    if is_divided and (reductions.sum_in(first) is not None or reductions.ends_in_sums(user, tail)):
        return Use.DIVISOR
    if user.target in PRODUCTS and reductions.sum_in(first if second is value else second) is not None:
        return Use.FACTOR
    return Use.PLAIN


def _names(nodes: Sequence[fx.Node], sizes: Sizes) -> tuple[str, ...]:
    return tuple(node.name for node in nodes if not sizes.is_given(node))

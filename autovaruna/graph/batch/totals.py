"""Finds the values of a graph that are of the whole batch: what was reduced over the batch from the inputs alone.

Such are the number of labels that count, the greatest length, and the size of the batch where it is a number among
others. Before a step each rank computes the first reductions, the *totals*, of its own samples; they are merged, and
the rest is computed from them. Where the model goes on with one, the graph has a call of `of_batch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autovaruna._torch import OpOverload, schema_of, storage_of
from autovaruna.errors import TraceError
from autovaruna.graph.batch.interpret import BatchAnalysis, from_inputs, is_number, picked_symbols
from autovaruna.graph.batch.powers import Powers
from autovaruna.graph.evaluate import evaluate
from autovaruna.graph.facts import Fact, KnownGraph, tensors_in
from autovaruna.graph.lengths import free_value
from autovaruna.graph.operators import (
    KEEPING,
    MEAN,
    SUM,
    SUM_OF,
    WITH_TENSORS,
    BatchShare,
    Linearity,
    ScalingUse,
    Trait,
    ValueSource,
    arguments,
    as_tensor,
    aten,
    count_by_class,
    give,
    has,
    is_differentiable,
    is_of_batch,
    of_batch,
    operator_of,
    reached,
)
from autovaruna.graph.source_lines import origin
from autovaruna.graph.traced import NO_TOTALS, BatchTotals

_HALF = frozenset({torch.float16, torch.bfloat16})
_KEPT = ("stack_trace", "nn_module_stack", "precision")  # what a new node has of the one before which it is put
_NUMBERS = frozenset({"Tensor", "number", "float", "Optional[number]", "Optional[float]", "Optional[Tensor]"})
"""Kinds of arguments that are computed with; others are shapes and places."""


def mark_totals(graph: KnownGraph, is_added: bool) -> BatchTotals:
    """Finds the values of a graph that are of the whole batch, and puts calls of `of_batch` where they are used.

    A graph of one fixed batch size has none. With `is_added`, losses of micro-batches are added up, not averaged.
    """
    sizes, facts = graph.sizes, graph.facts
    if sizes.symbol is None:
        return NO_TOTALS
    additions = _Additions(graph.module.graph, facts)
    means = _CountedMeans(graph, additions)
    for node in list(graph.module.graph.nodes):
        if node.op == "call_function" and (count := means.count_of(node)) is not None:
            means.part(node, count)
    known = from_inputs(graph)
    values = BatchAnalysis(graph, known)
    marks = _Marks(graph, values, additions)
    marks.give_totals(known)
    marks.give_lengths(known)
    tensors = marks.give_sizes(is_added)
    if not marks.given:
        return NO_TOTALS
    sources = {source for source, _ in marks.given.values()}
    needed = _what_makes([node for node in known if node.name in sources], known, facts)
    merges = {node: merge for node in needed if (merge := values[node].merge) is not None}
    before = [node.name for node in _what_makes(merges, known, facts) if not sizes.is_given(node)]
    after = [node.name for node in needed if values.is_whole(node) and node not in merges and not sizes.is_given(node)]
    return BatchTotals(
        {node.name: merge for node, merge in merges.items()}, tuple(before), (*tensors, *after), marks.given
    )


def _what_makes(nodes: Iterable[fx.Node], known: Iterable[fx.Node], facts: Mapping[str, Fact]) -> list[fx.Node]:
    """Returns nodes, the operations among `known` that they need, and what changed their memory before; in order."""
    operations = {node: place for place, node in enumerate(known) if node.op == "call_function"}
    wanted = set(nodes)
    while True:
        last: dict[int, int] = {}
        for node in wanted & operations.keys():
            for storage in facts[node.name].makes | facts[node.name].reads:
                last[storage] = max(last.get(storage, 0), operations[node])
        new = {source for node in wanted for source in node.all_input_nodes}
        for node, place in operations.items():
            if any(place < last.get(storage, 0) for storage in facts[node.name].writes):
                new.add(node)
        if new <= wanted:
            return [node for node in operations if node in wanted]
        wanted |= new


class _Marks:
    """Puts calls of `of_batch` into a graph; `given` has the node that each stands for, and what becomes of it."""

    def __init__(self, graph: KnownGraph, values: BatchAnalysis, additions: _Additions) -> None:
        self._known = graph
        self._graph, self._facts, self._sizes = graph.module.graph, graph.facts, graph.sizes
        self._values = values
        self._add = additions
        self._in_outputs = self._makes_outputs()
        self.given: dict[str, tuple[str, ScalingUse]] = {}

    def give_totals(self, known: Sequence[fx.Node]) -> None:
        """Marks a value of the whole batch wherever the graph goes on from it."""
        powers, tail = Powers(self._values, self._sizes), _linear_tail(self._graph)
        for value in [node for node in known if self._values[node].share is BatchShare.WHOLE]:
            for user in [user for user in value.users if user in self._in_outputs and self._goes_on(value, user)]:
                use = _use(value, user, powers, tail)
                is_cast = use is not ScalingUse.PLAIN or _is_plain(value)
                user.replace_input_with(value, self._stand_in(user, value, use, user if is_cast else value))

    def give_lengths(self, known: Sequence[fx.Node]) -> None:
        """Has the graph go on from the lengths of the whole batch: greatest or least numbers of its inputs.

        What makes them, and follows from them and the batch size alone, stays: the whole batch's are computed by it.
        """
        users = self._in_outputs - {node for node in known if self._values.is_whole(node)}
        taken: dict[fx.Node, fx.Node] = {}
        for number in [node for node in known if self._values[node].is_extreme and _is_plain(node)]:
            sources = number.all_input_nodes
            if taken.keys().isdisjoint(sources):
                (tensor,) = sources
                taken[tensor] = self._stand_in(number, tensor, ScalingUse.PLAIN, tensor)
            taken[number] = self._add.again(number, taken)
            for user in [user for user in number.users if user in users and not is_of_batch(user)]:
                if isinstance(user.meta.get("val"), Tensor):
                    user.replace_input_with(number, taken[number])
        for node in reversed(taken.values()):
            if not node.users:
                self._graph.erase_node(node)
                del self._facts[node.name]
        self.given = {name: mark for name, mark in self.given.items() if name in self._facts}

    def give_sizes(self, is_added: bool) -> list[str]:
        """Has the graph compute with the size of the whole batch; returns the tensors that the sizes become.

        A micro-batch has its own size where losses are added up and that makes a sum of what is none; where they are
        averaged, if a loss divides sums over the samples by it, or scales them.
        """
        powers, tail = Powers(self._values, self._sizes, is_added), _linear_tail(self._graph)
        size_of, in_outputs = self._numbers_of_sizes(), self._makes_outputs()

        def has_its_own(user: fx.Node) -> bool:
            """Whether an operation needs the size of the micro-batch: its result is added up to a loss, and no more."""
            others = [each for each in user.all_input_nodes if each not in size_of]
            if is_added:
                is_own = operator_of(user).linearity is Linearity.MULTIPLY and not any(map(powers.sum_in, others))
            else:
                is_own = any(self._values[each].source & (ValueSource.SAMPLES | ValueSource.TOTAL) for each in others)
            return is_own and user in tail and tail.issuperset(each for each in user.users if each.op != "output")

        made: list[str] = []
        uses = [(number, user) for number in size_of for user in number.users if user not in size_of]
        for number, user in [(number, user) for number, user in uses if _computes_with(user, number)]:
            if user in in_outputs and not has_its_own(user):
                tensor = self._add.before(user, as_tensor, size_of[number], _dtype(number, user))
                _replace(user, number, self._stand_in(user, tensor, ScalingUse.PLAIN, tensor))
                made.append(tensor.name)
        return made

    def _stand_in(self, user: fx.Node, value: fx.Node, use: ScalingUse, like: fx.Node) -> fx.Node:
        """Returns a new call of `of_batch`, right before a node, of the dtype of another one."""
        node = self._add.before(user, of_batch, value, use, like.meta["val"].dtype)
        self.given[node.name] = value.name, use
        return node

    def _makes_outputs(self) -> set[fx.Node]:
        """Returns what micro-batches make the outputs of: neither what is computed before, nor state."""
        outliving = self._known.outliving_storages()
        outputs: set[fx.Node] = set()
        state: set[fx.Node] = set()
        for node in reversed(self._graph.nodes):
            writes = self._facts[node.name].writes if node.name in self._facts else frozenset()
            if writes & outliving or not state.isdisjoint(node.users):
                state.add(node)
            if node.op == "output" or writes or any(user in outputs for user in node.users if not is_of_batch(user)):
                outputs.add(node)
        return outputs - state

    def _goes_on(self, value: fx.Node, user: fx.Node) -> bool:
        """Whether a node goes on from a value of the whole batch to numbers of a micro-batch, or to the loss."""
        if user.op != "call_function" or is_of_batch(user) or self._values.is_whole(user):
            return False
        result = user.meta.get("val")
        if not isinstance(result, Tensor):
            return False
        if not is_differentiable(result):
            return not _is_plain(value) and not self._is_own_size(value)
        return not _is_plain(value) or _scales(user) is not None

    def _is_own_size(self, value: fx.Node) -> bool:
        """Whether a tensor becomes a size that stays that of the micro-batch: integers that go with it stay so, too."""
        found = [(user, self._values[user]) for user in value.users]
        users = [user for user, known in found if known.share is BatchShare.WHOLE and not known.is_extreme]
        return any(_is_plain(user) or self._is_own_size(user) for user in users)

    def _numbers_of_sizes(self) -> dict[fx.Node, fx.Node]:
        """Returns the sizes of the batch that are numbers in the graph, or tensors of one, each with the size it is."""
        found: dict[fx.Node, fx.Node] = {}
        for node in self._graph.nodes:
            value, sources = node.meta.get("val"), node.all_input_nodes
            is_size = isinstance(value, torch.SymInt | torch.SymFloat) and self._sizes.is_given(node)
            if is_size and self._sizes.grows(value):
                found[node] = node
            elif has(node, Trait.SAME_NUMBER) and is_number(node) and len(sources) == 1 and sources[0] in found:
                found[node] = found[sources[0]]
        return found


def _is_plain(node: fx.Node) -> bool:
    return not isinstance(node.meta["val"], Tensor)


def _use(value: fx.Node, user: fx.Node, powers: Powers, tail: Collection[fx.Node]) -> ScalingUse:
    """Returns what becomes of a value of the whole batch in a node that goes on from it."""
    first, second = (*user.args, None, None)[:2]
    is_divided = _scales(user) is Linearity.DIVIDE and second is value
    if is_divided and (powers.sum_in(first) is not None or powers.ends_in_sums(user, tail)):
        return ScalingUse.DIVISOR
    if _scales(user) is Linearity.MULTIPLY and powers.sum_in(first if second is value else second) is not None:
        return ScalingUse.FACTOR
    return ScalingUse.PLAIN


def _scales(user: fx.Node) -> Linearity | None:
    """Says whether a node multiplies tensors, or divides one by another, and does nothing else."""
    linearity = operator_of(user).linearity
    is_plain = linearity in (Linearity.MULTIPLY, Linearity.DIVIDE) and str(user.target).endswith(".Tensor")
    return linearity if is_plain else None


def _linear_tail(graph: fx.Graph) -> set[fx.Node]:
    """Returns what goes into numbers that are outputs by being scaled and added up alone."""

    def terms(node: fx.Node) -> list[fx.Node]:
        linearity = operator_of(node).linearity
        if linearity is Linearity.DIVIDE:
            return [each for each in node.args[:1] if isinstance(each, fx.Node)]
        return node.all_input_nodes if linearity is Linearity.MULTIPLY or linearity in KEEPING else []

    return set(reached(filter(is_number, graph.output_node().all_input_nodes), terms))


def _computes_with(user: fx.Node, number: fx.Node) -> bool:
    """Whether an operation of torch's computes floating-point numbers with a size."""
    value: Any = user.meta.get("val")
    if not isinstance(user.target, OpOverload) or not isinstance(value, Tensor) or not is_differentiable(value):
        return False
    kinds = _kinds(user)
    is_read = any(given is number and kinds[name] in _NUMBERS for name, given in arguments(user).items())
    return is_read and not has(user, Trait.NUMBERS_PLACES)


def _kinds(node: fx.Node) -> dict[str, str]:
    target: Any = node.target
    return {argument.name: str(argument.type) for argument in schema_of(target).arguments}


def _dtype(number: fx.Node, user: fx.Node) -> torch.dtype:
    """Returns a dtype for a number that is a tensor now, which leaves the operation's that of its result."""
    value, result = number.meta["val"], user.meta["val"].dtype
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, torch.SymInt):
        return torch.int64
    return result if result.is_floating_point else torch.float64


def _replace(user: fx.Node, number: fx.Node, given: fx.Node) -> None:
    target: Any = user.target
    kinds = _kinds(user)
    if not all(kinds[name] == "Tensor" for name, each in arguments(user).items() if each is number):
        if target not in WITH_TENSORS:
            raise TraceError(
                f"The size of the batch is a number that {user.name} computes with, at {origin(user) or user.name}: "
                "micro-batches would give it another one. Expected an operation that takes it as a tensor; make it one "
                "(torch.tensor(len(x))), or multiply by it."
            )
        user.target = WITH_TENSORS[target]
    user.replace_input_with(number, given)


class _CountedMeans:
    """Parts each mean over a number of elements that the inputs decide into a sum and its count.

    Such are losses over the labels that are not ignored, and means of what a mask has picked. Micro-batches have
    unequal counts, so the mean of their means is not that of the batch.
    """

    def __init__(self, graph: KnownGraph, additions: _Additions) -> None:
        self._known = set(from_inputs(graph))
        self._sizes, self._facts = graph.sizes, graph.facts
        self._add = additions
        masks = picked_symbols(graph.module.graph)
        self._masks = {symbol: mask for symbol, mask in masks.items() if mask in self._known}

    def count_of(self, node: fx.Node) -> Callable[[], fx.Node] | None:
        """Returns what adds the count to the graph over which a node averages; None: it does not, or over all alike."""
        if has(node, Trait.AVERAGES_LABELS):
            given = arguments(node)
            target, weight = given["target"], given.get("weight")
            is_known = target in self._known and (weight is None or weight in self._known)
            if given["reduction"] != MEAN or not is_known:
                return None
            if is_differentiable(target.meta["val"]) or not self._sizes.has_samples(target):  # no labels of samples
                return None
            return lambda: self._labels(node, target, weight, given["ignore_index"])
        if node.target in SUM_OF or arguments(node).get("reduction") == MEAN:
            return self._picked(node)
        return None

    def part(self, node: fx.Node, count: Callable[[], fx.Node]) -> None:
        """Puts a sum over the count in the place of a mean."""
        users = list(node.users)
        made = count()
        dtype, memory = node.meta["val"].dtype, self._facts[node.name].makes
        if dtype in _HALF:  # a sum of many would overflow

            def wide(argument: fx.Node) -> fx.Node:
                value = argument.meta["val"]
                is_half = isinstance(value, Tensor) and value.dtype in _HALF
                return self._add.before(node, aten.to.dtype, argument, torch.float32) if is_half else argument

            node.args = tuple(wide(each) if isinstance(each, fx.Node) else each for each in node.args)
        if node.target in SUM_OF:
            node.target = SUM_OF[node.target]
        else:
            give(node, reduction=SUM)
        self._add.learn(node)
        after = node.next
        mean = self._add.before(after, aten.div.Tensor, node, made)
        if dtype in _HALF:
            mean = self._add.before(after, aten.to.dtype, mean, dtype)
        mean.meta |= {name: node.meta[name] for name in _KEPT if name in node.meta}
        self._facts[mean.name] = replace(self._facts[mean.name], makes=memory)
        for user in users:
            user.replace_input_with(node, mean)

    def _labels(self, node: fx.Node, target: fx.Node, weight: fx.Node | None, ignored: int) -> fx.Node:
        """Adds the number of labels that are not ignored, or the sum of the weights of their classes."""
        is_counted = self._add.before(node, aten.ne.Scalar, target, ignored)
        if weight is None:
            return self._add.before(node, aten.sum.default, is_counted)
        if weight.op in ("get_attr", "placeholder"):
            some_class = self._add.before(node, aten.mul.Tensor, target, is_counted)
            weights = self._add.before(node, aten.index.Tensor, weight, [some_class])
            weights = self._add.before(node, aten.mul.Tensor, weights, is_counted)
        else:  # it may itself be made of the labels
            num_classes = free_value(weight).shape[0]
            if not isinstance(num_classes, int):
                raise TraceError(
                    f"The number of classes at {origin(node) or node.name} follows from a length that varies."
                )
            by_class = self._add.before(node, count_by_class, target, ignored, num_classes)
            weights = self._add.before(node, aten.mul.Tensor, weight, by_class)
        return self._add.before(node, aten.sum.default, weights)

    def _picked(self, node: fx.Node) -> Callable[[], fx.Node] | None:
        """Returns what adds the number of elements that a node averages, if they were picked by the inputs."""
        value, result = node.args[0], node.meta["val"]
        if not isinstance(value, fx.Node) or not self._sizes.depends_on_data(value) or not isinstance(result, Tensor):
            return None
        if self._sizes.depends_on_data(node) or not isinstance(value.meta["val"], Tensor):
            return None
        averaged = _number_of_elements(value) / _number_of_elements(node)
        symbols = [symbol for symbol in averaged.free_symbols if symbol in self._masks]
        if len(symbols) != 1 or not (averaged / symbols[0]).is_Integer:
            return None
        factor = int(averaged / symbols[0])

        def add() -> fx.Node:
            count = self._add.before(node, aten.count_nonzero.default, self._masks[symbols[0]])
            return count if factor == 1 else self._add.before(node, aten.mul.Tensor, count, factor)

        return add


def _number_of_elements(node: fx.Node) -> Any:
    lengths = (length.node.expr if isinstance(length, torch.SymInt) else length for length in free_value(node).shape)
    return math.prod(lengths, start=sympy.Integer(1))


class _Additions:
    """Adds nodes to a graph, and what is known of them to its facts."""

    def __init__(self, graph: fx.Graph, facts: MutableMapping[str, Fact]) -> None:
        self._graph, self._facts = graph, facts
        placeholder = next(iter(graph.find_nodes(op="placeholder")))
        self._modes = placeholder.meta["val"].fake_mode, facts[placeholder.name].value.fake_mode

    def before(self, user: fx.Node, target: Any, *args: Any) -> fx.Node:
        """Returns a new call of a function, right before a node, of whose line of the model it becomes a part."""
        with self._graph.inserting_before(user):
            node = self._graph.call_function(target, args)
        node.meta = {name: user.meta[name] for name in _KEPT if name in user.meta}
        self.learn(node)
        return node

    def again(self, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Returns a copy of a node, right after it, with other arguments of the same kinds in place of some."""
        with self._graph.inserting_after(node):
            copy = self._graph.node_copy(node, lambda each: made.get(each, each))
        reads = frozenset(storage for each in copy.all_input_nodes for storage in self._facts[each.name].makes)
        self._facts[copy.name] = replace(self._facts[node.name], reads=reads)
        return copy

    def learn(self, node: fx.Node) -> None:
        """Notes what a node returns, and what else is known of it: that it is new, or has other arguments now."""
        symbolic, numeric = self._modes
        with torch.no_grad(), symbolic:
            node.meta["val"] = evaluate([node], lambda each: each.meta["val"], [node])[node]
        with numeric:
            value = evaluate([node], lambda each: self._facts[each.name].value, [node])[node]
        tensors = tensors_in(value)
        known = self._facts.get(node.name)
        given = [self._facts[each.name] for each in node.all_input_nodes]
        memory = {storage_of(f.value): place for f in given if isinstance(f.value, Tensor) for place in f.makes}
        self._facts[node.name] = Fact(
            value=value,
            needs_gradient=any(tensor.requires_grad for tensor in tensors),
            reads=frozenset(storage for fact in given for storage in fact.makes),
            writes=frozenset(),
            makes=frozenset(memory.get(storage_of(each), storage_of(each)) for each in tensors),
            is_random=False,
            num_flops=0.0 if known is None else known.num_flops,
        )

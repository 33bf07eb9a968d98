"""Gives every micro-batch the size of the whole batch where a model computes with it, as a number among others.

A loss may divide sums over the samples by it, or scale what it adds up: a micro-batch has its own size there, since
losses are averaged. If they are added up, it has its own size where that makes a sum of what is none. Everywhere else
it is the number that plain PyTorch computes with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna.errors import TraceError
from autovaruna.graph.arguments import arguments
from autovaruna.graph.batch.additions import Additions
from autovaruna.graph.batch.linear import DIVIDE, JOIN, KEEP_MEANS, MULTIPLY, VIEWS
from autovaruna.graph.batch.of_batch import Use, as_tensor, of_batch
from autovaruna.graph.batch.reductions import SAME_NUMBER, Reductions, name_of
from autovaruna.graph.origin import origin
from autovaruna.graph.sizes import Sizes

aten = torch.ops.aten
_PLACES = frozenset({"arange", "range", "linspace", "logspace"})
"""Operations whose numbers are lengths, as their results have them."""
_NUMBERS = frozenset({"Tensor", "number", "float", "Optional[number]", "Optional[float]", "Optional[Tensor]"})
"""Kinds of arguments that are computed with; others are shapes and places."""
_WITH_TENSORS: Mapping[Any, Any] = {
    aten.mul.Scalar: aten.mul.Tensor,
    aten.mul_.Scalar: aten.mul_.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.div_.Scalar: aten.div_.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.pow.Scalar: aten.pow.Tensor_Tensor,
    aten.masked_fill.Scalar: aten.masked_fill.Tensor,
}
"""What an operation of a tensor and a number is called where both are tensors."""


def give_batch_size(
    graph: fx.Graph,
    sizes: Sizes,
    batch: Collection[str],
    in_outputs: Collection[fx.Node],
    additions: Additions,
    is_added: bool,
) -> tuple[dict[str, tuple[str, Use]], list[str]]:
    """Has a graph compute with the size of the whole batch; returns the calls of `of_batch`, and what they are made of.

    Args:
        graph: The graph.
        sizes: Its sizes.
        batch: Names of the inputs whose first dimension is the batch.
        in_outputs: What the outputs are made of, and no state.
        additions: Adds nodes to the graph.
        is_added: Whether losses of micro-batches are added up, rather than averaged.

    Raises:
        TraceError: an operation takes the size in a way that cannot be given another one.
    """
    values: dict[str, tuple[str, Use]] = {}
    made: list[str] = []
    found = _Uses(graph, sizes, batch, is_added)
    for number, size, user in list(found):
        if user not in in_outputs or found.has_its_own(user):
            continue
        dtype = _dtype(number, user)
        tensor = additions.before(user, as_tensor, size, dtype)
        given = additions.before(user, of_batch, tensor, Use.PLAIN, dtype)
        values[given.name] = tensor.name, Use.PLAIN
        made.append(tensor.name)
        _replace(user, number, given)
    return values, made


class _Uses:
    """Yields the sizes of the batch that operations compute with: the number, the size that it is, the operation."""

    def __init__(self, graph: fx.Graph, sizes: Sizes, batch: Collection[str], is_added: bool) -> None:
        self._sizes = sizes
        self._reductions = Reductions(sizes, batch, is_added)
        self._is_added = is_added
        self._size_of: dict[fx.Node, fx.Node] = {}
        self._fed: set[fx.Node] = set()
        for node in graph.nodes:
            if _is_size(node, sizes):
                self._size_of[node] = node
            elif name_of(node) in SAME_NUMBER and _is_number(node) and self._only_size(node) is not None:
                self._size_of[node] = self._only_size(node)  # type: ignore[assignment]
            elif node.name in batch or not self._fed.isdisjoint(node.all_input_nodes):
                self._fed.add(node)
        self._tail = linear_tail(graph)

    def __iter__(self) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
        for number, size in self._size_of.items():
            for user in number.users:
                if user not in self._size_of and _computes_with(user, number):
                    yield number, size, user

    def has_its_own(self, user: fx.Node) -> bool:
        """Whether an operation needs the size of the micro-batch: its result is added up to a loss, and no more."""
        others = [each for each in user.all_input_nodes if each not in self._size_of]
        if self._is_added:
            is_own = name_of(user) in MULTIPLY and not any(map(self._reductions.sum_in, others))
        else:
            is_own = not self._fed.isdisjoint(others)
        return (
            is_own and user in self._tail and self._tail.issuperset(each for each in user.users if each.op != "output")
        )

    def _only_size(self, node: fx.Node) -> fx.Node | None:
        sources = node.all_input_nodes
        return self._size_of.get(sources[0]) if len(sources) == 1 else None


def _is_size(node: fx.Node, sizes: Sizes) -> bool:
    value = node.meta.get("val")
    is_number = isinstance(value, torch.SymInt | torch.SymFloat)
    return is_number and sizes.is_given(node) and sizes.grows(value)


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 0


def _computes_with(user: fx.Node, number: fx.Node) -> bool:
    """Whether an operation of torch's computes floating-point numbers with a size."""
    value: Any = user.meta.get("val")
    if not isinstance(user.target, torch._ops.OpOverload) or not isinstance(value, Tensor) or name_of(user) in _PLACES:
        return False
    if not (value.is_floating_point() or value.is_complex()):
        return False
    kinds = {argument.name: str(argument.type) for argument in user.target._schema.arguments}
    return any(given is number and kinds[name] in _NUMBERS for name, given in arguments(user).items())


def linear_tail(graph: fx.Graph) -> set[fx.Node]:
    """Returns what goes into numbers that are outputs by being scaled and added up alone."""
    (output,) = graph.find_nodes(op="output")
    waiting = [node for node in output.all_input_nodes if _is_number(node)]
    tail = set(waiting)
    while waiting:
        node = waiting.pop()
        name = name_of(node)
        sources: list[Any] = []
        if name in MULTIPLY | KEEP_MEANS | JOIN | VIEWS:
            sources = node.all_input_nodes
        elif name in DIVIDE:
            sources = [node.args[0]]
        new = {each for each in sources if isinstance(each, fx.Node)} - tail
        tail |= new
        waiting += new
    return tail


def _dtype(number: fx.Node, user: fx.Node) -> torch.dtype:
    """Returns a dtype for a number that is a tensor now, which leaves the operation's that of its result."""
    value = number.meta["val"]
    if isinstance(value, Tensor):
        return value.dtype
    result: torch.dtype = user.meta["val"].dtype
    if isinstance(value, torch.SymInt):
        return torch.int64
    return result if result.is_floating_point else torch.float64


def _replace(user: fx.Node, number: fx.Node, given: fx.Node) -> None:
    target: Any = user.target
    kinds = {argument.name: str(argument.type) for argument in target._schema.arguments}
    takes_tensor = all(kinds[name] == "Tensor" for name, each in arguments(user).items() if each is number)
    if not takes_tensor:
        if target not in _WITH_TENSORS:
            raise TraceError(
                f"The size of the batch is a number that {user.name} computes with, at {origin(user) or user.name}: "
                "micro-batches would give it another one. Expected an operation that takes it as a tensor; make it one "
                "(torch.tensor(len(x))), or multiply by it."
            )
        user.target = _WITH_TENSORS[target]
    user.replace_input_with(number, given)

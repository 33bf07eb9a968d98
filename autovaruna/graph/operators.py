"""Says what a value may have to do with the batch, and lists what torch's operators do with samples: one row for each.

The rest of the room asks this table alone. What an operator that is not in it makes of several samples is no mean.
Which tensors an operator takes and changes, its schema says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, Flag, IntEnum, auto
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from autovaruna._torch import OpOverload, pytree, schema_of

aten = torch.ops.aten
Node = TypeVar("Node", bound=Hashable)
MEAN, SUM = 1, 2  # the numbers of ``reduction="mean"`` and ``"sum"`` in an operation
NORMS = frozenset({aten.batch_norm.default, aten.instance_norm.default})
STATISTICS, BY_SAMPLES = slice(3, 5), 5
"""Places among their arguments: of running statistics, and of whether they go by their samples and change these."""
WITH_TENSORS: Mapping[Any, Any] = {
    **{each.Scalar: each.Tensor for each in (aten.mul, aten.mul_, aten.div, aten.div_, aten.add, aten.sub, aten.rsub)},
    **dict.fromkeys((aten.pow.Tensor_Scalar, aten.pow.Scalar), aten.pow.Tensor_Tensor),
    aten.masked_fill.Scalar: aten.masked_fill.Tensor,
}
"""What an operation of a tensor and a number is called where both are tensors."""
SUM_OF: Mapping[Any, Any] = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}
"""The sum that a mean divides."""
EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
"""Operators that leave memory to chance."""


class ValueSource(Flag):
    """What a value is made of."""

    NONE = 0
    SAMPLES = auto()  # numbers of samples
    TOTAL = auto()  # what `of_batch` gives of them
    BATCH = auto()  # numbers of samples, a total, or the size of the batch
    STATE = auto()  # parameters and buffers


class Dependence(IntEnum):
    """How the numbers of a value depend on the batch."""

    NONE = 0  # they do not depend on it
    COUNTS = 1  # integers or masks, or what was counted from them
    COUNTS_OF_SEVERAL = 2  # those that were made of several samples' integers or masks
    SAMPLES = 3  # numbers of the samples, each in a place of its own
    ALL = 4  # numbers of several samples in one, or of one for all


class BatchShare(IntEnum):
    """What a value that follows from the inputs alone has to do with the batch."""

    FIXED = 0  # nothing, or it follows from its size
    WHOLE = 1  # it is a total, or made of totals
    SAMPLES = 2  # it has numbers of samples, or cannot be merged
    AFTER = 3  # it joins the two


class Merge(str, Enum):
    """How the totals of several mini-batches become that of all."""

    SUM = "sum"
    MEAN = "mean"
    LARGEST = "largest"
    SMALLEST = "smallest"


@dataclass(frozen=True)
class BatchValue:
    """What is known of the value of a node.

    Attributes:
        share: None: it does not follow from the inputs alone.
        merge: how it is merged if it is a total.
        is_extreme: whether it is the greatest or the least of the batch, or follows from such values alone.
    """

    source: ValueSource = ValueSource.NONE
    dependence: Dependence = Dependence.NONE
    share: BatchShare | None = None
    merge: Merge | None = None
    is_extreme: bool = False


class ScalingUse(str, Enum):
    """What becomes of a value of the whole batch in the term of a loss."""

    PLAIN = "plain"  # it is used as it is
    DIVISOR = "divisor"
    """It divides a sum over the samples of a micro-batch: the quotients are averaged, so it is given in proportion."""
    FACTOR = "factor"  # it multiplies such a sum

    def of_share(self, value: Tensor | float, share: float) -> Tensor | float:
        """Returns what a micro-batch gets, whose loss has the weight `share` in that of the global batch."""
        if self is ScalingUse.PLAIN:
            return value
        wide = value.double() if isinstance(value, Tensor) else value
        return wide * share if self is ScalingUse.DIVISOR else wide / share


def of_batch(value: Any, use: ScalingUse, dtype: torch.dtype) -> Tensor:
    """Stands in a graph for `value` over the whole batch; run by itself, what it is given is the whole batch."""
    return value.to(dtype) if isinstance(value, Tensor) else torch.scalar_tensor(value, dtype=dtype)


def is_of_batch(node: fx.Node) -> bool:
    """Whether a node of a graph stands for a value of the whole batch."""
    return node.target is of_batch


def as_tensor(number: Any, dtype: torch.dtype) -> Tensor:
    return torch.scalar_tensor(number, dtype=dtype)


def run_opaque(
    kept: Callable[..., list[Tensor]], batch: int, tensors: Sequence[Tensor], state: Sequence[Tensor]
) -> list[Tensor]:
    """Runs a module that is kept whole; a function, since graphs call functions."""
    return kept(batch, tensors, state)


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Yields nodes and what follows from each by a function, in any direction of a graph; each node once."""
    waiting = list(dict.fromkeys(starts))
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = [each for each in dict.fromkeys(following(node)) if each not in seen]
        seen.update(new)
        waiting += new


def count_by_class(target: Tensor, ignored: int, num_classes: int) -> Tensor:
    """Returns how often each class is among labels, shape ``(num_classes,)``; those that are ignored are left out."""
    is_counted = target.ne(ignored).reshape(-1)
    classes = target.reshape(-1) * is_counted
    return classes.new_zeros(num_classes).index_add(0, classes, is_counted.to(classes.dtype))


def arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of an operation by name, defaults included; those of other functions have no names."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return {}
    known = schema_of(target).arguments
    given = {argument.name: argument.default_value for argument in known if argument.has_default_value()}
    return given | dict(zip([argument.name for argument in known], node.args, strict=False)) | dict(node.kwargs)


def changed_by(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns those arguments of a call, of a list each, that its operation changes: as a rule its schema says so."""
    if operation is run_opaque:  # buffers; whether it has changed them nobody knows
        return list(args[3][args[0].num_parameters :])
    if operation in NORMS:
        return [*args[STATISTICS]] if args[BY_SAMPLES] else []
    if not isinstance(operation, OpOverload) or not schema_of(operation).is_mutable:
        return []
    known = schema_of(operation).arguments
    given = dict(zip([argument.name for argument in known], args, strict=False)) | dict(kwargs)
    if given.get("training") is False:  # else a normalisation changes statistics; the schema of most does not say so
        return []
    values = [given.get(each.name) for each in known if each.alias_info is not None and each.alias_info.is_write]
    return pytree.tree_leaves(values)


def give(node: fx.Node, **changed: Any) -> None:
    """Gives other arguments to an operation."""
    target: Any = node.target
    given = arguments(node) | changed
    node.args = tuple(given.pop(argument.name) for argument in schema_of(target).arguments if not argument.kwarg_only)
    node.kwargs = given


class Linearity(Enum):
    """What an operator makes of numbers that are sums or means over samples."""

    UNKNOWN = auto()
    LINEAR = auto()
    """It adds them, adds those of one argument up, puts them elsewhere, or takes nothing of them but their shape."""
    VIEW = auto()  # it returns a view of them
    MULTIPLY = auto()
    DIVIDE = auto()
    PRODUCT = auto()  # it adds products up
    BREAK = auto()  # what it makes of a mean, or of samples, is no mean


SCALING = frozenset({Linearity.MULTIPLY, Linearity.DIVIDE})
KEEPING = frozenset({Linearity.LINEAR, Linearity.VIEW})


class Trait(Flag):
    """What else an operator does."""

    NONE = 0
    ADDS_UP = auto()  # it adds samples up, if it makes one number of several
    SAME_NUMBER = auto()  # it gives a number as a tensor
    PICKS = auto()  # it takes some of the samples, where nothing of its result grows with the batch
    BY_INDEX = auto()  # it reads or writes at places along a dimension that its indices name
    FINDS_PLACES = auto()  # it finds places among the numbers that it is given
    NUMBERS_PLACES = auto()  # its numbers are lengths, as its result has them
    SHAPE_ALONE = auto()  # it takes nothing of its first argument but its shape
    FILLS = auto()  # it fills that shape with one number
    AS_ANOTHER = auto()  # it takes of its second argument the kind or shape alone
    LAYER = auto()  # with a weight it is a layer
    TELLS_FINITE = auto()  # it says which numbers are finite
    JOINS_MASKS = auto()  # it makes a mask of masks
    IN_BAGS = auto()  # its third argument says where bags begin among its indices
    AVERAGES_LABELS = auto()  # it is a loss over labels, some of which may not count


Lengths = Callable[[fx.Node], Iterable[Any]]  # returns the lengths of dimensions of a node's arguments


@dataclass(frozen=True)
class Operator:
    """One row of the table.

    Attributes:
        merge: how its results for several mini-batches become that for all.
        along: the dimensions along which its result for one place depends on other places.
        counts_along: those along which it does if the result is integers or masks.
        not_read: the argument whose numbers do not count: what labels weigh in all, or where bags begin.
        picks_by: the argument whose elements other than zero say what it picks.
    """

    linearity: Linearity = Linearity.UNKNOWN
    traits: Trait = Trait.NONE
    merge: Merge | None = None
    along: Lengths | None = None
    counts_along: Lengths | None = None
    not_read: int | None = None
    picks_by: int | None = None


def _shape(argument: Any) -> tuple[Any, ...]:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _by_dimension(node: fx.Node) -> Iterable[Any]:
    given = arguments(node)
    shape = _shape(node.args[0])
    dims = given.get("dim", given.get("dims"))
    places = [dims] if isinstance(dims, int) else list(dims or range(len(shape)))
    return [shape[place] for place in places if shape]


def _all(node: fx.Node) -> Iterable[Any]:
    return [length for source in node.all_input_nodes for length in _shape(source)]


def _steps(node: fx.Node) -> Iterable[Any]:
    shape = _shape(node.args[0])
    is_second = bool(arguments(node).get("batch_first")) and len(shape) == 3
    return shape[1:2] if is_second else shape[:1]


_LINEAR, _VIEW, _BREAK = Linearity.LINEAR, Linearity.VIEW, Linearity.BREAK
_LABELS = Operator(traits=Trait.AVERAGES_LABELS)
_TABLE: tuple[tuple[str, Operator], ...] = (
    # element by element
    (
        "add add_ sub sub_ rsub neg neg_ positive where nan_to_num copy_ fill fill_ masked_fill masked_fill_",
        Operator(_LINEAR),
    ),
    ("real imag view_as_real view_as_complex lerp", Operator(_LINEAR)),
    ("to _to_copy clone detach detach_ lift_fresh_copy", Operator(_LINEAR, Trait.SAME_NUMBER)),
    ("to.other", Operator(_LINEAR, Trait.SAME_NUMBER | Trait.AS_ANOTHER)),
    ("mul mul_", Operator(Linearity.MULTIPLY)),
    ("div div_", Operator(Linearity.DIVIDE)),
    ("isnan isinf isfinite", Operator(traits=Trait.TELLS_FINITE)),
    ("logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or", Operator(traits=Trait.JOINS_MASKS)),
    # shapes
    (
        "view alias squeeze unsqueeze expand permute transpose t diagonal unflatten movedim broadcast_to",
        Operator(_VIEW),
    ),
    ("unbind split split_with_sizes chunk", Operator(_VIEW)),
    ("select slice narrow", Operator(_VIEW, Trait.PICKS)),
    (
        "stack cat hstack vstack concat repeat tile select_scatter slice_scatter constant_pad_nd pad diag",
        Operator(_LINEAR),
    ),
    ("contiguous reshape flatten _unsafe_view resolve_conj resolve_neg", Operator(_LINEAR)),
    ("view_as expand_as type_as", Operator(_LINEAR, Trait.AS_ANOTHER)),
    ("zeros_like ones_like full_like new_zeros new_ones new_full", Operator(_LINEAR, Trait.SHAPE_ALONE | Trait.FILLS)),
    ("empty_like new_empty", Operator(_LINEAR, Trait.SHAPE_ALONE)),
    ("rand_like randn_like randint_like", Operator(traits=Trait.SHAPE_ALONE)),
    ("scalar_tensor full", Operator(traits=Trait.SAME_NUMBER)),
    ("arange range linspace logspace", Operator(traits=Trait.NUMBERS_PLACES)),
    # reductions
    ("sum nansum", Operator(_LINEAR, Trait.ADDS_UP, Merge.SUM)),
    ("trace", Operator(_LINEAR, Trait.ADDS_UP)),
    ("count_nonzero", Operator(traits=Trait.ADDS_UP | Trait.FINDS_PLACES, merge=Merge.SUM)),
    ("mean", Operator(_LINEAR, merge=Merge.MEAN)),
    ("max amax", Operator(_BREAK, merge=Merge.LARGEST)),
    ("min amin", Operator(_BREAK, merge=Merge.SMALLEST)),
    ("any", Operator(_BREAK, Trait.JOINS_MASKS, Merge.LARGEST)),
    ("all", Operator(_BREAK, Trait.JOINS_MASKS, Merge.SMALLEST)),
    ("argmax argmin", Operator(_BREAK, Trait.FINDS_PLACES)),
    ("norm linalg_vector_norm linalg_norm dist std var std_mean var_mean logsumexp prod trapezoid", Operator(_BREAK)),
    ("median nanmedian nanmean quantile mode linalg_det logdet linalg_slogdet", Operator(_BREAK)),
    # sums of products
    ("mv dot vdot inner linalg_vecdot baddbmm einsum tensordot", Operator(Linearity.PRODUCT, Trait.ADDS_UP)),
    ("linear matmul mm bmm addmm", Operator(Linearity.PRODUCT, Trait.ADDS_UP | Trait.LAYER)),
    # along a dimension
    ("softmax log_softmax _softmax _log_softmax", Operator(_BREAK, along=_by_dimension)),
    ("kthvalue", Operator(_BREAK, counts_along=_by_dimension)),
    ("cumsum", Operator(_LINEAR, Trait.FINDS_PLACES, along=_by_dimension)),
    ("cumsum_ sort logcumsumexp", Operator(traits=Trait.FINDS_PLACES, along=_by_dimension)),
    ("flip roll", Operator(_LINEAR, along=_by_dimension)),
    ("cumprod cumprod_ cummax cummin fft_*", Operator(along=_by_dimension)),
    ("diff", Operator(counts_along=_by_dimension)),
    ("argsort topk", Operator(traits=Trait.FINDS_PLACES, counts_along=_by_dimension)),
    ("bincount histc", Operator(counts_along=_all)),
    ("unique* _unique*", Operator(traits=Trait.FINDS_PLACES, counts_along=_all)),
    # at places
    ("index index_select gather", Operator(_LINEAR, Trait.PICKS | Trait.BY_INDEX)),
    ("index_put index_put_ scatter", Operator(_LINEAR, Trait.BY_INDEX)),
    ("index_add index_add_ scatter_add scatter_add_", Operator(_LINEAR, Trait.ADDS_UP | Trait.BY_INDEX)),
    ("index_copy index_copy_ scatter_", Operator(traits=Trait.BY_INDEX)),
    (
        "index_fill index_fill_ index_reduce index_reduce_ scatter_reduce scatter_reduce_",
        Operator(traits=Trait.BY_INDEX),
    ),
    ("embedding take_along_dim", Operator(traits=Trait.BY_INDEX)),
    ("embedding_bag", Operator(traits=Trait.IN_BAGS, not_read=2)),
    ("_embedding_bag", Operator(traits=Trait.IN_BAGS)),
    ("masked_select", Operator(picks_by=1)),
    ("nonzero", Operator(traits=Trait.FINDS_PLACES, picks_by=0)),
    ("is_nonzero nonzero_* searchsorted bucketize _logcumsumexp", Operator(traits=Trait.FINDS_PLACES)),
    # layers and losses
    ("lstm.input gru.input rnn_tanh.input rnn_relu.input", Operator(along=_steps)),
    ("instance_norm", Operator(along=lambda node: _shape(node.args[0])[2:])),
    ("scaled_dot_product_attention", Operator(along=lambda node: _shape(node.args[1])[-2:-1])),
    ("cross_entropy_loss nll_loss_nd nll_loss nll_loss2d", _LABELS),
    ("nll_loss_backward nll_loss2d_backward", Operator(not_read=-1)),
)
_NO_ROW = Operator()


def name_of(node: fx.Node) -> str:
    """Returns the name of an operator of torch's own, without its overload; empty for other functions."""
    target: Any = node.target
    is_own = isinstance(target, OpOverload) and target.namespace == "aten"
    return target.overloadpacket.__name__ if is_own else ""


def operator_of(node: fx.Node) -> Operator:
    """Returns the row of the operator that a node calls; an empty one for what is not listed."""
    name = name_of(node)
    return _row(name, str(node.target).removeprefix("aten.")) if name else _NO_ROW


@cache
def rows() -> dict[str, Operator]:
    """Returns the row of each name: of an operator, of one overload of it, or of all that a pattern matches."""
    return {name: row for names, row in _TABLE for name in names.split()}


@cache
def _row(name: str, overload: str) -> Operator:
    known = rows()
    matching = (row for pattern, row in known.items() if fnmatchcase(name, pattern))
    return known.get(overload) or known.get(name) or next(matching, _NO_ROW)


def has(node: fx.Node, trait: Trait) -> bool:
    """Whether the operator that a node calls does something."""
    return bool(operator_of(node).traits & trait)


def is_listed(node: fx.Node) -> bool:
    """Whether it is known how an operator makes one number of several samples."""
    row = operator_of(node)
    is_known = row.linearity in (Linearity.LINEAR, Linearity.PRODUCT) or Trait.ADDS_UP in row.traits
    return is_known or arguments(node).get("reduction") in (MEAN, SUM)


def adds_up(node: fx.Node) -> bool:
    """Whether a listed operator adds samples up, if it makes one number of several."""
    return has(node, Trait.ADDS_UP) or arguments(node).get("reduction") == SUM


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers, or may; a dropout that is off draws none."""
    target: Any = node.target
    if target is run_opaque:
        return True
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = arguments(node)
    return not any(given.get(name) == 0 for name in ("p", "dropout", "dropout_p", "train", "training"))


def is_differentiable(tensor: Tensor) -> bool:
    """Whether a tensor has other than integers and truth values."""
    return tensor.is_floating_point() or tensor.is_complex()


def aliases_of(node: fx.Node) -> list[Any]:
    """Returns what torch's schema says of each result of an operation that is memory of an argument."""
    if not isinstance(node.target, OpOverload):
        return []
    return [each.alias_info for each in schema_of(node.target).returns if each.alias_info is not None]

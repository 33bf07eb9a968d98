"""Finds where a graph may be cut: at the user's cut points, and where no smaller cut is next to one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from autovaruna.errors import InputError, TraceError
from autovaruna.graph.records import CutMark, Size, Value

CUT, WATCHED = "cut", "watched"
_tracing = threading.local()
_FIRST, _LAST = "nothing of the model lies before it", "nothing of the model lies after it"


@torch.library.custom_op("autovaruna::mark", mutates_args=())
def mark(x: Tensor, kind: str, key: str) -> Tensor:
    """Marks a tensor in a trace, `CUT` or `WATCHED`; `_fake` says what comes out."""
    return x.clone()


@mark.register_fake
def _fake(x: Tensor, kind: str, key: str) -> Tensor:
    """Has the strides of its input, which the operations after it were chosen by."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


mark.register_autograd(lambda ctx, gradient: (gradient, None, None))


def is_mark(node: fx.Node, kind: str = "") -> bool:
    """Whether a node of a graph is a mark, of one kind if that is given."""
    return node.target is torch.ops.autovaruna.mark.default and kind in ("", node.args[1])


def drop(marks: Sequence[fx.Node]) -> None:
    """Takes marks out of a graph; what used them uses what they marked."""
    for node in reversed(marks):
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)


class CutPoint(nn.Module):
    """Marks a place where a model may be cut, and returns its tensor as it is.

    Each is used once in a call. Where several tensors cross, one cut point on any of them is enough: what else is used
    later crosses beside it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, of any shape and dtype.

        Raises:
            InputError: `x` is no tensor.
        """
        if not isinstance(x, Tensor):
            raise InputError(
                f"A CutPoint takes one tensor and returns it: got {type(x).__name__}. Pass one of the tensors that "
                "cross; the others cross beside it."
            )
        names: dict[int, str] | None = getattr(_tracing, "names", None)
        if names is None:
            return x
        marked: Tensor = mark(x, CUT, names.setdefault(id(self), f"cut point {len(names)}"))
        return marked


@contextmanager
def named_cut_points(model: nn.Module) -> Iterator[None]:
    """Lets the cut points of a model leave markers with their paths, on this thread, while the context lasts."""
    _tracing.names = {id(point): path for path, point in _cut_points(model)}
    try:
        yield
    finally:
        _tracing.names = None


def _cut_points(model: nn.Module) -> Iterator[tuple[str, CutPoint]]:
    """Yields the cut points of a model with their paths; those in plain lists and dicts of its modules, too."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            for place, entry in _entries(value) if not name.startswith("_") else ():
                if isinstance(entry, CutPoint):
                    yield ".".join(filter(None, (path, name, place))), entry
        if isinstance(module, CutPoint):
            yield path, module


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        yield from ((str(place), entry) for place, entry in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(key), entry) for key, entry in value.items())
    else:
        yield "", value


@dataclass(frozen=True)
class Marker:
    """A place in a traced graph.

    Attributes:
        users: nodes that used it through the cut point.
        region: whether it lies inside a region that is one node of the graph.
    """

    name: str
    source: str
    users: tuple[str, ...]
    place: int
    region: bool = False


def take_markers(module: fx.GraphModule) -> tuple[Marker, ...]:
    """Takes the markers out of a graph and returns where they were, in order of execution.

    Raises:
        TraceError: a cut point was used more than once.
    """
    markers = _take(module)
    counts = Counter(marker.name for marker in markers)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise TraceError(
            f"The CutPoint {repeated[0]} is used {counts[repeated[0]]} times in one call: got one mark for several "
            "places. Expected each to be used once; make one for each place, in an nn.ModuleList for a loop."
        )
    return tuple(markers)


def _take(module: fx.GraphModule, is_region: bool = False) -> list[Marker]:
    markers: list[Marker] = []
    kept = 0
    marks = [node for node in module.graph.nodes if is_mark(node, CUT)]
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and isinstance(region := getattr(module, str(node.target), None), fx.GraphModule):
            markers += _take(region, is_region=True)
        if node in marks:
            users = tuple(user.name for user in _final_users(node))
            markers.append(Marker(str(node.args[2]), _source(node).name, users, kept, is_region))
        kept += not is_mark(node)
    drop(marks)
    if markers and is_region:
        module.recompile()
    return markers


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return _source(source) if is_mark(source) else source


def _final_users(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if is_mark(user):
            yield from _final_users(user)
        else:
            yield user


class Blocks(Protocol):
    """What `locate` asks of a grouped graph."""

    nodes: dict[str, fx.Node]
    block_of: dict[str, int]

    def users(self, node: fx.Node) -> set[int]:
        """Returns the blocks that use a node, directly or through nodes that are in no block."""


def locate(
    markers: Sequence[Marker],
    blocks: Sequence[Sequence[str]],
    graph: Blocks,
    joins: Sequence[tuple[Sequence[str], str]],
) -> list[CutMark]:
    """Finds the cut that each marker means: its value is made before, what used it comes after."""
    places = {name: place for place, name in enumerate(graph.nodes)}
    starts = [places[names[0]] for names in blocks]
    found = []
    for marker in markers:
        least = graph.block_of.get(marker.source, -1) + 1
        most = min(_user_blocks(marker, graph), default=len(blocks))
        block = min(max(sum(start < marker.place for start in starts), least), most)
        reason = _reason(marker, least, most, block, len(blocks), joins)
        found.append(CutMark(marker.name, -1 if reason else block, reason))
    return found


def _user_blocks(marker: Marker, graph: Blocks) -> set[int]:
    found: set[int] = set()
    for name in marker.users if not marker.region else ():
        found |= {graph.block_of[name]} if name in graph.block_of else graph.users(graph.nodes[name])
    return found


def _reason(
    marker: Marker, least: int, most: int, block: int, num_blocks: int, joins: Sequence[tuple[Sequence[str], str]]
) -> str:
    """Returns why there can be no cut; empty if there can be one."""
    if marker.region:
        return "it lies inside a region of the graph that is run as one operation (torch.no_grad(), torch.cond)"
    if least > most:
        return why_joined(marker.source, marker.users, joins)
    if block == 0:
        return _FIRST
    return _LAST if block == num_blocks else ""


def why_joined(source: str, users: Collection[str], joins: Sequence[tuple[Sequence[str], str]]) -> str:
    """Returns the rules that keep a value and its users on one stage, by the shortest chain of joins."""
    reached: dict[str, tuple[str, ...]] = {source: ()}
    waiting = [source]
    while waiting:
        name = waiting.pop(0)
        if name in users:
            return "no cut may part what is before and after it: " + "; ".join(dict.fromkeys(reached[name]))
        for members, rule in joins:
            if name in members:
                new = [member for member in members if member not in reached]
                reached |= dict.fromkeys(new, (*reached[name], rule))
                waiting += new
    return "no cut may part what is before and after it"


def crossing_sizes(values: Sequence[Value], num_blocks: int) -> list[Size]:
    """Returns the bytes that cross the cut after each block (the last one: nothing does)."""
    fixed, sample = [0.0] * (num_blocks + 1), [0.0] * (num_blocks + 1)
    for value in values:
        if value.consumers:
            last = max(value.consumers)
            for totals, num_bytes in ((fixed, value.size.fixed_bytes), (sample, value.size.sample_bytes)):
                totals[value.producer] += num_bytes
                totals[last] -= num_bytes
    running = Size(0.0, 0.0)
    sizes = []
    for index in range(num_blocks):
        running = Size(running.fixed_bytes + fixed[index], running.sample_bytes + sample[index])
        sizes.append(running)
    return sizes


def merge_free_blocks(
    blocks: Sequence[tuple[str, ...]],
    crossing: Sequence[Size],
    is_free: Callable[[int], bool],
    marked: Collection[int] = (),
) -> tuple[tuple[str, ...], ...]:
    """Joins blocks so that only cuts are left that no other cut beats, and those that the user has `marked`.

    `crossing` is what crosses the cut after each block; `is_free` says whether a block holds views alone.
    """
    kept: list[int] = []
    run: list[int] = []
    for cut in range(len(blocks) - 1):
        if run and not is_free(cut):
            kept += _unbeaten(run, crossing)
            run = []
        run.append(cut)
    kept += _unbeaten(run, crossing)
    if len(blocks) > 1 and is_free(len(blocks) - 1):
        kept = [cut for cut in kept if cut not in run]
    if kept and is_free(0):
        first_run = [cut for cut in range(len(blocks) - 1) if all(is_free(block) for block in range(cut + 1))]
        kept = [cut for cut in kept if cut not in first_run]
    kept = sorted({*kept, *marked})
    starts = [0, *(cut + 1 for cut in kept)]
    ends = [*(cut + 1 for cut in kept), len(blocks)]
    return tuple(
        tuple(name for block in blocks[start:end] for name in block) for start, end in zip(starts, ends, strict=True)
    )


def _unbeaten(run: Sequence[int], crossing: Sequence[Size]) -> list[int]:
    return [cut for cut in run if not any(_beats(other, cut, crossing) for other in run)]


def _beats(one: int, other: int, crossing: Sequence[Size]) -> bool:
    """Whether cut `one` is never worse than `other`; of equals the earlier one wins."""
    mine, its = crossing[one], crossing[other]
    never_worse = mine.fixed_bytes <= its.fixed_bytes and mine.sample_bytes <= its.sample_bytes
    is_equal = mine == its
    return one != other and never_worse and (not is_equal or one < other)

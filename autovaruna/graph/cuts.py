"""Marks places in a trace: those where a user lets the model be cut, and tensors that hooks watch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import replaced
from autovaruna.errors import InputError, TraceError
from autovaruna.graph.operators import reached

CUT, WATCHED = "cut", "watched"
_tracing = threading.local()


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
        """Returns `x`, of any shape and dtype."""
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
    """Has the cut points of a model leave markers with their paths, on this thread, while the context lasts."""
    with replaced(_tracing, "names", {id(point): path for path, point in _cut_points(model)}):
        yield


def _cut_points(model: nn.Module) -> Iterator[tuple[str, CutPoint]]:
    """Yields the cut points of a model with their paths; those in plain lists and dicts of its modules, too."""
    for path, module in model.named_modules():
        if isinstance(module, CutPoint):
            yield path, module
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            for place, entry in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(entry, CutPoint):
                    yield f"{path}.{name}.{place}".removeprefix("."), entry


@dataclass(frozen=True)
class Marker:
    """A place in a traced graph; `users` used it through the cut point."""

    name: str
    source: str
    users: tuple[str, ...]
    place: int


def pop_markers(module: fx.GraphModule) -> tuple[Marker, ...]:
    """Takes the markers out of a graph and returns where they were, in order of execution; each may be used once."""
    markers: list[Marker] = []
    place = 0
    marks = [node for node in module.graph.nodes if is_mark(node, CUT)]
    for node in module.graph.nodes:
        if node in marks:
            through = reached([node], lambda each: each.users if is_mark(each) else ())
            users = tuple(each.name for each in through if not is_mark(each))
            source = node
            while is_mark(source):
                source = source.args[0]
            markers.append(Marker(str(node.args[2]), source.name, users, place))
        place += not is_mark(node)
    drop(marks)
    counts = Counter(marker.name for marker in markers)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise TraceError(
            f"The CutPoint {repeated[0]} is used {counts[repeated[0]]} times in one call: got one mark for several "
            "places. Expected each to be used once; make one for each place, in an nn.ModuleList for a loop."
        )
    return tuple(markers)

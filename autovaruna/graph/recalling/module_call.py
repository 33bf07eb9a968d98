"""Takes the call of a submodule apart, as `recall.py` does with the call of an operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from autovaruna.graph.layout import Layout, NotPlainError, layout_of, storage_of
from autovaruna.graph.recalling.recall import CONSTANTS, Call, switches
from autovaruna.graph.tree import Constant, Leaf, Opaque, Record, TensorLeaf, Tree, flatten

_FAKE = torch._C._TorchDispatchModeKey.FAKE


@dataclass(frozen=True)
class ModuleCall:
    """A call of a submodule in a trace.

    Attributes:
        module: The submodule.
        call: What decides about the result besides what its modules hold: the arguments and the own tensors.
        num_given: How many of those are arguments.
        nodes: Which node each of those is.
        key: What is equal for calls that may give the same.
    """

    module: nn.Module
    call: Call
    num_given: int
    nodes: tuple[fx.Node, ...]
    key: tuple[Any, ...]


@contextmanager
def untraced() -> Iterator[None]:
    """Leaves no nodes for what is done with fake tensors while the context lasts."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def take_apart(tracer: Any, module: nn.Module, args: Any, kwargs: Any) -> ModuleCall:
    """Takes a call apart.

    Raises:
        NotPlainError: what the module returns may depend on more than can be compared.
    """
    mode = torch._C._get_dispatch_mode(_FAKE)
    if not isinstance(mode, FakeTensorMode):
        raise NotPlainError
    call = Call(mode, lambda tensor: False, [type(module), *switches()])
    with untraced():
        given, tree = flatten((args, kwargs))
        tensors = [*given, *_own_tensors(module)]
        call.add(_constants(tree))
        call.add(tensors)
    first: dict[int, int] = {}
    pattern = tuple(first.setdefault(id(each), place) for place, each in enumerate(tensors))
    return ModuleCall(module, call, len(given), nodes_of(tracer, tensors), (*call.key, str(tree.spec), pattern))


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    for each in module.modules():
        for own in (each._parameters, each._buffers):
            yield from (tensor for tensor in own.values() if tensor is not None)


def _constants(tree: Tree) -> list[Any]:
    """Returns the leaves of a structure, tensors left out, with the structure of dataclasses among them.

    Raises:
        NotPlainError: one hides tensors.
    """
    return [_constant(leaf) for leaf in tree.leaves]


def _constant(leaf: Leaf) -> list[Any]:
    match leaf:
        case Constant(value):
            return [value]
        case TensorLeaf():
            return []
        case Record(cls, _, trees):
            return [f"{cls} {id(cls)}", *((str(tree.spec), _constants(tree)) for tree in trees)]
        case Opaque():
            raise NotPlainError


def nodes_of(tracer: Any, tensors: Sequence[Tensor]) -> tuple[fx.Node, ...]:
    """Returns which node of the graph each tensor is.

    Raises:
        NotPlainError: one is none, or more is known of it than its layout.
    """
    slots: list[Any] = [get_proxy_slot(each, tracer, None) for each in tensors]
    if any(slot is None or slot.constant is not None for slot in slots):
        raise NotPlainError
    return tuple(slot.proxy.node for slot in slots)


@dataclass(frozen=True)
class Returned:
    """What a submodule returned.

    Attributes:
        tree: structure of it.
        nodes: which node each of its tensors is.
        layouts: of each; a number: it is the call's tensor of that place.
    """

    tree: Tree
    nodes: tuple[fx.Node, ...]
    layouts: tuple[Layout | int, ...]


def describe(tracer: Any, returned: Any, made: ModuleCall) -> Returned:
    """Describes what a submodule has returned.

    Raises:
        NotPlainError: that cannot be made anew.
    """
    call = made.call
    with untraced():
        tensors, tree = flatten(returned)
        if not all(isinstance(leaf.value, CONSTANTS) for leaf in tree.walk() if isinstance(leaf, Constant)):
            raise NotPlainError
        places = {id(each): place for place, each in enumerate(call.tensors)}
        storages = [storage_of(each) for each in tensors if id(each) not in places]
        if len({*storages, *map(storage_of, call.tensors)}) < len(storages) + len({*map(storage_of, call.tensors)}):
            raise NotPlainError
        layouts = [
            layout_of(each, call.mode, call.sizes) if place is None else place
            for each, place in ((each, places.get(id(each))) for each in tensors)
        ]
    return Returned(tree, nodes_of(tracer, tensors), tuple(layouts))

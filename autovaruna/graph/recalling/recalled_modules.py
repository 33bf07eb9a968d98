"""Lets torch.export trace a repeated submodule from memory, as the layers of a deep model are.

The first one is traced as always. A later one that is built alike, holds the same in all attributes that the first one
has read, and is called with arguments of the same layouts, leaves the same nodes with its own tensors in the place of
the other's. Nothing is recalled of a submodule that changes what Python holds, or goes by what cannot be compared.
Where inner tensors are used outside of the submodule, which shows in the end, the whole is to be traced without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import module as torch_module

from autovaruna.graph.exporting.known import num_answers
from autovaruna.graph.layout import Layout, NotPlainError
from autovaruna.graph.recalling.globals_read import GlobalsRead
from autovaruna.graph.recalling.held_now import Held
from autovaruna.graph.recalling.module_call import ModuleCall, Returned, describe, take_apart, untraced
from autovaruna.graph.recalling.module_nodes import Place, copy_nodes, last_node, nodes_since, uses_outside
from autovaruna.graph.recalling.recall import make_all
from autovaruna.graph.recalling.same_modules import Pair, have_same_attributes, pairs, repeated_modules
from autovaruna.graph.watching.attribute_reads import Reads, Tables

_OF_TORCH = ("_ModuleStackTracer", "get_proxy_slot", "track_tensor_tree")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
_MOST = 4
"""Submodules that differ in what they hold though their calls are alike; of more, none is recalled."""


@contextmanager
def recalled_modules(model: nn.Module) -> Iterator[RecalledModules]:
    """Lets a trace recall submodules while the context lasts, if this version of torch has what that takes.

    Yields:
        What is recalled, once its `start` is called.
    """
    recalled = RecalledModules(model)
    if not all(hasattr(proxy_tensor, name) for name in _OF_TORCH):
        yield recalled
        return
    kind: Any = proxy_tensor._ModuleStackTracer
    plain, tracing = kind.call_module, get_ident()

    def call(self: Any, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def run() -> Any:
            return plain(self, module, forward, args, kwargs)

        return recalled.call(self, module, args, kwargs, run) if get_ident() == tracing else run()

    kind.call_module = call
    try:
        yield recalled
    finally:
        kind.call_module = plain


@dataclass(frozen=True)
class _Template:
    """The call of a submodule that may be recalled.

    Attributes:
        call: The call.
        returned: What came of it.
        nodes: that it has left.
        place: where it came from.
        read: what was read of attributes meanwhile.
        named: the globals that were named meanwhile.
        held: what attributes and globals hold, and all else that forward names.
    """

    call: ModuleCall
    returned: Returned
    nodes: tuple[fx.Node, ...]
    place: Place
    read: Tables
    named: GlobalsRead
    held: Any


class RecalledModules:
    """The submodules of one trace.

    Args:
        model: The model.

    Attributes:
        num_recalled: how many submodules were recalled.
        is_doubtful: whether inner tensors of what was recalled are used outside of it; known in the end.
    """

    def __init__(self, model: nn.Module) -> None:
        self.num_recalled = 0
        self.is_doubtful = False
        self._repeated = repeated_modules(model)
        self._held = Held(model)
        self._reads: Reads | None = None
        self._known: dict[Any, list[_Template | None]] = {}
        self._used: dict[int, _Template] = {}
        self._is_recording = False

    def start(self, reads: Reads) -> None:
        """Begins to recall; `reads` are noted of the model."""
        self._reads = reads

    def call(self, tracer: Any, module: nn.Module, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Returns what a submodule returns; `run` calls it."""
        reads = self._reads
        if reads is None or id(module) not in self._repeated or not _is_plain(tracer):
            return run()
        with reads.paused():
            call = _taken_apart(tracer, module, args, kwargs)
            found = None if call is None else self._find(call, reads)
        if call is None:
            return run()
        if found is None:
            return self._record(tracer, call, reads, run) if self._may_record(call) else run()
        template, twins = found
        for first, other in twins:
            reads.add(other, template.read.get(id(vars(first)), ()))
        with reads.paused():
            return self._recall(tracer, template, call)

    def check(self, outputs: list[Tensor]) -> None:
        """Looks, when forward has ended, whether inner tensors of what was recalled are used outside of it."""
        mode = proxy_tensor.get_proxy_mode()
        if mode is None or not self._used:
            return
        slots = [proxy_tensor.get_proxy_slot(each, mode.tracer, None) for each in outputs]
        given = {slot.proxy.node for slot in slots if slot is not None}
        used = self._used.values()
        self.is_doubtful = any(uses_outside(each.nodes, {*each.returned.nodes}, given) for each in used)

    def _find(self, call: ModuleCall, reads: Reads) -> tuple[_Template, list[Pair]] | None:
        """Returns what to recall for a call, and the modules of both side by side; None: nothing."""
        for template in self._known.get(call.key, ()):
            twins = None if template is None else pairs(template.call.module, call.module)
            if template is None or twins is None or not have_same_attributes(twins, template.read):
                continue
            if self._held.by(call.module, template.read, reads, template.named) == template.held:
                return template, twins
        return None

    def _may_record(self, call: ModuleCall) -> bool:
        """Whether to keep a call: no other one goes on, and those that were alike could be kept."""
        known = self._known.get(call.key, [])
        return not self._is_recording and len(known) < _MOST and None not in known and GlobalsRead.is_possible()

    def _record(self, tracer: Any, call: ModuleCall, reads: Reads, run: Callable[[], Any]) -> Any:
        """Calls a submodule, and keeps what there is to recall of it."""
        with reads.paused():
            last, answers, before = last_node(tracer), num_answers(), self._held.inside(call.module)
        named = GlobalsRead()
        self._is_recording = True
        with reads.apart() as read, named.noting():
            returned = run()
        self._is_recording = False
        with reads.paused():
            is_same = self._held.inside(call.module) == before and named.are_as_before()
            may_recall = is_same and num_answers() == answers
            found = self._template(tracer, call, returned, last, reads, read, named) if may_recall else None
        self._known.setdefault(call.key, []).append(found)
        return returned

    def _template(
        self,
        tracer: Any,
        call: ModuleCall,
        returned: Any,
        last: fx.Node,
        reads: Reads,
        read: Tables,
        named: GlobalsRead,
    ) -> _Template | None:
        read = {place: own for place, own in read.items() if own}
        held = self._held.by(call.module, read, reads, named)
        try:
            nodes, found = nodes_since(tracer, last, call), describe(tracer, returned, call)
        except NotPlainError:
            return None
        return None if held is None else _Template(call, found, nodes, Place.of(tracer, call), read, named, held)

    def _recall(self, tracer: Any, template: _Template, call: ModuleCall) -> Any:
        """Leaves the nodes of a recorded call for another one; returns what that would return."""
        self.num_recalled += 1
        self._used[id(template)] = template
        made = dict(zip(template.call.nodes, call.nodes, strict=True))
        copy_nodes(tracer, template.nodes, made, template.place, Place.of(tracer, call), self.num_recalled)
        return template.returned.tree.unflatten(list(_results(tracer, template.returned, call, made)))


def _is_plain(tracer: Any) -> bool:
    """Whether nothing else watches modules or operations."""
    if tracer.enable_attr_proxy or any(getattr(torch_module, name, None) for name in _GLOBAL_HOOKS):
        return False
    return torch._C._len_torch_dispatch_stack() == 1 and torch._C._functorch.peek_interpreter_stack() is None


def _taken_apart(tracer: Any, module: nn.Module, args: Any, kwargs: Any) -> ModuleCall | None:
    try:
        return take_apart(tracer, module, args, kwargs)
    except NotPlainError:
        return None


def _results(tracer: Any, returned: Returned, call: ModuleCall, made: dict[fx.Node, fx.Node]) -> Iterator[Tensor]:
    """Yields the tensors that a call returns, of which nodes were left."""
    with untraced():
        new = iter(make_all([each for each in returned.layouts if isinstance(each, Layout)], call.call))
        for node, layout in zip(returned.nodes, returned.layouts, strict=True):
            if isinstance(layout, int):
                yield call.call.tensors[layout]
            else:
                proxy = fx.Proxy(made[node], tracer)
                yield proxy_tensor.track_tensor_tree(next(new), proxy, constant=None, tracer=tracer)

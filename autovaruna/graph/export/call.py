"""Calls a model as torch.export traces it, tensors in and tensors out, and holds what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.graph.call import CallSpec
from autovaruna.graph.export.autograd import check_state, plain_state
from autovaruna.graph.export.constant_values import hide_fakes, hide_tracing
from autovaruna.graph.export.refused import ChangedStateError, refuse_backward
from autovaruna.graph.export.size_arithmetic import cached_size_arithmetic
from autovaruna.graph.module_state import left_tensors
from autovaruna.graph.tree import Tree, flatten


class FlatCall(nn.Module):
    """Calls the model on a flat list of tensors and returns a flat tuple of them."""

    def __init__(
        self,
        model: nn.Module,
        call: CallSpec,
        output_trees: list[Tree],
        left: list[str],
        is_told: bool,
    ) -> None:
        super().__init__()
        self.is_told = is_told
        self.model = model
        self.call = call
        self.note_batch: Callable[[list[Any]], None] = lambda sizes: None
        self.idioms: Callable[[], AbstractContextManager[None]] = nullcontext
        self.report = output_trees.append  # torch.export puts back every attribute that a trace sets
        self.report_left = left.extend

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        pairs = zip(tensors, self.call.inputs, strict=True)
        sizes = [each.shape[0] for each, spec in pairs if spec.is_batch]
        assert all(size == sizes[0] for size in sizes)  # the trace has one symbol for them from now on
        self.note_batch(sizes)
        args, kwargs = self.call.tree.unflatten(tensors)
        before = [(module, dict(module._buffers)) for module in self.model.modules()]
        numbers = plain_state(self.model)
        with self._hidden(), self.idioms():
            returned = self.model(*args, **kwargs)
        if any(each.grad is not None for each in self.model.parameters()):
            raise refuse_backward("torch.autograd.backward")
        outputs, tree = flatten(returned, "output")
        check_state(numbers, plain_state(self.model))
        self.report_left(left_tensors(self.model))
        for module, buffers in before:
            _write_back(module, buffers)
        self.report(tree)
        return tuple(outputs)

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Hides that the model is traced, unless it is to be told."""
        if self.is_told:
            yield
        else:
            with hide_tracing(), hide_fakes():
                yield


def _write_back(module: nn.Module, before: dict[str, Tensor | None]) -> None:
    """Turns assignments to buffers into copies into them; torch.export sees those of the root module alone."""
    for name, new in list(module._buffers.items()):
        old = before.get(name)
        if new is old:
            continue
        if old is None or new is None or new.shape != old.shape or new.dtype != old.dtype:
            raise ChangedStateError(
                f"{type(module).__qualname__}.forward replaces its buffer {name!r} by one of another kind: got "
                f"{_kind(new)}, expected {_kind(old)}. Keep the shape and dtype of a buffer that forward assigns, or "
                "run one batch through the model before it is wrapped."
            )
        old.copy_(new.detach())
        module._buffers[name] = old


def _kind(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


def program_of(flat: FlatCall, inputs: list[Tensor], shapes: list[Any]) -> torch.export.ExportedProgram:
    """Runs torch.export.

    Args:
        flat: Calls the model.
        inputs: What it is called with.
        shapes: Which of their dimensions are the batch.
    """
    with cached_size_arithmetic():
        return torch.export.export(flat, (inputs,), dynamic_shapes=(shapes,), strict=False)

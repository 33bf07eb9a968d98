"""Finds operations of a traced graph that cannot be cut, planned or summed over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from autovaruna._torch import FUNCTORCH, FakeTensor
from autovaruna.errors import TraceError
from autovaruna.graph.source_lines import origin, users_line

_SPARSE: dict[Any, int] = {
    torch.ops.aten.embedding.default: 4,
    torch.ops.aten.embedding_bag.padding_idx: 5,
    torch.ops.aten.embedding_bag.default: 5,
}
"""Where operations say that the gradient of a weight is sparse."""


class InModuleError(Exception):
    """Says that the module at `path` does what a trace does not keep."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path


class BatchSizeError(TraceError):
    """Says that a graph would hold for one batch size alone."""


class ChangedStateError(TraceError):
    """Says that forward changes what its next call reads, and a trace would fix."""


def check_operations(module: fx.GraphModule) -> None:
    """Refuses operations that would fail later.

    Raises:
        TraceError: a weight has sparse gradients.
        InModuleError: the inside of a function transform is in the graph.
    """
    for node in module.graph.nodes:
        if node.op == "get_attr" and _is_lost(module, str(node.target)):
            raise TraceError(
                f"The trace has lost how a value is made that {', '.join(map(str, node.users))} uses. Expected "
                "operations of torch; move what makes it into a submodule, which may then be kept whole."
            )
        place = _SPARSE.get(node.target)
        if place is not None and len(node.args) > place and node.args[place] is True:
            raise TraceError(
                f"An embedding has sparse=True at {origin(node) or node.name}: its weight would get sparse gradients, "
                "which are not summed over ranks. Expected sparse=False; the numbers are the same, and so are those of "
                "the optimizer (SGD or Adagrad in place of SparseAdam)."
            )
        if str(getattr(node.target, "__module__", "")).startswith(FUNCTORCH):
            where = origin(node) or node.name
            raise InModuleError(_path(node), f"it uses a function transform of torch.func at {where}")


def check_layouts(model: nn.Module) -> None:
    """Refuses parameters and buffers that are not plain tensors in memory.

    Raises:
        TraceError: one is not.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout is not torch.strided:
            raise TraceError(
                f"{name} is a sparse tensor: got {tensor.layout}, expected torch.strided. Register a dense one "
                "(to_dense()), or its indices and values, and make the sparse tensor in forward."
            )


def refuse_hook(what: str) -> TraceError:
    """Returns the error of a forward that sets a hook.

    Args:
        what: What it sets.
    """
    return TraceError(
        f"forward {what}{users_line()}, which a trace cannot keep. Expected a forward without hooks; write what the "
        "hook does to the gradient as operations, or set it in a submodule, which is then kept whole."
    )


def refuse_backward(name: str) -> TraceError:
    """Returns the error of a forward that goes backward itself, by the function `name`."""
    return TraceError(
        f"forward goes backward itself ({name}){users_line()}, which a trace cannot keep. Expected a forward that "
        "leaves that to the caller; move what needs gradients into a submodule, which is then kept whole as one "
        "operation, or write the derivative as operations."
    )


def _is_lost(module: nn.Module, target: str) -> bool:
    """Whether an attribute is a value of the trace, and none of the model."""
    if "lifted_tensor" not in target:
        return False
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return isinstance(value, FakeTensor) and not isinstance(value, nn.Parameter)


def _path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("model").removeprefix(".") if stack else ""

"""Recalls what an operation returned when the same one comes again, as it does in every layer of a deep model.

On fake tensors an operation runs through autograd and down to its smallest parts. What comes out depends on the
operation, its constants, the layouts of its tensors and a few switches of torch, so the second time it need not be run.

Recalled are operations of torch that change nothing and return new memory whose layout follows from layouts alone.
Views, operations in place, custom and data-dependent operations always run. A recalled tensor is joined to the autograd
graph, but has no derivative there: going backward from it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autovaruna.graph.layout import Layout, NotPlainError, expression, layout_of, lengths_of, storage_of

_EXCLUDED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
CONSTANTS = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What is equal for two calls if it is the same to them."""
_DEVICES = ("cpu", "cuda")
_SWITCHES = ("flash", "mem_efficient", "math", "cudnn")
_OF_TORCH = (
    "DisableTorchFunction",
    "_dispatch_keys",
    "_dispatch_tls_local_include_set",
    "_dispatch_tls_local_exclude_set",
    *(f"_get_{name}_sdp_enabled" for name in _SWITCHES),
)
_IS_SUPPORTED = all(hasattr(torch._C, name) for name in _OF_TORCH)
"""Whether this version of torch has the private parts that recalling takes; without them, all operations run."""


class _Joined(torch.autograd.Function):
    """Joins recalled tensors to the autograd graph."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[Tensor], argument: Tensor) -> Any:
        """Returns the results, which need a gradient as the argument does."""
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuses.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a recalled operation has no derivative")


_join: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Joined).apply


@dataclass(slots=True)
class Call:
    """A call of an operation, taken apart.

    Attributes:
        mode: The mode of its fake tensors.
        is_constant: Whether something more is known of a tensor than its layout.
        key: What decides about its result.
        sizes: Its symbolic sizes, in order.
        tensors: Its tensors, in order.
    """

    mode: FakeTensorMode
    is_constant: Callable[[Tensor], bool]
    key: list[Any] = field(default_factory=list)
    sizes: list[torch.SymInt] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def add(self, value: Any) -> None:
        """Takes an argument.

        Raises:
            NotPlainError: what the operation returns may depend on more than layouts and constants.
        """
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, torch.SymInt):
            self._add_length(value)
        elif isinstance(value, tuple | list):
            self.key += (type(value), len(value))
            for each in value:
                self.add(each)
        elif isinstance(value, CONSTANTS):
            self.key += (type(value), value)
        else:
            raise NotPlainError

    def _add_tensor(self, tensor: Tensor) -> None:
        if type(tensor) is not FakeTensor or tensor.fake_mode is not self.mode or tensor.constant is not None:
            raise NotPlainError
        if self.is_constant(tensor):
            raise NotPlainError
        self.tensors.append(tensor)
        keys = torch._C._dispatch_keys(tensor).raw_repr()
        self.key += (Tensor, tensor.dim(), tensor.dtype, tensor.fake_device, tensor.requires_grad, keys)
        for length in (*lengths_of(tensor), tensor.storage_offset()):
            self._add_length(length)

    def _add_length(self, length: Any) -> None:
        if not isinstance(length, int):
            self.sizes.append(length)
        self.key.append(expression(length))


@dataclass(frozen=True, slots=True)
class _Returned:
    """What an operation returned: `layouts` in a `container` (None: one tensor), and what was remarked of it."""

    layouts: tuple[Layout, ...]
    container: type | None
    remark: Any


def make_all(layouts: Sequence[Layout], call: Call) -> list[Tensor]:
    """Returns new tensors of some layouts as the results of a call."""
    with torch._C.DisableTorchFunction():
        results: list[Tensor] = [layout.make(call.mode, call.sizes) for layout in layouts]
        joined = [k for k, layout in enumerate(layouts) if layout.needs_gradient]
        if joined:
            needing = next(tensor for tensor in call.tensors if tensor.requires_grad)
            for k, tensor in zip(joined, _join([results[k] for k in joined], needing), strict=True):
                results[k] = tensor
    return results


class Memory:
    """Remembers what operations returned."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Returned | None] = {}
        self._is_fit: dict[Any, bool] = {}

    def take_apart(
        self, operation: Any, args: Any, kwargs: Any, mode: Any, is_constant: Callable[[Tensor], bool]
    ) -> Call | None:
        """Returns a call whose result may be recalled; None: it has to run.

        Args:
            operation: What is called.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            mode: The mode in which it would run; no fake mode: it has to run.
            is_constant: Whether something more is known of a tensor than its layout.
        """
        if operation not in self._is_fit:
            self._is_fit[operation] = _IS_SUPPORTED and _is_fit(operation)
        if not self._is_fit[operation] or not isinstance(mode, FakeTensorMode):
            return None
        try:
            with torch._C.DisableTorchFunction():
                call = Call(mode, is_constant, [operation, *switches()])
                call.add(args)
                call.add(tuple(kwargs.items()))
        except NotPlainError:
            return None
        return call if call.tensors else None

    def recall(self, call: Call) -> tuple[Any, list[Tensor], Any] | None:
        """Returns the result of a call, its tensors, and what was remarked of it; None: it is not known."""
        returned = self._known.get(tuple(call.key))
        if returned is None:
            return None
        results = make_all(returned.layouts, call)
        return results[0] if returned.container is None else returned.container(results), results, returned.remark

    def note(self, call: Call, result: Any, remark: Callable[[list[Tensor]], Any]) -> None:
        """Remembers what a call returned, if it can be made anew, and what `remark` says of its tensors."""
        key = tuple(call.key)
        if key not in self._known:
            self._known[key] = None
            container = type(result) if isinstance(result, tuple | list) else None
            results = [result] if container is None else list(result)
            layouts = _layouts(results, call) if container in (None, tuple, list) else None
            if layouts is not None:
                self._known[key] = _Returned(layouts, container, remark(results))


def _layouts(results: Sequence[Any], call: Call) -> tuple[Layout, ...] | None:
    """Returns the layouts of what a call returned; None: it is something else than new memory."""
    if not all(isinstance(each, Tensor) for each in results):
        return None
    try:
        with torch._C.DisableTorchFunction():
            if _share_memory(results, call.tensors):
                return None
            return tuple(layout_of(each, call.mode, call.sizes) for each in results)
    except NotPlainError:
        return None


def _share_memory(results: Sequence[Tensor], arguments: Sequence[Tensor]) -> bool:
    """Whether a result shares memory with another one or with an argument."""
    made = {storage_of(each) for each in results}
    return len(made) < len(results) or not made.isdisjoint(map(storage_of, arguments))


def _is_fit(operation: Any) -> bool:
    """Whether an operation is torch's own, changes nothing, and does not say that it returns a view."""
    if type(operation) is not torch._ops.OpOverload or operation.namespace != "aten" or _EXCLUDED & {*operation.tags}:
        return False
    schema = operation._schema
    is_new = all(each.alias_info is None and "Tensor" in str(each.type) for each in schema.returns)
    return bool(schema.returns) and is_new and not schema.is_mutable and "as_strided" not in str(operation)


def switches() -> tuple[Any, ...]:
    """Returns the switches of torch on which results may depend."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        *(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in _DEVICES),
        *(getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in _SWITCHES),
    )

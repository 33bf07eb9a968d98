"""Predicts costs on a device that is not there, from what its TOML file says (`DeviceSpec`).

An operation takes the greatest of its arithmetic, its memory and the least time of an operation.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autovaruna._torch import FakeTensorMode, OpOverload, TorchDispatchMode, current_fake_mode, storage_of
from autovaruna.config.files import (
    PACKAGED,
    Amount,
    Positive,
    at_home,
    conf_dir,
    did_you_mean,
    read_record,
    read_toml,
    shown,
)
from autovaruna.config.settings import BYTES, REFUSALS
from autovaruna.errors import ConfigError, MeasureError
from autovaruna.graph.facts import flop_formulas, tensors_in
from autovaruna.graph.module_state import fake_like
from autovaruna.graph.operators import changed_by
from autovaruna.graph.pieces import Argument, ArgumentSource
from autovaruna.graph.source_lines import failed_at, first_line
from autovaruna.graph.traced import TracedModel
from autovaruna.profiler.bytes import count_bytes
from autovaruna.profiler.measure import Key, PartCost, to_profile
from autovaruna.profiler.records import LinkCost, OptimizerCost, Profile
from autovaruna.profiler.work import MeasuredPart, Samples, block_parts, distinct, make_work, repeated_part

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
aten = torch.ops.aten
# Of these, only as much of the first argument is read as comes out.
_LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.take}
_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_WITHOUT_FORMULA = ("rnn", "lstm", "gru", "linalg_", "fft", "conv", "mm")
_ALIGNED_BYTES = 16
_CPU = torch.device("cpu")
_DROPOUT_PLACE = 4


class Compute(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Arithmetic of a second by dtype; other dtypes than those given count as float32.

    `efficiency` is what a product of large matrices reaches of it, `unaligned_efficiency` one of 16-bit matrices whose
    rows do not begin at multiples of 16 bytes.
    """

    float32: Positive
    float64: Positive | None = None
    float16: Positive | None = None
    bfloat16: Positive | None = None
    int8: Positive | None = None
    float8_e4m3fn: Positive | None = None
    float8_e5m2: Positive | None = None
    complex64: Positive | None = None
    efficiency: Share = 1.0
    unaligned_efficiency: Share | None = None

    def rate(self, dtype: str, *, is_aligned: bool) -> float:
        """Returns the operations a second that a product reaches."""
        share = self.efficiency if is_aligned else self.unaligned_efficiency or self.efficiency
        return float(getattr(self, dtype, None) or self.float32) * share


class Bandwidth(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Of memory, and the share of it that a pass over memory reaches."""

    bytes_per_second: Positive
    efficiency: Share = 1.0


class DeviceLink(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A link between two ranks."""

    bytes_per_second: Positive
    latency_seconds: Amount = 0.0

    @property
    def cost(self) -> LinkCost:
        return LinkCost(self.latency_seconds, self.bytes_per_second)


class AllReduceRates(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Bytes a second that a ring sends from each rank; the latency is for each rank that takes part."""

    local_bytes_per_second: Positive
    remote_bytes_per_second: Positive
    latency_seconds: Amount = 0.0


class DeviceSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A device and how its ranks talk, as its file says.

    `name` is as torch names it: a deployment is valid for it. `fragmentation` is what its allocator takes for each byte
    that micro-batches make and free.
    """

    name: Annotated[str, msgspec.Meta(min_length=1)]
    kind: Literal["cpu", "cuda"]
    compute: Compute
    memory_bandwidth: Bandwidth
    local_link: DeviceLink
    remote_link: DeviceLink
    all_reduce: AllReduceRates
    memory: Any = 0
    operation_seconds: Amount = 0.0
    fragmentation: Annotated[float, msgspec.Meta(ge=1)] = 1.0

    @property
    def memory_bytes(self) -> int:
        """What it has; 0: the file does not say."""
        return int(BYTES.read(self.memory))  # type: ignore[call-overload, no-any-return]

    @property
    def bytes_per_second(self) -> float:
        """What a pass over memory reaches."""
        return self.memory_bandwidth.bytes_per_second * self.memory_bandwidth.efficiency


def find_device_file(name: str) -> Path:
    """Returns the file of a device: a path, or the bare name of a file of this library or of the conf directory."""
    file = name if name.endswith(".toml") else f"{name}.toml"
    folders = [conf_dir(os.environ) / "devices", PACKAGED / "devices"]
    for path in (Path(at_home(name)), *(folder / file for folder in folders)):
        if os.path.isfile(path):  # False, too, where nobody may look
            return path
    known = sorted(path.stem for folder in folders for path in folder.glob("*.toml"))
    hint = did_you_mean(Path(file).stem, known) or "."
    raise ConfigError(
        f"There is no device file {name}{hint} Expected a path, or one of {', '.join(known)}; copy one of "
        f"{PACKAGED / 'devices'} to describe a device of your own."
    )


def read_device(name: str) -> DeviceSpec:
    """Reads the file of a device; ConfigError, with the key, if a value is missing, unknown or of the wrong kind."""
    path = find_device_file(name)
    try:
        device = read_record(read_toml(path), DeviceSpec)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        BYTES.read(device.memory)
    except REFUSALS:
        raise ConfigError(f"{path}: memory is {shown(device.memory)}, expected {BYTES.expected}") from None
    return device


logger = logging.getLogger(__name__)


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the predicted seconds of everything that runs in its context."""

    def __init__(self, device: DeviceSpec) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.formulas = flop_formulas()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        num_bytes = touched_bytes(func, args, kwargs, result)
        if num_bytes:
            self.seconds += self._operation(func, args, kwargs, result, num_bytes)
        return result

    def _operation(self, func: Any, args: Any, kwargs: Any, result: Any, num_bytes: int) -> float:
        seconds = max(num_bytes / self.device.bytes_per_second, self.device.operation_seconds)
        formula = self.formulas.get(func.overloadpacket)
        if formula is None:
            _warn_without_formula(str(func))
            return seconds
        is_aligned = all(map(_is_aligned, tensors_in((args, kwargs, result))))
        rate = self.device.compute.rate(_dtype((args, kwargs)), is_aligned=is_aligned)
        return max(seconds, float(formula(*args, **kwargs, out_val=result)) / rate)


def _is_aligned(tensor: Tensor) -> bool:
    """Whether the rows of a matrix of 16-bit numbers, or its columns, begin where units for products can load them."""
    if tensor.itemsize != 2 or tensor.dim() < 2:
        return True
    return int(max(tensor.stride()[-2:])) * tensor.itemsize % _ALIGNED_BYTES == 0


@cache
def _warn_without_formula(name: str) -> None:
    """Warns once of an operation with much arithmetic that only its bytes are counted."""
    if "norm" not in name and any(part in name for part in _WITHOUT_FORMULA):
        logger.warning("there is no formula for the arithmetic of %s: it is predicted from its bytes alone", name)


def touched_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Returns the bytes that an operation reads and writes; 0 for views and for memory that is only allocated."""
    packet = getattr(func, "overloadpacket", None)
    outputs = tensors_in(result)
    if not isinstance(func, OpOverload) or packet in _ALLOCATIONS or func.namespace == "prim" or not outputs:
        return 0
    inputs = tensors_in((args, kwargs))
    changed = tensors_in(changed_by(func, args, kwargs))
    storages = {storage_of(tensor) for tensor in inputs}
    made = [tensor for tensor in outputs if storage_of(tensor) not in storages]
    if not made and not changed:
        return 0
    written = sum(map(_num_bytes, [*made, *changed]))
    if packet in _LOOKUPS and inputs:
        read = written + sum(map(_num_bytes, inputs[1:]))
    else:
        only_written = {id(tensor) for tensor in changed} if packet in (aten.copy_, aten.fill_, aten.zero_) else set()
        distinct = {id(tensor): tensor for tensor in inputs if id(tensor) not in only_written}
        read = sum(map(_num_bytes, distinct.values()))
    return int(read + written)


def _dtype(values: Any) -> str:
    """Returns the dtype that an operation computes in: that of its first tensor of numbers with a point."""
    tensors = tensors_in(values)
    floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return str(next(iter(floating or [tensor.dtype for tensor in tensors]), "")).removeprefix("torch.")


def _num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's elements; those that share memory (an expanded mask) count once."""
    lengths = (length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(lengths) * tensor.element_size() if tensor.numel() else 0


def predict(
    traced: TracedModel,
    model: nn.Module,
    micro_batch_sizes: Sequence[int],
    device: DeviceSpec,
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Returns a profile that was predicted, not measured, of a model that was traced for the CPU.

    A block that cannot run without numbers is a MeasureError.
    """
    parts = distinct([part for part in (*block_parts(traced), repeated_part(traced)) if part.nodes])
    jobs = [(part, size) for size in micro_batch_sizes for part in parts]
    costs: dict[Key, PartCost] = {}
    samples = _FakeSamples(traced, model, _CPU, is_gpu=device.kind == "cuda")
    for done, (part, size) in enumerate(jobs):
        costs[part.signature, size] = _predict_one(part, samples, size, device)
        if on_progress is not None:
            on_progress(done + 1, len(jobs))
    return replace(to_profile(traced, costs, _CPU, has_layers=False), device=device.name, is_measured=False)


def optimizer_cost(device: DeviceSpec, bytes_factor: float) -> OptimizerCost:
    """Returns what an optimizer step takes: parameter, gradient and state are read, parameter and state written."""
    return OptimizerCost(0.0, (3.0 + 2.0 * bytes_factor) / device.bytes_per_second)


def _predict_one(part: MeasuredPart, samples: Samples, size: int, device: DeviceSpec) -> PartCost:
    try:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
            work = make_work(part, samples, size)
            with _Workspaces():  # type: ignore[no-untyped-call]
                num_bytes = count_bytes(work, _CPU)
            with Meter(device) as forward:
                outputs = work.forward()
            with Meter(device) as backward:
                if work.needs_gradient:
                    work.backward(outputs)
        return PartCost(forward.seconds, backward.seconds, num_bytes)
    except Exception as error:
        where = failed_at(error, samples.traced.nodes)
        raise MeasureError(
            f"The block {part.name} cannot be predicted{where}: got {type(error).__name__}: {first_line(error)}. "
            "Expected operations whose shapes do not depend on the numbers in tensors; measure the model instead "
            "(python -m autovaruna measure), and pass the profile."
        ) from error


class _Workspaces(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives recurrent layers the memory that they keep for their backward, which fake ones lack.

    Measured on layers of 16 to 512 features: 15 to 16 times the bytes of the output, in float32.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten.mkldnn_rnn_layer.default:
            return (*result[:3], result[3].new_empty(16 * 4 * result[0].numel(), dtype=torch.uint8))
        return result


@dataclass
class _FakeStream:
    """Stands for a random stream: nothing is drawn."""

    is_gpu: bool

    def draw(self, node: int, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a random operation; attention on a GPU drops inside its one kernel, which no CPU kernel does."""
        if self.is_gpu and operation is aten.scaled_dot_product_attention.default:
            is_positional = len(args) > _DROPOUT_PLACE
            args = (*args[:_DROPOUT_PLACE], 0.0, *args[_DROPOUT_PLACE + 1 :]) if is_positional else args
            kwargs = kwargs if is_positional else kwargs | {"dropout_p": 0.0}
        return operation(*args, **kwargs)


@dataclass
class _FakeSamples(Samples):
    """Makes fake arguments: tensors of the right shapes that hold nothing."""

    is_gpu: bool = False

    def argument(self, argument: Argument, batch_size: int) -> Any:
        """Returns what to pass for one argument of a piece."""
        if argument.source is ArgumentSource.RANDOM:
            return _FakeStream(self.is_gpu)
        return super().argument(argument, batch_size)

    def _copy(self, tensor: Tensor) -> Tensor:
        mode = current_fake_mode()
        assert mode is not None
        return fake_like(tensor, mode, self.device)

    def _make(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

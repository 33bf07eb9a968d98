"""Defines `DeviceSpec`: what a device and its links can do, read from a TOML file, for plans without the machine."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from autovaruna.config.files import PACKAGED, Amount, Positive, conf_dir, read_record, read_toml
from autovaruna.config.kinds import BYTES, REFUSALS
from autovaruna.errors import ConfigError
from autovaruna.profiler.records import LinkCost

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class _Compute(msgspec.Struct, forbid_unknown_fields=True):
    """Arithmetic of a second by dtype; other dtypes than those given count as float32."""

    float32: Positive
    float64: Positive | None = None
    float16: Positive | None = None
    bfloat16: Positive | None = None
    int8: Positive | None = None
    float8_e4m3fn: Positive | None = None
    float8_e5m2: Positive | None = None
    complex64: Positive | None = None
    efficiency: Share = 1.0


class _Bandwidth(msgspec.Struct, forbid_unknown_fields=True):
    bytes_per_second: Positive
    efficiency: Share = 1.0


class _Link(msgspec.Struct, forbid_unknown_fields=True):
    bytes_per_second: Positive
    latency_seconds: Amount = 0.0


class _AllReduce(msgspec.Struct, forbid_unknown_fields=True):
    local_bytes_per_second: Positive
    remote_bytes_per_second: Positive
    latency_seconds: Amount = 0.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    kind: Literal["cpu", "cuda"]
    compute: _Compute
    memory_bandwidth: _Bandwidth
    local_link: _Link
    remote_link: _Link
    all_reduce: _AllReduce
    memory: Any = 0
    operation_seconds: Amount = 0.0
    fragmentation: Annotated[float, msgspec.Meta(ge=1)] = 1.0


@dataclass(frozen=True)
class DeviceSpec:
    """A device and how its ranks talk.

    Attributes:
        name: as torch names it; a deployment is valid for it.
        kind: ``cpu`` or ``cuda``.
        flops_per_second: by dtype, what a product of large matrices reaches (data sheet times efficiency).
        bytes_per_second: what a pass over memory reaches (likewise).
        operation_seconds: the least time of an operation.
        memory_bytes: of the device; 0: the file does not say.
        local_link, remote_link: messages inside a host and between hosts.
        local_all_reduce, remote_all_reduce: bytes a second that a ring sends from each rank.
        all_reduce_latency_seconds: of an all-reduce, for each rank that takes part.
        fragmentation: bytes that its allocator takes for each byte that micro-batches make and free; 1 if not said.
    """

    name: str
    kind: str
    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    operation_seconds: float
    memory_bytes: int
    local_link: LinkCost
    remote_link: LinkCost
    local_all_reduce: float
    remote_all_reduce: float
    all_reduce_latency_seconds: float
    fragmentation: float = 1.0

    def flops_of(self, dtype: str) -> float:
        """Returns the arithmetic of a second; a dtype that the file does not name counts as float32."""
        return self.flops_per_second.get(dtype, self.flops_per_second["float32"])


def find_device_file(name: str) -> Path:
    """Returns the file of a device: a path, or the bare name of a file of this library or of the conf directory.

    Raises:
        ConfigError: there is none.
    """
    file = name if name.endswith(".toml") else f"{name}.toml"
    folders = [conf_dir(os.environ) / "devices", PACKAGED / "devices"]
    for path in (Path(name).expanduser(), *(folder / file for folder in folders)):
        if path.is_file():
            return path
    known = sorted(path.stem for folder in folders for path in folder.glob("*.toml"))
    nearest = difflib.get_close_matches(Path(file).stem, known, 1)
    hint = f"; did you mean {nearest[0]}?" if nearest else "."
    raise ConfigError(
        f"There is no device file {name}{hint} Expected a path, or one of {', '.join(known)}; copy one of "
        f"{PACKAGED / 'devices'} to describe a device of your own."
    )


def read_device(name: str) -> DeviceSpec:
    """Reads the file of a device.

    Raises:
        ConfigError: there is none, or a value is missing, unknown or of the wrong kind; names the key.
    """
    path = find_device_file(name)
    try:
        file = read_record(read_toml(path), _File)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    rates = msgspec.structs.asdict(file.compute)
    share = rates.pop("efficiency")
    return DeviceSpec(
        name=file.name,
        kind=file.kind,
        flops_per_second={dtype: rate * share for dtype, rate in rates.items() if rate is not None},
        bytes_per_second=file.memory_bandwidth.bytes_per_second * file.memory_bandwidth.efficiency,
        operation_seconds=file.operation_seconds,
        memory_bytes=_num_bytes(path, file.memory),
        local_link=LinkCost(file.local_link.latency_seconds, file.local_link.bytes_per_second),
        remote_link=LinkCost(file.remote_link.latency_seconds, file.remote_link.bytes_per_second),
        local_all_reduce=file.all_reduce.local_bytes_per_second,
        remote_all_reduce=file.all_reduce.remote_bytes_per_second,
        all_reduce_latency_seconds=file.all_reduce.latency_seconds,
        fragmentation=file.fragmentation,
    )


def _num_bytes(path: Path, value: Any) -> int:
    try:
        return int(BYTES.read(value))  # type: ignore[call-overload, no-any-return]
    except REFUSALS:
        raise ConfigError(f"{path}: memory is {value!r}, expected {BYTES.expected}") from None

"""Defines `DeviceSpec`: what a device and its links can do, read from a TOML file, for plans without the machine."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autovaruna.conf_files import PACKAGED, conf_dir, read_toml
from autovaruna.errors import ConfigError
from autovaruna.kinds import BYTES, REFUSALS
from autovaruna.profiler.records import LinkCost

_TABLES: dict[str, set[str]] = {
    "": {"name", "kind", "memory", "operation_seconds", "fragmentation"},
    "compute": {"efficiency"},
    "memory_bandwidth": {"bytes_per_second", "efficiency"},
    "local_link": {"latency_seconds", "bytes_per_second"},
    "remote_link": {"latency_seconds", "bytes_per_second"},
    "all_reduce": {"latency_seconds", "local_bytes_per_second", "remote_bytes_per_second"},
}
_DTYPES = {"float64", "float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "complex64"}


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
    reader = _Reader(path, read_toml(path))
    compute, passes = reader.table("compute"), reader.table("memory_bandwidth")
    rates = {key: reader.amount("compute", key) for key in compute if key in _DTYPES}
    if "float32" not in rates:
        raise ConfigError(f"{path}: compute.float32 is missing; other dtypes than those given count as float32")
    share = reader.share("compute") if "efficiency" in compute else 1.0
    return DeviceSpec(
        name=reader.text("name"),
        kind=reader.text("kind", ("cpu", "cuda")),
        flops_per_second={key: rate * share for key, rate in rates.items()},
        bytes_per_second=reader.amount("memory_bandwidth", "bytes_per_second")
        * (reader.share("memory_bandwidth") if "efficiency" in passes else 1.0),
        operation_seconds=reader.optional("", "operation_seconds"),
        memory_bytes=reader.num_bytes("memory"),
        local_link=reader.link("local_link"),
        remote_link=reader.link("remote_link"),
        local_all_reduce=reader.amount("all_reduce", "local_bytes_per_second"),
        remote_all_reduce=reader.amount("all_reduce", "remote_bytes_per_second"),
        all_reduce_latency_seconds=reader.optional("all_reduce", "latency_seconds"),
        fragmentation=reader.factor("fragmentation"),
    )


class _Reader:
    """Reads values from the content of a device file; every complaint names file and key."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path, self.content = path, content
        for table in ("", *(name for name in _TABLES if name)):
            known = _TABLES[table] | (_DTYPES if table == "compute" else set())
            known |= set(_TABLES) - {""} if not table else set()
            for key in self.table(table):
                if key not in known:
                    nearest = difflib.get_close_matches(key, known, 1)
                    meant = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(sorted(known))}"
                    raise self.error(table, key, f"is unknown; {meant}")

    def error(self, table: str, key: str, complaint: str) -> ConfigError:
        return ConfigError(f"{self.path}: {f'{table}.' if table else ''}{key} {complaint}")

    def table(self, name: str) -> dict[str, Any]:
        found = self.content.get(name, {}) if name else self.content
        if not isinstance(found, dict):
            raise self.error("", name, f"is {found!r}, expected a table")
        return found

    def get(self, table: str, key: str) -> Any:
        if key not in self.table(table):
            raise self.error(table, key, "is missing")
        return self.table(table)[key]

    def optional(self, table: str, key: str) -> float:
        return self._number(table, key, zero=True) if key in self.table(table) else 0.0

    def amount(self, table: str, key: str) -> float:
        return self._number(table, key, zero=False)

    def _number(self, table: str, key: str, zero: bool) -> float:
        value = self.get(table, key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 < value < 1e21 or (zero and value == 0)):
            raise self.error(table, key, f"is {value!r}, expected a number {'of 0 or more' if zero else 'above 0'}")
        return float(value)

    def share(self, table: str) -> float:
        value = self.amount(table, "efficiency")
        if value > 1:
            raise self.error(table, "efficiency", f"is {value!r}, expected a share: above 0, at most 1")
        return value

    def factor(self, key: str) -> float:
        value = self.optional("", key) or 1.0
        if value < 1:
            raise self.error("", key, f"is {value!r}, expected 1 or more")
        return value

    def text(self, key: str, choices: tuple[str, ...] = ()) -> str:
        value = self.get("", key)
        if not isinstance(value, str) or not value or (choices and value not in choices):
            raise self.error("", key, f"is {value!r}, expected {' or '.join(choices) or 'a text'}")
        return value

    def num_bytes(self, key: str) -> int:
        value = self.content.get(key, 0)
        try:
            return int(BYTES.read(value))  # type: ignore[call-overload, no-any-return]
        except REFUSALS:
            raise self.error("", key, f"is {value!r}, expected {BYTES.expected}") from None

    def link(self, table: str) -> LinkCost:
        return LinkCost(self.optional(table, "latency_seconds"), self.amount(table, "bytes_per_second"))

"""Reads and writes the folder of a profile: graph, costs and cluster as JSON, beside it each measurement."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from autovaruna.errors import MeasureError
from autovaruna.graph.records import Graph
from autovaruna.json_text import parse
from autovaruna.kinds import at_home
from autovaruna.profiler.checked import check, with_checksum
from autovaruna.profiler.profile_file import load_profile, save_profile
from autovaruna.profiler.records import Cluster, Profile
from autovaruna.varuna.grids import Measured

Record = TypeVar("Record")


@dataclass(frozen=True)
class Facts:
    """What a profile says besides graph, costs and cluster.

    Attributes:
        gpus_per_node: ranks on a host.
        optimizer_bytes_factor: bytes of optimizer state for each byte of a trained parameter.
    """

    gpus_per_node: int
    optimizer_bytes_factor: float


class ProfileFolder:
    """A folder with a profile.

    Args:
        path: Where it is; made when something is written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(at_home(path))
        self.measurements = self.path / "measurements"

    def write(self, graph: Graph, cluster: Cluster, facts: Facts) -> None:
        """Writes all but the costs.

        Raises:
            MeasureError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name, record in (("graph", graph), ("cluster", cluster), ("facts", facts)):
                part = self.path / f".{name}.part"
                content = with_checksum(_plain(asdict(record)))
                part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                part.replace(self._file(name))
        except OSError as error:
            raise MeasureError(f"the profile cannot be written to {self.path}: {error.strerror or error}") from error

    def write_costs(self, profile: Profile) -> None:
        """Writes the costs.

        Raises:
            MeasureError: they cannot be written.
        """
        save_profile(self._file("profile"), profile)

    def read(self) -> tuple[Measured, Facts]:
        """Reads everything.

        Raises:
            MeasureError: a file is missing or damaged, or they do not belong together; says which.
        """
        profile = load_profile(self._file("profile"))
        graph, cluster, facts = (
            self._record(name, kind) for name, kind in (("graph", Graph), ("cluster", Cluster), ("facts", Facts))
        )
        if profile.fingerprint != graph.fingerprint:
            raise MeasureError(
                f"the profile in {self.path} is of several models: the costs are of graph {profile.fingerprint}, the "
                f"graph is {graph.fingerprint}; measure again into an empty folder"
            )
        return Measured(graph, profile, cluster), facts

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.json"

    def _record(self, name: str, kind: type[Any]) -> Any:
        path = self._file(name)
        try:
            content = parse(path.read_text(encoding="utf-8"))
            check(content)
            return _read(kind, content)
        except OSError as error:
            raise MeasureError(f"{path} cannot be read: {error.strerror or error}; run a Profiler first") from error
        except (ValueError, TypeError, KeyError) as error:
            raise MeasureError(f"{path} is damaged: {error}; measure again") from error


def _plain(value: Any) -> Any:
    """Returns a value that JSON has: what is infinite becomes a word."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


_SINCE = frozenset({"own_process_bytes", "memory_margin"})
"""Fields that files of an older library lack."""


def _read(kind: Any, value: Any) -> Any:
    """Returns a value of a record's field from JSON.

    Raises:
        ValueError, TypeError, KeyError: it is of another kind.
    """
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [each.name for each in fields(kind) if each.name in value or each.name not in _SINCE]
        return kind(**{name: _read(hints[name], value[name]) for name in names})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        inner = [each for each in get_args(kind) if each is not Ellipsis]
        return tuple(_read(inner[0], each) for each in value)
    if kind is float:
        return float(value)
    if kind is NoneType or not isinstance(value, kind):
        raise TypeError(f"got {value!r}, expected {getattr(kind, '__name__', kind)}")
    return value

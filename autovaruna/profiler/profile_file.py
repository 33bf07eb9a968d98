"""Reads and writes a `Profile` as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from autovaruna.errors import MeasureError
from autovaruna.files import write_whole
from autovaruna.json_text import parse
from autovaruna.kinds import at_home
from autovaruna.profiler.checked import check, with_checksum
from autovaruna.profiler.records import FORMAT_VERSION, BlockCost, Profile

_COSTS = tuple(each.name for each in fields(BlockCost))


def save_profile(path: str | os.PathLike[str], profile: Profile) -> None:
    """Writes a profile.

    Raises:
        MeasureError: it cannot be written.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "graph": profile.fingerprint,
        "device": profile.device,
        "is_measured": profile.is_measured,
        "costs": [
            {"micro_batch_size": size} | {name: [getattr(cost, name) for cost in costs] for name in _COSTS}
            for size, costs in zip(profile.micro_batch_sizes, profile.costs, strict=True)
        ],
    }
    try:
        write_whole(path, json.dumps(with_checksum(content)) + "\n")
    except OSError as error:
        raise MeasureError(f"the profile cannot be written to {path}: {error.strerror or error}") from error


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Reads a profile.

    Raises:
        MeasureError: there is no file, or it is damaged; names the key.
    """
    try:
        content = parse(Path(at_home(path)).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise MeasureError(f"the profile {path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise MeasureError(
            f"the profile {path} is no JSON (line {error.lineno}: {error.msg}): measure again"
        ) from error
    try:
        check(content)
        return _profile(content)
    except KeyError as error:
        raise MeasureError(f"the profile {path} is damaged: {error} is missing; measure again") from error
    except (TypeError, ValueError) as error:
        raise MeasureError(f"the profile {path} is damaged: {error}; measure again") from error


def _profile(content: Any) -> Profile:
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type(content).__name__}, expected an object")
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format_version is {content['format_version']!r}, this library reads {FORMAT_VERSION}")
    tables = content["costs"]
    sizes = tuple(table["micro_batch_size"] for table in tables)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes) or len(set(sizes)) < len(sizes):
        raise ValueError(f"the micro-batch sizes are {list(sizes)}, expected different whole numbers above 0")
    costs = tuple(_costs(table) for table in tables)
    if len({len(each) for each in costs}) > 1:
        raise ValueError("the micro-batch sizes have costs of different numbers of blocks")
    return Profile(str(content["graph"]), str(content["device"]), sizes, costs, bool(content["is_measured"]))


def _costs(table: Mapping[str, Any]) -> tuple[BlockCost, ...]:
    columns = [table[name] for name in _COSTS]
    for name, column in zip(_COSTS, columns, strict=True):
        if not all(_is_amount(value) for value in column):
            raise ValueError(f"{name} has a value that is no number of 0 or more")
    if len(set(map(len, columns))) > 1:
        raise ValueError(f"{', '.join(_COSTS)} differ in length")
    return tuple(BlockCost(*cost) for cost in zip(*columns, strict=True))


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0

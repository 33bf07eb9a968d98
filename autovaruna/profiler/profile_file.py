"""Reads and writes a `Profile` as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autovaruna.errors import MeasureError
from autovaruna.files import write_whole
from autovaruna.json_text import parse
from autovaruna.kinds import at_home
from autovaruna.profiler.checked import check, with_checksum
from autovaruna.profiler.records import FORMAT_VERSION, BlockCost, Profile, Sequences

_COSTS = ("forward_seconds", "backward_seconds", "saved_bytes", "work_bytes")
_COSTS_SINCE = ("weight_seconds", "split_seconds", "deferred_bytes", "forward_work_bytes")
"""Files of an older library lack these, or the last of them: of what they measured, no backward can be split."""


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
            {"micro_batch_size": size}
            | {name: [getattr(cost, name) for cost in costs] for name in _COSTS + _COSTS_SINCE}
            | {"sequences": _sequences_in_words([cost.sequences for cost in costs])}
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
    since = [name for name in _COSTS_SINCE if _COSTS_SINCE[0] in table]
    if since and since[-1] not in table:
        since.pop()
    names = (*_COSTS, *since)
    columns = [table[name] for name in names]
    for name, column in zip(names, columns, strict=True):
        if not all(_is_amount(value) for value in column):
            raise ValueError(f"{name} has a value that is no number of 0 or more")
    if len(set(map(len, columns))) > 1:
        raise ValueError(f"{', '.join(names)} differ in length")
    found = (BlockCost(*cost) for cost in zip(*columns, strict=True))
    if "sequences" not in table:  # an older library wrote the file
        return tuple(found)
    sequences = _sequences(table["sequences"])
    return tuple(replace(cost, sequences=each) for cost, each in zip(found, sequences, strict=True))


def _sequences_in_words(sequences: Sequence[Sequences]) -> dict[str, Any]:
    """Returns each of the sequences once, and for each block which of them is its own."""
    places = {each: place for place, each in enumerate(dict.fromkeys(sequences))}
    return {"distinct": [asdict(each) for each in places], "of_blocks": [places[each] for each in sequences]}


def _sequences(words: Mapping[str, Any]) -> list[Sequences]:
    distinct = [
        Sequences(
            *(_steps(each[way]) for way in ("forward", "backward")),
            *(_places(each.get(what, ())) for what in ("read", "spans")),  # an older library has not written them
        )
        for each in words["distinct"]
    ]
    places = words["of_blocks"]
    if not all(isinstance(place, int) and 0 <= place < len(distinct) for place in places):
        raise ValueError(f"sequences names others than the {len(distinct)} that it has")
    for each in distinct:
        num_taken = sum(step > 0 for step in each.forward + each.backward)
        if max(each.read, default=0) > num_taken or len(each.read) != len(each.spans):
            raise ValueError(f"sequences has a gradient in none of the {num_taken} pieces that it takes, or no span")
        if min((*each.forward, *each.backward), default=0) < -num_taken:
            raise ValueError(f"sequences has one that gives back more than the {num_taken} pieces that it takes")
    return [distinct[place] for place in places]


def _steps(words: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(step, int) and not isinstance(step, bool) and step for step in words):
        raise ValueError("sequences has a step that is no whole number other than 0")
    return tuple(words)


def _places(words: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(place, int) and not isinstance(place, bool) for place in words):
        raise ValueError("sequences has a place that is no whole number")
    return tuple(words)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0

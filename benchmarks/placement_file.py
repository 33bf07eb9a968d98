"""Reads the file of a placement workload, and says what is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx

from autovaruna.errors import PlanError

Workload = dict[str, Any]


def read(path: Path) -> Workload:
    """Reads a workload.

    Raises:
        PlanError: the file cannot be read, lacks something, has what is no figure, or forward edges that lead in a
            circle.
    """
    try:
        workload = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"{path} cannot be read as JSON: {error}; give the file of a workload") from error
    _check_keys(path, "the workload", workload, ("maxFPGAs", "maxSizePerFPGA", "nodes", "edges"))
    if not workload["nodes"]:
        raise PlanError(f"{path} has no nodes; expected one or more")
    for node in workload["nodes"]:
        _check_keys(path, "a node", node, ("id", "fpgaLatency", "size"))
    for edge in workload["edges"]:
        _check_keys(path, "an edge", edge, ("sourceId", "destId", "cost"))
    _check_order(path, workload)
    return dict(workload)


def _is_amount(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


def _is_name(value: Any) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "maxFPGAs": (lambda value: _is_amount(value) and value == int(value), "a whole number of 0 or more"),
    "nodes": (lambda value: isinstance(value, list), "a list"),
    "edges": (lambda value: isinstance(value, list), "a list"),
    "isBackwardNode": (lambda value: value in (0, 1, None), "true or false"),
    "colorClass": (lambda value: value is None or _is_name(value), "a number, a text or null"),
    **dict.fromkeys(("id", "sourceId", "destId"), (_is_name, "a number or a text")),
    **dict.fromkeys(("maxSizePerFPGA", "fpgaLatency", "size", "cost"), (_is_amount, "a finite number of 0 or more")),
}


def _check_keys(path: Path, what: str, record: Any, needed: tuple[str, ...]) -> None:
    if not isinstance(record, dict):
        raise PlanError(f"{path}: {what} is {str(record)[:80]!r}; expected an object with {', '.join(needed)}")
    for key in needed:
        if key not in record:
            raise PlanError(f"{path}: {what} has no {key!r}: {str(record)[:80]}; expected {', '.join(needed)}")
    for key, (is_right, expected) in _KINDS.items():
        if key in record and not is_right(record[key]):
            raise PlanError(f"{path}: {what} has {key}={str(record[key])[:80]!r}; expected {expected}")


def _check_order(path: Path, workload: Workload) -> None:
    is_backward = {str(node["id"]): bool(node.get("isBackwardNode")) for node in workload["nodes"]}
    pairs = [(str(edge["sourceId"]), str(edge["destId"])) for edge in workload["edges"]]
    unknown = [pair for pair in pairs if not set(pair) <= is_backward.keys()]
    if unknown:
        raise PlanError(f"{path}: edge {unknown[0]} ends at an id that no node has; add the node or drop the edge")
    order = nx.DiGraph([pair for pair in pairs if not any(is_backward[name] for name in pair)])
    if not nx.is_directed_acyclic_graph(order):
        circle = " -> ".join(source for source, _ in nx.find_cycle(order))
        raise PlanError(f"{path}: forward edges lead in a circle: {circle}; drop one of them")

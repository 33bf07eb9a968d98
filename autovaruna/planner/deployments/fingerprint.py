"""Defines `Fingerprint`: what a plan is valid for, and says in words what changed since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autovaruna.planner.infeasible import readable


@dataclass(frozen=True)
class Fingerprint:
    """What a plan is valid for.

    Attributes:
        graph: fingerprint of the traced model.
        shapes: shape and dtype of each input, and the number of samples, as text by what it is.
        num_ranks: the number of ranks N.
        hosts: number of ranks on each host, in the order of ranks (names of hosts change from day to day).
        device: what the ranks compute on.
        memory_bytes: limit of each rank, or one number for all.
        settings: the settings that shaped the plan.
    """

    graph: str
    shapes: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int = 1
    hosts: tuple[int, ...] = (1,)
    device: str = ""
    memory_bytes: tuple[float, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def host_counts(hosts: tuple[str, ...]) -> tuple[int, ...]:
    """Returns how many ranks each host has, in the order of the first rank of each."""
    return tuple(Counter(hosts).values())


def differences(saved: Fingerprint, now: Fingerprint) -> list[str]:
    """Returns a sentence for each thing that changed since a plan was saved; empty: the plan is valid.

    A smaller memory limit makes a plan stale, a greater one too, since a better plan may fit.
    """
    told = []
    if saved.graph != now.graph:
        told.append(f"the model changed (graph {saved.graph[:12]} -> {now.graph[:12]})")
    told += _changed("", saved.shapes, now.shapes)
    if saved.num_ranks != now.num_ranks:
        told.append(f"the number of ranks changed ({saved.num_ranks} -> {now.num_ranks})")
    elif saved.hosts != now.hosts:
        told.append(f"the ranks of each host changed ({_listed(saved.hosts)} -> {_listed(now.hosts)})")
    if saved.device != now.device:
        told.append(f"the device changed ({saved.device} -> {now.device})")
    if saved.num_ranks == now.num_ranks and saved.memory_bytes != now.memory_bytes:
        told.append(f"the memory limit changed ({_bytes(saved.memory_bytes)} -> {_bytes(now.memory_bytes)})")
    return told + _changed("setting ", _plain(saved.settings), _plain(now.settings))


def _changed(what: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return [f"{what}{name} changed ({saved.get(name, 'not set')} -> {now.get(name, 'not set')})" for name in names]


def _plain(value: Any) -> Any:
    """Returns a value as JSON gives it back: tuples are lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (tuple, list)) else value


def _listed(numbers: tuple[int, ...]) -> str:
    return " + ".join(str(number) for number in numbers)


def _bytes(limits: tuple[float, ...]) -> str:
    return ", ".join(dict.fromkeys(readable(limit) for limit in limits)) or "none"

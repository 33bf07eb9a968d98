"""Finds the weights of a model in those of its base model, and the other way round, as the library transformers does.

A model of that library with a head holds a base model under a name, its ``base_model_prefix``. A file may be of either:
names of the one begin with it, names of the other do not.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace
from typing import Protocol

from torch import nn

from autovaruna.checkpoint.source import Source


class Names(Container[str], Iterable[str], Protocol):
    """Names of tensors."""


def by_names_of(source: Source, model: nn.Module, names: Names) -> Source:
    """Returns a source whose weights have the model's names, where they differ by the name of the base model alone.

    Args:
        source: What is loaded.
        model: The model.
        names: Of its parameters and buffers.
    """
    base = getattr(model, "base_model_prefix", "")
    if not isinstance(base, str) or not base or source.state is not None:
        return source
    begin = f"{base}."
    is_with_head = any(name.startswith(begin) for name in names)
    if is_with_head == any(name.startswith(begin) for name in source.weights):
        return source

    def renamed(name: str) -> str:
        if is_with_head:
            return begin + name if name not in names and begin + name in names else name
        return name.removeprefix(begin)

    return replace(
        source,
        weights={renamed(name): entry for name, entry in source.weights.items()},
        ties={renamed(name): renamed(kept) for name, kept in source.ties.items()},
    )

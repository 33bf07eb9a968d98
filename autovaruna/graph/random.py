"""Keeps the generators of torch, Python and numpy as they were, and finds modules that draw from them in a trace."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_generator_lock = Lock()


class RandomStream:
    """Seeds torch's generators before each random node of one micro-batch."""

    def __init__(self, seed: int, step: int, micro_batch: int, device: torch.device) -> None:
        digest = hashlib.blake2b(f"{seed},{step},{micro_batch}".encode(), digest_size=8).digest()
        self._base, self._device = int.from_bytes(digest, "little"), device

    def draw(self, node: int, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a random operation with the numbers that belong to `node`."""
        seed = (self._base + node * 0x9E3779B97F4A7C15) % 2**63
        return draw_from(seed, self._device, partial(operation, *args, **kwargs))


def draw(stream: RandomStream, node: int, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a random operation of a piece; a function, since graphs call functions."""
    return stream.draw(node, operation, *args, **kwargs)


def draw_from(seed: int, device: torch.device, operation: Callable[[], Any]) -> Any:
    """Runs a random operation with the numbers that follow from a seed."""
    with _generator_lock:
        seed_generators(device, seed)
        return operation()


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds what the operations of a model on `device` draw from."""
    for generator in _generators(device):
        generator.manual_seed(seed)


def _generators(device: torch.device) -> list[torch.Generator]:
    """Returns the generators of the CPU, from which models on a GPU draw, too, and of `device`."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = device.index if device.index is not None else torch.cuda.current_device()
    return [torch.default_generator, torch.cuda.default_generators[index]]


@contextmanager
def python_generators(seed: int) -> Iterator[None]:
    """Seeds the generators of Python and numpy, and gives them back as they were."""
    before, before_numpy = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        numpy.random.set_state(before_numpy)


@contextmanager
def untouched_generator(device: torch.device) -> Iterator[None]:
    generators = _generators(device)
    with _generator_lock:  # ranks that are threads share them
        states = [each.get_state() for each in generators]
    try:
        yield
    finally:
        with _generator_lock:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


@contextmanager
def recorded_draws(model: nn.Module) -> Iterator[list[str]]:
    """Records the innermost modules of a model that draw from Python's or numpy's generators, on this thread."""
    paths = {id(vars(module)): path for path, module in reversed(list(model.named_modules()))}
    thread = get_ident()
    running: list[tuple[int, Any]] = []
    found: list[str] = []

    def begin(module: nn.Module, args: Any) -> None:
        if get_ident() == thread:
            running.append((len(found), _place()))

    def end(module: nn.Module, args: Any, result: Any) -> None:
        if get_ident() != thread or not running:
            return
        num_found, place = running.pop()
        path = paths.get(id(vars(module)))
        if path is not None and len(found) == num_found and _place() != place:
            found.append(path)

    with register_module_forward_pre_hook(begin), register_module_forward_hook(end):
        yield found


def _place() -> tuple[Any, ...]:
    own = random.getstate()[1]
    other: Any = numpy.random.get_state()
    return own[0], own[-1], int(other[1][0]), other[2]

"""Keeps the generators of torch, Python and numpy as they were, and finds modules that draw from them in a trace."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock, get_ident, local
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autovaruna._torch import OpOverload, TorchDispatchMode, pytree, replaced, schema_of

_generator_lock = Lock()


class _Thread(local):
    is_seeded = False
    """Whether what runs draws from torch's own generators, which were seeded for it."""


_thread = _Thread()


class RandomStream:
    """Seeds torch's generators before each random node of one micro-batch."""

    def __init__(self, seed: int, step: int, micro_batch: int, device: torch.device) -> None:
        digest = hashlib.blake2b(f"{seed},{step},{micro_batch}".encode(), digest_size=8).digest()
        self._base, self._device = int.from_bytes(digest, "little"), device

    def draw(self, node: int, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a random operation with the numbers that belong to `node`."""
        seed = (self._base + node * 0x9E3779B97F4A7C15) % 2**63
        return draw_from(seed, self._device, operation, *args, **kwargs)


def draw(stream: RandomStream, node: int, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a random operation of a piece; a function, since graphs call functions."""
    return stream.draw(node, operation, *args, **kwargs)


def draw_from(seed: int, device: torch.device, operation: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Runs a random operation with the numbers that follow from a seed; torch's generators are left as they were."""
    if isinstance(operation, OpOverload):
        with OwnGenerators(seed):
            return operation(*args, **kwargs)
    return _draw_from_default(seed, device, operation, *args, **kwargs)


class OwnGenerators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has operations draw from generators of a seed: from torch's own, other threads of the process may draw."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        is_given = given.get("generator") is not None or _thread.is_seeded  # by who runs inside of this
        if torch.Tag.nondeterministic_seeded not in func.tags or is_given:
            return func(*args, **given)
        device = _device_of(args, given)
        drawing = _taking_generator(func)
        if drawing is None:  # a kernel of a GPU
            self._seed += 1  # the next one draws others
            return _draw_from_default(self._seed, device, func, *args, **given)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        names = [each.name for each in schema_of(drawing).arguments]
        return drawing(*args[: names.index("generator")], **{**given, "generator": self._generators[device]})


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    return tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")


@cache
def _taking_generator(func: OpOverload) -> OpOverload | None:
    """Returns the overload of an operator that draws from a generator that it is given."""
    names = {each.name for each in schema_of(func).arguments} | {"generator"}
    packet = func.overloadpacket
    every = [func, *(getattr(packet, name) for name in packet.overloads())]
    return next((each for each in every if {one.name for one in schema_of(each).arguments} == names), None)


def _draw_from_default(
    seed: int, device: torch.device, operation: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Runs what draws from torch's own generators alone, seeded, and gives these back as they were."""
    generators = _generators(device)
    with _generator_lock:
        states = [each.get_state() for each in generators]
        try:
            seed_generators(device, seed)
            with replaced(_thread, "is_seeded", True):
                return operation(*args, **kwargs)
        finally:
            _restore(generators, states)


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
            _restore(generators, states)


def _restore(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
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

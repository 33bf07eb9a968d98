"""Finds out how what a module returns for parts of a batch becomes what it returns for the whole: it is tried out.

A module that is kept whole cannot be read: a loss that it returns may be a mean over the samples, a sum, or neither,
and samples may meet in it. So it runs on a few samples, then on two parts of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from autovaruna.graph.kept import Join, Line, Returned, is_differentiable
from autovaruna.graph.random import default_generator
from autovaruna.graph.trial import Trial

_PARTS = (2, 3)
_WHOLE = sum(_PARTS)
_NOISE, _NOISE_OF_HALVES = 1e-4, 0.05
_HALVES = (torch.float16, torch.bfloat16)


class _Numbers(Enum):
    """Which numbers the arguments have, in the order in which they are tried: modules refuse some."""

    DRAWN = "drawn"
    SHARES = "shares"
    PLAIN = "plain"


def with_joins(trial: Trial) -> Returned:
    """Tries a module out; returns what it returns, with how that is joined.

    Raises:
        CannotKeepError: the module cannot be kept whole.
    """
    returned = trial.returned()
    joins = _learned(trial, returned.tensors)
    lines = (replace(line, join=join) for line, join in zip(returned.tensors, joins, strict=True))
    return replace(returned, tensors=tuple(lines))


def _learned(trial: Trial, lines: Sequence[Line]) -> list[Join]:
    """Returns how each tensor is joined; UNKNOWN if anything is random, or cannot be tried out."""
    if not isinstance(trial.batch[0], torch.SymInt):
        return [Join.UNKNOWN for _ in lines]
    for numbers in _Numbers:
        try:
            found = _joins(trial, lines, numbers)
        except Exception:  # it may want other numbers
            continue
        if Join.UNKNOWN not in found:
            return found
    return [Join.UNKNOWN for _ in lines]


def _joins(trial: Trial, lines: Sequence[Line], numbers: _Numbers) -> list[Join]:
    tensors = _drawn(trial, numbers)
    parts = [[_part(trial, place, each, part) for place, each in enumerate(tensors)] for part in range(len(_PARTS))]
    whole, *of_parts = [_outputs(trial, each, seed=0) for each in (tensors, *parts)]
    again = _outputs(trial, tensors, seed=1)
    is_half = any(each.dtype in _HALVES for each in (*tensors, *whole, *trial.state))
    noise = _NOISE_OF_HALVES if is_half or trial.precision else _NOISE
    if not all(_is_close(one, other, noise) for one, other in zip(again, whole, strict=True)):  # it is random
        return [Join.UNKNOWN for _ in lines]
    return [_join(line, whole[place], [each[place] for each in of_parts], noise) for place, line in enumerate(lines)]


def _join(line: Line, whole: Tensor, parts: Sequence[Tensor], noise: float) -> Join:
    if not is_differentiable(whole) or not whole.numel():
        return Join.MEAN
    if not all(each.isfinite().all() for each in (whole, *parts)):
        return Join.UNKNOWN
    grows = [place for place, (slope, _) in enumerate(line.lengths) if slope]
    if grows:
        is_same = _is_close(torch.cat(list(parts), grows[0]), whole, noise)
        is_plain = len(grows) == 1 and line.lengths[grows[0]] == (1, 0)
        return Join.SAMPLES if is_same else Join.OTHER if is_plain else Join.UNKNOWN
    if not whole.any() and not any(each.any() for each in parts):
        return Join.UNKNOWN
    first, second = (each.double() if not each.is_complex() else each for each in parts)
    if _is_close((_PARTS[0] * first + _PARTS[1] * second) / _WHOLE, whole, noise):
        return Join.MEAN
    return Join.SUM if _is_close(first + second, whole, noise) else Join.OTHER


def _is_close(one: Tensor, other: Tensor, noise: float) -> bool:
    if one.shape != other.shape or not is_differentiable(other):
        return torch.equal(one, other)
    kind = torch.complex128 if other.is_complex() else torch.double
    first, second = one.to(kind), other.to(kind)
    return not other.numel() or bool((first - second).abs().max() <= noise * second.abs().max())


def _outputs(trial: Trial, tensors: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Runs the module.

    Raises:
        ValueError: it changes a buffer, as BatchNorm does: what it returns may follow from the micro-batch.
    """
    default_generator(trial.device).manual_seed(seed)
    copies = [each.detach().clone().requires_grad_(each.requires_grad) for each in tensors]
    outputs, _, is_same = trial.run(copies, trial.numbers(), seed)
    if not is_same:
        raise ValueError("it changes a buffer")
    return [each.detach() for each in outputs]


def _drawn(trial: Trial, numbers: _Numbers) -> list[Tensor]:
    """Returns the arguments for all samples; integers are zeros and ones, for they may be classes, or lengths."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for each in trial.inputs:
        shape = trial.shape_of(each, _WHOLE)
        kind = torch.empty((), dtype=each.dtype)
        if is_differentiable(kind):
            wide = torch.complex64 if kind.is_complex() else torch.float32
            drawn = torch.randn(shape, generator=generator, dtype=wide)
            drawn = drawn.sigmoid() if numbers is _Numbers.SHARES else drawn
            drawn = 0.05 * drawn if numbers is _Numbers.PLAIN else drawn
        else:
            drawn = torch.randint(2, shape, generator=generator)
            drawn = torch.full_like(drawn, each.dtype is torch.bool) if numbers is _Numbers.PLAIN else drawn
        made.append(drawn.to(trial.device, each.dtype).requires_grad_(each.requires_grad and trial.is_differentiated))
    return made


def _part(trial: Trial, place: int, tensor: Tensor, part: int) -> Tensor:
    """Returns the samples of a part.

    Raises:
        ValueError: its length does not say which those are.
    """
    given = trial.inputs[place]
    sizes = [trial.shape_of(given, size) for size in _PARTS]
    for dimension, length in enumerate(tensor.shape):
        lengths = [size[dimension] for size in sizes]
        if length in lengths and len(set(lengths)) == 1:
            continue
        if sum(lengths) != length or lengths[0] * _PARTS[1] != lengths[1] * _PARTS[0]:
            raise ValueError(f"a dimension has {length} elements for all samples and {lengths} for parts of them")
        tensor = tensor.split_with_sizes(lengths, dimension)[part]
    return tensor.detach().requires_grad_(tensor.requires_grad)

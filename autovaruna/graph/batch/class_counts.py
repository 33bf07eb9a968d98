"""Counts labels by class."""

from __future__ import annotations

from torch import Tensor


def count_by_class(target: Tensor, ignored: int, num_classes: int) -> Tensor:
    """Returns how often each class is among labels, shape ``(num_classes,)``; those that are ignored are left out."""
    is_counted = target.ne(ignored).reshape(-1)
    classes = target.reshape(-1) * is_counted
    return classes.new_zeros(num_classes).index_add(0, classes, is_counted.to(classes.dtype))

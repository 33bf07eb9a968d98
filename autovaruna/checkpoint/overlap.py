"""Writes into tensors whose numbers share memory, as those of ``torch.ones(1, 2).expand(3, 2)`` do."""

from __future__ import annotations

from torch import Tensor

from autovaruna.checkpoint.layout import bytes_of
from autovaruna.checkpoint.tensor_file import Entry, read_header
from autovaruna.errors import CheckpointError


def overwrite(tensor: Tensor, numbers: Tensor, entry: Entry) -> None:
    """Overwrites a tensor, in whatever order it lies, with numbers of its shape.

    Raises:
        CheckpointError: numbers that share memory in the tensor differ.
    """
    first = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
    if 0 in tensor.stride() and not bytes_of(numbers[first].expand_as(numbers)).equal(bytes_of(numbers)):
        raise CheckpointError(
            f"{_name_of(entry)} in {entry.path} has different numbers for what is one number in the model: got shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}, as expand() makes it. Expected one with memory "
            "for each number: call .clone() where the model makes it."
        )
    tensor.detach()[first].copy_(numbers[first])


def _name_of(entry: Entry) -> str:
    entries, _ = read_header(entry.path)
    return next(name for name, each in entries.items() if each == entry)

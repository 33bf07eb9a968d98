"""Copies what is to be written to memory of its own, in one pass, while the model computes.

Weights and the optimizer's state change when the optimizer steps. So the copy runs beside forwards and backwards, and
a step waits for its end. What may change earlier (buffers), and what is not on the host, is copied at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from autovaruna.errors import CheckpointError

_BLOCK_BYTES = 8 << 20


class Snapshot:
    """Tensors by name, as they were when it was made.

    Args:
        tensors: What is copied.
        is_steady: Says of a name whether its tensor changes in the optimizer's step alone.
    """

    def __init__(self, tensors: Mapping[str, Tensor], is_steady: Callable[[str], bool]) -> None:
        self._originals = {name: tensor.detach() for name, tensor in tensors.items()}
        self._copies: dict[str, Tensor] = {}
        self._is_done = threading.Event()
        for name, tensor in self._originals.items():
            if tensor.device.type != "cpu" or tensor.is_inference() or not is_steady(name):
                self._copies[name] = _copy(tensor)
        self._versions = {name: self._originals[name]._version for name in self._originals.keys() - self._copies.keys()}

    def take(self) -> dict[str, Tensor]:
        """Copies the rest, and returns all; called once, in a thread.

        Raises:
            CheckpointError: a tensor was changed meanwhile, by something other than the optimizer.
        """
        try:
            for name in self._versions:
                self._copies[name] = _copy(self._originals[name])
            changed = [name for name, version in self._versions.items() if self._originals[name]._version != version]
        finally:
            self._originals.clear()
            self._is_done.set()
        if changed:
            raise CheckpointError(
                f"{', '.join(changed[:3])} changed while it was copied in the background: got a change by something "
                "other than the optimizer's step. Call wait_checkpoint() before it, or save with background=False."
            )
        copies, self._copies = self._copies, {}
        return copies

    def wait(self) -> None:
        """Returns once everything has been copied."""
        self._is_done.wait()


def _copy(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    source = tensor.reshape(-1).view(torch.uint8).numpy()
    target = np.empty_like(source)
    for start in range(0, len(source), _BLOCK_BYTES):  # other threads run between two blocks
        np.copyto(target[start : start + _BLOCK_BYTES], source[start : start + _BLOCK_BYTES])
    return torch.from_numpy(target).view(tensor.dtype).reshape(tensor.shape)

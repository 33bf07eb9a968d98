"""Looks whether ranks that are to pass the same mini-batch do, and warns if they do not.

Each stage takes what it needs from its own rank's copy: with other samples there, a step would join the inputs of some
samples with the labels of others, and no error would say so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from autovaruna.graph.call import CallSpec

_NUM_FIRST_CALLS, _CALLS_BETWEEN = 8, 64
_NUM_NUMBERS = 64

logger = logging.getLogger(__name__)


class SameInputs:
    """What the ranks of each group have passed, in a few of their calls.

    Args:
        groups: The ranks that pass the same mini-batch.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = [ranks for ranks in groups if len(ranks) > 1]
        self._has_told = False

    def digests(self, number: int, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Returns a digest of some numbers of each tensor; nothing in most calls.

        Args:
            number: How many calls there were before.
            tensors: Those of the call.
        """
        is_due = number < _NUM_FIRST_CALLS or (number % _CALLS_BETWEEN == 0 and all(each.is_cpu for each in tensors))
        return tuple(map(_digest, tensors)) if self._groups and is_due and not self._has_told else ()

    def compare(self, call: CallSpec, digests: Sequence[tuple[int, ...]]) -> None:
        """Warns, once, of inputs that differ.

        Args:
            call: The call.
            digests: What `digests` returned on each rank.
        """
        for ranks in self._groups:
            odd = {
                spec.name
                for rank in ranks
                for spec, first, own in zip(call.inputs, digests[ranks[0]], digests[rank], strict=False)
                if own != first
            }
            if odd and not self._has_told:
                self._has_told = True
                logger.warning(
                    "ranks %s are to pass the same samples, but %s differ there: a step then joins inputs and labels "
                    "of several batches. Give each of them the same batch (seed their loaders alike); with samples of "
                    "its own on each rank, pass inputs='per_rank'",
                    list(ranks),
                    ", ".join(sorted(odd)),
                )


def _digest(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        return 0
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // _NUM_NUMBERS)].contiguous()
    return crc32(some.view(torch.uint8).cpu().numpy().tobytes())

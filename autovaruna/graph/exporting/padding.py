"""Traces ``torch.nn.TransformerEncoder`` with a padding mask as it evaluates: padded places are zero before its norm.

There plain PyTorch goes through nested tensors, which have no padded places and which a trace cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def padded_encoders() -> Iterator[None]:
    """Traces such encoders so on this thread, while the context lasts."""
    tracing, plain = get_ident(), nn.TransformerEncoder.forward

    def forward(
        self: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        is_plain = get_ident() != tracing or mask is not None or is_causal
        if is_plain or src_key_padding_mask is None or not _nests(self, src):
            return plain(self, src, mask, src_key_padding_mask, is_causal)
        return _evaluated(self, src, src_key_padding_mask)

    nn.TransformerEncoder.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.TransformerEncoder.forward = plain  # type: ignore[method-assign]


def _nests(encoder: Any, src: Tensor) -> bool:
    """Whether plain PyTorch makes a nested tensor of what an encoder gets with a padding mask."""
    first = encoder.layers[0]
    is_meant = getattr(encoder, "use_nested_tensor", False) and torch.backends.mha.get_fastpath_enabled()
    if not is_meant or first.training or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in (src, *first.parameters())))


def _evaluated(encoder: Any, src: Tensor, padding: Tensor) -> Tensor:
    """Runs an encoder; in front of its norm, padded places are zero if all padding is at the ends."""
    is_word = padding.logical_not()
    output = src
    for layer in encoder.layers:
        output = layer(output, src_key_padding_mask=padding)
    is_aligned = (is_word[:, 1:] <= is_word[:, :-1]).all()
    output = torch.where((is_word | ~is_aligned).unsqueeze(-1), output, 0.0)
    return output if encoder.norm is None else encoder.norm(output)

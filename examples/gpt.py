"""A byte-level GPT in plain PyTorch, and the text it learns: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BYTES = 256


class Layer(nn.Module):
    """Attends to what came before, then thinks about it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (batch, tokens, width)."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Predicts the next byte; returns the mean cross-entropy."""

    def __init__(self, width: int = 384, num_layers: int = 6, num_heads: int = 6, num_tokens: int = 128) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.places = nn.Parameter(0.02 * torch.randn(num_tokens, width))
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES)
        self.apply(self._start)

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Takes two integer tensors (batch, tokens)."""
        x = self.bytes(inputs) + self.places
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def library_text() -> Tensor:
    """Returns the source of Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw(text: Tensor, size: int, num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns `size` pieces of the text, and the same pieces one byte later."""
    starts = torch.randint(len(text) - num_tokens, (size, 1), generator=generator)
    pieces = text[starts + torch.arange(num_tokens + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]

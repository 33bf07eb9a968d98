"""GPT-3 with 175 billion parameters, planned for 1,024 GPUs on a laptop: nothing of it is ever held.

python examples/gpt3.py, or, with every choice at hand:
python -m autovaruna plan examples/gpt3.py:build --ranks 1024 --ranks-per-host 8 --memory 80GiB --device h100
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna.__main__ import main

NUM_LAYERS, WIDTH, NUM_HEADS, NUM_TOKENS = 96, 12288, 96, 2048
NUM_WORDS = 50304  # 50,257, and some that never occur: products with rows of multiples of 8 numbers are 6 times as fast


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


class GPT3(nn.Module):
    """Predicts the next word; the words' embedding is the head too."""

    def __init__(self, num_layers: int = NUM_LAYERS, width: int = WIDTH, num_heads: int = NUM_HEADS) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(NUM_WORDS, width), nn.Embedding(NUM_TOKENS, width)
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Takes two integer tensors (batch, tokens) and returns the mean cross-entropy."""
        x = self.words(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(num_layers: int = NUM_LAYERS) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    """Returns the model in bfloat16 without numbers, and the arguments of one call with one sequence."""
    with torch.device("meta"):
        tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
        return GPT3(num_layers).bfloat16(), (tokens, tokens.clone()), {}


if __name__ == "__main__":
    arguments = ["--ranks", "1024", "--ranks-per-host", "8", "--memory", "80GiB", "--device", "h100"]
    sys.exit(main(["plan", f"{__file__}:build", *arguments, "--batch-size", "1536", "-o", "gpt3.json", *sys.argv[1:]]))

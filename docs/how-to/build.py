"""A GPT of 0.8 billion parameters, built without numbers: what it needs is planned, and nothing of it is held."""

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_LAYERS, WIDTH, NUM_HEADS, NUM_TOKENS, NUM_WORDS = 12, 2048, 16, 1024, 50304


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(NUM_WORDS, WIDTH), nn.Embedding(NUM_TOKENS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(NUM_LAYERS)
        )
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(NUM_TOKENS, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(NUM_TOKENS, device=tokens.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def build() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    """Returns the model, and the arguments of one call: a batch of one text."""
    with torch.device("meta"):
        tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
        return GPT().bfloat16(), (tokens, tokens.clone()), {}

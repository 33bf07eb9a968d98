"""Defines the models of `plans.py`: GPT, an encoder-decoder, ResNet, and a lopsided one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Subject:
    """A model, and a function that makes a batch of its inputs."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]


def tokens(num_samples: int, length: int, num_words: int) -> Tensor:
    """Returns random tokens, ``(num_samples, length)``."""
    return torch.randint(num_words, (num_samples, length))


class Language(nn.Module):
    """Predicts the next token: embedding, transformer layers, head."""

    def __init__(self, num_layers: int, width: int, num_words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(num_words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, num_words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Returns the loss of ``(batch, length)`` tokens."""
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


class EncoderDecoder(nn.Module):
    """Reads one sequence and predicts another, every decoder layer using the encoder's result, as T5 does."""

    def __init__(self, num_layers: int, width: int, num_words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        options = {"d_model": width, "nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**options) for _ in range(num_layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**options) for _ in range(num_layers))
        self.head = nn.Linear(width, num_words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of ``(batch, length)`` tokens each."""
        memory, x = self.words(source), self.words(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Bottleneck(nn.Module):
    """Adds three convolutions to its input."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.narrow, self.middle = nn.Conv2d(before, width, 1), nn.Conv2d(width, width, 3, stride, 1)
        self.wide = nn.Conv2d(width, after, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in (width, width, after))
        self.short = nn.Conv2d(before, after, 1, stride) if before != after or stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``(batch, 4 width, height / stride, width / stride)``."""
        y = x
        for conv, norm in zip((self.narrow, self.middle, self.wide), self.norms, strict=True):
            y = F.relu(norm(conv(y)))
        return y + self.short(x)


class ResNet(nn.Module):
    """Classifies pictures with bottlenecks, early ones with large pictures, late ones with many parameters."""

    def __init__(self, depths: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3)
        layers, before = [], width
        for group, depth in enumerate(depths):
            for k in range(depth):
                layers.append(Bottleneck(before, width << group, 2 if k == 0 and group else 1))
                before = 4 * width << group
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(before, 1000)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss of ``(batch, 3, size, size)`` pictures."""
        x = F.max_pool2d(F.relu(self.stem(pictures)), 3, 2, 1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


SUBJECTS = (
    Subject("GPT", lambda: Language(16, 1024, 32_000, 512), lambda n: (tokens(n, 512, 32_000),)),
    Subject("T5", lambda: EncoderDecoder(8, 1024, 32_000), lambda n: (tokens(n, 512, 32_000), tokens(n, 128, 32_000))),
    Subject(
        "ResNet", lambda: ResNet((3, 4, 23, 3), 128), lambda n: (torch.zeros(n, 3, 224, 224), tokens(n, 1, 1000)[:, 0])
    ),
    Subject("lopsided", lambda: Language(6, 1024, 256_000, 256), lambda n: (tokens(n, 256, 256_000),)),
)

"""Builds the models, batches and optimizers whose predictions are compared with measurements."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gpt import GPT, Layer
from torch import Tensor, nn

NUM_WORDS, NUM_TOKENS, NUM_CLASSES = 20_000, 64, 100


class Mlp(nn.Module):
    """Runs equal layers of linear and relu; the loss is the distance from the target.

    Numbers keep their size from layer to layer, as in models that train. Where they fade, most gradients are zero, of
    which the square roots in an optimizer's step take ten times as long, and that depends on numbers alone.
    """

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(x, target)


class Block(nn.Module):
    """Adds two convolutions with batch normalisation to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(inner)))


class ResNet(nn.Module):
    """Classifies images."""

    def __init__(self, width: int = 32, num_blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), classes)


class Lopsided(nn.Module):
    """Predicts words: nearly all parameters are in the table and the head."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(3))
        self.head = nn.Linear(width, NUM_WORDS)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class WithLoss(nn.Module):
    """Returns the loss alone of a model of the library transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=words, labels=targets).loss
        return loss


def import_library(name: str) -> None:
    """Imports what a model comes from, if that is not torch alone."""
    if name == "t5":
        from transformers import T5ForConditionalGeneration  # noqa: F401
    if name == "bert":
        from transformers import BertForMaskedLM  # noqa: F401


def t5() -> nn.Module:
    """Returns an encoder with a decoder, whose words are tied three times."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 320, "d_kv": 40, "num_heads": 8, "d_ff": 1280, "num_layers": 4, "vocab_size": NUM_WORDS // 2}
    return WithLoss(T5ForConditionalGeneration(T5Config(**sizes, use_cache=False, decoder_start_token_id=0)))


def bert() -> nn.Module:
    """Returns an encoder that guesses words."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 320, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1280}
    return WithLoss(BertForMaskedLM(BertConfig(**sizes, vocab_size=NUM_WORDS // 2)))


def model_of(name: str) -> nn.Module:
    """Returns a model; the same numbers on every rank."""
    torch.manual_seed(0)
    match name:
        case "gpt":
            return GPT(width=512, num_layers=6, num_heads=8)
        case "mlp":
            return Mlp(1024, 12)
        case "resnet":
            return ResNet()
        case "lopsided":
            return Lopsided()
        case "t5":
            return t5()
        case "bert":
            return bert()
        case _:
            return Mlp(16, 2)


def batch_of(name: str, num_samples: int, rank: int) -> tuple[Tensor, Tensor]:
    """Returns a rank's mini-batch."""
    generator = torch.Generator().manual_seed(rank)
    match name:
        case "resnet":
            classes = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
            return torch.randn(num_samples, 3, 32, 32, generator=generator), classes
        case "gpt" | "lopsided" | "t5" | "bert":
            highest, length = {"gpt": (256, 128), "lopsided": (NUM_WORDS, NUM_TOKENS)}.get(name, (NUM_WORDS // 2, 64))
            pieces = torch.randint(highest, (num_samples, length + 1), generator=generator)
            return pieces[:, :-1], pieces[:, 1:]
        case _:
            width = 1024 if name == "mlp" else 16
            x, target = torch.randn(2, num_samples, width, generator=generator)
            return x, target


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer of all parameters."""
    parameters = model.parameters()
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-4)
    if name == "foreach":
        return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9 if name == "momentum" else 0.0)

"""Scripts of language: pretraining, fine-tuning, translation, tagging."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compatibility.script import Share, Wrap, descend, script, whole

WORDS, WIDTH, BATCH, STEPS = 40, 16, 6, 3


class CausalBlock(nn.Module):
    """Is a block as small GPTs have it: fused projections, heads by view and transpose."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.register_buffer("mask", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.attend(self.norms[0](x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf")).softmax(-1)
        x = x + self.project((scores @ v).transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks, self.norm = nn.ModuleList(CausalBlock() for _ in range(3)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, length = idx.shape
        assert length <= 32, f"cannot forward a sequence of length {length}"
        x = self.wte(idx) + self.wpe(torch.arange(length, device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def next_words(seed: int, length: int = 9) -> Tensor:
    return whole(seed, WORDS, BATCH, length)


@script()
def gpt_pretraining(wrap: Wrap, share: Share) -> None:
    """GPT with tied embeddings, decay groups, warm-up, accumulation of two batches, clipping, evaluation."""
    model: Any = TinyGPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    model = wrap(model, optimizer)
    for step in range(STEPS):
        for micro_step in range(2):
            tokens = share(next_words(2 * step + micro_step))
            _, loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        tokens = share(next_words(99))
        _, loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        assert math.isfinite(loss.item())
    model.train()


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.down.T) @ self.up.T * 2.0


@script()
def low_rank_adaptation(wrap: Wrap, share: Share) -> None:
    """LoRA: all weights frozen, linear layers replaced by hand, an optimizer of the trainable ones alone."""
    model: Any = TinyGPT()
    model.requires_grad_(False)
    for block in model.blocks:
        block.attend, block.project = LoRALinear(block.attend), LoRALinear(block.project)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, eps=1e-4)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        tokens = share(next_words(step))
        logits, _ = model(tokens[:, :-1])
        descend(optimizer, F.cross_entropy(logits.reshape(-1, WORDS), tokens[:, 1:].reshape(-1)))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask, padding = nn.Transformer.generate_square_subsequent_mask(target.size(1)), source == 0
        masks = {"tgt_mask": mask, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        return self.head(self.transformer(self.source(source) * math.sqrt(WIDTH), self.target(target), **masks))


@script()
def translation(wrap: Wrap, share: Share) -> None:
    """nn.Transformer with causal and padding masks, label smoothing, a schedule by hand in the optimizer's groups."""
    model: Any = Translator()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-4)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = WIDTH**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4**-1.5) * 0.05
        source = share(whole(step, WORDS - 1, BATCH, 8) + 1)
        source[:, -1] = 0
        target = share(whole(step + 30, WORDS - 1, BATCH, 7) + 1)
        logits = model(source, target[:, :-1])
        descend(optimizer, criterion(logits.reshape(-1, WORDS), target[:, 1:].reshape(-1)))


class Experts(nn.Module):
    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, WIDTH)
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            result.index_add_(0, rows, expert(x[rows]) * weights[rows, None])
        return result.view(shape)


@script()
def mixture_of_experts(wrap: Wrap, share: Share) -> None:
    """Words routed to one of three experts by index_add, in a classifier of texts."""
    embed = nn.Embedding(WORDS, WIDTH)
    model: Any = nn.Sequential(embed, Experts(), nn.LayerNorm(WIDTH), Experts(), nn.Flatten(), nn.Linear(WIDTH * 6, 4))
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3, eps=1e-4)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        loss = F.cross_entropy(model(share(whole(step, WORDS, BATCH, 6))), share(whole(step + 9, 4, BATCH)))
        descend(optimizer, loss)


@script()
def bag_of_words(wrap: Wrap, share: Share) -> None:
    """EmbeddingBag with mean over bags of one size, Adagrad."""
    bag = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")
    model: Any = nn.Sequential(bag, nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        loss = F.cross_entropy(model(share(whole(step, WORDS, BATCH, 5))), share(whole(step + 9, 3, BATCH)))
        descend(optimizer, loss)


class WordModel(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = layers
        self.drop, self.encoder = nn.Dropout(0.0), nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, layers, dropout=0.0)
        self.decoder = nn.Linear(WIDTH, WORDS)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        self.decoder.weight = self.encoder.weight

    def forward(self, words: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, WORDS)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, batch: int) -> tuple[Tensor, Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(self.layers, batch, WIDTH), weight.new_zeros(self.layers, batch, WIDTH)


@script(change='`batch_dims={"words": 1, "hidden": 1}`')
def word_language_model(wrap: Wrap, share: Share) -> None:
    """PyTorch's own example: LSTM of (time, batch) with tied weights, its state from call to call, clipping, SGD."""
    model: Any = WordModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model = wrap(model, optimizer, batch_dims={"words": 1, "hidden": 1})
    text = share(whole(1, WORDS, BATCH, 5 * STEPS + 1)).t().contiguous()
    hidden = model.init_hidden(text.shape[1])
    for start in range(0, 5 * STEPS, 5):
        data, targets = text[start : start + 5], text[start + 1 : start + 6].reshape(-1)
        hidden = tuple(each.detach() for each in hidden)
        output, hidden = model(data, hidden)
        optimizer.zero_grad()
        F.nll_loss(output, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()

"""Trains an unmodified model of the library transformers: keyword arguments, `.loss`, a scheduler, clipping.

The task is BERT's own: find the masked bytes in pieces of Python's standard library. Micro-batches have unequal numbers
of them; the loss is the mean over all of the batch, as on one process.

mpirun -n 2 python examples/finetune_hf.py
"""

from __future__ import annotations

import statistics
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

from autovaruna import AutoVaruna, get_rank

NUM_STEPS, SIZE, NUM_TOKENS = 60, 16, 48
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASK, PAD = 256, 257


def load() -> Tensor:
    """Returns the source of one module, as bytes."""
    source = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
    return torch.frombuffer(bytearray(source.read_bytes()), dtype=torch.uint8).long()


def draw(text: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns pieces of differing lengths, padded, with a seventh of their bytes masked."""
    starts = torch.randint(len(text) - NUM_TOKENS, (SIZE, 1), generator=generator)
    lengths = torch.randint(NUM_TOKENS // 2, NUM_TOKENS + 1, (SIZE, 1), generator=generator)
    words, is_text = text[starts + torch.arange(NUM_TOKENS)], torch.arange(NUM_TOKENS) < lengths
    is_masked = is_text & (torch.rand(words.shape, generator=generator) < 1 / 7)
    inputs = words.masked_fill(is_masked, MASK).where(is_text, PAD)
    batch = {"input_ids": inputs, "attention_mask": is_text.long(), "labels": words.where(is_masked, -100)}
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


torch.manual_seed(0)
config = BertConfig(
    vocab_size=258,
    hidden_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=192,
    max_position_embeddings=NUM_TOKENS,
    pad_token_id=PAD,
)
net = BertForMaskedLM(config).to(DEVICE)
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=NUM_STEPS)
model = AutoVaruna(net, optimizer, save_deployment=False, load_deployment=False)

text, generator = load(), torch.Generator().manual_seed(get_rank())
losses = []
for step in range(NUM_STEPS):
    loss = model(**draw(text, generator)).loss
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 20 == 19 and get_rank() == 0:
        print(f"step {step + 1}: loss {statistics.fmean(losses[-20:]):.3f}, rate {scheduler.get_last_lr()[0]:.1e}")
assert statistics.fmean(losses[-10:]) < 0.7 * statistics.fmean(losses[:5]), "the model did not learn"

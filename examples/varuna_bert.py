"""Trains a small BERT in Varuna's own style: cut points in a list, tied embeddings by name, float16 with a loss scale.

python examples/varuna_bert.py                                                    one process
echo localhost > machines; python -m autovaruna.run_varuna --machine_list machines --gpus_per_node 2 \\
    --batch_size 12 --nstages 2 --chunk_size 3 examples/varuna_bert.py --fp16     two stages
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from typing import Any

import torch
import torch.nn.functional as F
from gpt import draw, library_text
from torch import Tensor, nn

from autovaruna.varuna import CutPoint, Varuna

NUM_STEPS, BATCH_SIZE, WIDTH, NUM_TOKENS, NUM_LAYERS, MASK = 30, 12, 48, 24, 3, 256

parser = argparse.ArgumentParser()
for name, default in {"rank": 0, "local_rank": 0, "chunk_size": 6, "resume_step": None}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--stage_to_rank_map", default=None)
parser.add_argument("--fp16", action="store_true")
args = parser.parse_args()


class Bert(nn.Module):
    """Finds masked bytes; the decoder has the embedding's weights, under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MASK + 1, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 96, batch_first=True) for _ in range(NUM_LAYERS)
        )
        self.cutpoints = [CutPoint() for _ in range(NUM_LAYERS)]
        self.decoder = nn.Linear(WIDTH, MASK + 1)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer, cutpoint in zip(self.layers, self.cutpoints, strict=True):
            hidden = cutpoint(layer(hidden))
        return F.cross_entropy(self.decoder(hidden).flatten(0, 1), labels.flatten())


def get_batch_fn(size: int, device: Any = None, step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    words, _ = draw(text, size, NUM_TOKENS, generator)
    is_masked = torch.rand(words.shape, generator=generator) < 0.3
    return {"input_ids": words.masked_fill(is_masked, MASK).to(device), "labels": words.to(device)}


torch.manual_seed(0)
text, tied = library_text(), [("embedding.weight", "decoder.weight")]
model = Varuna(
    Bert(), args.stage_to_rank_map, get_batch_fn, BATCH_SIZE, args.chunk_size, args.fp16, shared_weights=tied
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model.set_optimizer(optimizer, init_loss_scale=2.0**16)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(model.checkpoint("checkpoints", on_demand=True)))
losses = []
for step in range(NUM_STEPS):
    mine = {name: tensor[model.samples] for name, tensor in get_batch_fn(BATCH_SIZE, step=step).items()}
    loss, overflow = model.step(mine, clip_grad_max_norm=1.0)
    if not overflow:
        optimizer.step()
    losses.append(loss)
if args.rank == 0:
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; loss scale {model.get_loss_scale()}")
assert statistics.fmean(losses[-5:]) < 0.7 * losses[0], "the model did not learn"
state = model.state_dict()  # on every rank, the whole model under its own names
assert torch.equal(state["embedding.weight"], state["decoder.weight"]), "the tied weights differ"

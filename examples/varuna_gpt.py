"""Trains a byte-level GPT in Varuna's own style: cut points, whole steps, a checkpoint on SIGUSR1.

python examples/varuna_gpt.py                                                     one process
echo localhost > machines; python -m autovaruna.run_varuna --machine_list machines --gpus_per_node 4 \\
    --batch_size 10 --nstages 2 --chunk_size 2 examples/varuna_gpt.py             two stages of two replicas
"""

from __future__ import annotations

import argparse
import copy
import signal
import sys
from typing import Any

import torch
import torch.nn.functional as F
from gpt import NUM_BYTES, Layer, draw, library_text
from torch import Tensor, nn

from autovaruna.varuna import CutPoint, Varuna

NUM_STEPS, BATCH_SIZE, WIDTH, NUM_TOKENS, NUM_LAYERS = 12, 10, 48, 24, 4

parser = argparse.ArgumentParser()
for name, default in {"rank": 0, "local_rank": 0, "chunk_size": 5, "resume_step": None}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
for name, default in {"stage_to_rank_map": None, "store": "checkpoints"}.items():
    parser.add_argument(f"--{name}", default=default)
args = parser.parse_args()


class CutGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, 4) for _ in range(NUM_LAYERS))
        self.cutpoints = nn.ModuleList(CutPoint() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, NUM_BYTES)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.bytes(inputs)
        for place, layer in enumerate(self.layers):
            x = layer(self.cutpoints[place](x))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def get_batch(size: int, device: Any = None, step: int = 0) -> dict[str, Tensor]:
    inputs, targets = draw(text, size, NUM_TOKENS, torch.Generator().manual_seed(step))
    return {"inputs": inputs.to(device), "targets": targets.to(device)}


def stop(number: int, frame: Any) -> None:
    model.checkpoint(args.store, on_demand=True)
    sys.exit(0)


torch.manual_seed(0)
text, plain = library_text(), CutGPT()
model = Varuna(
    copy.deepcopy(plain), args.stage_to_rank_map, get_batch, BATCH_SIZE, args.chunk_size, local_rank=args.local_rank
)
optimizer, plain_optimizer = (torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (model, plain))
model.set_optimizer(optimizer)
signal.signal(signal.SIGUSR1, stop)
if args.resume_step is not None:
    model.load_checkpoint(args.store, args.resume_step)
for step in range(NUM_STEPS):
    batch = get_batch(BATCH_SIZE, step=step)
    plain_optimizer.zero_grad()
    (expected := plain(**batch)).backward()  # with plain PyTorch, to show that it is the same
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    plain_optimizer.step()
    if step >= model.iteration:
        loss, overflow = model.step({name: t[model.samples] for name, t in batch.items()}, clip_grad_max_norm=1.0)
        optimizer.step() if not overflow else None
        print(f"step {step}: loss {loss:.4f}", flush=True) if args.rank == 0 else None
        assert abs(loss - expected.item()) <= 1e-5 * expected.item(), f"{loss} is not {expected.item()}"
assert loss < 4.5, "the model did not learn"

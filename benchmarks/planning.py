"""Measures what planning takes: seconds and memory of the whole command, against the layers and the ranks.

python benchmarks/planning.py           # GPT-3's layers, a few sizes
python benchmarks/planning.py --full    # 12 to 384 layers, 8 to 16,384 ranks, and RaNNC's BERT of 4.9 billion

Each row is a process of its own with one thread: it builds the model on meta, traces it, predicts its blocks with the
H100's figures, plans, and proves the bound. Seconds are those of the processor, so that other programs count less.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from time import process_time

ROOT = Path(__file__).parents[1]
QUICK = [("gpt", 12, 8), ("gpt", 12, 64), ("gpt", 24, 64)]
LAYERS = [("gpt", layers, 1024) for layers in (12, 24, 48, 96, 192, 384)]
RANKS = [("gpt", 96, ranks) for ranks in (8, 64, 512, 4096, 16384)]
FULL = [*LAYERS, *RANKS, ("bert", 96, 32)]
SAMPLES_PER_1024_RANKS = 1536


def build_gpt(num_layers: int):
    """Returns GPT-3 with so many layers."""
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt3 import build

    return build(num_layers)


def build_bert(num_layers: int):
    """Returns BERT of 2048 features and 128 tokens, which RaNNC planned in 4 hours with 96 layers."""
    import torch
    from transformers import BertConfig, BertForPreTraining

    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 8192}
    with torch.device("meta"):
        model = BertForPreTraining(BertConfig(num_hidden_layers=num_layers, **sizes))
        tokens = torch.zeros(8, 128, dtype=torch.long)
        labels = {"labels": tokens.clone(), "next_sentence_label": torch.zeros(8, dtype=torch.long)}
        return model, (), {"input_ids": tokens, "attention_mask": tokens.clone(), **labels}


def run_one(kind: str, num_layers: int, num_ranks: int) -> dict[str, object]:
    """Plans one model in this process, and returns what that took."""
    from autovaruna.__main__ import collect_rarely, parser_of

    collect_rarely()  # before torch is imported, as in the command

    import autovaruna.commands.plan as planning
    from autovaruna.heap import keep_freed_memory

    keep_freed_memory()
    phases: dict[str, float] = {}

    def timed(name: str, act):
        def timing(*args, **kwargs):
            started = process_time()
            result = act(*args, **kwargs)
            phases[name] = process_time() - started
            return result

        return timing

    for name in ("load_target", "predict", "plan_and_choices"):
        setattr(planning, name, timed(name, getattr(planning, name)))
    batch = 8 * num_ranks if kind == "bert" else max(num_ranks, SAMPLES_PER_1024_RANKS * num_ranks // 1024)
    more = ["--memory", "32GiB"] if kind == "bert" else _memory(num_layers, num_ranks)
    target = f"{__file__}:{kind}_{num_layers}"
    arguments = ["plan", target, "--ranks", str(num_ranks), "--ranks-per-host", "8", "--device", "h100", *more]
    plan = planning.Planning(parser_of(["plan"]).parse_args([*arguments, "--batch-size", str(batch)])).plan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"total": process_time(), "peak": peak, "stages": plan.num_stages, "gap": plan.gap, **phases}


def _memory(num_layers: int, num_ranks: int) -> list[str]:
    """Returns enough memory for few ranks to hold many layers: planning is what is measured, not what fits."""
    needed = 20 * num_layers * 12 * 12288**2 / num_ranks + 60 * 2**30
    return ["--memory", str(int(max(80 * 2**30, needed)))]


def __getattr__(name: str):
    """Returns ``gpt_96`` and the like: functions that build a model."""
    kind, _, layers = name.partition("_")
    if kind not in ("gpt", "bert") or not layers.isdigit():
        raise AttributeError(name)
    return lambda: (build_gpt if kind == "gpt" else build_bert)(int(layers))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all sizes; takes minutes")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, layers, ranks = options.one
        print(json.dumps(run_one(kind, int(layers), int(ranks))), flush=True)
        os._exit(0)  # as the command does: to take a trace apart takes longer than to save a plan
    compileall.compile_dir(ROOT / "autovaruna", quiet=2)  # as when it is installed
    print("model layers  ranks | trace s  predict s  plan s  whole s | peak GiB | stages   gap")
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for kind, layers, ranks in FULL if options.full else QUICK:
        command = [sys.executable, __file__, "--one", kind, str(layers), str(ranks)]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=900)
        row = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
        print(f"{kind:5} {layers:6} {ranks:6} | {_cells(row)}", flush=True)


def _cells(row: dict[str, float] | None) -> str:
    if row is None:
        return "failed, as said above"
    times = f"{row['load_target']:7.1f}  {row['predict']:9.1f}  {row['plan_and_choices']:6.1f}  {row['total']:7.1f}"
    return f"{times} | {row['peak']:8.2f} | {row['stages']:6} {row['gap']:5.1%}"


if __name__ == "__main__":
    main()

"""Trains a small GPT while half of its ranks are taken away and given back; draws the losses beside a quiet run's.

python examples/elastic_gpt.py            # writes elastic_gpt.png
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch
from gpt import GPT, draw, library_text

from autovaruna import AutoVaruna, get_rank

NUM_STEPS, BATCH_SIZE, NUM_TOKENS = 60, 8, 32
LAUNCH = [sys.executable, "-m", "autovaruna", "run", "--machine_list", "machines", "--ranks_per_host", "1", __file__]


def train(losses: Path) -> None:
    """Is the training script: but for `resume` it is as any other."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = GPT(width=64, num_layers=4, num_heads=4, num_tokens=NUM_TOKENS).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)
    model = AutoVaruna(net, optimizer, inputs="replicated")  # the global batch, whatever the ranks are
    info = model.resume()  # goes on from what the hosts have in memory
    text = library_text()
    for step in range(info.step or 0, NUM_STEPS):
        inputs, targets = draw(text, BATCH_SIZE, NUM_TOKENS, torch.Generator().manual_seed(step))
        loss = model(inputs.to(device), targets.to(device))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if get_rank() == 0:
            with losses.open("a") as file:
                file.write(f"{step} {loss.item()!r}\n")
        time.sleep(0.05)  # or it would be over before anything happens


def run(losses: Path, events: dict[int, str]) -> dict[int, float]:
    """Runs the job; after some steps the machine list changes. Returns the loss of each step."""
    machines, script = Path("machines"), [str(losses.absolute())]
    losses.write_text("")
    machines.write_text("localhost\nlocalhost\n")  # listed twice: two ranks
    job = subprocess.Popen([*LAUNCH, *script])
    while job.poll() is None:
        done = len(losses.read_text().splitlines())
        if due := [step for step in events if step <= done]:
            machines.write_text(events.pop(due[0]))
        time.sleep(0.1)
    assert job.returncode == 0
    return {int(line.split()[0]): float(line.split()[1]) for line in losses.read_text().splitlines()}


def main() -> None:
    quiet = run(Path("quiet.txt"), {})
    eventful = run(Path("eventful.txt"), {15: "localhost\n", 35: "localhost\nlocalhost\n"})
    assert quiet.keys() == eventful.keys() == set(range(NUM_STEPS))
    assert all(abs(quiet[step] - eventful[step]) < 1e-3 for step in quiet), "the loss curve has noticed"
    print(f"{NUM_STEPS} steps, once with half of the ranks away: the losses differ by less than 0.001")
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    pyplot.plot(quiet.values(), linewidth=4, alpha=0.4, label="two ranks all the time")
    pyplot.plot(eventful.values(), label="one of them away from step 15 to step 35")
    pyplot.xlabel("step"), pyplot.ylabel("loss"), pyplot.legend()
    pyplot.savefig("elastic_gpt.png")


if __name__ == "__main__":
    train(Path(sys.argv[1])) if len(sys.argv) > 1 else main()

"""The smallest script: a model that returns its output, and a backward that starts from it.

python examples/tutorial.py            one process
mpirun -n 2 python examples/tutorial.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna, get_rank, get_world_size


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.last = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.first(x)))
        return out


def sample(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Returns what a rank passes in: an input, and the gradient of its output."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 32, generator=generator), torch.randn(8, 16, generator=generator) / 10


torch.manual_seed(0)
net = Net()
plain = copy.deepcopy(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = AutoVaruna(net, optimizer, save_deployment=False, load_deployment=False)

for step in range(5):
    x, target = sample(get_rank(), step)
    out = model(x)
    out.backward(target)
    optimizer.step()
    optimizer.zero_grad()

# The same on one process, with what all ranks passed in; a rank counts by its share of the samples.
plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
for step in range(5):
    xs, targets = zip(*(sample(rank, step) for rank in range(get_world_size())), strict=True)
    plain(torch.cat(xs)).backward(torch.cat(targets) / get_world_size())
    plain_optimizer.step()
    plain_optimizer.zero_grad()

state = model.state_dict()  # on every rank, the whole model under its own names
for name, expected in plain.state_dict().items():
    torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=1e-6)
if get_rank() == 0:
    print(f"{get_world_size()} rank(s) trained the same weights as plain PyTorch")

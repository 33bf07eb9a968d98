"""Scripts of speech, graphs, reinforcement, recommendation, tables and science."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from tests.compatibility.script import Share, Wrap, descend, normal, script, whole

BATCH, STEPS = 6, 3


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 16, 3, 2, 1), nn.LayerNorm(16)
        self.gru, self.out = nn.GRU(16, 16, batch_first=True, bidirectional=True), nn.Linear(32, 10)

    def forward(self, sound: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.conv(sound).transpose(1, 2)))
        return self.out(self.gru(hidden)[0]).log_softmax(-1)


@script()
def speech_recognition(wrap: Wrap, share: Share) -> None:
    """Convolution, GRU and CTC outside of the model, after a transpose to time first."""
    model: Any = Speech()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        sound, letters = share(normal(step, BATCH, 8, 24)), share(whole(step, 9, BATCH, 4) + 1)
        chances = model(sound).transpose(0, 1)
        sizes = torch.full((len(sound),), 12), torch.full((len(sound),), 4)
        descend(optimizer, F.ctc_loss(chances, letters, *sizes))


@script()
def deep_q_learning(wrap: Wrap, share: Share) -> None:
    """A network and a target network, copied now and then; Huber loss of the chosen actions."""
    model: Any = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True, eps=1e-4)
    model = wrap(model, optimizer)
    target = copy.deepcopy(model)
    for step in range(STEPS):
        state, after = share(normal(step, BATCH, 4)), share(normal(step + 9, BATCH, 4))
        action, reward = share(whole(step, 2, BATCH, 1)), share(normal(step + 99, BATCH))
        with torch.no_grad():
            value = reward + 0.9 * target(after).max(1).values
        descend(optimizer, F.smooth_l1_loss(model(state).gather(1, action).squeeze(1), value))
        target.load_state_dict(model.state_dict())


@script(change='`inputs="replicated", num_micro_batches=1`: all ranks play the same episode', is_replicated=True)
def policy_gradient(wrap: Wrap, share: Share) -> None:
    """One observation a call, an episode of calls, one backward of the sum of their losses."""
    model: Any = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2), nn.Softmax(-1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    model = wrap(model, optimizer, num_micro_batches=1)
    for episode in range(2):
        losses = []
        for move in range(3):
            seen = normal(10 * episode + move, 1, 4)
            chances = Categorical(model(seen))
            losses.append(-chances.log_prob(torch.tensor([move % 2])) * (1.0 + move))
        descend(optimizer, torch.cat(losses).sum())


@script()
def tables(wrap: Wrap, share: Share) -> None:
    """Categories and numbers in one row, early stopping on a validation loss that the ranks share by the model."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = nn.ModuleList(nn.Embedding(n, 4) for n in (5, 6))
            self.layers = nn.Sequential(nn.Linear(8 + 3, 16), nn.SELU(), nn.AlphaDropout(0.0), nn.Linear(16, 1))

        def forward(self, categories: Tensor, numbers: Tensor, target: Tensor) -> Tensor:
            embedded = [table(categories[:, i]) for i, table in enumerate(self.embeddings)]
            return F.mse_loss(self.layers(torch.cat([*embedded, numbers], 1)).flatten(), target)

    model: Any = Rows()
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2, eps=1e-4)
    model = wrap(model, optimizer)
    best, patience = float("inf"), 0
    for step in range(6):
        categories, numbers = share(whole(step % 2, 5, BATCH, 2)), share(normal(step % 2, BATCH, 3))
        descend(optimizer, model(categories, numbers, share(normal(step % 2 + 5, BATCH))))
        model.eval()
        with torch.no_grad():
            checked = model(share(whole(7, 5, BATCH, 2)), share(normal(7, BATCH, 3)), share(normal(8, BATCH))).item()
        model.train()
        best, patience = (checked, 0) if checked < best else (best, patience + 1)
        if patience > 2:
            break


class Equation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, y: Tensor) -> Tensor:
        h = 0.25
        for _ in range(3):
            k1 = self.right(y)
            k2 = self.right(y + h / 2 * k1)
            k3 = self.right(y + h / 2 * k2)
            k4 = self.right(y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.head(y)


@script()
def differential_equation(wrap: Wrap, share: Share) -> None:
    """One network used twelve times in a call, with a learning rate by cyclic schedule."""
    model: Any = Equation()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.8)
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.05, 2)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        descend(optimizer, F.mse_loss(model(share(normal(step, BATCH, 3))), share(normal(step + 9, BATCH, 2))))
        schedule.step()


@script()
def forecasting(wrap: Wrap, share: Share) -> None:
    """Dilated causal convolutions with weight normalisation, quantile loss, several horizons."""
    norm = torch.nn.utils.parametrizations.weight_norm

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(norm(nn.Conv1d(1 if d == 1 else 8, 8, 2, dilation=d)) for d in (1, 2, 4))
            self.out = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            for conv in self.convs:
                x = F.relu(conv(F.pad(x, (conv.dilation[0], 0))))
            return self.out(x[:, :, -1])

    model: Any = Causal()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        x, y = share(normal(step, BATCH, 1, 12)), share(normal(step + 9, BATCH, 1))
        error, levels = y - model(x), torch.tensor([0.1, 0.5, 0.9])
        descend(optimizer, torch.max(levels * error, (levels - 1) * error).mean())

"""Scripts of speech, graphs, reinforcement, recommendation, tables and science."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from tests.compatibility.script import Share, State, Wrap, normal, script, whole

BATCH, STEPS = 6, 3


class Speech(nn.Module):
    """Hears with a convolution over time and a GRU, and gives log probabilities of letters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 16, 3, 2, 1), nn.LayerNorm(16)
        self.gru, self.out = nn.GRU(16, 16, batch_first=True, bidirectional=True), nn.Linear(32, 10)

    def forward(self, sound: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.conv(sound).transpose(1, 2)))
        return self.out(self.gru(hidden)[0]).log_softmax(-1)


@script()
def speech_recognition(wrap: Wrap, share: Share) -> State:
    """Convolution, GRU and CTC outside of the model, after a transpose to time first."""
    model: Any = Speech()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        sound, letters = share(normal(step, BATCH, 8, 24)), share(whole(step, 9, BATCH, 4) + 1)
        chances = model(sound).transpose(0, 1)
        sizes = torch.full((len(sound),), 12), torch.full((len(sound),), 4)
        loss = F.ctc_loss(chances, letters, *sizes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


@script()
def deep_q_learning(wrap: Wrap, share: Share) -> State:
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
        loss = F.smooth_l1_loss(model(state).gather(1, action).squeeze(1), value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        target.load_state_dict(model.state_dict())
    return model.state_dict()


@script(
    change='`inputs="replicated", num_micro_batches=1`: all ranks play the same episode',
    is_replicated=True,
)
def policy_gradient(wrap: Wrap, share: Share) -> State:
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
        optimizer.zero_grad()
        torch.cat(losses).sum().backward()
        optimizer.step()
    return model.state_dict()

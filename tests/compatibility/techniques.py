"""Scripts that are known by a technique of training: penalties, parts that thaw, several losses, loops by hand."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from tests.compatibility.script import ONE_GRAPH, Share, State, Wrap, descend, normal, script, whole

BATCH, STEPS, WIDTH, CLASSES = 4, 3, 12, 4


def layers(*more: nn.Module) -> nn.Sequential:
    """Returns a small network."""
    first, second = ((nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
    return nn.Sequential(*first, *more, *second, nn.Linear(WIDTH, CLASSES))


def batches(share: Share, num_steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """Returns this rank's samples and labels of each step, as a data loader does."""
    seeds = range(num_steps)
    return [(share(normal(seed, BATCH, WIDTH)), share(whole(seed, CLASSES, BATCH))) for seed in seeds]


@script()
def thawing(wrap: Wrap, share: Share) -> None:
    """The body is frozen for some steps, then trained at a smaller rate in a group that is added to the optimizer."""
    model: Any = layers()
    model[:2].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    body = list(model[:2].parameters())
    model = wrap(model, optimizer)
    for step, (x, y) in enumerate(batches(share, 2 * STEPS)):
        if step == STEPS:
            for weight in body:
                weight.requires_grad_(True)
            optimizer.add_param_group({"params": body, "lr": 1e-3})
        descend(optimizer, F.cross_entropy(model(x), y))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.heads = nn.ModuleDict({"classes": nn.Linear(WIDTH, CLASSES), "depth": nn.Linear(WIDTH, 1)})
        self.spread = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {name: head(hidden) for name, head in self.heads.items()} | {"spread": self.spread * 1.0}


@script()
def two_tasks(wrap: Wrap, share: Share) -> None:
    """Two losses weighted by learned uncertainties, whose parameter comes out of the model as an output."""
    model: Any = TwoHeads()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    model = wrap(model, optimizer)
    for x, y in batches(share):
        out = model(x)
        losses = torch.stack([F.cross_entropy(out["classes"], y), out["depth"].square().mean()])
        descend(optimizer, (losses * torch.exp(-out["spread"]) + out["spread"]).sum())


@script()
def loop_by_hand(wrap: Wrap, share: Share) -> None:
    """No optimizer: weights are changed in place by the loop, as tutorials do."""
    model: Any = layers()
    model = wrap(model)
    for x, y in batches(share):
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.grad is not None:
                    weight -= 0.1 * weight.grad


class Frugal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@script()
def gradient_checkpointing(wrap: Wrap, share: Share) -> None:
    """torch.utils.checkpoint in forward."""
    model: Any = Frugal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    for x, y in batches(share):
        descend(optimizer, F.cross_entropy(model(x), y))


@script(
    change='`inputs="replicated"`: a sample is compared with those of all ranks; the slow network copies the wrapper',
    is_replicated=True,
)
def momentum_contrast(wrap: Wrap, share: Share) -> State:
    """Pairs are told apart from a queue of earlier samples, seen by a slow network without gradients (MoCo)."""
    query: Any = layers()
    optimizer = torch.optim.SGD(query.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    query = wrap(query, optimizer)
    key = copy.deepcopy(query).requires_grad_(False)
    queue = F.normalize(normal(0, CLASSES, 3 * BATCH), dim=0)
    for step in range(STEPS):
        with torch.no_grad():
            for weight, slow in zip(query.parameters(), key.parameters(), strict=True):
                slow.data = slow.data * 0.9 + weight.data * 0.1
            keys = F.normalize(key(normal(step + 9, BATCH, WIDTH)), dim=1)
        queries = F.normalize(query(normal(step, BATCH, WIDTH)), dim=1)
        alike, others = (queries * keys).sum(1, keepdim=True), queries @ queue.clone()
        descend(optimizer, F.cross_entropy(torch.cat([alike, others], 1) / 0.2, torch.zeros(BATCH, dtype=torch.long)))
        queue[:, step * BATCH : (step + 1) * BATCH] = keys.t()
    return key.state_dict()


@script()
def averaged_weights(wrap: Wrap, share: Share) -> State:
    """Stochastic weight averaging with its learning rate and, at the end, update_bn."""
    model: Any = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    average, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for x, y in batches(share):
        descend(optimizer, F.cross_entropy(model(x), y))
        average.update_parameters(model)
        schedule.step()
    update_bn([share(normal(7, BATCH, WIDTH))], average)
    return average.module.state_dict()


@script(refusal=r"create_graph|second derivative")
def gradient_penalty(wrap: Wrap, share: Share) -> None:
    """The norm of a critic's gradient by its input is part of the loss (WGAN-GP)."""
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    model = wrap(model, optimizer)
    x = share(normal(0, BATCH, WIDTH)).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    descend(optimizer, out.mean() + 10 * (slope.norm(2, 1) - 1).square().mean())


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.size(0))
        for net in self.nets:
            kept, moved = x.chunk(2, dim=1)
            scale, shift = net(kept).chunk(2, dim=1)
            moved = moved * torch.tanh(scale).exp() + shift
            total = total + torch.tanh(scale).sum(1)
            x = torch.cat([moved, kept], 1)
        prior = torch.distributions.Normal(torch.zeros(WIDTH), torch.ones(WIDTH))
        return -(prior.log_prob(x).sum(1) + total).mean()


@script()
def normalizing_flow(wrap: Wrap, share: Share) -> None:
    """Affine couplings that return the mean negative log likelihood, a prior of torch.distributions, Adamax."""
    model: Any = Flow()
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2, eps=1e-4)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        descend(optimizer, model(share(normal(step, BATCH, WIDTH))))


class Margin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.PReLU(), nn.Linear(16, 8))
        self.weight = nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - cosine**2).clamp(1e-4, 1))
        moved = cosine * 0.9 - sine * 0.4
        hot = torch.zeros(cosine.size(), device=x.device)
        hot.scatter_(1, label.view(-1, 1).long(), 1)
        return F.cross_entropy(8 * (hot * moved + (1.0 - hot) * cosine), label)


@script()
def angular_margin(wrap: Wrap, share: Share) -> None:
    """A margin on the angle of the right class, made by scatter_ into zeros of the batch's size (ArcFace)."""
    model: Any = Margin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    model = wrap(model, optimizer)
    for x, y in batches(share):
        descend(optimizer, model(x, y))


@script(ONE_GRAPH, is_replicated=True)
def message_passing(wrap: Wrap, share: Share) -> None:
    """Messages along a list of edges, gathered and added up at their targets (index_add), several graphs in one."""

    class Messages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(16, 8), nn.Linear(8, 3)

        def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor, num_graphs: int) -> Tensor:
            hidden = F.relu(self.first(nodes))
            source, target = edges
            received = torch.zeros_like(hidden).index_add(0, target, hidden[source])
            hidden = F.relu(self.second(torch.cat([hidden, received], 1)))
            return self.head(hidden.new_zeros(num_graphs, 8).index_add(0, graph, hidden))

    model: Any = Messages()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    model = wrap(model, optimizer, num_micro_batches=1, dynamic_batch=False)
    for step in range(STEPS):
        nodes, edges, graph = normal(step, 9, 5), whole(step, 9, 2, 14), torch.arange(9) // 3
        descend(optimizer, F.cross_entropy(model(nodes, edges, graph, 3), whole(step, 3, 3)))

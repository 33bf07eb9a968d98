"""Scripts that are known by a technique of training: penalties, parts that thaw, several losses, loops by hand."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from autovaruna import keep_whole
from tests.catalogue.structure import StraightThrough
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


@torch.jit.script
def without_even(words: Tensor) -> Tensor:
    """Replaces even words."""
    kept = words.clone()
    for row in kept:
        for k in range(row.numel()):
            if row[k] % 2 == 0:
                row[k] = 1
    return kept


@keep_whole
def by_length(hidden: Tensor, words: Tensor) -> Tensor:
    """Averages over the places up to the last word that is not 1."""
    ends = [max([k + 1 for k, word in enumerate(row) if word != 1], default=1) for row in words.tolist()]
    return torch.stack([row[:end].mean(0) for row, end in zip(hidden, ends, strict=True)])


@script(change="`@keep_whole` on the function that goes by numbers; that of torch.jit.script stays as it is")
def functions_by_numbers(wrap: Wrap, share: Share) -> None:
    """Functions whose Python goes by the numbers in tensors: one of torch.jit.script, one plain."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, CLASSES)

        def forward(self, words: Tensor) -> Tensor:
            words = without_even(words)
            return self.out(by_length(torch.tanh(self.body(self.embed(words))), words))  # type: ignore[no-any-return]

    model: Any = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        words, y = share(whole(step, 20, BATCH, 6)), share(whole(step, CLASSES, BATCH))
        descend(optimizer, F.cross_entropy(model(words), y))


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
def two_backwards(wrap: Wrap, share: Share) -> None:
    """Two losses, each with a backward of its own over one graph."""
    model: Any = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    for x, y in batches(share):
        out = model(x)
        optimizer.zero_grad()
        F.cross_entropy(out["classes"], y).backward(retain_graph=True)
        (out["depth"].square().mean() + 0 * out["spread"].sum()).backward()
        optimizer.step()


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


@script()
def closure(wrap: Wrap, share: Share) -> None:
    """The optimizer calls the loss itself."""
    model: Any = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    for x, y in batches(share):

        def loss(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(model(x), y)
            value.backward()
            return value

        optimizer.step(loss)


class Binary(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, StraightThrough.apply(self.weight, 1.0), self.bias)


@script()
def binary_weights(wrap: Wrap, share: Share) -> None:
    """Straight-through gradients by an autograd.Function of weights, which are clamped after each step."""
    model: Any = layers(Binary(WIDTH, WIDTH), nn.Hardtanh())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    model = wrap(model, optimizer)
    for x, y in batches(share):
        descend(optimizer, F.cross_entropy(model(x), y))
        for weight in model.parameters():
            weight.data.clamp_(-1, 1)


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
    """torch.utils.checkpoint in forward, and Lion as people write it."""

    class Lion(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    p.data.mul_(1 - group["lr"] * group["weight_decay"])
                    state = self.state[p]
                    if len(state) == 0:
                        state["mean"] = torch.zeros_like(p)
                    update = state["mean"] * group["betas"][0] + p.grad * (1 - group["betas"][0])
                    p.add_(torch.tanh(update * 1e3), alpha=-group["lr"])
                    state["mean"].mul_(group["betas"][1]).add_(p.grad, alpha=1 - group["betas"][1])

    model: Any = Frugal()
    optimizer = Lion(model.parameters())
    model = wrap(model, optimizer)
    for x, y in batches(share):
        descend(optimizer, F.cross_entropy(model(x), y))


@script()
def own_target(wrap: Wrap, share: Share) -> State:
    """An online network with a predictor follows a slow copy of itself (BYOL), updated parameter by parameter."""
    online: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
    optimizer = torch.optim.SGD(online.parameters(), lr=0.1, momentum=0.9)
    online = wrap(online, optimizer)
    slow = copy.deepcopy(online)
    for step in range(STEPS):
        first, second = share(normal(step, BATCH, WIDTH)), share(normal(step + 9, BATCH, WIDTH))
        with torch.no_grad():
            goal = F.normalize(slow(second), dim=-1)
        descend(optimizer, 2 - 2 * (F.normalize(online(first), dim=-1) * goal).sum(-1).mean())
        with torch.no_grad():
            for weight, average in zip(online.parameters(), slow.parameters(), strict=True):
                average.data = average.data * 0.9 + weight.data * 0.1
    return slow.state_dict()


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


@script(refusal=r"norm|weight_decay|penalt")
def penalty_outside(wrap: Wrap, share: Share) -> None:
    """The squares of all weights are added to the loss outside of the model."""
    model: Any = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, optimizer)
    for x, y in batches(share):
        descend(optimizer, F.cross_entropy(model(x), y) + 1e-3 * sum(p.square().sum() for p in model.parameters()))


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


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(8, 9))
        self.features, self.head = nn.Conv1d(3, 16, 1), nn.Linear(16, CLASSES)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        batch = points.size()[0]
        turn = self.turn(points).view(-1, 3, 3) + torch.eye(3).repeat(batch, 1, 1)
        moved = torch.bmm(points.transpose(2, 1), turn).transpose(2, 1)
        return F.log_softmax(self.head(torch.max(F.relu(self.features(moved)), 2)[0]), -1), turn


@script()
def point_clouds(wrap: Wrap, share: Share) -> None:
    """A PointNet whose transformation is kept near orthogonal by a term outside of the model."""
    model: Any = Points()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-4)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        chances, turn = model(share(normal(step, BATCH, 3, 10)))
        loss = F.nll_loss(chances, share(whole(step, CLASSES, BATCH)))
        near = torch.mean(torch.norm(torch.bmm(turn, turn.transpose(2, 1)) - torch.eye(3), dim=(1, 2)))
        descend(optimizer, loss + 0.01 * near)


class Captions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8))
        self.embed, self.lstm, self.out = nn.Embedding(20, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 20)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        start = self.see(image).unsqueeze(1)
        return self.out(self.lstm(torch.cat((start, self.embed(words)), 1))[0])


@script()
def captions(wrap: Wrap, share: Share) -> None:
    """A convolutional encoder and an LSTM decoder, an optimizer of the decoder and one layer of the encoder."""
    model: Any = Captions()
    chosen = [*model.lstm.parameters(), *model.embed.parameters(), *model.out.parameters(), *model.see[3].parameters()]
    optimizer = torch.optim.Adam(chosen, lr=1e-2, eps=1e-4)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        image, words = share(normal(step, BATCH, 1, 8, 8)), share(whole(step, 20, BATCH, 5))
        loss = F.cross_entropy(model(image, words[:, :-1]).reshape(-1, 20), words.reshape(-1))
        model.zero_grad()
        loss.backward()
        optimizer.step()


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

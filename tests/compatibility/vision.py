"""Scripts of vision: classification, segmentation, detection, generation."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compatibility.script import Share, State, Wrap, descend, normal, script, whole

BATCH, STEPS, CLASSES = 4, 3, 5


class Basic(nn.Module):
    def __init__(self, planes: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(planes, out, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.GroupNorm(2, out), nn.GroupNorm(2, out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.shortcut = nn.Sequential()
        if stride != 1 or planes != out:
            self.shortcut = nn.Sequential(nn.Conv2d(planes, out, 1, stride, bias=False), nn.GroupNorm(2, out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return F.relu(out)


@script()
def residual_network(wrap: Wrap, share: Share) -> None:
    """A residual network in channels_last, Nesterov, one-cycle schedule, label smoothing, mixed samples (mixup)."""
    body = (nn.Conv2d(3, 8, 3, 1, 1), Basic(8, 8), Basic(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model: Any = nn.Sequential(*body, nn.Linear(16, CLASSES)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        x = share(normal(step, BATCH, 3, 12, 12)).to(memory_format=torch.channels_last)
        y, other, part = share(whole(step, CLASSES, BATCH)), share(whole(step + 9, CLASSES, BATCH)), 0.3
        out = model(x)
        loss = part * F.cross_entropy(out, y, label_smoothing=0.1) + (1 - part) * F.cross_entropy(out, other)
        descend(optimizer, loss)
        schedule.step()


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, 10, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


@script()
def vision_transformer(wrap: Wrap, share: Share) -> None:
    """A vision transformer with a class token, cosine schedule, accuracy counted by the script."""
    model: Any = VisionTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        x, y = share(normal(step, BATCH, 3, 12, 12)), share(whole(step, CLASSES, BATCH))
        out = model(x)
        descend(optimizer, F.cross_entropy(out, y))
        schedule.step()
        assert 0 <= (out.argmax(1) == y).float().mean().item() <= 1


class UNet(nn.Module):
    """Goes down twice and up twice, with skips; takes a time step, or none."""

    def __init__(self, out: int, has_time: bool = False) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) if has_time else None
        self.down1, self.down2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up1, self.up2 = nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(8, out, 1)

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:
        first = F.relu(self.down1(x))
        if t is not None and self.time is not None:
            half = torch.exp(-math.log(1e4) * torch.arange(4) / 4)
            angles = t[:, None].float() * half[None]
            first = first + self.time(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]
        second = F.relu(self.down2(F.max_pool2d(first, 2)))
        third = F.relu(self.middle(F.max_pool2d(second, 2)))
        up = self.up2(torch.cat([self.up1(third), F.avg_pool2d(first, 2)], 1))
        if up.shape[2:] != x.shape[2:]:
            up = F.interpolate(up, size=x.shape[2:], mode="bilinear", align_corners=False)
        return self.last(up)


@script()
def segmentation(wrap: Wrap, share: Share) -> None:
    """A U-Net with skips, cross entropy by pixel and a Dice term by sample, with ReduceLROnPlateau."""
    model: Any = UNet(2)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, eps=1e-4)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        x, y = share(normal(step, BATCH, 1, 12, 12)), share(whole(step, 2, BATCH, 12, 12))
        logits = model(x)
        chosen = logits.softmax(1)[:, 1]
        dice = 1 - (2 * (chosen * y).sum((1, 2)) + 1) / (chosen.sum((1, 2)) + y.sum((1, 2)) + 1)
        descend(optimizer, F.cross_entropy(logits, y) + dice.mean())
        schedule.step(step / STEPS)


@script()
def diffusion(wrap: Wrap, share: Share) -> State:
    """Noise prediction with sinusoidal time steps and an average of weights updated after each step."""
    model: Any = UNet(1, has_time=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0)
    model = wrap(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        clean, noise = share(normal(step, BATCH, 1, 8, 8)), share(normal(step + 50, BATCH, 1, 8, 8))
        t = share(whole(step, 50, BATCH))
        noisy = alphas[t].sqrt()[:, None, None, None] * clean + (1 - alphas[t]).sqrt()[:, None, None, None] * noise
        descend(optimizer, F.mse_loss(model(noisy, t), noise))
        average.update_parameters(model)
    return average.module.state_dict()


class Autoencoder(nn.Module):
    """Is variational; its noise comes in as an input, so that ranks and plain PyTorch draw the same."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread = nn.Linear(16, 12), nn.Linear(12, 3), nn.Linear(12, 3)
        self.decode = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 16))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.encode(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        return torch.sigmoid(self.decode(mean + noise * torch.exp(0.5 * spread))), mean, spread


@script(change="sums divided by the number of samples, as DistributedDataParallel wants them too")
def variational_autoencoder(wrap: Wrap, share: Share) -> None:
    """Reconstruction and KL divergence from three outputs, both outside of the model."""
    model: Any = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        x = share(normal(step, BATCH, 16).sigmoid())
        got, mean, spread = model(x, share(normal(step + 50, BATCH, 3)))
        loss = F.binary_cross_entropy(got, x, reduction="sum")
        descend(optimizer, (loss - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())) / len(x))


@script()
def adversarial_networks(wrap: Wrap, share: Share) -> None:
    """A generator and a discriminator, each wrapped, trained in turns, one through the other."""
    generator: Any = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8), nn.Tanh())
    critic: Any = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    first = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-4)
    second = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-4)
    generator, critic = wrap(generator, first), wrap(critic, second)
    criterion = nn.BCEWithLogitsLoss()
    for step in range(STEPS):
        real, noise = share(normal(step, BATCH, 8)), share(normal(step + 50, BATCH, 4))
        second.zero_grad()
        fake = generator(noise)
        right = criterion(critic(real).squeeze(1), torch.ones(len(real)))
        right.backward()
        wrong = criterion(critic(fake.detach()).squeeze(1), torch.zeros(len(real)))
        wrong.backward()
        second.step()
        first.zero_grad()
        criterion(critic(fake).squeeze(1), torch.ones(len(real))).backward()
        first.step()


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.lower = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.scores = nn.ModuleList(nn.Conv2d(8, CLASSES, 3, padding=1) for _ in range(2))
        self.boxes = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(2))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = [F.relu(self.stem(images))]
        maps.append(F.relu(self.lower(maps[0])))
        scores = [head(each).flatten(2).transpose(1, 2) for head, each in zip(self.scores, maps, strict=True)]
        boxes = [head(each).flatten(2).transpose(1, 2) for head, each in zip(self.boxes, maps, strict=True)]
        return {"scores": torch.cat(scores, 1), "boxes": torch.cat(boxes, 1)}


@script()
def detection(wrap: Wrap, share: Share) -> None:
    """A one-stage detector with a dict of outputs, focal loss and smooth L1 on the places that hold an object."""
    model: Any = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    model = wrap(model, optimizer)
    for step in range(STEPS):
        images, places = share(normal(step, BATCH, 3, 16, 16)), 80
        labels = share(F.one_hot(whole(step, CLASSES, BATCH, places), CLASSES).float())
        target = share(normal(step + 9, BATCH, places, 4))
        out = model(images)
        chance = out["scores"].sigmoid()
        plain = F.binary_cross_entropy_with_logits(out["scores"], labels, reduction="none")
        near = chance * labels + (1 - chance) * (1 - labels)
        focal = (plain * (1 - near) ** 2).mean()
        held = labels[..., 0]
        regression = (F.smooth_l1_loss(out["boxes"], target, reduction="none").sum(-1) * held).mean()
        descend(optimizer, focal + regression)

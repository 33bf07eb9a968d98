"""Trains a convolutional network with BatchNorm and dropout to read digits, and evaluates it after each epoch.

mpirun -n 2 python examples/train_digits.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from autovaruna import AutoVaruna, get_rank, get_world_size

NUM_EPOCHS, GLOBAL_SIZE, NUM_TESTS = 8, 64, 360
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def block(inputs: int, outputs: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.MaxPool2d(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(block(1, 32), block(32, 64), nn.Flatten(), nn.Dropout(0.25))
        self.head = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 10))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.body(images))
        return {"loss": F.cross_entropy(scores, labels), "scores": scores}


def load() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns images and labels to train with, and to test with."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order].to(DEVICE) / 16
    labels = torch.tensor(digits.target)[order].to(DEVICE)
    return (images[NUM_TESTS:], labels[NUM_TESTS:]), (images[:NUM_TESTS], labels[:NUM_TESTS])


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Returns the share of right answers; every rank passes the test images and gets the scores of its own."""
    model.eval()
    with torch.no_grad():
        scores = model(images, labels)["scores"]
    model.train()
    return (scores.argmax(dim=1) == labels).float().mean().item()


torch.manual_seed(0)
net = Net().to(DEVICE)
optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS)
model = AutoVaruna(net, optimizer, save_deployment=False, load_deployment=False)
(images, labels), test = load()
shuffle = torch.Generator().manual_seed(1)
for epoch in range(NUM_EPOCHS):
    order = torch.randperm(len(labels), generator=shuffle)  # the same on every rank
    for mine in (batch[get_rank() :: get_world_size()] for batch in order.split(GLOBAL_SIZE)):
        loss = model(images[mine], labels[mine])["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    right = accuracy(model, *test)
    if get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {right:.1%}")
assert right >= 0.97, f"test accuracy is {right:.1%}, expected at least 97 %"

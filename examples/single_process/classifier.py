"""Classifies points by a small network, evaluates after each epoch, and keeps the best state."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--checkpoint", default="classifier.pt")
options = parser.parse_args()

torch.manual_seed(1)
points = torch.randn(768, 8)
classes = (points[:, :4].square().sum(1) > points[:, 4:].square().sum(1)).long()
train = DataLoader(TensorDataset(points[:512], classes[:512]), batch_size=options.batch_size, shuffle=True)
test = DataLoader(TensorDataset(points[512:], classes[512:]), batch_size=128)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
loss_of = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
best = float("inf")
for epoch in range(options.epochs):
    model.train()
    for x, y in train:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

    model.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for x, y in test:
            scores = model(x)
            loss += loss_of(scores, y).item() * len(x) / len(test.dataset)
            right += int((scores.argmax(1) == y).sum())
    print(f"epoch {epoch}: loss {loss:.6f}, accuracy {right / len(test.dataset):.3f}")
    if loss < best:
        best = loss
        torch.save(model.state_dict(), options.checkpoint)

model.load_state_dict(torch.load(options.checkpoint))

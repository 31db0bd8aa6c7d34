"""Fits a curve by LBFGS, which evaluates a closure several times in each step."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()

torch.manual_seed(5)
x = torch.linspace(-2, 2, 128)[:, None]
y = torch.sin(2 * x)
loader = DataLoader(TensorDataset(x, y), batch_size=options.batch_size, shuffle=True)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
for epoch in range(options.epochs):
    for inputs, targets in loader:

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)

loss = nn.functional.mse_loss(model(x), y).item()
print(f"loss {loss:.6f}")

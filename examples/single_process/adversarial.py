"""Trains a generator against a discriminator, each by an optimizer of its own."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()

torch.manual_seed(3)
angles = 6.28 * torch.rand(512)
circle = torch.stack([angles.cos(), angles.sin()], 1)
noises = torch.randn(512, 4)
loader = DataLoader(TensorDataset(circle, noises), batch_size=options.batch_size, shuffle=True)

generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
loss_of = nn.BCEWithLogitsLoss()
for epoch in range(options.epochs):
    for real, noise in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        false = generator(noise)

        discriminator_optimizer.zero_grad()
        (loss_of(discriminator(real), ones) + loss_of(discriminator(false.detach()), zeros)).backward()
        discriminator_optimizer.step()

        generator_optimizer.zero_grad()
        loss_of(discriminator(false), ones).backward()
        generator_optimizer.step()

with torch.no_grad():
    loss = loss_of(discriminator(generator(noises)), torch.ones(512, 1)).item()
print(f"loss {loss:.6f}")

"""Predicts the next character of a text by a recurrent network, with clipped gradients of two batches in each step."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=1)
options = parser.parse_args()

text = "the ranks of a job reduce what each of them has computed, and every rank gets the sum. " * 6
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])
length = 12


class Windows(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, at):
        return codes[at : at + length], codes[at + 1 : at + length + 1]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(letters), 16)
        self.recurrence = nn.LSTM(16, 32, batch_first=True)
        self.linear = nn.Linear(32, len(letters))

    def forward(self, x):
        return self.linear(self.recurrence(self.embedding(x))[0])


torch.manual_seed(4)
loader = DataLoader(Windows(), batch_size=options.batch_size, shuffle=True, drop_last=True)
model = Network()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(options.epochs):
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        (loss / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

with torch.no_grad():
    x, y = (torch.stack(part) for part in zip(*(Windows()[at] for at in range(64))))
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
print(f"loss {loss:.6f}")

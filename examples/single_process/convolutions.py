"""Classifies small images by convolutions with batch normalization, and lowers the learning rate."""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
options = parser.parse_args()

torch.manual_seed(2)
classes = torch.randint(0, 4, (320,))
images = 0.5 * torch.randn(320, 1, 8, 8)
for number, image in zip(classes.tolist(), images):
    image[0, 2 * number : 2 * number + 2] += 1
train, test = random_split(TensorDataset(images, classes), [256, 64])
train_loader = DataLoader(train, options.batch_size, shuffle=True)
test_loader = DataLoader(test, 64)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3, padding=1)
        self.normalization = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8 * 4 * 4, 4)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.normalization(self.convolution(x))), 2)
        return self.linear(x.flatten(1))


model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
for epoch in range(options.epochs):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    schedule.step()

model.eval()
with torch.no_grad():
    loss = sum(functional.cross_entropy(model(x), y).item() for x, y in test_loader) / len(test_loader)
print(f"loss {loss:.4f}")

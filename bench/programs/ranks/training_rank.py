"""One rank of `unisono.bench.programs.training`: trains a model by several methods, and prints the curves.

Run by path with a `TrainingRequest` as JSON. Unisono's variables say which rank this is. Every method begins with the
same model and the same data on each rank. Clocks stop while the loss is computed.
"""

from __future__ import annotations

import ctypes
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import unisono as un

PR_SET_PDEATHSIG = 1
_CONTEXT, _VOCABULARY = 64, 128
_TEST_IMAGES, _CLASSES = 360, 10
_PORT = 29511
_NAMES = ("anna", "bela", "carl", "dora", "emil", "fred", "gina", "hugo")
_THINGS = ("lamp", "book", "kite", "ring", "cake", "sled", "rope", "drum")
_PLACES = ("yard", "barn", "hall", "lake")


class TrainingRequest(NamedTuple):
    """What to train: the model, its width, the steps, and the samples of a rank in a step.

    The loss is computed after `every` steps, and `host` is the address of rank 0. A method is a list: "synchronous",
    "local" or "ddp", the name of a class of `unisono.torch`, and its arguments.
    """

    model: str
    width: int
    steps: int
    batch: int
    every: int
    methods: dict[str, list[Any]]
    host: str


class Result(NamedTuple):
    """What a method has reached on rank 0.

    Attributes:
        curve: the seconds of training and the loss on test data, from time to time.
        sent_nbytes: the bytes that left the network device of the rank that sent most, with all headers.
        worst_stall_s: how much longer the longest step took than the median step without communication.
    """

    curve: list[tuple[float, float]]
    sent_nbytes: int
    worst_stall_s: float


def text(random: np.random.Generator) -> Iterator[str]:
    """Yield sentences for ever. The last word of each follows from earlier sentences, so it can be learned."""
    place_of = {thing: str(random.choice(_PLACES)) for thing in _THINGS}
    while True:
        name, thing, place = (str(random.choice(words)) for words in (_NAMES, _THINGS, _PLACES))
        if random.random() < 0.4:
            place_of[thing] = place
            yield f"{name} takes the {thing} to the {place}. "
        else:
            yield f"{name} finds the {thing} in the {place_of[thing]}. "


def sequences(seed: int, count: int) -> torch.Tensor:
    """Return so many sequences of the characters of a text of their own seed."""
    sentences, characters = text(np.random.default_rng(seed)), ""
    while len(characters) < count * (_CONTEXT + 1):
        characters += next(sentences)
    codes = np.frombuffer(characters.encode(), np.uint8)[: count * (_CONTEXT + 1)].astype(np.int64)
    return torch.from_numpy(codes.reshape(count, _CONTEXT + 1))


class Language(torch.nn.Module):  # type: ignore[misc]
    """A transformer of four layers that predicts the next character."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.embedding = torch.nn.Embedding(_VOCABULARY, width)
        self.places = torch.nn.Parameter(torch.zeros(_CONTEXT, width))
        self.body = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, _VOCABULARY)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(_CONTEXT), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next character, the last dimension first after the batch."""
        return self.head(self.body(self.embedding(x) + self.places, mask=self.mask)).transpose(1, 2)


class TrainingTask(NamedTuple):
    """A model to train. `batches` has the inputs and targets of this rank for each step, and `test` those of all."""

    model: torch.nn.Module
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    test: tuple[torch.Tensor, torch.Tensor]


def language(request: TrainingRequest, rank: int, size: int) -> TrainingTask:
    """Return the task to predict characters of a text that this program makes."""
    seen = sequences(1 + rank, request.steps * request.batch).split(request.batch)
    test = sequences(0, 64)
    return TrainingTask(Language(request.width), [(x[:, :-1], x[:, 1:]) for x in seen], (test[:, :-1], test[:, 1:]))


def digits(request: TrainingRequest, rank: int, size: int) -> TrainingTask:
    """Return the task to recognise the digits of scikit-learn; each rank has its own part of the images."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = torch.from_numpy((pixels[order] / 16).astype(np.float32)), torch.from_numpy(labels[order])
    own = np.arange(_TEST_IMAGES, len(y))[rank::size]
    random = np.random.default_rng(1 + rank)
    chosen = [torch.from_numpy(random.choice(own, request.batch)) for _ in range(request.steps)]
    width = request.width
    layers = [torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, _CLASSES))
    return TrainingTask(model, [(x[each], y[each]) for each in chosen], (x[:_TEST_IMAGES], y[:_TEST_IMAGES]))


TASKS: dict[str, Callable[[TrainingRequest, int, int], TrainingTask]] = {"transformer": language, "digits": digits}


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy."""
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def sent_nbytes() -> int:
    """Return the bytes that have left the network devices of this host, without the loopback."""
    lines = [line.replace(":", " ").split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(fields[9]) for fields in lines if fields[0] != "lo")


def wrapped(world: un.Communicator, method: list[Any], task: TrainingTask, host: str) -> tuple[torch.nn.Module, Any]:
    """Return the model to call and the optimizer of a method."""
    kind, name, options = method
    inner = torch.optim.AdamW(task.model.parameters(), lr=1e-3)
    if kind == "ddp":
        if not dist.is_initialized():
            dist.init_process_group("gloo", f"tcp://{host}:{_PORT}", rank=world.rank, world_size=world.size)
        return torch.nn.parallel.DistributedDataParallel(task.model), inner
    if kind == "synchronous":
        named = list(task.model.named_parameters())
        return task.model, un.torch.DistributedOptimizer(inner, world, named_parameters=named, **options)
    return task.model, getattr(un.torch, name)(task.model, inner, world, **options)


def trained(world: un.Communicator, request: TrainingRequest, method: list[Any]) -> Result:
    """Train by one method, and return the losses and times."""
    torch.manual_seed(0)
    task = TASKS[request.model](request, world.rank, world.size)
    alone = []
    for batch in task.batches[:5]:
        began = time.monotonic()
        loss_of(task.model, batch).backward()
        alone.append(time.monotonic() - began)
    task.model.zero_grad()
    model, optimizer = wrapped(world, method, task, request.host)
    world.barrier()
    sent, seconds, times, curve = sent_nbytes(), 0.0, [], []
    for step, batch in enumerate(task.batches, 1):
        began = time.monotonic()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if step == request.steps and hasattr(optimizer, "synchronize") and method[0] == "local":
            optimizer.synchronize()
        times.append(time.monotonic() - began)
        seconds += times[-1]
        if step % request.every == 0 or step == request.steps:
            with torch.no_grad():
                curve.append((seconds, float(loss_of(task.model, task.test))))
    most = int(world.allreduce(np.array(sent_nbytes() - sent), "max"))
    if hasattr(optimizer, "close"):
        optimizer.close()
    return Result(curve, most, max(times) - statistics.median(alone))


def main() -> None:
    """Train by all methods. Rank 0 prints the results by method as JSON."""
    request = TrainingRequest(*json.loads(sys.argv[1]))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    world = un.init()
    results = {name: trained(world, request, method) for name, method in request.methods.items()}
    if world.rank == 0:
        sys.stdout.write(json.dumps(results))
        sys.stdout.flush()
    world.barrier()
    world.close()


if __name__ == "__main__":
    main()

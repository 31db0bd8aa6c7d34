"""The models and data of `unisono.bench.programs.training`.

The transformer predicts the characters of a text that this program makes. The digits are those of scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

_CONTEXT, _VOCABULARY = 64, 128
_TEST_IMAGES, _CLASSES = 360, 10
_NAMES = ("anna", "bela", "carl", "dora", "emil", "fred", "gina", "hugo")
_THINGS = ("lamp", "book", "kite", "ring", "cake", "sled", "rope", "drum")
_PLACES = ("yard", "barn", "hall", "lake")


class TrainingRequest(NamedTuple):
    """The request to a rank: the model to train, and the method.

    Attributes:
        model: a name of `TASKS`.
        width: the width of its layers.
        steps: the steps of each rank.
        batch: the samples of a rank in a step.
        every: the steps from one computation of the loss to the next.
        method: the kind of the method, the name of a class of `unisono.torch`, and its arguments.
        hosts: the addresses of the ranks.
        port: the first of three free ports of the first host.
    """

    model: str
    width: int
    steps: int
    batch: int
    every: int
    method: list[Any]
    hosts: list[str]
    port: int


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
    """Return `count` sequences of character codes, cut from a text that `seed` determines."""
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
        self.places = torch.nn.Embedding(_CONTEXT, width)
        torch.nn.init.zeros_(self.places.weight)
        self.body = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, _VOCABULARY)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(_CONTEXT), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next character, the last dimension first after the batch."""
        return self.head(self.body(self.embedding(x) + self.places.weight, mask=self.mask)).transpose(1, 2)


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
    return TrainingTask(model, [(x[rows], y[rows]) for rows in chosen], (x[:_TEST_IMAGES], y[:_TEST_IMAGES]))


TASKS: dict[str, Callable[[TrainingRequest, int, int], TrainingTask]] = {"transformer": language, "digits": digits}


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy."""
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

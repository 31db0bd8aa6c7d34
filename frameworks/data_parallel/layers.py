"""Parameters as layers: which belong together, and one flat piece of memory for each layer, to be sent as a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np

from unisono import UsageError
from unisono.frameworks.arrays import Array, FlatArray, same_bits

_HEADER_NBYTES = 16


class Layer(NamedTuple):
    """Parameters whose names are the same up to the last dot.

    Attributes:
        name: that part of their names.
        parts: their names, dtypes and counts, in their order.
        dtype: what the layer is kept in: float64 if one of them is, else float32.
    """

    name: str
    parts: tuple[tuple[str, str, int], ...]
    dtype: str

    @property
    def elements(self) -> int:
        """The number of elements."""
        return sum(count for _, _, count in self.parts)


class Frame:
    """A message with two numbers and the elements of a layer.

    Attributes:
        memory: all of it, as bytes.
        numbers: an array of two int64, in that memory.
        values: the elements, likewise.
    """

    def __init__(self, layer: Layer | None) -> None:
        """Make one for a layer, or with nothing but the numbers."""
        elements, dtype = (0, "float32") if layer is None else (layer.elements, layer.dtype)
        self.memory = np.zeros(_HEADER_NBYTES + elements * np.dtype(dtype).itemsize, np.uint8)
        self.numbers = self.memory[:_HEADER_NBYTES].view(np.int64)
        self.values: Array = self.memory[_HEADER_NBYTES:].view(dtype)


def layers_of(lent: Mapping[str, FlatArray]) -> tuple[Layer, ...]:
    """Return the layers, in the order of their first parameters.

    Raises:
        UsageError: there are none, or one is not of real floats.
    """
    parts: dict[str, list[tuple[str, str, int]]] = {}
    for name, each in lent.items():
        if each.flat.dtype.kind not in "fV":
            raise UsageError(f"{name} is {each.described()}: only real floats are averaged; broadcast it by itself")
        parts.setdefault(name.rpartition(".")[0], []).append((name, each.flat.dtype.name, each.flat.size))
    if not any(each.flat.size for each in lent.values()):
        raise UsageError("there are no parameters: pass arrays by name")
    wide = {name: any(dtype == "float64" for _, dtype, _ in each) for name, each in parts.items()}
    made = (Layer(name, tuple(each), "float64" if wide[name] else "float32") for name, each in parts.items())
    return tuple(layer for layer in made if layer.elements)


def change(layer: Layer, lent: Mapping[str, FlatArray], since: Array, into: Array) -> None:
    """Write to `into` by how much a layer has changed since it was set to `since`."""
    for name, start, end in _places(layer):
        flat = lent[name].flat
        # What narrow parameters were set to is rounded, and the rounding is no change.
        into[start:end] = flat.astype(layer.dtype) - since[start:end].astype(flat.dtype).astype(layer.dtype)


def read(layer: Layer, lent: Mapping[str, FlatArray], into: Array) -> None:
    """Write the parameters of a layer to `into`."""
    for name, start, end in _places(layer):
        into[start:end] = lent[name].flat


@same_bits
def write(layer: Layer, lent: Mapping[str, FlatArray], values: Array) -> None:
    """Set the parameters of a layer; they are yet to be put back."""
    for name, start, end in _places(layer):
        lent[name].flat[...] = values[start:end].astype(lent[name].flat.dtype)


def spread(layers: Sequence[Layer], servers: Sequence[int]) -> tuple[int, ...]:
    """Return the server of each layer: the largest layers first, each to whom has the fewest elements so far."""
    load = dict.fromkeys(servers, 0)
    server = {}
    for index in sorted(range(len(layers)), key=lambda index: -layers[index].elements):
        server[index] = min(load, key=lambda rank: load[rank])
        load[server[index]] += layers[index].elements
    return tuple(server[index] for index in range(len(layers)))


def _places(layer: Layer) -> list[tuple[str, int, int]]:
    ends = np.cumsum([count for _, _, count in layer.parts]).tolist()
    return [(name, end - count, end) for (name, _, count), end in zip(layer.parts, ends, strict=True)]

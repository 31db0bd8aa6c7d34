"""Layers: parameters that belong together, and the frame in which a layer is sent as one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np

from unisono import UsageError
from unisono.frameworks.arrays import Array, FlatArray, same_bits

_HEADER_NBYTES = 16


class Layer(NamedTuple):
    """Parameters whose names are equal up to the last dot.

    Attributes:
        name: the common part of the names.
        parts: the name, dtype and number of elements of each parameter, in order.
        dtype: the dtype of the layer in messages: float64 if a parameter has it, else float32.
    """

    name: str
    parts: tuple[tuple[str, str, int], ...]
    dtype: str

    @property
    def elements(self) -> int:
        """The number of elements of the layer."""
        return sum(count for _, _, count in self.parts)


class Frame:
    """A message with two numbers and the elements of a layer.

    Attributes:
        memory: the whole message, as bytes.
        numbers: two int64 in that memory.
        values: the elements in that memory.
    """

    def __init__(self, layer: Layer | None) -> None:
        """Create a frame for a layer, or one with only the numbers if `layer` is None."""
        elements, dtype = (0, "float32") if layer is None else (layer.elements, layer.dtype)
        self.memory = np.zeros(_HEADER_NBYTES + elements * np.dtype(dtype).itemsize, np.uint8)
        self.numbers = self.memory[:_HEADER_NBYTES].view(np.int64)
        self.values: Array = self.memory[_HEADER_NBYTES:].view(dtype)


def layers_of(lent: Mapping[str, FlatArray]) -> tuple[Layer, ...]:
    """Return the layers, in the order of their first parameters.

    Raises:
        UsageError: there are no parameters, or one is not of real floats.
    """
    parts: dict[str, list[tuple[str, str, int]]] = {}
    for name, array in lent.items():
        if array.flat.dtype.kind not in "fV":
            raise UsageError(f"{name} is {array.described()}: only real floats are averaged: broadcast it instead")
        parts.setdefault(name.rpartition(".")[0], []).append((name, array.flat.dtype.name, array.flat.size))
    if not any(each.flat.size for each in lent.values()):
        raise UsageError("there are no parameters: pass at least one array, by name")
    dtypes = {
        name: "float64" if any(dtype == "float64" for _, dtype, _ in parts_of_layer) else "float32"
        for name, parts_of_layer in parts.items()
    }
    layers = (Layer(name, tuple(parts_of_layer), dtypes[name]) for name, parts_of_layer in parts.items())
    return tuple(layer for layer in layers if layer.elements)


def change(layer: Layer, lent: Mapping[str, FlatArray], since: Array, into: Array) -> None:
    """Write the change of a layer since it was set to `since` into `into`."""
    for name, start, end in _places(layer):
        flat = lent[name].flat
        # Narrow parameters were set to rounded values, and the rounding is no change.
        into[start:end] = flat.astype(layer.dtype) - since[start:end].astype(flat.dtype).astype(layer.dtype)


def read(layer: Layer, lent: Mapping[str, FlatArray], into: Array) -> None:
    """Write the parameters of a layer into `into`."""
    for name, start, end in _places(layer):
        into[start:end] = lent[name].flat


@same_bits
def write(layer: Layer, lent: Mapping[str, FlatArray], values: Array) -> None:
    """Write values to the parameters of a layer, which the program has passed. The caller puts them back."""
    for name, start, end in _places(layer):
        lent[name].flat[...] = values[start:end].astype(lent[name].flat.dtype)


def mix(layer: Layer, lent: Mapping[str, FlatArray], values: Array, share: float) -> None:
    """Move the parameters of a layer towards `values`, by a share of the difference. The caller puts them back."""
    for name, start, end in _places(layer):
        flat = lent[name].flat
        own = flat.astype(layer.dtype)
        own += np.dtype(layer.dtype).type(share) * (values[start:end] - own)
        flat[...] = own.astype(flat.dtype)


def spread(layers: Sequence[Layer], servers: Sequence[int]) -> tuple[int, ...]:
    """Return the server of each layer: from the largest layer on, each goes to the server with the fewest elements."""
    load = dict.fromkeys(servers, 0)
    server_of = {}
    for index in sorted(range(len(layers)), key=lambda index: -layers[index].elements):
        server_of[index] = min(load, key=lambda rank: load[rank])
        load[server_of[index]] += layers[index].elements
    return tuple(server_of[index] for index in range(len(layers)))


def _places(layer: Layer) -> list[tuple[str, int, int]]:
    ends = np.cumsum([count for _, _, count in layer.parts]).tolist()
    return [(name, end - count, end) for (name, _, count), end in zip(layer.parts, ends, strict=True)]

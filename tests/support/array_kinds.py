"""Kinds of arrays for tests: how to make one from a numpy array, what comes back for it, and how to read that."""

from __future__ import annotations

import array
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.dtypes import DTYPES

ALL = frozenset(DTYPES)
OF_ML_DTYPES = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})
OF_NUMPY = ALL - OF_ML_DTYPES
WITHOUT_64_BITS = ALL - {"int64", "uint64", "float64", "complex128"}
_CODES = {
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "int64": "q",
    "float32": "f",
    "float64": "d",
}


class Interfaced:
    """An array of nobody's, with `__array_interface__`."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.__array_interface__ = values.__array_interface__


class Exported:
    """An array of nobody's, with `__dlpack__`."""

    def __init__(self, values: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.values = values
        self._device = device

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.values.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class Standard(Exported):
    """An array of a library that keeps to the standard of array libraries, and has no name in Unisono."""

    def __array_namespace__(self) -> Any:
        return Namespace


class Namespace:
    """That library."""

    @staticmethod
    def asarray(values: Any) -> Standard:
        return Standard(values)


class OnDevice:
    """Memory of the host that calls itself a GPU's, by `__cuda_array_interface__`."""

    def __init__(self, values: Any, **changes: Any) -> None:
        told = values.__array_interface__
        self.values = values
        self.__cuda_array_interface__ = {
            **{key: told[key] for key in ("shape", "typestr", "data", "strides")},
            "version": 3,
            **changes,
        }


@dataclass(frozen=True)
class Kind:
    """One kind of arrays.

    Attributes:
        make: an array of the kind with the elements of a numpy array, and in its memory if the library can.
        read: a numpy array with the elements of such an array.
        result: the name of the class that comes back.
        dtypes: the types of elements that it can have.
        writable: whether it may be an out.
        library: what must be installed.
        axes: the most axes that it can have.
    """

    make: Callable[[Any], Any]
    read: Callable[[Any], Any]
    result: str = "ndarray"
    dtypes: frozenset[str] = OF_NUMPY
    writable: bool = True
    library: str = "numpy"
    axes: int = 8

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.library) is not None


def torch_tensor(values: Any) -> Any:
    import torch

    if values.dtype.name not in OF_ML_DTYPES:
        return torch.from_numpy(values)
    return torch.from_numpy(values.view(f"i{values.itemsize}")).view(getattr(torch, values.dtype.name))


def numpy_of_tensor(tensor: Any) -> Any:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in OF_ML_DTYPES:
        return tensor.numpy()
    import torch

    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int8).numpy().view(name)


def jax_array(values: Any) -> Any:
    import jax

    return jax.numpy.array(values)


def tensorflow_tensor(values: Any) -> Any:
    import tensorflow as tf

    return tf.constant(values)


def field_of(values: Any) -> Any:
    return values.values


KINDS = {
    "numpy": Kind(np.asarray, np.asarray, dtypes=ALL),
    "a class derived from numpy's": Kind(lambda values: values.view(np.memmap), np.asarray, dtypes=ALL),
    "memoryview": Kind(memoryview, np.asarray, dtypes=OF_NUMPY),
    "bytes": Kind(lambda values: values.tobytes(), np.asarray, dtypes=frozenset({"uint8"}), writable=False, axes=1),
    "bytearray": Kind(bytearray, np.asarray, dtypes=frozenset({"uint8"}), axes=1),
    "array.array": Kind(
        lambda values: array.array(_CODES[values.dtype.name], values.tobytes()),
        np.asarray,
        dtypes=frozenset(_CODES),
        axes=1,
    ),
    "__array_interface__": Kind(Interfaced, lambda x: np.asarray(getattr(x, "values", x))),
    "__dlpack__": Kind(Exported, lambda x: getattr(x, "values", x)),
    "the standard": Kind(Standard, field_of, "Standard"),
    "torch": Kind(torch_tensor, numpy_of_tensor, "Tensor", ALL, library="torch"),
    "JAX": Kind(jax_array, np.asarray, "ArrayImpl", WITHOUT_64_BITS, writable=False, library="jax"),
    "TensorFlow": Kind(tensorflow_tensor, np.asarray, "EagerTensor", ALL, writable=False, library="tensorflow"),
}
INSTALLED = tuple(name for name, kind in KINDS.items() if kind.is_installed)

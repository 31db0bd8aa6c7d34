"""Kinds of arrays for tests: how to make an array of each kind from a numpy array, and how to read a result of it."""

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


class WithArrayInterface:
    """An array of an unknown library, with `__array_interface__`."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.__array_interface__ = values.__array_interface__


class WithDlpack:
    """An array of an unknown library, with `__dlpack__`."""

    def __init__(self, values: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.values = values
        self._device = device

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.values.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class StandardArray(WithDlpack):
    """An array of an unknown library that follows the Python array API standard."""

    def __array_namespace__(self) -> Any:
        return StandardNamespace


class StandardNamespace:
    """The namespace of the library of `StandardArray`."""

    @staticmethod
    def asarray(values: Any) -> StandardArray:
        return StandardArray(values)


class WithCudaInterface:
    """An array in host memory that claims to be on a GPU, by `__cuda_array_interface__`.

    `changes` replaces entries of that interface.
    """

    def __init__(self, values: Any, **changes: Any) -> None:
        interface = values.__array_interface__
        self.values = values
        self.__cuda_array_interface__ = {
            **{key: interface[key] for key in ("shape", "typestr", "data", "strides")},
            "version": 3,
            **changes,
        }


@dataclass(frozen=True)
class Kind:
    """One kind of arrays.

    Attributes:
        make: makes an array from a numpy array. Both share their memory if the library can do that.
        read: returns a numpy array with the elements of an array of this kind.
        result: the name of the class of the results of collectives on such arrays.
        dtypes: the dtypes that such an array can have.
        writable: whether such an array may be the `out` of a collective.
        library: the package that must be installed.
        axes: the largest number of axes that such an array can have.
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


def values_of(array: Any) -> Any:
    return array.values


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
    "__array_interface__": Kind(WithArrayInterface, lambda x: np.asarray(getattr(x, "values", x))),
    "__dlpack__": Kind(WithDlpack, lambda x: getattr(x, "values", x)),
    "the standard": Kind(StandardArray, values_of, "StandardArray"),
    "torch": Kind(torch_tensor, numpy_of_tensor, "Tensor", ALL, library="torch"),
    "JAX": Kind(jax_array, np.asarray, "ArrayImpl", WITHOUT_64_BITS, writable=False, library="jax"),
    "TensorFlow": Kind(tensorflow_tensor, np.asarray, "EagerTensor", ALL, writable=False, library="tensorflow"),
}
INSTALLED = tuple(name for name, kind in KINDS.items() if kind.is_installed)

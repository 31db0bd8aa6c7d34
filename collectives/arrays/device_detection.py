"""Recognises arrays on a GPU, without importing anything that uses one.

Used by: the dispatch of calls and messages, which asks for every array that is not numpy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.collectives.arrays.adapters import library_of
from unisono.collectives.arrays.operands import LISTS

_CUDA = (2, 13)  # DLPack's device types for CUDA device memory and managed memory


def on_device(*arrays: Any) -> bool:
    """Return whether any of these arrays, or lists of arrays, is on a GPU."""
    return any(_any_on_device(x) if type(x) in LISTS else device_adapter_name(x) is not None for x in arrays)


def device_test_of(cls: type) -> Callable[[Any], bool] | None:
    """Return the function that says whether an array of a class is on a GPU; None if calls use all on the host.

    A user that sees arrays of one class again and again keeps it, because it takes less time than `on_device`.
    """
    library = library_of(cls)
    if library is None or (library.is_on_gpu is None and library.adapter is None):
        return on_device
    return library.is_on_gpu


def device_adapter_name(x: Any) -> str | None:
    """Return the name of the device adapter for an array on a GPU; None for everything else.

    The name is that of a row of `adapters.LIBRARIES`, such as ``torch.Tensor``, or that of a protocol, such as
    ``__dlpack__``.
    """
    if x is None or type(x) is np.ndarray or isinstance(x, type):
        return None
    cls: type = type(x)
    library = library_of(cls)
    if library is not None and library.is_on_gpu is not None:
        return library.name if library.is_on_gpu(x) else None
    if library is not None and library.adapter is not None:  # arrays of this library are taken on the host only
        return None
    if hasattr(x, "__cuda_array_interface__"):
        return "__cuda_array_interface__"
    return "__dlpack__" if hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] in _CUDA else None


def _any_on_device(arrays: Sequence[Any]) -> bool:
    """Return whether an array of a list is on a GPU. The test of a class is looked up once for all its arrays."""
    for cls in set(map(type, arrays)):
        test = device_test_of(cls)
        if test is not None and any(test(x) for x in arrays if type(x) is cls):
            return True
    return False

"""The kinds of arrays that callers may pass, as one table: how each is seen as a numpy array, and made from one.

Nothing is imported for it: an array of a library exists only if that library has been. What no row names is recognised
by the protocols of arrays, and by the buffer protocol in the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.errors import TransportUnavailableError, UsageError
from unisono.records import record
from unisono.transports.contracts.call import AnyArray

if TYPE_CHECKING:
    from unisono.collectives.arrays.dlpack import ForeignMemory


@record
class ArrayAdapter:
    """What is done with arrays of one kind. An `x` is the caller's array, and `name` what errors call it.

    Attributes:
        view: ``view(x, name)`` is a numpy array with the elements of `x`, in the same memory where `x` may change.
        view_to_write: ``view_to_write(out, name)`` is a numpy array in the memory of `out`, which will be written.
        wrap: ``wrap(array, x)`` is an array of the kind of `x` with the elements of a numpy array that is given away.
        shares: whether what is wrapped has the memory of the numpy array, and changes with it.
        lasts: whether what is viewed changes with the array.
    """

    view: Callable[[Any, str], AnyArray]
    view_to_write: Callable[[Any, str], AnyArray]
    wrap: Callable[[AnyArray, Any], Any]
    shares: bool
    lasts: bool = True


def view(x: Any, name: str) -> AnyArray:
    """Return a numpy array with the elements of `x`, which is only read.

    Raises:
        UsageError: `x`, which the error calls `name`, is no array, or one that cannot be read where it is.
        TransportUnavailableError: it is in the memory of a device.
    """
    return x if type(x) is np.ndarray else adapter_of(x, name).view(x, name)


def view_to_write(out: Any, name: str) -> AnyArray:
    """Return a numpy array in the memory of `out`; it is read-only if `out` is.

    Raises:
        UsageError: `out`, which the error calls `name`, is no array, or of a kind that cannot be written.
        TransportUnavailableError: it is in the memory of a device.
    """
    return out if type(out) is np.ndarray else adapter_of(out, name).view_to_write(out, name)


def wrapped(array: AnyArray, x: Any) -> tuple[Any, Callable[[AnyArray], Any] | None]:
    """Return `array`, which is yet to be written, as an array of the kind of `x`, if that can be done before.

    Returns:
        The array, and None; or the numpy array as it is, and the function that makes the other from it afterwards.
    """
    if type(x) is np.ndarray:
        return array, None
    kind = adapter_of(x, "x")
    return (kind.wrap(array, x), None) if kind.shares else (array, lambda made: kind.wrap(made, x))


def are_of_numpy(x: Any, out: Any) -> bool:
    """Return whether the arrays, as far as there are any, are of numpy's own class."""
    return (x is None or type(x) is np.ndarray) and (out is None or type(out) is np.ndarray)


def adapter_of(x: Any, name: str) -> ArrayAdapter:
    """Return the kind of the array `x`.

    Raises:
        UsageError: `x`, which the error calls `name`, is no array.
    """
    cls: type = type(x)
    kind = of_class(cls) or _by_protocol(x)
    if kind is not None:
        return kind
    what = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    raise UsageError(f"{name} must be an array, not {what}: {_advice(x, name)}")


def _advice(x: Any, name: str) -> str:
    if isinstance(x, Mapping):
        return f"pass list({name}.values())"
    return (
        "broadcast_object takes any object, and so do its like" if isinstance(x, str) else f"pass numpy.asarray({name})"
    )


# --- numpy, and what only the protocols tell about -----------------------------------------------------------------


def _numpy_view(x: Any, name: str) -> AnyArray:
    """View what lends numpy its memory; of a subclass of numpy's, that part."""
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError(f"{name} is a masked array, and masks are not reduced: pass {name}.filled(value)")
    try:
        return np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} cannot be read as a numpy array: {error}") from error


def _interface_view(x: Any, name: str) -> AnyArray:
    # Numpy would take a buffer first, and call what has none to make a copy.
    return _numpy_view(SimpleNamespace(__array_interface__=x.__array_interface__, owner=x), name)


def _buffer_view(x: Any, name: str) -> AnyArray:
    return _numpy_view(memoryview(x), name)


def _cuda_view(x: Any, name: str) -> AnyArray:
    from unisono.collectives.arrays.dlpack import from_cuda_interface

    return _foreign_view(from_cuda_interface(x, name), name)


def _dlpack_view(x: Any, name: str) -> AnyArray:
    from unisono.collectives.arrays.dlpack import from_dlpack

    return _foreign_view(from_dlpack(x, name), name)


def _foreign_view(memory: ForeignMemory, name: str) -> AnyArray:
    if not memory.is_on_host:
        raise on_device(name, ":".join(map(str, memory.device)))
    return memory.view()


def on_device(name: str, device: str) -> TransportUnavailableError:
    """Return the error for an array, called `name`, in memory that only a device can use."""
    return TransportUnavailableError(
        f"{name} is on the device {device}, and no transport here moves device memory: "
        "copy it to the host, and the result back"
    )


def _unwrapped(array: AnyArray, _: Any) -> AnyArray:
    return array


def _wrap_by_standard(array: AnyArray, x: Any) -> Any:
    """Make an array of the library of `x`, if that keeps to the standard of array libraries."""
    return x.__array_namespace__().asarray(array) if hasattr(x, "__array_namespace__") else array


# --- libraries -----------------------------------------------------------------------------------------------------


def _torch() -> ArrayAdapter:
    from unisono.collectives.arrays import torch

    return ArrayAdapter(torch.view, torch.view_to_write, torch.wrap, shares=True)


def _jax_view(x: Any, name: str) -> AnyArray:
    try:
        platforms = {device.platform for device in x.devices()}
    except TypeError as error:
        advice = "call outside of transformations, or by jax.experimental.io_callback"
        raise UsageError(f"{name} has no elements while JAX traces it: {advice}") from error
    if platforms != {"cpu"}:
        raise on_device(name, ", ".join(sorted(platforms)))
    return _numpy_view(x, name)


def _wrap_for_jax(array: AnyArray, x: Any) -> Any:
    import jax

    return jax.device_put(array, min(x.devices(), key=lambda device: device.id))


def _tensorflow_view(x: Any, name: str) -> AnyArray:
    if not hasattr(x, "numpy"):
        raise UsageError(f"{name} has no elements while TensorFlow traces it: call by tf.numpy_function")
    if "CPU" not in x.device:
        raise on_device(name, x.device)
    return _numpy_view(x, name)


def _wrap_for_tensorflow(array: AnyArray, x: Any) -> Any:
    import tensorflow as tf

    with tf.device(x.device):
        return tf.convert_to_tensor(array)


def _variable_view(x: Any, name: str) -> AnyArray:
    import tensorflow as tf

    if not tf.executing_eagerly():
        raise UsageError(f"{name} has no elements while TensorFlow traces it: call by tf.numpy_function")
    return _tensorflow_view(x.value(), name)


def _refuse_to_assign(out: Any, name: str) -> AnyArray:
    raise UsageError(f"{name} is a Variable, which changes by assignment only: pass none, and assign the result to it")


def _refuse_to_write(out: Any, name: str) -> AnyArray:
    what = f"{name} is of type {type(out).__name__}, which cannot be written"
    raise UsageError(f"{what}: pass an array of numpy, or none where the call makes one")


# --- the table -----------------------------------------------------------------------------------------------------

_NUMPY = ArrayAdapter(_numpy_view, _numpy_view, _unwrapped, shares=True)
_JAX = ArrayAdapter(_jax_view, _refuse_to_write, _wrap_for_jax, shares=False)
_TENSORFLOW = ArrayAdapter(_tensorflow_view, _refuse_to_write, _wrap_for_tensorflow, shares=False)
_VARIABLE = ArrayAdapter(_variable_view, _refuse_to_assign, _wrap_for_tensorflow, shares=False, lasts=False)

# Where a library has been imported: its module, the name of a class there, and the kind of that.
_CLASSES: tuple[tuple[str, str, Callable[[], ArrayAdapter]], ...] = (
    ("numpy", "ndarray", lambda: _NUMPY),
    ("torch", "Tensor", _torch),
    ("jax", "Array", lambda: _JAX),
    ("jax.core", "Tracer", lambda: _JAX),
    ("tensorflow", "Tensor", lambda: _TENSORFLOW),
    ("tensorflow", "Variable", lambda: _VARIABLE),
)
# The attribute of an array, in the order in which they are tried.
_PROTOCOLS: tuple[tuple[str, ArrayAdapter], ...] = (
    ("__cuda_array_interface__", ArrayAdapter(_cuda_view, _cuda_view, _unwrapped, shares=True)),
    ("__array_interface__", ArrayAdapter(_interface_view, _interface_view, _unwrapped, shares=True)),
    ("__dlpack__", ArrayAdapter(_dlpack_view, _dlpack_view, _wrap_by_standard, shares=False)),
)
_BUFFER = ArrayAdapter(_buffer_view, _buffer_view, _unwrapped, shares=True)


@lru_cache(maxsize=256)
def of_class(cls: type) -> ArrayAdapter | None:
    """Return the kind of the arrays of a class that is known by its name; None of any other."""
    for module, name, make in _CLASSES:
        known = getattr(sys.modules.get(module), name, None)
        if known is not None and issubclass(cls, known):
            return make()
    return None


def _by_protocol(x: Any) -> ArrayAdapter | None:
    if isinstance(x, np.generic):  # a number, which only lends a copy of itself
        return None
    for protocol, kind in _PROTOCOLS:
        if hasattr(x, protocol):
            return kind
    return _BUFFER if _has_buffer(x) else None


def _has_buffer(x: Any) -> bool:
    try:
        memoryview(x).release()
    except (TypeError, ValueError, BufferError):
        return False
    return True

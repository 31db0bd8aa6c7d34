"""The table of array libraries: how a caller's array is recognised, read, written, and made from a numpy array.

`LIBRARIES` has a row for each class of arrays that Unisono knows by name. Other arrays are recognised by a protocol
(``__cuda_array_interface__``, ``__array_interface__``, ``__dlpack__``), and last by the buffer protocol. No library is
imported for this: an array can exist only if the program has imported its library.

Used by: `operands`, `device_detection`, and `unisono.arrays` for the frameworks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.collectives.arrays.refusals import in_device_memory, traced_by_tensorflow
from unisono.errors import UsageError
from unisono.foundation.records import record
from unisono.transports.contracts.call import AnyArray

if TYPE_CHECKING:
    from unisono.collectives.arrays.dlpack import ForeignMemory


@record
class ArrayAdapter:
    """How arrays of one library are used on the host. `x` and `out` are the caller's arrays; errors call them `name`.

    Attributes:
        view: ``view(x, name)`` returns a numpy array with the elements of `x`. It shares the memory of `x` if `x` can
            change.
        view_to_write: ``view_to_write(out, name)`` returns a numpy array in the memory of `out`. The caller writes it.
        wrap: ``wrap(array, x)`` returns an array of the library of `x` with the elements of `array`, a numpy array that
            nothing else uses.
        shares_memory: whether the result of `wrap` shares the memory of the numpy array. If so, a call may wrap the
            array first and write it later.
        lasts: whether a view still shows the elements after the program has changed the array.
    """

    view: Callable[[Any, str], AnyArray]
    view_to_write: Callable[[Any, str], AnyArray]
    wrap: Callable[[AnyArray, Any], Any]
    shares_memory: bool
    lasts: bool = True


@record
class ArrayLibrary:
    """A row of `LIBRARIES`: a class of arrays.

    Attributes:
        module: the module that holds the class, once the program has imported the library.
        class_name: the name of the class there.
        adapter: returns the adapter for arrays on the host; None if such arrays are recognised by a protocol.
        is_on_gpu: ``is_on_gpu(x)`` says whether calls use the array `x` on a GPU, through the device adapter of this
            row; None if the row has no device adapter.
    """

    module: str
    class_name: str
    adapter: Callable[[], ArrayAdapter] | None = None
    is_on_gpu: Callable[[Any], bool] | None = None

    @property
    def name(self) -> str:
        """The module and the class, such as ``torch.Tensor``; other tables use it as the key of this row."""
        return f"{self.module}.{self.class_name}"


def view(x: Any, name: str) -> AnyArray:
    """Return a numpy array with the elements of `x`, for reading only.

    Raises:
        UsageError: `x`, which the error calls `name`, is not an array, or cannot be read in its memory.
        TransportUnavailableError: `x` is in the memory of a device.
    """
    return x if type(x) is np.ndarray else adapter_of(x, name).view(x, name)


def view_to_write(out: Any, name: str) -> AnyArray:
    """Return a numpy array in the memory of `out`, into which a call writes its result.

    If `out` is read-only, the array is read-only too. The caller checks that.

    Raises:
        UsageError: `out`, which the error calls `name`, is not an array, or its library has arrays that nobody may
            write, as JAX has.
        TransportUnavailableError: `out` is in the memory of a device.
    """
    return out if type(out) is np.ndarray else adapter_of(out, name).view_to_write(out, name)


def wrapped(array: AnyArray, x: Any) -> tuple[Any, Callable[[AnyArray], Any] | None]:
    """Return `array`, which a call will write, as an array of the library of `x`, if both can share memory.

    Returns:
        The wrapped array and None. If the memory cannot be shared: `array` itself, and a function that wraps it after
        the call.
    """
    if type(x) is np.ndarray:
        return array, None
    adapter = adapter_of(x, "x")
    return (
        (adapter.wrap(array, x), None) if adapter.shares_memory else (array, lambda written: adapter.wrap(written, x))
    )


def are_of_numpy(x: Any, out: Any) -> bool:
    """Return whether each of the two is a numpy array (of no subclass) or None."""
    return (x is None or type(x) is np.ndarray) and (out is None or type(out) is np.ndarray)


def adapter_of(x: Any, name: str) -> ArrayAdapter:
    """Return the adapter for the array `x`.

    Raises:
        UsageError: `x`, which the error calls `name`, is not an array.
    """
    cls: type = type(x)
    adapter = _adapter_of_class(cls) or _adapter_by_protocol(x)
    if adapter is not None:
        return adapter
    class_name = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    raise UsageError(f"{name} must be an array, not {class_name}: {_advice(x, name)}")


_OR_OBJECT = "or use a method for objects, such as broadcast_object or scatter_object, which take any object"


def _advice(x: Any, name: str) -> str:
    if isinstance(x, Mapping):
        return f"pass list({name}.values())"
    if x is None:
        return "every rank passes an array, also a rank whose values are not used"
    if isinstance(x, (bool, int, float, complex, np.generic)):
        return f"pass numpy.asarray({name}); the result is an array too, and result.item() its number"
    if type(x).__module__.partition(".")[0] == "pandas":
        return f"pass {name}.to_numpy(dtype), with one dtype for all columns, {_OR_OBJECT}"
    if hasattr(x, "__array__") or isinstance(x, (list, tuple)):
        return f"pass numpy.asarray({name})"
    return f"pass numpy.asarray({name}) if its elements are numbers, {_OR_OBJECT}"


# --- numpy and the protocols ---------------------------------------------------------------------------------------


def _numpy_view(x: Any, name: str) -> AnyArray:
    """Return a plain numpy array in the memory of `x`; the extra data of a numpy subclass is dropped."""
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError(f"{name} is a masked array, and masks are not reduced: pass {name}.filled(value)")
    try:
        return np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} cannot be read as a numpy array: {error}") from error


def _interface_view(x: Any, name: str) -> AnyArray:
    # Given `x` itself, numpy would prefer a buffer, or call `__array__`, which may copy.
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
        raise in_device_memory(name, ":".join(map(str, memory.device)))
    return memory.view()


def _unwrapped(array: AnyArray, _: Any) -> AnyArray:
    return array


def _wrap_by_standard(array: AnyArray, x: Any) -> Any:
    """Return an array of the library of `x` if it follows the array API standard; otherwise the numpy array."""
    return x.__array_namespace__().asarray(array) if hasattr(x, "__array_namespace__") else array


# --- libraries -----------------------------------------------------------------------------------------------------


def _torch() -> ArrayAdapter:
    from unisono.collectives.arrays import torch

    torch.let_core_read()
    return ArrayAdapter(torch.view, torch.view_to_write, torch.wrap, shares_memory=True)


def _jax_view(x: Any, name: str) -> AnyArray:
    try:
        platforms = {device.platform for device in x.devices()}
    except TypeError as error:
        advice = "make this call by unisono.jax, or outside of transformations"
        raise UsageError(f"{name} has no elements while JAX traces it: {advice}") from error
    if platforms != {"cpu"}:
        raise in_device_memory(name, ", ".join(sorted(platforms)))
    return _numpy_view(x, name)


def _wrap_for_jax(array: AnyArray, x: Any) -> Any:
    import jax

    return jax.device_put(array, min(x.devices(), key=lambda device: device.id))


def _tensorflow_view(x: Any, name: str) -> AnyArray:
    if not hasattr(x, "numpy"):
        raise traced_by_tensorflow(name)
    if "CPU" not in x.device:
        raise in_device_memory(name, x.device)
    return _numpy_view(x, name)


def _wrap_for_tensorflow(array: AnyArray, x: Any) -> Any:
    import tensorflow as tf

    with tf.device(x.device):
        return tf.convert_to_tensor(array)


def _variable_view(x: Any, name: str) -> AnyArray:
    import tensorflow as tf

    if not tf.executing_eagerly():
        raise traced_by_tensorflow(name)
    return _tensorflow_view(x.value(), name)


def _refuse_to_assign(out: Any, name: str) -> AnyArray:
    raise UsageError(
        f"{name} is a Variable, which changes by assignment only: pass no {name}, and assign the result to the variable"
    )


def _refuse_to_write(out: Any, name: str) -> AnyArray:
    raise UsageError(
        f"{name} is of type {type(out).__name__}, which cannot be written: pass a numpy array, or no {name} if the "
        "call can make one"
    )


# --- the table -----------------------------------------------------------------------------------------------------

_NUMPY = ArrayAdapter(_numpy_view, _numpy_view, _unwrapped, shares_memory=True)
_JAX = ArrayAdapter(_jax_view, _refuse_to_write, _wrap_for_jax, shares_memory=False)
_TENSORFLOW = ArrayAdapter(_tensorflow_view, _refuse_to_write, _wrap_for_tensorflow, shares_memory=False)
_VARIABLE = ArrayAdapter(_variable_view, _refuse_to_assign, _wrap_for_tensorflow, shares_memory=False, lasts=False)

# An array belongs to the first row whose class it is an instance of.
LIBRARIES: tuple[ArrayLibrary, ...] = (
    ArrayLibrary("numpy", "ndarray", lambda: _NUMPY),
    ArrayLibrary("torch", "Tensor", _torch, is_on_gpu=lambda x: x.is_cuda),
    ArrayLibrary("cupy", "ndarray", is_on_gpu=lambda _: True),
    # A program that reads the interface of such an array may use its memory from then on.
    ArrayLibrary("unisono.collectives.device.result_array", "DeviceArray", is_on_gpu=lambda _: True),
    ArrayLibrary("jax", "Array", lambda: _JAX),
    ArrayLibrary("jax.core", "Tracer", lambda: _JAX),
    ArrayLibrary("keras", "Variable"),
    ArrayLibrary("tensorflow", "Variable", lambda: _VARIABLE),
    ArrayLibrary("tensorflow", "Tensor", lambda: _TENSORFLOW),
)
# The first attribute that an array has decides.
_PROTOCOLS: tuple[tuple[str, ArrayAdapter], ...] = (
    ("__cuda_array_interface__", ArrayAdapter(_cuda_view, _cuda_view, _unwrapped, shares_memory=True)),
    ("__array_interface__", ArrayAdapter(_interface_view, _interface_view, _unwrapped, shares_memory=True)),
    ("__dlpack__", ArrayAdapter(_dlpack_view, _dlpack_view, _wrap_by_standard, shares_memory=False)),
)
_BUFFER = ArrayAdapter(_buffer_view, _buffer_view, _unwrapped, shares_memory=True)


@lru_cache(maxsize=256)
def library_of(cls: type) -> ArrayLibrary | None:
    """Return the row of `LIBRARIES` that a class belongs to; None if there is none."""
    for library in LIBRARIES:
        array_class = getattr(sys.modules.get(library.module), library.class_name, None)
        if array_class is not None and issubclass(cls, array_class):
            return library
    return None


@lru_cache(maxsize=256)
def _adapter_of_class(cls: type) -> ArrayAdapter | None:
    library = library_of(cls)
    return None if library is None or library.adapter is None else library.adapter()


def _adapter_by_protocol(x: Any) -> ArrayAdapter | None:
    if isinstance(x, np.generic):  # a scalar of numpy, whose interface describes a temporary copy
        return None
    for protocol, adapter in _PROTOCOLS:
        if hasattr(x, protocol):
            return adapter
    return _BUFFER if _has_buffer(x) else None


def _has_buffer(x: Any) -> bool:
    try:
        memoryview(x).release()
    except (TypeError, ValueError, BufferError):
        return False
    return True

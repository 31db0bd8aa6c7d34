"""Flat arrays: the elements of any library's array as a flat numpy array, which may be changed and put back.

`unisono.arrays` recognises the libraries. This module imports none of them before their first array. Unlike a
collective, it copies arrays that JAX or TensorFlow keep on a GPU to the host.

Used by: `gradients` and `data_parallel`.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with numpy)
import numpy as np
from numpy.typing import NDArray

from unisono import UsageError
from unisono.arrays import class_name_of, traced_by_tensorflow
from unisono.dtypes import DTYPES
from unisono.transports import _core

Array: TypeAlias = NDArray[Any]
_P = ParamSpec("_P")
_R = TypeVar("_R")
# By dtype, because numpy computes `dtype.name` anew, in Python, each time.
_NAMES = {np.dtype(name): name for name in DTYPES}
# Arrays with names: ``model.named_parameters()``, ``model.state_dict()`` or a plain dict.
Named: TypeAlias = "Mapping[str, Any] | Iterable[tuple[str, Any]]"


def same_bits(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function whose results must have the same bits on all ranks if its arguments do.

    The function runs in the default floating-point environment, because the thread's own may differ between ranks.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _core.DefaultFloatEnvironment():
            return function(*args, **kwargs)

    return run


class FlatArray(NamedTuple):
    """The elements of an array, flat, and the way to put changed elements back.

    Attributes:
        array: the array.
        flat: the elements in C order, contiguous; in the memory of the array if possible.
        shape: the shape of the array.
        writable: whether `put_back` works.
        copied_back: writes the elements of `flat` to the array and returns the array, or a new one; None if `flat` is
            the memory of the array.
        in_place: whether `put_back` changes the array itself. Arrays of JAX and a ``tf.Tensor`` never change.
        changed: returns whether the program has written the array since; None if the library does not count writes, as
            numpy. A write through ``tensor.data`` or ``tensor.numpy()`` is not counted either.
        streams: returns the streams on which the program uses the array now, if it is on a GPU; else None. On a GPU,
            `flat` is at the address on the device, so its elements may not be used, and `put_back` issues a copy on
            the current stream of the program.
    """

    array: Any
    flat: Array
    shape: tuple[int, ...]
    writable: bool = True
    copied_back: Callable[[], Any] | None = None
    in_place: bool = True
    changed: Callable[[], bool] | None = None
    streams: Callable[[], Sequence[Any]] | None = None

    def put_back(self) -> Any:
        """Write the elements of `flat` to the array and return it.

        If the library's arrays cannot be written, return a new array of that library.
        """
        return self.array if self.copied_back is None else self.copied_back()

    def with_elements(self, elements: Array) -> Any:
        """Write `elements` to the array, and return it. If it is read-only, return a numpy copy of `elements`."""
        if not self.writable:
            return elements.reshape(self.shape).copy()
        self.flat[...] = elements.reshape(-1)  # copies nothing if `elements` is this memory
        return self.array if self.copied_back is None else self.copied_back()

    def described(self) -> str:
        """Return dtype and shape, such as ``float32[2,3]``."""
        return f"{self.flat.dtype.name}[{','.join(map(str, self.shape))}]"


def flatten(x: Any, name: str) -> FlatArray:
    """Return the elements of the array `x`, which errors call `name`.

    Raises:
        UsageError: `x` is not an array, or its elements cannot be moved.
    """
    return flattening_of(x, name)(x, name)


def flattening_of(x: Any, name: str) -> Callable[[Any, str], FlatArray]:
    """Return the function that is `flatten` for arrays of the class of `x`.

    Raises:
        UsageError: `x`, which the error calls `name`, is not an array.
    """
    flatten_class = _BY_CLASS.get(class_name_of(x))
    if flatten_class is not None:
        return flatten_class
    if hasattr(x, "__array__") or hasattr(x, "__array_interface__"):
        return _of_protocol
    raise UsageError(
        f"{name} is of type {type(x).__name__}, which is not an array: "
        "pass one of numpy, torch, JAX, TensorFlow or Keras"
    )


def flatten_all(named: Named) -> dict[str, FlatArray]:
    """Return the flat arrays of named arrays, in order. Arrays in the same memory appear under the first name only.

    Raises:
        UsageError: `named` does not hold arrays with names, or `flatten` refuses one of them.
    """
    return first_names({name: flatten(x, name) for name, x in pairs_of(named)})


def pairs_of(named: Named) -> list[tuple[str, Any]]:
    """Return pairs of a name and an array.

    Raises:
        UsageError: `named` does not hold arrays with names, or two have the same name.
    """
    try:
        pairs = [(name, x) for name, x in (named.items() if isinstance(named, Mapping) else named)]
    except (TypeError, ValueError):
        pairs = [(None, named)]
    if not all(isinstance(name, str) for name, _ in pairs):
        raise UsageError("pass arrays with their names: a dict, model.state_dict() or model.named_parameters()")
    if len(dict(pairs)) != len(pairs):
        raise UsageError("two arrays have the same name: give each its own")
    return pairs


def checksum(flat: Array, before: int = 0) -> int:
    """Return the CRC-32 of a flat array; with the CRC-32 of earlier arrays as `before`, that of all together."""
    return zlib.crc32(flat.view(np.uint8).data, before)


def first_names(arrays: Mapping[str, FlatArray]) -> dict[str, FlatArray]:
    """Return `arrays` without each array that occupies the memory of an earlier array, as tied weights do."""
    name_by_memory: dict[tuple[int, int], str] = {}
    for name, array in arrays.items():
        memory = array.flat.ctypes.data, array.flat.nbytes
        if array.flat.nbytes:
            name_by_memory.setdefault(memory, name)
    names = set(name_by_memory.values())
    return {name: array for name, array in arrays.items() if name in names or not array.flat.nbytes}


def _of_numpy(x: Array, name: str) -> FlatArray:
    if x.dtype not in _NAMES:
        _check_dtype(x.dtype, name)
    flags = x.flags
    if flags.c_contiguous:
        return FlatArray(x, x.reshape(-1), x.shape, flags.writeable)
    flat = np.ascontiguousarray(x).reshape(-1)

    def copied_back() -> Array:
        x[...] = flat.reshape(x.shape)
        return x

    return FlatArray(x, flat, x.shape, flags.writeable, copied_back)


def _of_protocol(x: Any, name: str) -> FlatArray:
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} cannot be read as a numpy array: {error}") from error
    flat_array = _of_numpy(array, name)
    # A scalar of numpy, like many objects, returns a new array each time. Writes to that would be lost.
    is_shared = not array.size or np.may_share_memory(array, np.asarray(x))
    return flat_array._replace(
        array=x,
        writable=flat_array.writable and is_shared,
        copied_back=None if flat_array.copied_back is None else lambda: (flat_array.put_back(), x)[1],
    )


def _of_torch(x: Any, name: str) -> FlatArray:
    tensors = _tensors()
    flat, copied_back = tensors.plain_memory(x), None
    if flat is None:
        stage = tensors.CallTensors()
        try:
            flat = stage.write(x)
        except UsageError as error:
            raise UsageError(f"{name} cannot be used: {error.message}") from None
        copied_back = (lambda: (stage.finish(), x)[1]) if stage.has_copies else None
    try:
        version = x._version
    except RuntimeError:  # torch does not count the writes of a tensor that was made in inference mode
        return FlatArray(x, flat, tuple(x.shape), True, copied_back)
    return FlatArray(x, flat, tuple(x.shape), True, copied_back, True, lambda: x._version != version)


@functools.cache
def _tensors() -> Any:
    """Return the module of tensors, which imports torch. Call it for tensors of torch only."""
    from unisono.frameworks.torch.calls import tensors

    return tensors


def _of_jax(x: Any, name: str) -> FlatArray:
    import jax

    array = np.array(x, order="C")
    return _copied(x, array, name, lambda: jax.device_put(array, x.sharding), in_place=False)


def _of_variable(x: Any, name: str) -> FlatArray:
    try:
        array = np.array(x.numpy(), order="C")
    except NotImplementedError:
        raise traced_by_tensorflow(name) from None
    return _copied(x, array, name, lambda: (x.assign(array), x)[1])


def _of_tensorflow(x: Any, name: str) -> FlatArray:
    import tensorflow as tf

    if not hasattr(x, "numpy"):
        raise traced_by_tensorflow(name)
    array = np.array(x.numpy(), order="C")
    return _copied(x, array, name, lambda: tf.convert_to_tensor(array), in_place=False)


def _copied(x: Any, array: Array, name: str, copied_back: Callable[[], Any], *, in_place: bool = True) -> FlatArray:
    """Return the flat array of `x` by a copy of its elements, `array`, in C order."""
    _check_dtype(array.dtype, name)
    return FlatArray(x, array.reshape(-1), array.shape, copied_back=copied_back, in_place=in_place)


def _check_dtype(dtype: np.dtype[Any], name: str) -> None:
    if dtype not in _NAMES:
        raise UsageError(f"{name} has dtype {dtype}, which cannot be sent: convert it to one of {', '.join(DTYPES)}")


# By the names that `class_name_of` returns.
_BY_CLASS: dict[str | None, Callable[[Any, str], FlatArray]] = {
    "numpy.ndarray": _of_numpy,
    "torch.Tensor": _of_torch,
    "jax.Array": _of_jax,
    "jax.core.Tracer": _of_jax,
    "keras.Variable": _of_variable,
    "tensorflow.Variable": _of_variable,
    "tensorflow.Tensor": _of_tensorflow,
}

"""Arrays of any library as flat numpy arrays: lent to be read or changed, and put back.

Nothing is imported for it: an array of a library exists only if that library has been.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
from numpy.typing import NDArray

from unisono import UsageError
from unisono.dtypes import DTYPES
from unisono.transports import _core

Array: TypeAlias = NDArray[Any]
_P = ParamSpec("_P")
_R = TypeVar("_R")
# By dtype, for numpy makes a dtype's name anew whenever it is asked for it, in Python.
_NAMES = {np.dtype(name): name for name in DTYPES}
# Arrays by name, as ``model.named_parameters()``, ``model.state_dict()`` or a plain dict give them.
Named: TypeAlias = "Mapping[str, Any] | Iterable[tuple[str, Any]]"


def same_bits(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function whose results must have the same bits on all ranks, as its arguments have.

    It runs in the default floating-point environment, because the thread's own may differ between ranks.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _core.DefaultFloatEnvironment():
            return function(*args, **kwargs)

    return run


class Lent(NamedTuple):
    """The elements of an array.

    Attributes:
        flat: them in C order, contiguous; in the memory of the array where that is possible.
        shape: of the array.
        writable: whether `put` can put back what has been changed.
        put: puts `flat` back and returns the array, or, of a kind that cannot be written, a new one of that kind.
        in_place: whether `put` changes the array itself. That of JAX and a ``tf.Tensor`` never change.
        changed: returns whether the program has written the array since; always False for a library that does not
            count writes, as numpy. A write through ``tensor.data`` or ``tensor.numpy()`` is not counted either.
    """

    flat: Array
    shape: tuple[int, ...]
    writable: bool
    put: Callable[[], Any]
    in_place: bool = True
    changed: Callable[[], bool] = lambda: False

    def give_back(self, elements: Array) -> Any:
        """Return the array with these elements instead of its own; one of numpy, where it cannot be written."""
        if not self.writable:
            return elements.reshape(self.shape).copy()
        self.flat[...] = elements.reshape(-1)  # where they lie there, numpy copies nothing
        return self.put()

    def described(self) -> str:
        """Return dtype and shape, such as ``float32[2,3]``."""
        return f"{self.flat.dtype.name}[{','.join(map(str, self.shape))}]"


def lend(x: Any, name: str) -> Lent:
    """Return the elements of `x`, which errors call `name`.

    Raises:
        UsageError: it is no array, or one whose elements cannot be moved.
    """
    lend_known = _known.get(type(x)) or _know(x)
    if lend_known is not None:
        return lend_known(x, name)
    if hasattr(x, "__array__") or hasattr(x, "__array_interface__"):
        return _of_protocol(x, name)
    raise UsageError(
        f"{name} is of type {type(x).__name__}, which is no array of numpy, torch, JAX, TensorFlow or Keras"
    )


def _know(x: Any) -> Callable[[Any, str], Lent] | None:
    """Return what lends arrays of the type of `x`, and remember it; None if it is of no library in `_KINDS`."""
    for module, kind, lend_kind in _KINDS:
        known = getattr(sys.modules.get(module), kind, None)
        if known is not None and isinstance(x, known):
            _known[type(x)] = lend_kind
            return lend_kind
    return None


def lend_all(named: Named) -> dict[str, Lent]:
    """Return the elements of all arrays by name, in their order; arrays in one memory are lent once, by the first name.

    Raises:
        UsageError: these are no named arrays, or one of them is none that `lend` knows.
    """
    return first_names({name: lend(x, name) for name, x in pairs_of(named)})


def pairs_of(named: Named) -> list[tuple[str, Any]]:
    """Return names and arrays.

    Raises:
        UsageError: these are none, or two have the same name.
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
    """Return the CRC-32 of the elements of a flat array, or of all arrays so far, if `before` is that of the others."""
    return zlib.crc32(flat.view(np.uint8).data, before)


def first_names(lent: Mapping[str, Lent]) -> dict[str, Lent]:
    """Return those that are not in the memory of an earlier one, as tied weights are."""
    seen: dict[tuple[int, int], str] = {}
    for name, each in lent.items():
        place = each.flat.ctypes.data, each.flat.nbytes
        if each.flat.nbytes:
            seen.setdefault(place, name)
    kept = set(seen.values())
    return {name: each for name, each in lent.items() if name in kept or not each.flat.nbytes}


def _of_numpy(x: Array, name: str) -> Lent:
    _check_dtype(x.dtype, name)
    flat = np.ascontiguousarray(x).reshape(-1)

    def put() -> Array:
        if not np.may_share_memory(flat, x):
            x[...] = flat.reshape(x.shape)
        return x

    return Lent(flat, x.shape, x.flags.writeable, put)


def _of_protocol(x: Any, name: str) -> Lent:
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} cannot be read as a numpy array: {error}") from error
    lent = _of_numpy(array, name)
    # Numbers of numpy, and many objects, make a new array whenever they are asked, where writes would be lost.
    is_shared = not array.size or np.may_share_memory(array, np.asarray(x))
    return lent._replace(writable=lent.writable and is_shared, put=lambda: (lent.put(), x)[1])


def _of_torch(x: Any, name: str) -> Lent:
    stage = _stage_type()()
    try:
        flat = stage.write(x)
    except UsageError as error:
        raise UsageError(f"{name} cannot be used: {error.message}") from None

    def put() -> Any:
        stage.finish()
        return x

    try:
        version = x._version
    except RuntimeError:  # of a tensor made in inference mode, whose writes torch does not count
        return Lent(flat, tuple(x.shape), True, put)
    return Lent(flat, tuple(x.shape), True, put, changed=lambda: x._version != version)


@functools.cache
def _stage_type() -> Any:
    """Return the class of the memory of tensors, for which torch must be there."""
    from unisono.frameworks.torch.tensors import Stage

    return Stage


def _of_jax(x: Any, name: str) -> Lent:
    import jax

    array = np.array(x, order="C")
    _check_dtype(array.dtype, name)
    return Lent(array.reshape(-1), array.shape, True, lambda: jax.device_put(array, x.sharding), in_place=False)


def _of_variable(x: Any, name: str) -> Lent:
    try:
        array = np.array(x.numpy(), order="C")
    except NotImplementedError:
        raise _traced(name) from None
    _check_dtype(array.dtype, name)
    return Lent(array.reshape(-1), array.shape, True, lambda: (x.assign(array), x)[1])


def _of_tensorflow(x: Any, name: str) -> Lent:
    import tensorflow as tf

    if not hasattr(x, "numpy"):
        raise _traced(name)
    array = np.array(x.numpy(), order="C")
    _check_dtype(array.dtype, name)
    return Lent(array.reshape(-1), array.shape, True, lambda: tf.convert_to_tensor(array), in_place=False)


def _traced(name: str) -> UsageError:
    return UsageError(f"{name} has no elements while TensorFlow traces it: call by tf.numpy_function")


def _check_dtype(dtype: np.dtype[Any], name: str) -> None:
    if dtype not in _NAMES:
        raise UsageError(f"{name} has dtype {dtype}, which cannot be sent: convert it to one of {', '.join(DTYPES)}")


_known: dict[type, Callable[[Any, str], Lent]] = {}
_KINDS: tuple[tuple[str, str, Callable[[Any, str], Lent]], ...] = (
    ("numpy", "ndarray", _of_numpy),
    ("torch", "Tensor", _of_torch),
    ("jax", "Array", _of_jax),
    ("keras", "Variable", _of_variable),
    ("tensorflow", "Variable", _of_variable),
    ("tensorflow", "Tensor", _of_tensorflow),
)

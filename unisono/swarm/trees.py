"""The state of a program as arrays and a description: `described` takes it apart, and `restored` writes it back.

A state is an array, a number, a text, None, or a list, tuple or dict of states. It may also be another node of a pytree
of JAX, such as the tuples of optax, or an object that has its state in one of the ways of `_HOLDERS`: a module or an
optimizer of torch, or a model or an optimizer of Keras.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.collectives.arrays import adapters
from unisono.dtypes import DTYPES
from unisono.errors import MismatchError, UnisonoError, UsageError
from unisono.foundation.json_checks import checked

_PLAIN = (bool, int, float, str, type(None))


class _StateMethods(NamedTuple):
    """A way in which an object hands out its state and takes it back.

    Attributes:
        methods: the methods that such an object has.
        get, put: return the state of an object, and replace it.
    """

    methods: tuple[str, str]
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]


def _put_variables(of: Any, values: Sequence[Any]) -> None:
    variables = of.variables
    if len(variables) != len(values):
        raise UsageError(
            f"the optimizer of Keras has {len(variables)} variables here, and {len(values)} on the other members: call "
            "optimizer.build(model.trainable_variables) before the call of state"
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


_HOLDERS = (
    _StateMethods(
        ("state_dict", "load_state_dict"), lambda of: of.state_dict(), lambda of, state: of.load_state_dict(state)
    ),
    _StateMethods(("get_weights", "set_weights"), lambda of: of.get_weights(), lambda of, state: of.set_weights(state)),
    _StateMethods(
        ("apply_gradients", "load_own_variables"),  # an optimizer of Keras
        lambda of: [sys.modules["keras"].ops.convert_to_numpy(variable) for variable in of.variables],
        _put_variables,
    ),
)
_MISSING = object()
# The limits of numpy.
_MOST_DIMENSIONS, _MOST_NBYTES = 32, 1 << 62


def described(state: Any) -> tuple[Any, list[Any]]:
    """Return a description of a state, as a value of JSON, and its arrays as contiguous arrays of numpy.

    Raises:
        UsageError: it has a value that cannot be passed to another process.

    >>> described({"step": 3, "w": np.zeros(2)})
    ({'items': [['step', {'value': 3}], ['w', {'array': 0, 'dtype': 'float64', 'shape': [2]}]]}, [array([0., 0.])])
    """
    arrays: list[Any] = []
    return _described(state, "state", arrays), arrays


def _described(state: Any, name: str, arrays: list[Any]) -> Any:
    holder = _holder_of(state)
    if holder is not None:
        return {"of": _described(holder.get(state), name, arrays)}
    if isinstance(state, Mapping):
        if not all(type(key) in (str, int) for key in state):
            raise UsageError(f"{name} has a key that is neither a text nor a whole number")
        return {"items": [[key, _described(value, f"{name}[{key!r}]", arrays)] for key, value in state.items()]}
    sequence = _sequence_of(state)
    if sequence is not None:
        return {"list": [_described(value, f"{name}[{index}]", arrays) for index, value in enumerate(sequence.values)]}
    if type(state) in _PLAIN:
        if isinstance(state, float) and not np.isfinite(state):
            raise UsageError(f"{name} is {state}: pass it as an array")
        return {"value": state}
    array = np.ascontiguousarray(adapters.view(state, name)).reshape(np.shape(adapters.view(state, name)))
    if array.dtype.name not in DTYPES:
        raise UsageError(f"{name} has the dtype {array.dtype}, which cannot be passed to another process")
    arrays.append(array)
    return {"array": len(arrays) - 1, "dtype": array.dtype.name, "shape": list(array.shape)}


def arrays_in(description: Any) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
    """Return dtype and shape of each array in a description from another process; raises ValueError if it is none."""
    found: dict[int, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    try:
        _collect(description, found)
    except RecursionError:
        raise ValueError("a description of a state is nested too deeply") from None
    if sorted(found) != list(range(len(found))):
        raise ValueError("a description of a state does not number its arrays from 0 on")
    return [found[index] for index in range(len(found))]


def _collect(description: Any, found: dict[int, tuple[np.dtype[Any], tuple[int, ...]]]) -> None:
    checked(description, dict, "a description of a state")
    if "of" in description:
        _collect(description["of"], found)
    elif "items" in description:
        for pair in checked(description["items"], [list]):
            if len(pair) != 2 or type(pair[0]) not in (str, int):
                raise ValueError("a description of a state has a key that is neither a text nor a whole number")
            _collect(pair[1], found)
    elif "list" in description:
        for value in checked(description["list"], list):
            _collect(value, found)
    elif "array" in description:
        checked(description, {"array": int, "dtype": str, "shape": [int]})
        dtype, shape = description["dtype"], tuple(description["shape"])
        if dtype not in DTYPES or len(shape) > _MOST_DIMENSIONS or any(length < 0 for length in shape):
            raise ValueError("a description of a state names no array")
        if _dtype(dtype).itemsize * math.prod(max(1, length) for length in shape) >= _MOST_NBYTES:
            raise ValueError("a description of a state names an array that is too large")
        found[description["array"]] = _dtype(dtype), shape
    elif "value" not in description or type(description["value"]) not in _PLAIN:
        raise ValueError("a description of a state has a value of an unknown form")


def restored(state: Any, description: Any, arrays: Sequence[Any]) -> Any:
    """Write arrays into a state, which had been described on another process, and return it.

    Arrays that can be written are written in place. Others are replaced by new ones of their library. Values that
    `state` lacks, such as the moments of a new optimizer, are made.

    Raises:
        MismatchError: an array of `state` has another shape or dtype, or an object does not take its state.
        UsageError: an optimizer of Keras is not built.
    """
    return _restored(state, description, arrays, None, "state")


def _restored(state: Any, description: Any, arrays: Sequence[Any], like: Any, name: str) -> Any:
    if "of" in description:
        holder = _holder_of(state)
        if holder is None:
            raise MismatchError(f"{name}: the other members have an object here, and this member has none")
        values = _restored(holder.get(state), description["of"], arrays, _tensor_of(state), name)
        try:
            holder.put(state, values)
        except UnisonoError:
            raise
        except (RuntimeError, ValueError, KeyError) as error:
            raise MismatchError(f"{name} does not take the state of the other members: {error}") from error
        return state
    if "items" in description:
        own = state if isinstance(state, Mapping) else {}
        values = {
            key: _restored(own.get(key, _MISSING), value, arrays, like, f"{name}[{key!r}]")
            for key, value in description["items"]
        }
        if own is not state or isinstance(state, dict):
            return values
        kind: Callable[[dict[Any, Any]], Any] = type(state)
        return kind(values)
    if "list" in description:
        sequence = _sequence_of(state) or _Sequence([], list)
        items = [*sequence.values, *[_MISSING] * (len(description["list"]) - len(sequence.values))]
        return sequence.rebuilt(
            [
                _restored(*pair, arrays, like, f"{name}[{index}]")
                for index, pair in enumerate(zip(items, description["list"], strict=False))
            ]
        )
    if "array" in description:
        return _written(state, arrays[description["array"]], like, name)
    return description["value"]


def _written(target: Any, array: Any, like: Any, name: str) -> Any:
    if target is _MISSING or target is None or type(target) in _PLAIN:
        return array.copy() if like is None else adapters.adapter_of(like, "the state").wrap(array.copy(), like)
    adapter = adapters.adapter_of(target, name)
    own = adapter.view(target, name)
    here, there = (f"{each.dtype.name}{list(each.shape)}" for each in (own, array))
    if here != there:
        raise MismatchError(f"{name} is {here} on this member, and {there} on the others")
    try:
        adapter.view_to_write(target, name)[...] = array
        return target
    except UsageError:  # it cannot be written
        return adapter.wrap(array.copy(), target)


class _Sequence(NamedTuple):
    """The values in a list, a tuple or another node of a pytree, and the function that makes such a one of others."""

    values: list[Any]
    rebuilt: Callable[[list[Any]], Any]


def _sequence_of(state: Any) -> _Sequence | None:
    if type(state) in (list, tuple):
        return _Sequence(list(state), type(state))
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return _Sequence(list(state), lambda values: type(state)(*values))
    jax = sys.modules.get("jax")
    if jax is None or type(state) in _PLAIN or state is _MISSING:
        return None
    values, form = jax.tree_util.tree_flatten(state, is_leaf=lambda each: each is not state)
    return None if jax.tree_util.treedef_is_leaf(form) else _Sequence(values, form.unflatten)


def _dtype(name: str) -> np.dtype[Any]:
    if name not in np.sctypeDict:
        import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
    return np.dtype(name)


def _holder_of(state: Any) -> _StateMethods | None:
    return next((each for each in _HOLDERS if all(callable(getattr(state, name, None)) for name in each.methods)), None)


def _tensor_of(state: Any) -> Any:
    """Return a tensor of torch if an object of torch has the state, and None for others."""
    if type(state).__module__.partition(".")[0] == "keras" or not hasattr(state, "load_state_dict"):
        return None
    torch = sys.modules.get("torch")
    return None if torch is None else torch.empty(0)

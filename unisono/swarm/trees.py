"""The state of a program as arrays and a description: `described` takes it apart, and `restored` writes it back.

A state is an array, a number, a text, None, or a list, tuple or dict of states. It may also be an object that has its
state in one of the ways of `_HOLDERS`: a module or an optimizer of torch, or a model of Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.collectives.arrays import adapters
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.foundation.json_checks import checked

_PLAIN = (bool, int, float, str, type(None))


class _Holder(NamedTuple):
    """A way in which an object hands out its state and takes it back.

    Attributes:
        methods: the methods that such an object has.
        get, put: return the state of an object, and replace it.
    """

    methods: tuple[str, str]
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]


_HOLDERS = (
    _Holder(("state_dict", "load_state_dict"), lambda of: of.state_dict(), lambda of, state: of.load_state_dict(state)),
    _Holder(("get_weights", "set_weights"), lambda of: of.get_weights(), lambda of, state: of.set_weights(state)),
)
_MISSING = object()


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
    if type(state) in (list, tuple):
        return {"list": [_described(value, f"{name}[{index}]", arrays) for index, value in enumerate(state)]}
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
    _collect(description, found)
    if sorted(found) != list(range(len(found))):
        raise ValueError("a description of a state does not number its arrays")
    return [found[index] for index in range(len(found))]


def _collect(description: Any, found: dict[int, tuple[np.dtype[Any], tuple[int, ...]]]) -> None:
    checked(description, dict, "a description of a state")
    if "of" in description:
        _collect(description["of"], found)
    elif "items" in description:
        for _, value in checked(description["items"], [list]):
            _collect(value, found)
    elif "list" in description:
        for value in checked(description["list"], list):
            _collect(value, found)
    elif "array" in description:
        checked(description, {"array": int, "dtype": str, "shape": [int]})
        if description["dtype"] not in DTYPES or any(length < 0 for length in description["shape"]):
            raise ValueError("a description of a state names no array")
        found[description["array"]] = np.dtype(description["dtype"]), tuple(description["shape"])
    elif "value" not in description or type(description["value"]) not in _PLAIN:
        raise ValueError("a description of a state has a value that is none")


def restored(state: Any, description: Any, arrays: Sequence[Any]) -> Any:
    """Write arrays into a state, which had been described on another process, and return it.

    Arrays that can be written and have the same shape and dtype are written in place. Others are replaced by new ones
    of their library. Values that `state` lacks, such as the moments of a new optimizer, are made.
    """
    return _restored(state, description, arrays, None)


def _restored(state: Any, description: Any, arrays: Sequence[Any], like: Any) -> Any:
    if "of" in description:
        holder = _holder_of(state)
        if holder is None:
            raise UsageError("the state of the other members has an object where this member has none")
        own = holder.get(state)
        holder.put(state, _restored(own, description["of"], arrays, _tensor_of(state)))
        return state
    if "items" in description:
        own = state if isinstance(state, Mapping) else {}
        return {key: _restored(own.get(key, _MISSING), value, arrays, like) for key, value in description["items"]}
    if "list" in description:
        own = list(state) if type(state) in (list, tuple) else []
        own += [_MISSING] * (len(description["list"]) - len(own))
        values = [_restored(*pair, arrays, like) for pair in zip(own, description["list"], strict=False)]
        return tuple(values) if type(state) is tuple else values
    if "array" in description:
        return _written(state, arrays[description["array"]], like)
    return description["value"]


def _written(target: Any, array: Any, like: Any) -> Any:
    if target is _MISSING or target is None or type(target) in _PLAIN:
        return array.copy() if like is None else adapters.adapter_of(like, "the state").wrap(array.copy(), like)
    adapter = adapters.adapter_of(target, "the state")
    try:
        own = adapter.view_to_write(target, "the state")
        if own.shape == array.shape and own.dtype == array.dtype:
            own[...] = array
            return target
    except UsageError:  # it cannot be written
        pass
    return adapter.wrap(array.copy(), target)


def _holder_of(state: Any) -> _Holder | None:
    return next((each for each in _HOLDERS if all(callable(getattr(state, name, None)) for name in each.methods)), None)


def _tensor_of(state: Any) -> Any:
    """Return a tensor of torch if an object of torch has the state, and None for others."""
    if type(state).__module__.partition(".")[0] == "keras" or not hasattr(state, "load_state_dict"):
        return None
    import sys

    torch = sys.modules.get("torch")
    return None if torch is None else torch.empty(0)

"""Checks of values that another process has written: JSON that may be anything, and the types of its fields."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

# Sums and products of a few such numbers stay finite.
_MOST_FLOAT = 1e18
# Half of a UTF-16 pair: JSON can express one alone, but no file and no terminal can encode it.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parsed_json(text: str | bytes) -> Any:
    """Return the value in a text of JSON.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or has a number or a character that JSON cannot hand on
            (NaN, Infinity, 1e999, half of a surrogate pair).
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def checked(value: Any, shape: Any, name: str = "it") -> Any:
    """Return `value`, which must have a shape.

    Args:
        value: a value that was read from JSON.
        shape: a type; a tuple of types of which one must fit; ``[shape]`` for a list; or a mapping of names to shapes
            for a dict with these fields and perhaps others. An int has at most 64 bits, and a bool is none. A float is
            at most 1e18.
        name: the name of the value in errors.

    Raises:
        ValueError: it has another shape; names the first field that has.

    >>> checked({"rank": 3, "peers": [0, 1]}, {"rank": int, "peers": [int]})
    {'rank': 3, 'peers': [0, 1]}
    """
    if isinstance(shape, list):
        for number, each in enumerate(_of_type(value, list, name)):
            checked(each, shape[0], f"{name}[{number}]")
    elif isinstance(shape, Mapping):
        for field, inner in shape.items():
            if field not in _of_type(value, dict, name):
                raise ValueError(f"{name} has no field {field!r}")
            checked(value[field], inner, field)
    else:
        _of_type(value, shape, name)
    return value


def _of_type(value: Any, types: type | tuple[type, ...], name: str) -> Any:
    if type(value) not in (types if isinstance(types, tuple) else (types,)):
        raise ValueError(f"{name} cannot be a value of type {type(value).__name__}")
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{name} is a number of more than 64 bits")
    if type(value) is float and not abs(value) <= _MOST_FLOAT:
        raise ValueError(f"{name} is too large a number")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large for a number")
    return number

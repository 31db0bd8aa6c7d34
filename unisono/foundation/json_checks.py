"""Checks of values that another process has written: files, JSON that may be anything, and the types of its fields."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from typing import Any, BinaryIO, NoReturn

from unisono.foundation.printable import printable_values

# Sums and products of a few such numbers stay finite.
_MOST_FLOAT = 1e18
# A dump of 10,000 calls has 5 MB, and a trace of 100,000 groups 20 MB.
MOST_FILE_NBYTES = 1 << 28
# Control characters themselves, and the escapes of JSON that express them.
_MAY_HOLD_CONTROL = re.compile(r"\\[bfru]|[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Half of a UTF-16 pair: JSON can express one alone, but no file and no terminal can encode it.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file that anybody may have made, to read it.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is no regular file. Reading a FIFO might never end.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError(f"{os.fspath(path)} is no regular file")


def text_of_file(path: str | os.PathLike[str], most_nbytes: int = MOST_FILE_NBYTES) -> str:
    """Return the text of a file that anybody may have made.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, has more than `most_nbytes`, or is no UTF-8.
    """
    with open_regular(path) as file:
        data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise ValueError(f"{os.fspath(path)} has more than {most_nbytes >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{os.fspath(path)} is no text") from None


def parsed_json(text: str | bytes) -> Any:
    """Return the value in a text of JSON, with every text in it `printable`; raises ValueError as `exact_json` does."""
    text = text if isinstance(text, str) else text.decode()
    value = exact_json(text)
    try:
        return printable_values(value) if _MAY_HOLD_CONTROL.search(text) else value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def exact_json(text: str | bytes) -> Any:
    """Return the value in a text of JSON, control characters included.

    Only data that is passed on, such as the environment of a rank, needs them: they must reach no terminal and no log.

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
        raise ValueError(f"{name} must be from {-_MOST_FLOAT:g} to {_MOST_FLOAT:g}")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large for a number")
    return number

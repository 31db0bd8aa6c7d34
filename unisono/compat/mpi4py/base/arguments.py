"""Integers as arguments of calls, which the compiled module of mpi4py converts as C does.

A program that computes a rank by ``size / 2`` passes a float, and mpi4py cuts its fraction off. The elements of lists
and of buffer specifications are integers only, there and here (`integer` of `memory.access`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_Callable = TypeVar("_Callable", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


def whole(value: Any) -> int:
    """Return the integer of an argument; the fraction of a number is cut off.

    Raises:
        TypeError: it is no number.
    """
    if type(value) is int:
        return value
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"an integer is required, not {value!r}")
    return int(value)


def whole_arguments(function: _Callable) -> _Callable:
    """Return a function that converts those arguments of another function that are annotated as ``int``."""
    inner: Any = inspect.unwrap(function)
    names = [name for name in inner.__code__.co_varnames if inner.__annotations__.get(name) == "int"]
    if not names:
        return function
    places = [place for place, name in enumerate(inner.__code__.co_varnames) if name in names]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        converted = [whole(arg) if place in places else arg for place, arg in enumerate(args)]
        for name in kwargs.keys() & names:
            kwargs[name] = whole(kwargs[name])
        return function(*converted, **kwargs)

    return call  # type: ignore[return-value]


def whole_numbers(of_class: _Class) -> _Class:
    """Let the public methods of a class convert their arguments by `whole_arguments`, and return the class."""
    for name, method in list(vars(of_class).items()):
        if name.startswith("_"):
            continue
        if inspect.isfunction(method):
            setattr(of_class, name, whole_arguments(method))
        elif isinstance(method, (classmethod, staticmethod)):
            setattr(of_class, name, type(method)(whole_arguments(method.__func__)))
    return of_class

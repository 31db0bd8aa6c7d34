"""Makes programs that repeat calls, as text that can be saved and run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from math import ceil
from typing import Any

# The default time after which a program ends itself. No call takes a second.
TIMEOUT_S = 60.0
# The time that its ranks then have to dump their stacks on a busy machine.
_TELLING_S = 10

_PROGRAM = '''\
"""Run this on {size} ranks: unisono run -n {size} FILE"""

import faulthandler
import signal

import unisono as un
from unisono.testing import {names}
{imported}
{noun} = {value}
with un.init() as comm:  # or the communicator under test
    faulthandler.dump_traceback_later({timeout_s:g})  # a rank that hangs dumps its stack,
    signal.alarm({end_s})  # and ends when all ranks have done so
    {function}({comm}, {noun})
'''


@dataclass(frozen=True)
class SourceBackend:
    """A backend under test: the function `name` of `module` turns a communicator into the object that is tested."""

    module: str
    name: str

    @property
    def make(self) -> Callable[[Any], Any]:
        """The function; reading this property imports the module."""
        function: Callable[[Any], Any] = getattr(importlib.import_module(self.module), self.name)
        return function


def source(
    function: str, value: Any, size: int, *, backend: SourceBackend | None = None, timeout_s: float = TIMEOUT_S
) -> str:
    """Return a program that calls ``function(comm, value)`` on `size` ranks, and fails if that raises or hangs.

    Args:
        function: a name in `unisono.testing`, which also has the dataclasses in `value`.
        value: a dataclass.
        size: the number of ranks.
        backend: the backend under test; None for Unisono itself.
        timeout_s: the time limit of the call.
    """
    return _PROGRAM.format(
        size=size,
        names=", ".join(sorted({*_names(value), function})),
        imported="" if backend is None else f"from {backend.module} import {backend.name}\n",
        timeout_s=timeout_s,
        end_s=ceil(timeout_s) + _TELLING_S,
        noun=type(value).__name__.lower(),
        value=_lines(value),
        function=function,
        comm="comm" if backend is None else f"{backend.name}(comm)",
    )


def literal(value: Any) -> str:
    """Return a Python expression for `value`, in which dataclasses omit fields that have their default."""
    if isinstance(value, tuple) and any(is_dataclass(each) for each in value):
        return f"({''.join(f'{literal(each)}, ' for each in value).rstrip()})"
    return f"{type(value).__name__}({', '.join(_arguments(value))})" if is_dataclass(value) else repr(value)


def _lines(value: Any) -> str:
    """Return `literal(value)` with one line for each argument or, for a program, for each step."""
    parts = [literal(step) for step in value.steps] if hasattr(value, "steps") else _arguments(value)
    lines = "".join(f"    {part},\n" for part in parts)
    if hasattr(value, "steps"):
        rest = ", ".join(["", *_arguments(value)[1:]])
        return f"{type(value).__name__}((\n{lines}){rest})"
    return f"{type(value).__name__}(\n{lines})"


def _arguments(value: Any) -> list[str]:
    pairs = [(field, getattr(value, field.name)) for field in fields(value)]
    needed = [literal(argument) for field, argument in pairs if field.default is MISSING]
    return needed + [
        f"{field.name}={literal(argument)}"
        for field, argument in pairs
        if field.default is not MISSING and argument != field.default
    ]


def _names(value: Any) -> set[str]:
    """Return the names of the dataclasses in `value`."""
    if isinstance(value, tuple):
        return set().union(*(_names(each) for each in value))
    if not is_dataclass(value):
        return set()
    return {type(value).__name__}.union(*(_names(getattr(value, field.name)) for field in fields(value)))

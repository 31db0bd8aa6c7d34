"""`Exception` with MPI's classes of errors, and the errors of Unisono as such exceptions.

An error of Unisono becomes an `Exception` whose text ends with the text of the error, and whose ``__cause__`` it is.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from unisono import errors
from unisono.compat.mpi4py.base.constants import CONSTANTS, ERROR_TEXTS, ERRORS

_Call = TypeVar("_Call", bound=Callable[..., Any])

SUCCESS, _LAST = 0, CONSTANTS["ERR_LASTCODE"]
# The class of each error of Unisono; the first one that fits counts.
_CLASSES = (
    (errors.MismatchError, "ERR_TRUNCATE"),
    (errors.PeerLostError, "ERR_PROC_FAILED"),
    (errors.AbortedError, "ERR_PROC_ABORTED"),
    (errors.CollectiveTimeoutError, "ERR_PENDING"),
    (errors.UsageError, "ERR_ARG"),
    (errors.InternalError, "ERR_INTERN"),
)


# The losses of ranks that calls of this process have reported.
LOST: list[errors.PeerLostError] = []


class _Codes:
    """The error classes and codes that the program has added."""

    def __init__(self) -> None:
        self.classes: dict[int, int] = {}  # code → class; a class is a code too
        self.texts: dict[int, str] = {}
        self.last = _LAST

    def add(self, of_class: int | None) -> int:
        self.last += 1
        self.classes[self.last] = self.last if of_class is None else of_class
        return self.last

    def remove(self, code: int, *, is_class: bool) -> None:
        used = [other for other, of_class in self.classes.items() if of_class == code and other != code]
        if self.classes.get(code) is None or (self.classes[code] == code) != is_class or used or code in self.texts:
            raise Exception(ERRORS["ERR_OTHER"])
        del self.classes[code]


CODES = _Codes()


class Exception(RuntimeError):
    """An error of a call, with the number of MPI's error code."""

    def __init__(self, ierr: int = SUCCESS, /, detail: str = "") -> None:
        self._code = int(ierr) if ierr >= SUCCESS else ERRORS["ERR_UNKNOWN"]
        self._detail = detail
        super().__init__(self._code, self.error_string)

    def __eq__(self, other: object) -> bool:
        return self._code == (other._code if isinstance(other, Exception) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return self._code < int(other)

    def __le__(self, other: Any) -> bool:
        return self._code <= int(other)

    def __gt__(self, other: Any) -> bool:
        return self._code > int(other)

    def __ge__(self, other: Any) -> bool:
        return self._code >= int(other)

    def __hash__(self) -> int:
        return hash(self._code)

    def __bool__(self) -> bool:
        return self._code != SUCCESS

    def __int__(self) -> int:
        return self._code

    def __repr__(self) -> str:
        return f"MPI.Exception({self._code})"

    def __str__(self) -> str:
        return f"{self.error_string}: {self._detail}" if self._detail else self.error_string

    def __reduce__(self) -> Any:
        return type(self), (self._code, self._detail)

    def Get_error_code(self) -> int:
        """Return the error code."""
        return self._code

    def Get_error_class(self) -> int:
        """Return the class of the error."""
        return Get_error_class(self._code)

    def Get_error_string(self) -> str:
        """Return the text of the error class."""
        return Get_error_string(self._code)

    error_code = property(Get_error_code, doc="The error code.")
    error_class = property(Get_error_class, doc="The class of the error.")
    error_string = property(Get_error_string, doc="The text of the error class.")


def fail(name: str, detail: str = "") -> Exception:
    """Return the exception of an error class, such as "ERR_RANK"."""
    return Exception(ERRORS[name], detail)


def translated(error: errors.UnisonoError) -> Exception:
    """Return the exception for an error of Unisono, whose text it shows."""
    name = next((name for of_type, name in _CLASSES if isinstance(error, of_type)), "ERR_OTHER")
    exception = fail(name, f"{type(error).__name__}: {error}")
    exception.__cause__ = error
    if isinstance(error, errors.PeerLostError):
        LOST.append(error)
    return exception


def translating(function: _Call) -> _Call:
    """Return a function that raises `Exception` for errors of Unisono, and if an array does not fit into memory."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except errors.UnisonoError as error:
            raise translated(error) from error
        except MemoryError as error:
            raise fail("ERR_NO_MEM", str(error)) from error

    return call  # type: ignore[return-value]


def called_back(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function of the program returns; its exception is shown, and becomes an `Exception`."""
    try:
        return function(*args, **kwargs)
    except Exception:
        sys.stderr.write(traceback.format_exc())
        raise
    except BaseException as error:
        sys.stderr.write(traceback.format_exc())
        raise fail("ERR_OTHER", f"{type(error).__name__}: {error}") from error


def Get_error_class(errorcode: int) -> int:
    """Return the class of an error code."""
    if 0 <= errorcode < len(ERROR_TEXTS) or errorcode == _LAST:
        return errorcode
    return CODES.classes.get(errorcode, ERRORS["ERR_UNKNOWN"])


def Get_error_string(errorcode: int) -> str:
    """Return the text of an error code."""
    if 0 <= errorcode < len(ERROR_TEXTS):
        return ERROR_TEXTS[errorcode]
    if errorcode == _LAST:
        return "last predefined error code"
    return CODES.texts.get(errorcode, "" if errorcode in CODES.classes else "unknown error code")


def Add_error_class() -> int:
    """Add an error class, and return it."""
    return CODES.add(None)


def Remove_error_class(errorclass: int) -> None:
    """Remove an error class that has been added and has no codes and no text."""
    CODES.remove(errorclass, is_class=True)


def Add_error_code(errorclass: int) -> int:
    """Add an error code to a class, and return it."""
    return CODES.add(errorclass)


def Remove_error_code(errorcode: int) -> None:
    """Remove an error code that has been added and has no text."""
    CODES.remove(errorcode, is_class=False)


def Add_error_string(errorcode: int, string: str) -> None:
    """Set the text of an error code that has been added."""
    if errorcode not in CODES.classes:
        raise fail("ERR_ARG", f"{errorcode} is not an error code that has been added")
    CODES.texts[errorcode] = string


def Remove_error_string(errorcode: int) -> None:
    """Remove the text of an error code."""
    if CODES.texts.pop(errorcode, None) is None:
        raise fail("ERR_ARG", f"error code {errorcode} has no text that was added")

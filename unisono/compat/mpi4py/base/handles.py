"""`Handle`, the base of all objects of MPI, with attributes, names and error handlers.

A handle refers to a *state*, or to nothing if it is null. Two handles of one state are equal. A *constant*, such as
`COMM_WORLD`, is a handle that an attribute of `MPI` holds; `free` leaves it as it is.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

from unisono.compat.mpi4py.base.constants import CONSTANTS, KEYVAL_INVALID
from unisono.compat.mpi4py.base.errors import called_back, fail

_numbers = itertools.count(1)
_states: weakref.WeakValueDictionary[int, State] = weakref.WeakValueDictionary()
_keyvals = itertools.count(100)
# The class of MPI, such as `Comm`, of each class of handles. No attribute of the class, because that would be public.
_bases: dict[type, type[Handle]] = {}


class State:
    """What handles refer to. A call makes many of them, so most attributes are made when they are used.

    Attributes:
        number: the number that `handle` returns.
        name: the name by `Set_name`.
        attributes: the values by keyval.
        constant: the name of the constant, if it is predefined.
    """

    name = constant = ""
    errhandler: Any = None

    def __init__(self, constant: str = "") -> None:
        if constant:
            self.name, self.constant = f"MPI_{constant}", constant

    @cached_property
    def number(self) -> int:
        number = next(_numbers)
        _states[number] = self
        return number

    @cached_property
    def attributes(self) -> dict[int, Any]:
        return {}


class Handle:
    """A handle; without an argument it is null."""

    __slots__ = ("__weakref__", "_constant", "_state")
    _null: ClassVar[str]  # the name of the null constant
    _error: ClassVar[str]  # the error of calls on the null handle
    _state: Any
    _constant: str
    __hash__ = None  # type: ignore[assignment]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _bases[cls] = cls if Handle in cls.__bases__ else next(filter(None, map(_bases.get, cls.__mro__)))

    def __new__(cls, other: Any = None) -> Any:
        if other is not None and not isinstance(other, _bases[cls]):
            raise TypeError(f"expected {_bases[cls].__name__}, got {type(other).__name__}")
        if other is not None and other._state is not None and not cls._accepts(other._state):
            raise TypeError(f"this {type(other).__name__} is no {cls.__name__}")
        self = object.__new__(cls)
        self._state = None if other is None else other._state
        self._constant = ""
        return self

    @classmethod
    def _accepts(cls, state: Any) -> bool:
        """Return whether a handle of this class may refer to `state`, the object behind another handle."""
        return True

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def _of(cls, state: Any, constant: str = "") -> Any:
        self = object.__new__(cls)
        self._state, self._constant = state, constant
        return self

    @property
    def _live(self) -> Any:
        """The state; raises the error of a null handle."""
        if self._state is None:
            raise fail(self._error, f"{self._null} has no such operation")
        return self._state

    def __eq__(self, other: object) -> bool:
        return self._state is other._state if isinstance(other, _bases[type(self)]) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return self._state is not other._state if isinstance(other, _bases[type(self)]) else NotImplemented

    def __bool__(self) -> bool:
        return self._state is not None

    def __reduce__(self) -> Any:
        if self._constant:
            return self._constant
        if self._state is None or self._state.constant:
            return type(self), (CONSTANT_HANDLES[self._null if self._state is None else self._state.constant],)
        raise ValueError(f"cannot pickle a {type(self).__name__} that is not predefined")

    @property
    def handle(self) -> int:
        """The number of the state; 0 if the handle is null."""
        return 0 if self._state is None else int(self._state.number)

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        """Return a handle of the state of this number."""
        return cls._of(_states.get(handle))

    def toint(self) -> int:
        """Return the number of the state."""
        return self.handle

    @classmethod
    def fromint(cls, arg: int, /) -> Any:
        """Return a handle of the state of this number."""
        return cls.fromhandle(arg)

    def py2f(self) -> int:
        """Return the number of the state, which `f2py` takes; no code of Fortran can use it."""
        return self.handle

    @classmethod
    def f2py(cls, arg: int) -> Any:
        """Return a handle of the state of this number."""
        return cls.fromhandle(arg)

    def free(self) -> None:
        """Free the object if it is not predefined, and make the handle null; a constant stays as it is."""
        if self._constant or self._state is None:
            return
        if not self._state.constant:
            self._release()
        self._state = None

    def _release(self) -> None:
        """End the use of the state."""

    def _free(self) -> None:
        """Free the object, which must not be predefined."""
        if self._live.constant:
            raise fail(self._error, f"{self._state.constant} is predefined and cannot be freed")
        self._release()
        self._state = None


# The constants by name, such as "COMM_WORLD".
CONSTANT_HANDLES: dict[str, Any] = {}


def constant(name: str, of_class: type[Handle], state: Any) -> Any:
    """Return a new constant."""
    CONSTANT_HANDLES[name] = handle = of_class._of(state, name)
    return handle


class Named:
    """The methods of objects with names."""

    __slots__ = ()
    _live: Any
    _state: Any
    _null: ClassVar[str]

    def Get_name(self) -> str:
        """Return the name."""
        return f"MPI_{self._null}" if self._state is None else str(self._state.name)

    def Set_name(self, name: str) -> None:
        """Set the name."""
        self._live.name = name[: CONSTANTS["MAX_OBJECT_NAME"]]

    name = property(Get_name, Set_name, doc="The name.")


class Attributed:
    """The methods of objects with attributes: values by keyvals, which callbacks copy and delete."""

    __slots__ = ()
    _live: Any
    _keyvals: ClassVar[dict[int, tuple[Any, Any, bool]]]

    @classmethod
    def Create_keyval(cls, copy_fn: Any = None, delete_fn: Any = None, nopython: bool = False) -> int:
        """Return a new keyval.

        Args:
            copy_fn: called as ``copy_fn(object, keyval, value)`` by `Dup`; returns the value of the new object, or
                `NotImplemented` for none. None copies nothing, and True copies the value itself.
            delete_fn: called as ``delete_fn(object, keyval, value)`` when the value is deleted.
            nopython: whether the values are integers.
        """
        keyval = next(_keyvals)
        cls._keyvals[keyval] = copy_fn, delete_fn, nopython
        return keyval

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Forget a keyval, and return the invalid one."""
        if cls._keyvals.pop(keyval, None) is None:
            raise fail("ERR_KEYVAL", f"there is no keyval {keyval}")
        return KEYVAL_INVALID

    def _predefined_attribute(self, keyval: int) -> Any:
        raise fail("ERR_KEYVAL", f"there is no keyval {keyval}")

    def Get_attr(self, keyval: int) -> Any:
        """Return the value of a keyval; None if there is none."""
        attributes = self._live.attributes
        if keyval not in attributes and keyval not in self._keyvals:
            return self._predefined_attribute(keyval)
        value = attributes.get(keyval, (None, None))[0]
        return value

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        """Set the value of a keyval."""
        attributes = self._live.attributes
        if keyval not in self._keyvals:
            raise fail("ERR_KEYVAL", f"there is no keyval {keyval}")
        if keyval in attributes:
            self.Delete_attr(keyval)
        attributes[keyval] = attrval, self._keyvals[keyval]

    def Delete_attr(self, keyval: int) -> None:
        """Delete the value of a keyval."""
        attributes = self._live.attributes
        if keyval not in attributes:
            raise fail("ERR_KEYVAL", f"this object has no value of keyval {keyval}")
        value, (_, delete_fn, _) = attributes.pop(keyval)
        if delete_fn is not None:
            called_back(delete_fn, self, keyval, value)

    def _copy_attributes(self, to: Any) -> None:
        for keyval, (value, callbacks) in self._live.attributes.items():
            copy_fn = callbacks[0]
            if copy_fn is None or copy_fn is False:
                continue
            copied = value if copy_fn is True else called_back(copy_fn, self, keyval, value)
            if copied is not NotImplemented:
                to.attributes[keyval] = copied, callbacks

    def _delete_attributes(self) -> None:
        for keyval in list(self._live.attributes):
            self.Delete_attr(keyval)


class ErrhandlerState(State):
    """An error handler: predefined, or a function that gets the object and the error code."""

    def __init__(self, constant: str = "", function: Callable[[Any, int], None] | None = None) -> None:
        super().__init__(constant)
        self.function = function


# The error handlers that the program has created and not freed, by the class of their objects.
_handlers: defaultdict[str, set[int]] = defaultdict(set)
_MOST_HANDLERS = 32


class Errhandler(Handle):
    """An error handler. Errors of calls raise `Exception` whatever the handler is; `Call_errhandler` calls it."""

    __slots__ = ()
    _null, _error = "ERRHANDLER_NULL", "ERR_ERRHANDLER"

    def Free(self) -> None:
        """Make the handle null."""
        number = self._live.number
        for numbers in _handlers.values():
            numbers.discard(number)
        self._state = None


ERRHANDLER_NULL = constant("ERRHANDLER_NULL", Errhandler, None)
ERRORS_RETURN = constant("ERRORS_RETURN", Errhandler, ErrhandlerState("ERRORS_RETURN"))
ERRORS_ABORT = constant("ERRORS_ABORT", Errhandler, ErrhandlerState("ERRORS_ABORT"))
ERRORS_ARE_FATAL = constant("ERRORS_ARE_FATAL", Errhandler, ErrhandlerState("ERRORS_ARE_FATAL"))


class Handled:
    """The methods of objects with error handlers."""

    __slots__ = ()
    _live: Any

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[[Any, int], None]) -> Errhandler:
        """Return an error handler that calls a function with the object and the error code."""
        if len(_handlers[cls.__name__]) >= _MOST_HANDLERS:
            raise RuntimeError(f"cannot create more than {_MOST_HANDLERS} error handlers of a {cls.__name__}")
        handler: Errhandler = Errhandler._of(ErrhandlerState(function=errhandler_fn))
        _handlers[cls.__name__].add(handler._state.number)
        return handler

    def Get_errhandler(self) -> Errhandler:
        """Return the error handler."""
        handler: Errhandler = Errhandler._of(self._live.errhandler or ERRORS_RETURN._state)
        return handler

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set the error handler."""
        self._live.errhandler = errhandler._live

    def Call_errhandler(self, errorcode: int) -> None:
        """Call the error handler with an error code; the handlers that end the job abort it."""
        handler = self._live.errhandler or ERRORS_RETURN._state
        if handler.function is not None:
            handler.function(self, errorcode)
        elif handler is not ERRORS_RETURN._state:
            from unisono.compat.mpi4py.base.world import abort

            abort(errorcode)

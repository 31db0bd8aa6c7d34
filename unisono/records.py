"""Records: data classes that cannot be changed, and whose classes cost little to make.

A class with ``@record`` is one with ``@dataclass(frozen=True, slots=True)`` in all that can be seen of it, for
`dataclasses.replace` and its like too; all annotations of its body are fields. But `dataclass` writes and compiles
source for every class, which takes half a millisecond, and a rank makes some fifty of them before its first result. A
record's methods are closures instead, which are there before its class is made; and what `dataclasses` reads of it is
made when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, replace
from operator import attrgetter
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

if TYPE_CHECKING:
    from inspect import Signature

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[Any], Any]:
        """Return a decorator that does nothing, as only type checkers read it."""
        return lambda decorated: decorated


Class = TypeVar("Class", bound=type)
# Where the class of a record has all its fields, those of its bases first.
_FIELDS = "_record_fields"


@overload
def record(cls: Class, /) -> Class: ...


@overload
def record(*, slots: bool) -> Callable[[Class], Class]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: Any = None, /, *, slots: bool = True) -> Any:
    """Make a class a record; without `slots` where it has a `cached_property`, which keeps what it is in a dictionary.

    As by `dataclass`, methods that the class has itself are left as they are.
    """
    return (lambda decorated: _made(decorated, slots)) if cls is None else _made(cls, slots)


def _made(cls: Any, slots: bool) -> Any:
    own = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
    names = tuple(cls.__annotations__)
    own_fields = [_field(name, cls.__annotations__[name], own.pop(name, MISSING)) for name in names]
    if slots:
        own["__slots__"] = names
    else:
        own.update({each.name: each.default for each in own_fields if each.default is not MISSING})
    all_fields = list({each.name: each for each in (*getattr(cls, _FIELDS, ()), *own_fields)}.values())
    parameters = [each for each in all_fields if each.init]
    setters: list[Callable[[Any, Any], None]] = []
    methods = {
        _FIELDS: all_fields,
        "__dataclass_fields__": _Described(),
        "__dataclass_params__": _Described(),
        "__match_args__": tuple(each.name for each in parameters),
        "__signature__": _LazySignature(),
        "__init__": _init(cls.__name__, parameters, setters, getattr(cls, "__post_init__", None)),
        **_methods(all_fields),
    }
    made = type(cls)(cls.__name__, cls.__bases__, {**methods, **own})
    setters += [_setter(made, each.name) for each in parameters]
    return made


def _setter(made: type, name: str) -> Callable[[Any, Any], None]:
    """Return what sets a field; the descriptor of a slot does it in half of the time that others take."""
    descriptor = getattr(made, name, None)
    if isinstance(descriptor, MemberDescriptorType):
        return descriptor.__set__
    return lambda self, value: object.__setattr__(self, name, value)


def _field(name: str, annotation: Any, default: Any) -> Field[Any]:
    made: Field[Any] = default if isinstance(default, Field) else field(default=default)
    made.name, made.type = name, annotation
    return made


def _init(
    name: str,
    parameters: Sequence[Field[Any]],
    setters: Sequence[Callable[[Any, Any], None]],
    after: Callable[[Any], None] | None,
) -> Callable[..., None]:
    """Return ``__init__``; `setters` are looked at when it is called."""
    defaults = tuple(each.default for each in parameters)
    most = len(parameters)
    least = max((index + 1 for index, default in enumerate(defaults) if default is MISSING), default=0)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs or not least <= len(args) <= most:
            args = _bound(name, parameters, args, kwargs)
        elif len(args) < most:
            args += defaults[len(args) :]
        for put, value in zip(setters, args, strict=True):
            put(self, value)
        if after is not None:
            after(self)

    return init


def _methods(all_fields: Sequence[Field[Any]]) -> dict[str, Callable[..., Any]]:
    names = [each.name for each in all_fields]
    shown = [each.name for each in all_fields if each.repr]
    compared = attrgetter(*(each.name for each in all_fields if each.compare))

    def show(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def is_equal(self: Any, other: object) -> bool:
        return bool(compared(self) == compared(other)) if type(other) is type(self) else NotImplemented

    def state(self: Any) -> list[Any]:
        return [getattr(self, name) for name in names]

    def set_state(self: Any, state: Sequence[Any]) -> None:
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)

    return {
        "__repr__": show,
        "__eq__": is_equal,
        "__hash__": lambda self: hash(compared(self)),
        "__setattr__": _refuse_to_set,
        "__delattr__": _refuse_to_delete,
        "__getstate__": state,
        "__setstate__": set_state,
        "__replace__": replace,
    }


def _refuse_to_set(self: object, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _bound(name: str, parameters: Sequence[Field[Any]], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return a value for each parameter: the first are `args`, and `kwargs` says others by name."""
    if len(args) > len(parameters):
        raise TypeError(f"{name}() takes {len(parameters)} arguments but {len(args)} were given")
    values = list(args)
    for each in parameters[len(args) :]:
        if each.name in kwargs:
            values.append(kwargs.pop(each.name))
        elif each.default is not MISSING:
            values.append(each.default)
        elif each.default_factory is not MISSING:
            values.append(each.default_factory())
        else:
            raise TypeError(f"{name}() missing required argument {each.name!r}")
    if kwargs:
        known = {each.name for each in parameters}
        wrong = next(iter(kwargs))
        raise TypeError(
            f"{name}() got {'multiple values for' if wrong in known else 'an unexpected'} argument {wrong!r}"
        )
    return tuple(values)


class _Described:
    """What `dataclasses` writes into a class that it makes, made when somebody reads it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: Any) -> Any:
        its_fields = {each.name: each for each in getattr(owner, _FIELDS)}
        annotations = {name: each.type for name, each in its_fields.items()}
        described = type(
            owner.__name__, (), {**its_fields, "__annotations__": annotations, "__module__": owner.__module__}
        )
        value = getattr(dataclass(init=False, repr=False, eq=False)(described), self._name)
        setattr(owner, self._name, value)
        return value


class _LazySignature:
    """What `inspect.signature` and `help` show of a record, made when they ask."""

    def __get__(self, instance: object, owner: type) -> Signature:
        from inspect import Parameter, Signature

        def default(each: Field[Any]) -> Any:
            made = Parameter.empty if each.default_factory is MISSING else each.default_factory
            return made if each.default is MISSING else each.default

        kind = Parameter.POSITIONAL_OR_KEYWORD
        return Signature(
            [
                Parameter(each.name, kind, default=default(each), annotation=each.type)
                for each in getattr(owner, _FIELDS)
                if each.init
            ]
        )

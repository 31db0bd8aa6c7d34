"""`record`: a decorator for frozen data classes that are cheap to create.

A class with ``@record`` behaves like one with ``@dataclass(frozen=True, slots=True)``, also for `dataclasses.replace`
and similar functions. All annotations of its body are fields. `dataclass` writes and compiles source for every class,
which takes half a millisecond, and a rank creates about fifty such classes before its first result. The methods of a
record are closures, which need no compilation, and the attributes that `dataclasses` reads are created when they are
read.
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
        """Return a decorator that does nothing, because only type checkers need it."""
        return lambda decorated: decorated


Class = TypeVar("Class", bound=type)
# The attribute of a record class with all fields, those of its bases first.
_FIELDS = "_record_fields"


@overload
def record(cls: Class, /) -> Class: ...


@overload
def record(*, slots: bool) -> Callable[[Class], Class]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: Any = None, /, *, slots: bool = True) -> Any:
    """Turn a class into a record. Methods that the class defines stay, as with `dataclass`.

    Pass ``slots=False`` for a class with a `cached_property`, which needs a dictionary in the instance.
    """
    return (lambda decorated: _record_class(decorated, slots)) if cls is None else _record_class(cls, slots)


def _record_class(cls: Any, slots: bool) -> Any:
    own = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
    names = tuple(cls.__annotations__)
    own_fields = [_field(name, cls.__annotations__[name], own.pop(name, MISSING)) for name in names]
    if slots:
        own["__slots__"] = names
    else:
        own.update({item.name: item.default for item in own_fields if item.default is not MISSING})
    all_fields = list({item.name: item for item in (*getattr(cls, _FIELDS, ()), *own_fields)}.values())
    parameters = [item for item in all_fields if item.init]
    setters: list[Callable[[Any, Any], None]] = []
    methods = {
        _FIELDS: all_fields,
        "__dataclass_fields__": _LazyDataclassAttribute(),
        "__dataclass_params__": _LazyDataclassAttribute(),
        "__match_args__": tuple(item.name for item in parameters),
        "__signature__": _LazySignature(),
        "__init__": _init(cls.__name__, parameters, setters, getattr(cls, "__post_init__", None)),
        **_methods(all_fields),
    }
    record_class = type(cls)(cls.__name__, cls.__bases__, {**methods, **own})
    setters += [_setter(record_class, item.name) for item in parameters]
    return record_class


def _setter(record_class: type, name: str) -> Callable[[Any, Any], None]:
    """Return a function that sets a field. The descriptor of a slot takes half the time of `object.__setattr__`."""
    descriptor = getattr(record_class, name, None)
    if isinstance(descriptor, MemberDescriptorType):
        return descriptor.__set__
    return lambda self, value: object.__setattr__(self, name, value)


def _field(name: str, annotation: Any, default: Any) -> Field[Any]:
    item: Field[Any] = default if isinstance(default, Field) else field(default=default)
    item.name, item.type = name, annotation
    return item


def _init(
    name: str,
    parameters: Sequence[Field[Any]],
    setters: Sequence[Callable[[Any, Any], None]],
    post_init: Callable[[Any], None] | None,
) -> Callable[..., None]:
    """Return ``__init__``. It reads the list `setters` when it is called, because the list is filled later."""
    defaults = tuple(item.default for item in parameters)
    most = len(parameters)
    least = max((index + 1 for index, default in enumerate(defaults) if default is MISSING), default=0)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs or not least <= len(args) <= most:
            args = _bound(name, parameters, args, kwargs)
        elif len(args) < most:
            args += defaults[len(args) :]
        for set_field, value in zip(setters, args, strict=True):
            set_field(self, value)
        if post_init is not None:
            post_init(self)

    return init


def _methods(all_fields: Sequence[Field[Any]]) -> dict[str, Callable[..., Any]]:
    names = [item.name for item in all_fields]
    shown = [item.name for item in all_fields if item.repr]
    compared = attrgetter(*(item.name for item in all_fields if item.compare))

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
    """Return a value for each parameter: first those of `args`, then those of `kwargs` and the defaults."""
    if len(args) > len(parameters):
        raise TypeError(f"{name}() takes {len(parameters)} arguments but {len(args)} were given")
    values = list(args)
    for item in parameters[len(args) :]:
        if item.name in kwargs:
            values.append(kwargs.pop(item.name))
        elif item.default is not MISSING:
            values.append(item.default)
        elif item.default_factory is not MISSING:
            values.append(item.default_factory())
        else:
            raise TypeError(f"{name}() missing required argument {item.name!r}")
    if kwargs:
        names = {item.name for item in parameters}
        wrong = next(iter(kwargs))
        raise TypeError(
            f"{name}() got {'multiple values for' if wrong in names else 'an unexpected'} argument {wrong!r}"
        )
    return tuple(values)


class _LazyDataclassAttribute:
    """An attribute that `dataclass` would set on the class; here it is created when it is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: Any) -> Any:
        fields = {item.name: item for item in getattr(owner, _FIELDS)}
        annotations = {name: item.type for name, item in fields.items()}
        # Without a docstring, `dataclass` would write one with `inspect.signature`, which compiles Python's tokenizer.
        body = {**fields, "__annotations__": annotations, "__module__": owner.__module__, "__doc__": owner.__name__}
        twin = type(owner.__name__, (), body)
        value = getattr(dataclass(init=False, repr=False, eq=False)(twin), self._name)
        setattr(owner, self._name, value)
        return value


class _LazySignature:
    """The signature that `inspect.signature` and `help` read from a record class; it is created when they do."""

    def __get__(self, instance: object, owner: type) -> Signature:
        from inspect import Parameter, Signature

        def default(item: Field[Any]) -> Any:
            factory = Parameter.empty if item.default_factory is MISSING else item.default_factory
            return factory if item.default is MISSING else item.default

        kind = Parameter.POSITIONAL_OR_KEYWORD
        return Signature(
            [
                Parameter(item.name, kind, default=default(item), annotation=item.type)
                for item in getattr(owner, _FIELDS)
                if item.init
            ]
        )

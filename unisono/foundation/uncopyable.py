"""`uncopyable`: a decorator for classes whose objects belong to one process and one job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from unisono.errors import UsageError

Class = TypeVar("Class", bound=type)


def uncopyable(advice: str) -> Callable[[Class], Class]:
    """Return a decorator that makes `copy`, `deepcopy` and pickling of a class raise `UsageError` with this advice.

    Otherwise copies would fail in a part that the user does not know, or, made in part, at their first use.
    """

    def decorated(cls: Class) -> Class:
        def refuse(self: object, protocol: Any) -> NoReturn:
            raise UsageError(f"a {type(self).__name__} cannot be copied or pickled: {advice}")

        cls.__reduce_ex__ = refuse  # type: ignore[method-assign, assignment]
        return cls

    return decorated

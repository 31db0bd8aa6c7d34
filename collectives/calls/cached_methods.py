"""Decorators of methods that the native core runs without a Python frame, if it knows the call or the message."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from unisono.transports import _core

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Method = TypeVar("Method", bound=Callable[..., Any])

    def cached_method(method: Method) -> Method:
        """Wrap a collective method: a call with an `out` that the call cache knows runs without a Python frame."""

    def fast_message(method: Method) -> Method:
        """Wrap a method of messages: the native core passes plain numpy arrays on without a Python frame."""
else:
    cached_method = _core.CachedMethod
    fast_message = partial(_core.CachedMethod, cache="_messages")

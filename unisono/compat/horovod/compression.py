"""`Compression`: the forms in which tensors travel. A framework says how its tensors are cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Compressor:
    """Makes a tensor smaller before a call, and restores its dtype after it. Programs may write their own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and a context that `decompress` takes, such as the original dtype."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return a received tensor in the form of the tensor that was compressed."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class HalfCompressor(Compressor):
    """Sends floats as float16. Each framework has a subclass. Gradients are compressed by the reducer instead.

    Attributes:
        half: the dtype float16.
        is_float: returns whether a tensor has a dtype of floats.
        cast: returns a tensor with a dtype.
    """

    half: Any
    is_float: Callable[[Any], bool]
    cast: Callable[[Any, Any], Any]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return (cls.cast(tensor, cls.half) if cls.is_float(tensor) else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return cls.cast(tensor, ctx)

"""The base classes of `Compression`: the forms in which tensors travel."""

from __future__ import annotations

from typing import Any


class Compressor:
    """Makes a tensor smaller before a call, and restores its dtype after it. Programs may write their own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return a received tensor in the form of the tensor that was compressed."""
        raise NotImplementedError


class HalfCompressor(Compressor):
    """The base class of compressors that send floats as float16. Gradients are compressed by the reducer instead."""


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor

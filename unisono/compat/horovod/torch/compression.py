"""`Compression`: the forms in which tensors travel."""

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


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class FP16Compressor(Compressor):
    """Sends tensors of floats as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor.to(ctx)


class Compression:
    """The compressors that a call or a `DistributedOptimizer` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor

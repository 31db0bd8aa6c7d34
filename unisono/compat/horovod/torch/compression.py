"""`Compression`: the forms in which tensors travel."""

from __future__ import annotations

from typing import Any

from unisono.compat.horovod.compression import HalfCompressor, NoneCompressor


class FP16Compressor(HalfCompressor):
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

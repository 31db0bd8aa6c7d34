"""`Compression`: the forms in which tensors travel."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from unisono.compat.horovod.compression import HalfCompressor, NoneCompressor


class FP16Compressor(HalfCompressor):
    """Sends tensors of floats as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx)


class Compression:
    """The compressors that a call, a tape or a `DistributedOptimizer` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor

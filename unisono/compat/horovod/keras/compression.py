"""`Compression`: the forms in which tensors travel, on each backend of Keras."""

from __future__ import annotations

from typing import Any

import keras

from unisono.compat.horovod.compression import HalfCompressor, NoneCompressor


class FP16Compressor(HalfCompressor):
    """Sends tensors of floats as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return (keras.ops.cast(tensor, "float16") if "float" in dtype else tensor), dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return keras.ops.cast(tensor, ctx)


class Compression:
    """The compressors that a call or a `DistributedOptimizer` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor

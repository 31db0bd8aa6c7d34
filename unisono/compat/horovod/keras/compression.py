"""`Compression`: the forms in which tensors travel."""

import keras

from unisono.compat.horovod.compression import HalfCompressor, NoneCompressor


class FP16Compressor(HalfCompressor):
    """Sends tensors of floats as float16."""

    half = "float16"
    is_float = staticmethod(lambda tensor: "float" in keras.backend.standardize_dtype(tensor.dtype))
    cast = staticmethod(keras.ops.cast)


class Compression:
    """The compressors that a call or a `DistributedOptimizer` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor

"""`Compression`: the forms in which tensors travel."""

import tensorflow as tf

from unisono.compat.horovod.compression import HalfCompressor, NoneCompressor


class FP16Compressor(HalfCompressor):
    """Sends tensors of floats as float16."""

    half = tf.float16
    is_float = staticmethod(lambda tensor: tensor.dtype.is_floating)
    cast = staticmethod(tf.cast)


class Compression:
    """The compressors that a call or a `DistributedOptimizer` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor

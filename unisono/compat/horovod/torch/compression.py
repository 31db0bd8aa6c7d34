"""`Compression`: the forms in which tensors travel."""

import torch

from unisono.compat.horovod.compression import HalfCompressor, NoneCompressor


class FP16Compressor(HalfCompressor):
    """Sends tensors of floats as float16."""

    half = torch.float16
    is_float = staticmethod(torch.is_floating_point)
    cast = staticmethod(torch.Tensor.to)


class Compression:
    """The compressors that a call or a `DistributedOptimizer` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor

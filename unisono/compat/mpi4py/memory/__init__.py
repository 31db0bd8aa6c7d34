"""Memory and its layouts.

access: the memory of objects.
buffers: buffer specifications.
exported: memory by DLPack and the CUDA array interface.
datatype: layouts of elements.
"""

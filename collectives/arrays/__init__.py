"""The caller's arrays: recognised, checked, and turned into operands.

- `operands`: an array in the form that executors take, and the checks on it
- `makers`: how new arrays for results are made
- `adapters`: the table of array libraries
- `device_detection`: which arrays are on a GPU
- `dlpack`: memory described by DLPack or by the CUDA array interface
- `torch`: torch tensors, imported at the first one
- `mapped`: `un.empty`, arrays in shared memory
- `typing`: the types in signatures
- `refusals`: errors that several of these modules raise
"""

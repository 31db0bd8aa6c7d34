"""Elementwise reductions, and compressed wire formats.

`definition.py`     defines the arithmetic, in numpy
`native.py`         calls the native kernels
`wire_formats.py`   converts gradients to and from float16, bfloat16 and int8
"""

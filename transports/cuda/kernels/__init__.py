"""Kernels, from source to launch.

- `catalogue`: the kernels by operation and dtype. `compiler`: NVRTC. `cache`: compiled kernels on disk.
- `launcher`: loads and launches kernels. `tables`: numbers that are too many for a kernel's parameters.
- `quantised_form`: how codes and their scales lie in memory.
- ``*.cuh``, ``standard/``: the C++ source. NVRTC compiles it without CUDA's headers. The tests compile the same source
  for the host, where loops replace the GPU's threads.
"""

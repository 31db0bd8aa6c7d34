"""Kernels for NVIDIA GPUs, and what compiles them: no transport yet, and nothing that runs on a GPU by itself.

The kernels stand in `kernels/`, in the C++ that NVRTC compiles without any header of CUDA. The tests compile the same
source for the host, where a loop takes the place of the GPU's threads.
"""

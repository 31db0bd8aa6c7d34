"""NVIDIA GPUs: the interface of a device, the one over CUDA's driver, kernels, and what moves data between ranks.

The kernels stand in `kernels/`, in the C++ that NVRTC compiles without any header of CUDA. The tests compile the same
source for the host, where a loop takes the place of the GPU's threads.
"""

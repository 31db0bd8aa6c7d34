"""NVIDIA GPUs: collectives between device memory, by the CUDA driver and kernels compiled at run time.

- `device`: `Device`, the interface of a GPU. `devices`: the devices that this process has opened.
- `issued_calls`: work that is issued again, as data.
- `driver_api/`: `CudaDevice`, the implementation of `Device` by the CUDA driver.
- `memory/`: memory of a device and of the host, and its release.
- `kernels/`: kernels, from C++ source to launch.
- `peers/`: `DeviceCollectives`, the `cuda_ipc` transport, and how ranks find each other's device memory.
- `executors/`: executors of plans on memory of a device, graphs of persistent calls, and host staging.
"""

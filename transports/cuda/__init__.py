"""NVIDIA GPUs: collectives between device memory, by the CUDA driver and kernels compiled at run time.

- `device`: `Device`, the interface of a GPU. `driver`: `CudaDevice`, the implementation by the CUDA driver.
- `devices`: the devices that this process has opened. `driver_errors`: calls of the driver, and their errors.
  `context`: makes the context of a device current. `memory_pool`: memory that streams take.
- `ipc`: `DeviceCollectives`, the `cuda_ipc` transport. `executor`: issues a plan to a stream.
- `peer_exchange`, `peer_board`, `host_memory`, `process_token`: the ranks of a host find each other's device memory.
- `registered_memory`: memory that other processes may open. `shown_arrays`: arrays there that ranks show each other.
- `channel`: slabs and signals (flags or events) between devices. `layout`: the memory of a call.
- `issued_calls`: work that is issued again, as data. `native_programs`: the same, compiled for native code.
  `replays`: the same, as graphs, for persistent calls.
- `ipc_probe`: tests whether IPC works.
- `message_run`: runs a plan of messages on memory of a device.
- `staging`: the slower way, through pinned host memory. `pinned_pool`: such memory, used again.
- `reaper`: a thread that releases memory, because the driver may wait for all work of the process meanwhile.
  `context_fence`: all work that the process has issued so far.
- `quantised_form`: how codes and their scales lie in memory.
- `kernel_catalogue`, `compiler`, `cache`, `kernel_launcher`, `device_tables`: kernels, from source to launch.
- `kernels/`: their C++ source. NVRTC compiles it without CUDA's headers. The tests compile the same source for the
  host, where loops replace the GPU's threads.
"""

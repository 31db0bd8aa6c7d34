"""The CUDA driver: the implementation of `device.Device`, and its helpers.

- `cuda_device`: `CudaDevice`, a GPU of this process.
- `errors`: calls of the driver, and their errors.
- `context`: makes the context of a device current. `context_fence`: all work that the process has issued so far.
- `native_programs`: issued calls, compiled to programs of driver calls for native code.
"""

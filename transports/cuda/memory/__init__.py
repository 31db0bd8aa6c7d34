"""Memory of a device, and of the host beside it.

- `pool`: device memory that is allocated and freed in the order of a stream.
- `pinned_pool`: pinned memory of the host, which later calls reuse because pinning is slow.
- `registered`: memory of a device that other processes may open. `host`: memory that processes of one host map.
- `reaper`: a thread that frees device memory. To free may block until all work of the process has ended, so no thread
  of the program does it.
"""

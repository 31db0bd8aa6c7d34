"""Memory of a device, and of the host beside it.

- `pool`: memory of a device that streams take. `pinned_pool`: pinned memory of the host, used again.
- `registered`: memory of a device that other processes may open. `host`: memory that processes of one host map.
- `reaper`: a thread that releases memory, because the driver may wait for all work of the process meanwhile.
"""

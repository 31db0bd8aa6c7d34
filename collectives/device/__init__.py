"""Calls and messages on GPU arrays, imported at the first such array.

- `gateway`: the entrance, which creates everything else when it is needed
- `calls`: collective calls, ordered with the caller's streams
- `work`: the works of these calls
- `events`: events that are used again
- `contracts`: the protocols between calls and routes
- `routes`: CUDA IPC, and staging through the host
- `across_hosts`: GPUs work within a host, and links join the hosts
- `host_phases`: the phases of these calls and their segments, as data
- `phased_call`, `host_slots`: one call, and the memory of its segments
- `within_hosts`: the collectives of the GPUs of one host
- `by_nccl`: NCCL, for calls that name it or for which a decision table chooses it
- `nccl_refusals`: the calls that NCCL cannot carry out
- `segments`: how a staged call is cut into segments
- `point_to_point`: messages
- `displaced`: shares at displacements
- `adapters`: the table of libraries for GPU arrays
- `registered_arrays`: `un.empty` on a GPU
- `workspace`: memory and streams for work between calls, such as on gradients
- `result_array`: a GPU array of Unisono's own, for results
"""

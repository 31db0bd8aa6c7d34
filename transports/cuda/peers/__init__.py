"""The transport `cuda_ipc`: ranks of a host read each other's device memory.

- `collectives`: `DeviceCollectives`, the transport.
- `peer_exchange`, `peer_board`, `process_token`: the ranks of a host find each other's device memory.
- `channel`: slabs and signals (flags or events) between devices. `shown_arrays`: arrays that ranks show each other.
- `probe`: tests whether IPC works.
"""

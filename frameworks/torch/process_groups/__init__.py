"""Process groups of the backend, over communicators.

- `creation`: the factory that torch calls.
- `backend`, `process_group`: what the factory returns, from torch 2.14 on and before.
- `direct_group`: the process group of a backend that serves all devices, from torch 2.14 on.
- `group_operations`: what these have in common. `options`: the options of a process group.
- `collectives`, `point_to_point`: its calls. `monitored_barrier`: a barrier that names the missing ranks.
"""

"""The stages of `bench/gpu.py` on a machine with a GPU. Each module is a stage, which runs in a process of its own.

A stage prints each result at once as a record, one line of JSON, so that little is lost if its deadline ends it.

- `machine.py`: the machine, its packages, and the checks of `unisono doctor`.
- `probes.py`: whether a driver does what the code takes for granted, and the costs of its calls.
- `suite.py`, `outcomes.py`: the tests that use a GPU. `sanitizer.py`: reductions under compute-sanitizer.
- `issue.py`: how long the host is busy until a call has been issued.
- `variants.py`: the speed of variants of kernels, so that the best ones can be kept.
- `kernels.py`, `threads.py`, `processes.py`: the speed of kernels, and of allreduce among threads and processes.
- `routes.py`: the ways that an allreduce takes, and a decision table of them.
- `nccl_alone.py`: whether NCCL carries out calls, by one rank.
- `hosts.py`: the speed of allreduce among ranks that count as those of two hosts.
- `ddp.py`, `ddp_rank.py`: training by torch, and calls of CuPy and JAX.
- `gpu.py`, `records.py`, `nccl.py`: what stages share.
- `report.py`, `targets.py`: tables of a run, and its targets.
"""

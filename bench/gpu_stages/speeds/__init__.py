"""Stages that measure speeds.

- `issue.py`: how long the host is busy until a call has been issued.
- `variants.py`: the speed of variants of kernels, so that the best ones can be kept.
- `kernels.py`, `threads.py`, `processes.py`: the speed of kernels, and of allreduce among threads and processes.
- `routes.py`: the ways that an allreduce takes, and a decision table of them.
- `hosts.py`: the speed of allreduce among ranks that count as those of two hosts.
- `ddp.py`, `ddp_rank.py`: training by torch, and calls of CuPy and JAX.
"""

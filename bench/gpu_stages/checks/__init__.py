"""Stages that check the machine, the driver and the code.

- `machine.py`: the machine, its packages, and the checks of `unisono doctor`.
- `probes.py`: whether a driver does what the code takes for granted, and the costs of its calls.
- `suite.py`, `outcomes.py`: the tests that use a GPU. `sanitizer.py`: reductions under compute-sanitizer.
- `nccl_alone.py`: whether NCCL carries out calls, by one rank.
"""

"""The stages of `bench/gpu.py` on a machine with a GPU. Each stage is a module, which runs in a process of its own.

A stage prints each result at once as a record, one line of JSON, so that little is lost if its deadline ends it.

- `checks/`: stages that check the machine, the driver and the code.
- `speeds/`: stages that measure speeds.
- `results/`: records of stages, tables of a run, and its targets.
- `gpu.py`, `nccl.py`: what stages share.
"""

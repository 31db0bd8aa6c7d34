"""The state of this machine, as `unisono doctor` shows it.

- `checks.py`, `gpu_checks.py`: the checks of `unisono doctor`.
- `means.py`: the transports, launchers and stores, judged by the checks.
- `load.py`: the load of the machine before a measurement.
"""

"""The subcommands of `unisono`: each module defines one `command`.

- `run.py`, `swarm.py`: start the ranks of a job, and the place where the members of a swarm meet.
- `top.py`, `postmortem.py`, `trace.py`: show what running jobs do, why a job failed, and its traces.
- `doctor.py`, `test.py`, `verify.py`: check the machine, the calls and the algorithms.
- `bench.py`, `calibrate.py`, `tune.py`: measure.
- `import_schedule.py`, `export_schedule.py`: read and write schedules of other programs (`import`, `export`).
- `explain.py`, `simulate.py`, `place.py`, `show.py`: explain, predict, place and draw calls without running them.
"""

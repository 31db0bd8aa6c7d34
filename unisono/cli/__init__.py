"""The command `unisono`. Each subcommand is a module that is imported only when it is called.

- `main.py`: the table of subcommands, and how errors are shown.
- `bench.py`, `calibrate.py`, `doctor.py`, `explain.py`, `postmortem.py`, `run.py`, `show.py`, `simulate.py`,
  `swarm.py`, `test.py`, `top.py`, `trace.py`, `tune.py` and `verify.py`: the subcommands of these names.
- `tables.py`: writes and shows decision tables; the subcommands of `unisono tune`. `tune_report.py`: their page.
- `schedule_picture.py`: the pictures of `unisono show`.
- `job_statistics.py`: the summary of `unisono run --stats`.
- `checks.py`, `gpu_checks.py`: the checks of `unisono doctor`.
- `means.py`: the transports, launchers and stores of `unisono doctor`, judged by the checks.
- `outputs.py`: files that commands write, checked before the work.
- `counts.py`, `loading.py`, `completion.py`: options that several subcommands share, and names that a shell completes.
- `groups.py`: groups of subcommands that suggest a name.
- `load.py`: the load of the machine before a measurement.
- `messages.py`, `terminal.py`: output to standard error and to the terminal.
"""

"""The output of subcommands: tables, pictures and pages.

- `terminal.py`: consoles, progress bars and columns.
- `tables.py`: shows and merges decision tables; the subcommands of `unisono tune`. `tune_report.py`: their page.
- `network_map.py`: the map of far hosts, and the ways that a call uses, for `unisono explain`.
- `schedule_picture.py`: the pictures of `unisono show`.
- `ran_calls.py`: the calls of a job beside their predictions, for `unisono explain --dumps`.
- `job_statistics.py`: the summary of `unisono run --stats`.
"""

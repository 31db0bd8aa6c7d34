"""The output of subcommands: tables, pictures and pages.

- `terminal.py`: consoles, progress bars and columns.
- `tables.py`: writes and shows decision tables; the subcommands of `unisono tune`. `tune_report.py`: their page.
- `network_map.py`: the map of far hosts, and the ways that a call uses.
- `network_map.py`: the map of far hosts, and the ways that a call uses, for `unisono explain`.
- `schedule_picture.py`: the pictures of `unisono show`.
- `job_statistics.py`: the summary of `unisono run --stats`.
"""

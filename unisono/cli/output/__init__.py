"""The output of subcommands: tables, pictures and pages.

- `terminal.py`: consoles, progress bars and columns.
- `tables.py`: writes and shows decision tables; the subcommands of `unisono tune`. `tune_report.py`: their page.
- `schedule_picture.py`: the pictures of `unisono show`.
- `job_statistics.py`: the summary of `unisono run --stats`.
"""

"""Measures algorithms and machines, and keeps the results.

- `calibrate.py`: turns measured times into parameters.
- `calibration_files.py`: the files in which calibrations are kept.
- `campaign.py`: measures the best variant for each collective and size within a budget.
- `host_groups.py`: finds groups of hosts in measured latencies and bandwidths.
- `job_tuning.py`: which calls of a running job are trials, and of which algorithm.
- `measurement_log.py`: the JSONL file of measurements.
- `race.py`: compares several candidates in one job.
- `table_files.py`: writes decision tables, and reads the measurements that belong to them.
"""

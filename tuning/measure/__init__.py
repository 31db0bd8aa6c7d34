"""Measures algorithms and machines, and keeps the results.

- `calibrate.py`: turns measured times into parameters.
- `calibration_files.py`: the files in which calibrations are kept.
- `campaign.py`: measures the best variant for each collective and size within a budget.
- `host_groups.py`: finds groups of hosts that are near each other, by their measured distances.
- `measurement_log.py`: the JSONL file of measurements.
- `race.py`: compares several candidates in one job.
- `report.py`: shows a decision table as HTML.
"""

"""The results of a run: records of the stages, their tables, and the targets.

- `records.py`: records, one line of JSON each.
- `report.py`: tables of a run. `targets.py`: its targets.
"""

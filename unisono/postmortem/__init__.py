"""The common reading of the dumps of a job's ranks: who did what wrong, and where each rank was.

`loading.py`       reads the dumps of a directory, and picks those of one job
`culprits.py`      compares the ranks and finds the culprit
`analysis.py`      the report
`timeline.py`      the calls of all ranks on one clock
`page.py`          the HTML page
`timings.py`       how long the calls of each kind took
`torch_layout.py`  the dumps in the layout of torch's flight recorder
"""

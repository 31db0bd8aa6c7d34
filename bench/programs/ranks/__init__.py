"""Programs of ranks that benchmarks start by path.

`gradients_rank.py`, `shaped_rank.py`, `training_rank.py`, `wan_rank.py`; `training_tasks.py` has models and data.
"""

"""Programs of ranks that benchmarks start by their paths: `gradients_rank.py`, `shaped_rank.py`, `wan_rank.py`."""

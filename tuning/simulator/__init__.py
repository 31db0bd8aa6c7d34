"""Predicts how long plans take on a described machine.

- `event_model.py`: simulates every message as an event.
- `orders.py`: the times of one schedule (see `step_table.py`) in each of many orders of the ranks, in one pass.
- `round_model.py`: simulates rounds of messages with arrays, for many ranks.
- `simulate.py`: simulates a plan or an algorithm by the model that suits it.
- `step_table.py`: a *schedule*, the steps of all ranks' plans as arrays.
- `training.py`: predicts how much of the gradient reductions a training step hides.
"""

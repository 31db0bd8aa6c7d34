"""Predicts how long plans take on a described machine.

- `event_model.py`: simulates every message as an event.
- `orders.py`: simulates a schedule in many orders of far hosts at once.
- `round_model.py`: simulates rounds of messages with arrays, for many ranks.
- `simulate.py`: simulates a plan or an algorithm by the model that suits it.
- `step_table.py`: the steps of all ranks' plans as arrays.
- `training.py`: predicts how much of the gradient reductions a training step hides.
"""

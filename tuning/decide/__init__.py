"""Decides which algorithm a call uses.

- `choice.py`: the tuner's choice for a question, with all candidates and their refusals.
- `device_routes.py`: the choice for arrays on a GPU: CUDA IPC with one of its algorithms, or staged.
- `host_order.py`: the order of far hosts in which an algorithm takes the least time.
- `forced_rules.py`: rules that force algorithms by collective and size.
- `lint.py`: finds suspicious decisions and times in a decision table.
- `model.py`: predicts times by closed-form costs of algorithms.
- `order_search.py`: improves orders by single changes.
- `place_order.py`: the order of places of a machine in which a collective takes the least time.
- `rank_interpolation.py`: predicts the fastest algorithm between measured numbers of ranks and bytes.
- `senders.py`: counts the hosts that send to one host at once, from plans.
- `table.py`: decision tables and their files.
"""

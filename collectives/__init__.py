"""The communicator, its calls, and how a job starts.

- `communicator.py`: the class `Communicator`, which inherits the methods of `api/` and `calls/groups.py`.
- `api/`: the methods of a communicator that make calls.
- `calls/`: how a call is checked, planned, run, started, grouped and counted.
- `neighbourhoods/`: grids and graphs of ranks, and the calls among neighbours.
- `custom_ops/`: reductions by Python functions.
- `arrays/`: how arrays of numpy and other libraries become operands.
- `device/`: calls and messages on arrays of a GPU.
- `windows/`: one-sided access to memory of other ranks.
- `bootstrap/`: how the ranks of a job meet, and how survivors meet again.
- `measurement/`: how tools measure calls and links on a communicator.
"""

"""Executors of plans on memory of a device.

- `executor`: issues a plan over mapped memory to a stream. `replays`: the same as graphs, for persistent calls.
- `message_run`: runs a plan of messages.
- `layout`: the memory of a call.
- `staging`: the slower way, through pinned host memory.
"""

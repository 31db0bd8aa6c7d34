"""Bounds that no library can be below.

- `bare_copy.py`: each rank copies the result of an allreduce.
- `bare_tcp.py`, ``bare_tcp.c``: two processes and one TCP socket.
"""

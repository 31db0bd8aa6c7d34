"""The small objects of MPI.

op: reduction operations.
status: descriptions of messages.
info: hints.
group: sets of processes.
pickles: objects as bytes.
"""

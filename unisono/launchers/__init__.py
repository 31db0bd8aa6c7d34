"""Launchers: they start the ranks of a job on this machine, merge their output, and run functions in them.

launch: `un.launch` and `un.Pool`.
job: the ranks of one job, from their start to their end.
process: one rank as a process.
job_store: the store in which the ranks of a job meet.
output: the merged output of the ranks, with tracebacks held back.
root_cause: which failed rank made the others fail.
pool_processes: the processes of a pool.
pool_protocol: the messages between a pool and its ranks.
worker: the program of a rank of a pool.

In processes that other engines have placed:
    meeting: what the engines have in common.
    dask: the workers of a Dask cluster.
    ray: the actors of a Ray cluster, and a backend of its collective groups.
"""

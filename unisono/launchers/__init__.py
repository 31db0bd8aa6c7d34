"""Launchers: they start the ranks of a job, merge their output, and run functions in them.

launch: `un.launch` and `un.Pool`.
spawn: `un.spawn`, by which a job starts another one and meets it.
job: the ranks of one job on this machine, from their start to their end.
process: one rank as a process.
job_store: the store in which the ranks of a job meet.
placement: where the ranks of `unisono run` run.
ssh_job: the ranks of one job on hosts that ssh reaches.
ssh_agent: the program that starts the ranks of such a host.
ssh_protocol: the messages between the two.
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

"""The start of a job: from the environment of the launcher to a communicator of all ranks.

- `init`: `un.init`, and the objects that a communicator of all ranks holds open
- `environment`: rank, size, store and key from environment variables
- `launcher_variables`: the variables of mpirun, mpiexec and Slurm's srun
- `rendezvous`: how the ranks find each other
- `shared_settings`: the settings of rank 0 that all ranks apply
- `plugin_transport`: communicators over the transport of an installed package
- `user_algorithms`: files that register algorithms of a user
- `shrink`: a new communicator of the survivors after a rank was lost
- `grow`: a new communicator of the members of a job and of processes that join it
- `join`: how such a process joins
- `bridge`: two running jobs meet and get a communicator of the ranks of both
- `measuring`: measures the network between far hosts again, while a job runs
- `job_report`: the lines that rank 0 logs about a job
- `trust`: who can join a job besides its ranks
- `exit_reason`: the error with which this process leaves a job
"""

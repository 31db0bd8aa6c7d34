"""The methods of a communicator that make calls.

- `collectives.py`: collectives with equal shares, such as `allreduce`.
- `vector_collectives.py`: collectives with a number of rows for each rank, such as `allgatherv`.
- `neighbours.py`: collectives among neighbours, such as `neighbor_alltoall`.
- `grids.py`: the coordinates of ranks in a grid.
- `point_to_point.py`: messages between two ranks.
- `alltoallw.py`: the exchange of arrays of unequal dtypes and shapes.
- `persistent.py`: persistent calls, which are planned once and made several times.
- `objects.py`: collectives and messages of Python objects.
- `observation.py`: the place of the ranks, the choice of algorithms, and the record of the last calls.
- `windows.py`: one-sided access to memory of other ranks.
- `reduce_local.py`: the reduction of arrays of one process.
- `mpi_names.py`: advice for programs that use MPI's names of methods.
"""

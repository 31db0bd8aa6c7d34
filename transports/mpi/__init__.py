"""The MPI library of this process, through mpi4py.

`library.py`       checks the library, and makes communicators
`messenger.py`     opens tagged messages over MPI
`collectives.py`   runs calls by MPI's own collectives: `mpi.native`
"""

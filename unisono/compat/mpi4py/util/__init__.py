"""Utilities of mpi4py.

pkl5: communicators that send objects without copying their large parts of memory.
pool: workers, with the methods of `multiprocessing.Pool`.
sync: ranks take turns, count, exclude and notify each other.
dtlib: datatypes and numpy's dtypes.
"""

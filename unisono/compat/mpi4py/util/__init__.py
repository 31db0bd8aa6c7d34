"""Utilities of mpi4py.

pkl5: communicators that send objects without copying their large parts of memory.
dtlib: datatypes and numpy's dtypes.
"""

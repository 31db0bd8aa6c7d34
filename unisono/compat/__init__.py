"""Interfaces of other libraries over Unisono.

mlcomm: the Cray PE ML plugin.
horovod: Horovod.
mpi4py: mpi4py.
"""

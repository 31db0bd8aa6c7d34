"""Decision tables in the formats of other libraries.

counterparts.py  the algorithms that a library shares with Unisono, and the rules of a table in its names
nccl.py          the CSV file of NCCL's example of a tuner plugin
openmpi.py       the file of dynamic rules of Open MPI
ucc.py           the score string of UCC
mpich.py         the selection file of MPICH
"""

"""NVIDIA's NCCL: collectives between GPUs that the library carries out by itself, as the algorithm `nccl.native`.

`library.py`       finds NCCL, through nccl4py or CuPy, and makes its communicators
`refusals.py`      says which calls NCCL cannot carry out as Unisono defines them, as data
`collectives.py`   the ranks of a communicator meet in NCCL, and issue calls to it
"""

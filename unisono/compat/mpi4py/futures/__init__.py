"""Executors whose workers are ranks: `MPIPoolExecutor` and `MPICommExecutor`.

Files:
    pool: the executors.
    workers: the workers of an executor, and the thread that gives them tasks.
    channels: the ways from that thread to workers: ranks, spawned ranks, and threads.
    tasks: tasks, their outcomes, and the program that workers import.
    worker: the loop of a worker.
    server: the program of spawned workers.
    util, aplus: functions of futures.
"""

from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    InvalidStateError,
    TimeoutError,
    as_completed,
    wait,
)

from unisono.compat.mpi4py.futures.pool import (
    MPICommExecutor,
    MPIPoolExecutor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from unisono.compat.mpi4py.futures.util import collect, compose
from unisono.compat.mpi4py.futures.worker import get_comm_workers

__all__ = [
    "ALL_COMPLETED",
    "FIRST_COMPLETED",
    "FIRST_EXCEPTION",
    "BrokenExecutor",
    "CancelledError",
    "Executor",
    "Future",
    "InvalidStateError",
    "MPICommExecutor",
    "MPIPoolExecutor",
    "ProcessPoolExecutor",
    "ThreadPoolExecutor",
    "TimeoutError",
    "as_completed",
    "collect",
    "compose",
    "get_comm_workers",
    "wait",
]

"""One rank of a measured library: joins its library's job, and runs the commands of the driver.

Run by path as ``worker.py ADAPTER SOCKET RANK_VARIABLE CORES`` by the library's own launcher. ADAPTER is the path of a
module of this folder. SOCKET is the name of the driver's abstract Unix socket. RANK_VARIABLE is the environment
variable with the rank. CORES are the cores to which ranks are bound ("0,1", or "-" for none).

Driver and worker exchange lines of JSON: a command with its arguments, and its reply. Between commands, the worker
sleeps in a read, so that no library spins while another one is measured. When the driver ends, the read ends, and so
does the worker. It needs only numpy (and ml_dtypes for bfloat16).
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

import numpy as np

PR_SET_PDEATHSIG = 1

# Small integers, so that every dtype holds every partial sum exactly, and any order of summation gives the same bits.
PERIOD = 5
RANK_PERIOD = 3


class VectorForm(NamedTuple):
    """The form of a collective on a vector of `count` elements, of which each rank has all, or an equal share.

    Attributes:
        expected: (size, rank, count, dtype) → the result of the rank; None if it has none.
        puts_share, gets_share: whether the input, or the result, of a rank is only a share.
        in_place: whether input and result are the same array.
    """

    expected: Callable[[int, int, int, Any], Any]
    puts_share: bool = False
    gets_share: bool = False
    in_place: bool = True


def contribution(rank: int, count: int, dtype: Any) -> Any:
    """Return the input of `rank`: `count` elements that depend on the rank and the position."""
    return _repeated(np.arange(PERIOD) + rank % RANK_PERIOD, count, dtype)


def _repeated(period: Any, count: int, dtype: Any) -> Any:
    return np.tile(period.astype(dtype), -(-count // PERIOD))[:count]


def _sum(size: int, rank: int, count: int, dtype: Any) -> Any:
    return _repeated(sum(contribution(other, PERIOD, np.int64) for other in range(size)), count, dtype)


def _sum_at_root(size: int, rank: int, count: int, dtype: Any) -> Any:
    return _sum(size, rank, count, dtype) if rank == 0 else None


def _share_of_sum(size: int, rank: int, count: int, dtype: Any) -> Any:
    return np.split(_sum(size, rank, count, dtype), size)[rank]


def _of_root(size: int, rank: int, count: int, dtype: Any) -> Any:
    return contribution(0, count, dtype)


def _sum_up_to(size: int, rank: int, count: int, dtype: Any) -> Any:
    return _sum(rank + 1, rank, count, dtype)


def _of_all_at_root(size: int, rank: int, count: int, dtype: Any) -> Any:
    return _of_all(size, rank, count, dtype) if rank == 0 else None


def _share_of_root(size: int, rank: int, count: int, dtype: Any) -> Any:
    return np.split(contribution(0, count, dtype), size)[rank]


def _of_all(size: int, rank: int, count: int, dtype: Any) -> Any:
    return np.concatenate([contribution(other, count // size, dtype) for other in range(size)])


def _share_of_each(size: int, rank: int, count: int, dtype: Any) -> Any:
    return np.concatenate([np.split(contribution(other, count, dtype), size)[rank] for other in range(size)])


FORMS: dict[str, VectorForm] = {
    "allreduce": VectorForm(_sum),
    "reduce": VectorForm(_sum_at_root),
    "broadcast": VectorForm(_of_root),
    "scan": VectorForm(_sum_up_to),
    "gather": VectorForm(_of_all_at_root, puts_share=True, in_place=False),
    "scatter": VectorForm(_share_of_root, gets_share=True, in_place=False),
    "allgather": VectorForm(_of_all, puts_share=True, in_place=False),
    "reduce_scatter": VectorForm(_share_of_sum, gets_share=True, in_place=False),
    "alltoall": VectorForm(_share_of_each, in_place=False),
    "barrier": VectorForm(_of_root),
}


class NumpyMemory:
    """numpy arrays. An adapter of a library with other arrays has an object like this one as its `memory`."""

    @staticmethod
    def empty(count: int, dtype: Any) -> Any:
        """Return a flat array to be overwritten, of a numpy dtype."""
        return np.empty(count, dtype)

    @staticmethod
    def place(array: Any) -> Any:
        """Return an array with the content of a numpy array, which is only read."""
        return array

    @staticmethod
    def fill(array: Any, source: Any) -> None:
        """Copy an array from `place` into an array from `empty`; the copy is complete when this returns."""
        np.copyto(array, source)

    @staticmethod
    def fetch(array: Any, part: slice) -> Any:
        """Return a part of an array as a numpy array."""
        return array[part]

    @staticmethod
    def compared(count: int) -> list[slice]:
        """Return the parts of an array of `count` elements that are compared with the expected result."""
        return [slice(0, count)]


class Worker:
    """Runs the commands of the benchmark's main process. Each public method is a command, and returns its reply."""

    def __init__(self, adapter_path: str, rank: int) -> None:
        self._adapter_path = adapter_path
        self._rank = rank
        self._array: Any = None
        self._out: Any = None
        self._call: Any = None

    def join(self) -> dict[str, Any]:
        """Join the library's job, which needs all ranks."""
        self._adapter = _load(self._adapter_path).connect()
        self._memory = getattr(self._adapter, "memory", NumpyMemory)
        return {"version": self._adapter.version, "size": self._adapter.size}

    def prepare(self, collective: str, dtype: str, count: int) -> dict[str, Any]:
        """Compute the input and the expected result of a call on a vector of `count` elements; nothing is sent."""
        if dtype == "bfloat16":
            importlib.import_module("ml_dtypes")  # registers the dtype's name with numpy
        element = np.dtype(dtype)
        form, size = FORMS[collective], self._adapter.size
        put = contribution(self._rank, count // size if form.puts_share else count, element)
        got = None if form.in_place else count // size if form.gets_share else count
        self._expected = form.expected(size, self._rank, count, element)
        self._source = self._memory.place(put)
        self._request = (collective, element, put.size, got)
        return {}

    def verify(self) -> dict[str, Any]:
        """Run the call once, on new arrays, and compare every element of the result.

        The reply has the difference, or None. Later calls use these arrays. Their pages decide how well caches hold
        them, which changes the time of a call by up to a third.
        """
        collective, element, put, got = self._request
        self._array = self._out = self._call = None  # so that the new arrays can have their memory
        self._array = self._memory.empty(put, element)
        self._out = self._array if got is None else self._memory.empty(got, element)
        self._call = self._adapter.call(collective, self._array, self._out)
        self._memory.fill(self._array, self._source)
        self._call()
        return {"wrong": self._difference()}

    def run(self, iterations: int) -> dict[str, Any]:
        """Run the call `iterations` times; reply with the nanoseconds of each call and of the whole loop.

        Before every call, outside the measured time, the data is written again and the ranks meet in a barrier. The
        last result is compared like the first.
        """
        array, source, call, barrier = self._array, self._source, self._call, self._adapter.barrier
        fill, clock, times = self._memory.fill, time.perf_counter_ns, []
        gc.disable()
        started = clock()
        for _ in range(iterations):
            fill(array, source)
            barrier()
            before = clock()
            call()
            times.append(clock() - before)
        elapsed = clock() - started
        gc.enable()
        return {"times_ns": times, "elapsed_ns": elapsed, "wrong": self._difference()}

    def repeat(self, iterations: int) -> dict[str, Any]:
        """Write the data and run the call `iterations` times without a barrier; reply with the nanoseconds of the loop.

        The time includes all delays, as that of a program does: a rank that waits for a core holds up the others in
        their next calls.
        """
        array, source, call, fill = self._array, self._source, self._call, self._memory.fill
        started = time.perf_counter_ns()
        for _ in range(iterations):
            fill(array, source)
            call()
        return {"elapsed_ns": time.perf_counter_ns() - started, "wrong": self._difference()}

    def leave(self) -> dict[str, Any]:
        """Leave the library's job in order."""
        self._adapter.close()
        return {}

    def _difference(self) -> str | None:
        if self._expected is None:
            return None
        for part in self._memory.compared(self._expected.size):
            got, expected = self._memory.fetch(self._out, part), self._expected[part]
            wrong = np.flatnonzero(got != expected)
            if wrong.size:
                first = wrong[0]
                at = part.start + first
                return f"element {at} is {got[first]} and must be {expected[first]}; {wrong.size} are wrong"
        return None


def serve(worker: Worker, stream: TextIO) -> None:
    """Answer the driver's commands until the driver has ended or a command fails."""
    for line in stream:
        command = json.loads(line)
        try:
            reply = getattr(worker, command.pop("do"))(**command)
        except NotImplementedError as error:
            reply = {"unsupported": str(error)}
        except Exception as error:
            _write(stream, {"failed": f"{type(error).__name__}: {error}"})
            raise
        _write(stream, reply)


def _write(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("adapter", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Bind this rank to its core, connect to the driver and serve it."""
    adapter_path, address, rank_variable, cores = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # so that no rank outlives its launcher
    rank = int(os.environ[rank_variable])
    if cores != "-":
        allowed = [int(core) for core in cores.split(",")]
        os.sched_setaffinity(0, {allowed[rank % len(allowed)]})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect("\0" + address)
        stream = connection.makefile("rw", encoding="ascii", newline="\n")
        _write(stream, {"rank": rank})
        serve(Worker(adapter_path, rank), stream)


if __name__ == "__main__":
    main()

"""The ranks of a trial of `campaign.py`: the faults, the calls in which they happen, and the libraries that make them.

A rank makes the same call `STEPS` times and compares every result. If it is the victim, it has the fault at one of the
calls. It reports to the campaign by lines of JSON with the keys "fault", "wrong", "error" or "done".

Ranks of Unisono and Gloo are forked by the campaign. Ranks of MPI are started by `mpiexec`, by this command line::

    python -m unisono.bench.studies.trial_ranks TRIAL FOLDER
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import unisono as un
from unisono.bench.namespaces import address

STEPS = 6
LIMIT_S = 20.0
TIMEOUT_S = 0.7
COUNTS = (1, 1000, 50_000, 600_000)
# The hosts of the transport "hosts". The ranks are distributed over them in turn.
HOSTS = 2

Say = Callable[[dict[str, Any]], None]


class Trial(NamedTuple):
    """The trial of a seed.

    Attributes:
        seed: its seed.
        library, transport, ranks: the library, its transport, and the number of ranks.
        call, elements: the collective, and the number of elements of its vector.
        fault, phase: the fault, and when it happens: "before", "during" or "after" a call.
        victim, at: the rank that has the fault, and at which of the calls.
    """

    seed: int
    library: str
    transport: str
    ranks: int
    call: str
    elements: int
    fault: str
    phase: str
    victim: int
    at: int

    def host_of(self, rank: int) -> int:
        """Return the host of a rank; all ranks are on host 0 unless the transport is "hosts"."""
        return rank % HOSTS if self.transport == "hosts" else 0


# --- faults ----------------------------------------------------------------------------------------------------------


class TrialFault(NamedTuple):
    """A fault, and the end that the library promises for calls after it.

    Attributes:
        plant: called in the victim with its communicator.
        errors: the names of the errors of which each survivor raises one; empty if all calls end well.
        bound_ms: the promised latency of the error, on an idle machine.
        timeout_s: the time limit of the calls.
        is_of_process: whether the fault happens to the whole process, also amid a call. Others are calls of the
            program.
        is_of_host: whether it happens to the victim's host, and so to all ranks there. It needs several hosts.
        kills: whether the victim has no result and no error.
        resumes: whether the survivors then make a communicator of their own, and a call on it.
        options: settings of Unisono.
    """

    plant: Callable[[Any], None]
    errors: tuple[str, ...] = ()
    bound_ms: float = 100.0
    timeout_s: float = LIMIT_S
    is_of_process: bool = False
    is_of_host: bool = False
    kills: bool = True
    resumes: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012


def _send_signal(number: signal.Signals) -> Callable[[Any], None]:
    return lambda _: os.kill(os.getpid(), number)


def _abort(world: Any) -> None:
    world.abort("planted")


def _leave(world: Any) -> None:
    world.close()
    os._exit(0)


def _disagree(world: Any) -> None:
    world.allreduce(np.ones(7, np.uint8))


def _damage(_: Any) -> None:
    """Flip a bit of the next result of this rank, before the ranks compare their results."""
    from unisono.collectives.calls import verification

    checksum = verification._checksum

    def damaged(arrays: Any) -> int:
        verification._checksum = checksum
        result = arrays[0].source if arrays[0].target is None else arrays[0].target
        result.view(np.uint8)[-1] ^= 1
        return checksum(arrays)

    verification._checksum = damaged


def _reset_connections(_: Any) -> None:
    """Reset all connections of this host, as a firewall does when it restarts."""
    quiet = subprocess.DEVNULL
    subprocess.run(["ss", "-HK", "state", "established"], stdout=quiet, stderr=quiet, check=True)


def _unplug(_: Any) -> None:
    """Cut this host off. Its connections get neither data nor an end."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


_STOP = _send_signal(signal.SIGSTOP)
_KILL = TrialFault(_send_signal(signal.SIGKILL), ("PeerLostError",), is_of_process=True)

FAULTS: dict[str, TrialFault] = {
    "none": TrialFault(lambda _: None, is_of_process=True, kills=False),
    "SIGKILL": _KILL,
    "SIGKILL, then shrink": _KILL._replace(bound_ms=350.0, resumes=True),
    "SIGTERM": _KILL._replace(plant=_send_signal(signal.SIGTERM)),
    "segmentation fault": _KILL._replace(plant=_send_signal(signal.SIGSEGV)),
    "Ctrl-C": _KILL._replace(plant=_send_signal(signal.SIGINT), errors=("AbortedError", "PeerLostError")),
    "SIGSTOP and SIGCONT": TrialFault(_STOP, is_of_process=True, kills=False),
    "SIGSTOP": TrialFault(
        _STOP, ("CollectiveTimeoutError",), TIMEOUT_S * 1e3 + 100, timeout_s=TIMEOUT_S, is_of_process=True
    ),
    "abort": TrialFault(_abort, ("AbortedError",), is_of_process=True),
    "leaving": TrialFault(_leave, ("PeerLostError",)),
    "another call": TrialFault(_disagree, ("MismatchError",), 1100.0),
    "damaged result": TrialFault(_damage, ("CorruptionError",), kills=False, options={"verify_results": True}),
    "reset connections": TrialFault(_reset_connections, is_of_process=True, is_of_host=True, kills=False),
    "host cut off": TrialFault(_unplug, ("PeerLostError",), 3000.0, is_of_process=True, is_of_host=True, kills=False),
}
# The faults that make sense for every library.
COMMON_FAULTS = ("none", "SIGKILL", "segmentation fault", "SIGSTOP and SIGCONT", "SIGSTOP", "leaving")


# --- calls -----------------------------------------------------------------------------------------------------------

Step = Callable[[Any, int, int], tuple[Any, Any]]


def _allreduce(world: Any, count: int, salt: int) -> tuple[Any, Any]:
    x = np.arange(count) * (salt + 1) + world.rank
    return world.allreduce(x), np.arange(count) * (salt + 1) * world.size + sum(range(world.size))


def _broadcast(world: Any, count: int, salt: int) -> tuple[Any, Any]:
    root = salt % world.size
    return world.broadcast(np.arange(count) + (salt if world.rank == root else -1), root), np.arange(count) + salt


def _allgather(world: Any, count: int, salt: int) -> tuple[Any, Any]:
    part = max(1, count // world.size)
    expected = np.concatenate([np.arange(part) + salt + rank for rank in range(world.size)])
    return world.allgather(np.arange(part) + salt + world.rank).reshape(-1), expected


def _alltoall(world: Any, count: int, salt: int) -> tuple[Any, Any]:
    part = max(1, count // world.size)
    x = np.repeat(np.arange(world.size), part) + world.size * world.rank + salt
    return world.alltoall(x), np.repeat(np.arange(world.size), part) * world.size + world.rank + salt


def _sendrecv(world: Any, count: int, salt: int) -> tuple[Any, Any]:
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    x = np.arange(count) + salt + world.rank
    return world.sendrecv(x, after, np.empty_like(x), before), np.arange(count) + salt + before


CALLS: dict[str, Step] = {
    "allreduce": _allreduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "sendrecv": _sendrecv,
}


# --- libraries -------------------------------------------------------------------------------------------------------


class _GlooTrial:
    """The calls of a trial by torch.distributed and Gloo."""

    def __init__(self, trial: Trial, rank: int, store: str) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self.rank, self.size = rank, trial.ranks
        limit = timedelta(seconds=FAULTS[trial.fault].timeout_s)
        shared = dist.FileStore(store.removeprefix("file://") + "-torch", trial.ranks)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=trial.ranks, timeout=limit)
        self.barrier = dist.barrier
        self.close = dist.destroy_process_group

    def allreduce(self, x: Any) -> Any:
        result = self._torch.from_numpy(x.copy())
        self._dist.all_reduce(result)
        return result.numpy()

    def broadcast(self, x: Any, root: int) -> Any:
        result = self._torch.from_numpy(x.copy())
        self._dist.broadcast(result, root)
        return result.numpy()

    def allgather(self, x: Any) -> Any:
        results = [self._torch.from_numpy(np.empty_like(x)) for _ in range(self.size)]
        self._dist.all_gather(results, self._torch.from_numpy(x))
        return self._torch.cat(results).numpy()

    def alltoall(self, x: Any) -> Any:
        result = self._torch.from_numpy(np.empty_like(x))
        self._dist.all_to_all_single(result, self._torch.from_numpy(x))
        return result.numpy()

    def sendrecv(self, x: Any, dest: int, out: Any, source: int) -> Any:
        sent = self._dist.isend(self._torch.from_numpy(x), dest)
        self._dist.recv(self._torch.from_numpy(out), source)
        sent.wait()
        return out


class _Mpi:
    """The calls of a trial by mpi4py, with errors as ULFM (User-Level Failure Mitigation) intends them.

    A rank whose call fails revokes the communicator, so that the calls of all other ranks fail too.
    """

    def __init__(self, trial: Trial, rank: int, store: str) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = self._comm.rank, self._comm.size
        self.close = lambda: None

    def barrier(self) -> None:
        self._call(self._comm.Barrier)

    def allreduce(self, x: Any) -> Any:
        result = np.empty_like(x)
        self._call(self._comm.Allreduce, x, result)
        return result

    def broadcast(self, x: Any, root: int) -> Any:
        result = x.copy()
        self._call(self._comm.Bcast, result, root)
        return result

    def allgather(self, x: Any) -> Any:
        result = np.empty(self.size * x.size, x.dtype)
        self._call(self._comm.Allgather, x, result)
        return result

    def alltoall(self, x: Any) -> Any:
        result = np.empty_like(x)
        self._call(self._comm.Alltoall, x, result)
        return result

    def sendrecv(self, x: Any, dest: int, out: Any, source: int) -> Any:
        self._call(self._comm.Sendrecv, x, dest, 0, out, source, 0)
        return out

    def _call(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except self._mpi.Exception as error:
            failed = self._comm.Get_failed()
            ranks = failed.Translate_ranks(range(failed.size), self._comm.Get_group()) if failed.size else []
            self._comm.Revoke()
            raise RuntimeError(f"{error}; failed: {', '.join(f'rank {rank}' for rank in ranks) or 'unknown'}") from None


def _unisono(trial: Trial, rank: int, store: str) -> un.Communicator:
    fault = FAULTS[trial.fault]
    settings = {"transports": trial.transport, "timeout_s": fault.timeout_s, "log": "error", **fault.options}
    if trial.transport == "hosts":
        settings |= {"transports": "shm,tcp", "bind_address": address(trial.host_of(rank))}
    return un.init(un.Options(**settings), store=store, rank=rank, size=trial.ranks)


LIBRARIES: dict[str, Callable[[Trial, int, str], Any]] = {"unisono": _unisono, "gloo": _GlooTrial, "ulfm": _Mpi}


# --- one rank --------------------------------------------------------------------------------------------------------


def be_rank(trial: Trial, rank: int, store: str, pipe: int, namespace: str = "") -> None:
    """Be a rank of a trial, in a process that has just been started. Never returns.

    Args:
        trial: the trial.
        rank: this rank.
        store: where the ranks meet.
        pipe: the descriptor for the lines of this rank.
        namespace: the network namespace of this rank's host; empty if the process is already there.
    """
    status = 1
    try:
        faulthandler.disable()  # a planted crash needs no report
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
        if namespace:
            _enter(namespace)
        with os.fdopen(pipe, "wb", buffering=0) as to_parent:
            _run(trial, rank, store, lambda line: _write(to_parent, line))
        status = 0
    finally:
        os._exit(status)


def _enter(namespace: str) -> None:
    """Move this thread, the only one of the process, to a network namespace."""
    with Path("/run/netns", namespace).open("rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def _write(pipe: io.RawIOBase | io.FileIO, line: dict[str, Any]) -> None:
    pipe.write(json.dumps(line).encode() + b"\n")


def _run(trial: Trial, rank: int, store: str, say: Say) -> None:
    fault = FAULTS[trial.fault]
    say({"pid": os.getpid()})
    try:
        with contextlib.ExitStack() as closing:
            world = LIBRARIES[trial.library](trial, rank, store)
            closing.callback(world.close)
            try:
                _make_calls(world, trial, say)
            except un.PeerLostError:
                if not fault.resumes:
                    raise
                _resume(world, trial, say, closing)
    except KeyboardInterrupt:
        say({"interrupted": True})
    except Exception as error:  # noqa: BLE001  (each library has errors of its own)
        say({"error": type(error).__name__, **_now(), "peer": getattr(error, "peer", None), "text": str(error)[:300]})
    else:
        say({"done": True, **_now()})


def _resume(world: un.Communicator, trial: Trial, say: Say, closing: contextlib.ExitStack) -> None:
    """Make a call on a communicator of the survivors, and compare its result."""
    survivors = world.shrink()
    closing.callback(survivors.close)
    result, expected = _allreduce(survivors, trial.elements, 0)
    if survivors.size != trial.ranks - 1 or not np.array_equal(result, expected):
        say({"wrong": f"the call after shrink on rank {world.rank}"})


def _make_calls(world: Any, trial: Trial, say: Say) -> None:
    for step in range(STEPS):
        is_at = (world.rank, step) == (trial.victim, trial.at)
        _make_call(world, trial, step, FAULTS[trial.fault].plant if is_at else None, say)
    world.barrier()


def _make_call(world: Any, trial: Trial, step: int, plant: Callable[[Any], None] | None, say: Say) -> None:
    def planted() -> None:
        if plant is not None:
            say({"fault": True, **_now()})
            with contextlib.suppress(un.UnisonoError):
                plant(world)

    if trial.phase == "before":
        planted()
    timer = threading.Timer(random.Random(trial.seed).random() * 2e-3, planted)
    if trial.phase == "during":
        timer.start()
    result, expected = CALLS[trial.call](world, trial.elements, step)
    if not np.array_equal(result, expected):
        say({"wrong": f"call {step} on rank {world.rank}"})
    if trial.phase == "during":
        timer.join()
    if trial.phase == "after":
        planted()
    world.barrier()  # no rank runs ahead, so every survivor needs the victim


def _now() -> dict[str, int]:
    """Return the time of the clock that all processes of a machine share."""
    return {"ns": time.monotonic_ns()}


def main() -> None:
    """Be the rank that `mpiexec` has started."""
    text, folder = sys.argv[1:]
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    pipe = os.open(Path(folder, str(rank)), os.O_WRONLY)
    be_rank(Trial(**json.loads(text)), rank, "", pipe)


if __name__ == "__main__":
    main()

"""A communicator over the workers of a Dask cluster.

The result of this program is a list of four times 4.0::

    with Client(n_workers=4, threads_per_worker=1) as client, unisono.launchers.dask.communicator(client) as ranks:
        sums = ranks.run(lambda world: float(world.allreduce(numpy.ones(1))[0]))

Theory of operation. Each worker that takes part becomes a rank. `Client.run` calls functions outside of Dask's task
queue, on all these workers at once, so no rank waits for a free thread while others wait for it. The functions run in a
thread beside the worker's event loop, which goes on meanwhile. A plug-in closes the communicators of a worker when the
worker ends.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from distributed import Client, Future, WorkerPlugin

from unisono import AbortedError, Communicator, Options, PeerLostError, UsageError
from unisono.launchers import meeting
from unisono.launchers.meeting import Ticket


class _Closing(WorkerPlugin):  # type: ignore[misc]
    """Closes the communicators of a worker when it ends, so that the other ranks learn that it leaves."""

    name = "unisono"
    idempotent = True  # a second registration would end the first, and so close the communicators

    def teardown(self, worker: Any) -> None:
        for name in meeting.names():
            meeting.leave(name)


class WorkerRanks:
    """The workers that are ranks of a communicator. Make it by `communicator`; close it, or use it in a with-block.

    Attributes:
        workers: the address of the worker of each rank.
        name: the name of the communicator on the workers.
    """

    def __init__(self, client: Client, workers: Sequence[str], name: str) -> None:
        self._client, self.workers, self.name = client, list(workers), name
        self._lost: set[str] = set()  # the scheduler lists a dead worker for some time

    def __enter__(self) -> WorkerRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function(world, ...)`` on all ranks at the same time, and return the results by rank.

        Raises:
            PeerLostError: a worker has died.
            Exception: the error of a rank. Calls of the other ranks fail then, and the communicator cannot be used
                again.
        """
        self._check_living()
        call = partial(meeting.call, self.name, function, *args, **kwargs)
        found = self._client.run(_outcome, call, workers=self.workers, on_error="return")
        # An exception is that of the connection to a worker.
        self._lost |= {worker for worker, outcome in found.items() if isinstance(outcome, Exception)}
        for rank, worker in enumerate(self.workers):
            if worker in self._lost:
                raise _lost(rank, worker) from found[worker]
        errors = [outcome.error for outcome in found.values() if outcome.error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, AbortedError)):
            raise error
        return [found[worker].result for worker in self.workers]

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future]:
        """Submit a task ``function(world, ...)`` for each rank , pinned to its worker; return the futures by rank.

        An argument may be a list with one element for each rank if it is wrapped by `of_ranks`, such as the futures of
        the parts of a collection. Each worker needs a free thread for its task, because the tasks wait for each other.

        Raises:
            PeerLostError: a worker has died.
        """
        self._check_living()
        return [
            self._client.submit(
                partial(meeting.call, self.name, function),
                *(_of_rank(each, rank) for each in args),
                workers=[worker],
                allow_other_workers=False,
                pure=False,
                **{key: _of_rank(each, rank) for key, each in kwargs.items()},
            )
            for rank, worker in enumerate(self.workers)
        ]

    def close(self) -> None:
        """Close the communicator on all workers that are alive."""
        living = self._living()
        leave = partial(meeting.leave, self.name)
        workers = [worker for worker in self.workers if worker in living]
        self._client.run(_in_thread, leave, workers=workers, on_error="ignore")

    def _check_living(self) -> None:
        living = self._living()
        for rank, worker in enumerate(self.workers):
            if worker not in living:
                raise _lost(rank, worker)

    def _living(self) -> set[str]:
        return set(_workers(self._client)) - self._lost


def _workers(client: Client) -> list[str]:
    """Return the addresses of all workers that the scheduler knows now.

    `Client.scheduler_info` asks the scheduler too, but returns an attribute of the client. A timer of the client sets
    this attribute to a description without workers, also between the answer and the return.
    """
    return list(client.sync(client.scheduler.identity)["workers"])


def _lost(rank: int, worker: str) -> PeerLostError:
    return PeerLostError(f"the worker {worker} of rank {rank} has died", peer=rank)


class _Outcome(NamedTuple):
    """The result of a function on a worker, or its error."""

    result: Any = None
    error: Exception | None = None


class _OfRanks:
    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values


def of_ranks(values: Sequence[Any]) -> Any:
    """Return an argument for `WorkerRanks.submit` of which rank r gets ``values[r]``."""
    return _OfRanks(values)


def communicator(
    client: Client, workers: Sequence[str] | None = None, *, name: str | None = None, options: Options | None = None
) -> WorkerRanks:
    """Open a communicator over workers of a Dask cluster.

    Args:
        client: the client of the cluster.
        workers: the addresses of the workers, in the order of the ranks; by default all workers now.
        name: the name of the communicator on the workers, for `current`; by default a new one.
        options: as of `un.init`, for all ranks. By default, each worker reads its ``UNISONO_*`` variables, and ranks
            listen on the address by which Dask reaches the worker.

    Raises:
        UsageError: there are no workers, a worker is named twice or is not in the cluster, or the workers are threads
            of one process.
        RendezvousError: the workers cannot reach each other.

    The key of the job travels in Dask's messages. With ``tls://`` between client and workers, nobody else can read it.
    """
    known = _workers(client)
    ranks = known if workers is None else list(workers)
    if not ranks:
        raise UsageError("the cluster has no workers: start some, or wait for them by client.wait_for_workers(n)")
    if unknown := [worker for worker in ranks if worker not in known]:
        raise UsageError(f"the cluster has no worker {unknown[0]!r}: its workers are {', '.join(known)}")
    if len(set(ranks)) != len(ranks):
        raise UsageError("workers names a worker twice, and a worker can be one rank only")
    client.register_plugin(_Closing())
    if len(ranks) > 1 and any(worker.startswith("inproc://") for worker in ranks):
        raise UsageError("the workers are threads of one process, and a process can be one rank: use processes=True")
    ticket = Ticket.new("dask", name or f"unisono-{uuid.uuid4().hex}", len(ranks))
    first = ranks[0]
    url = client.run(_serve, ticket, workers=[first])[first]
    numbers = {worker: rank for rank, worker in enumerate(ranks)}
    opened = WorkerRanks(client, ranks, ticket.name)
    try:
        client.run(_join, ticket._replace(store=url), numbers, options, workers=ranks)
    except BaseException:
        opened.close()
        raise
    return opened


def current(name: str) -> Communicator:
    """Return the communicator of a name on this worker, in a task.

    Raises:
        UsageError: there is none.
    """
    return meeting.current(name)


def _of_rank(value: Any, rank: int) -> Any:
    return value.values[rank] if isinstance(value, _OfRanks) else value


# Dask passes the worker to functions that have an argument of this name.
async def _in_thread(call: Callable[[], Any], dask_worker: Any = None) -> Any:
    return await asyncio.to_thread(call)


async def _outcome(call: Callable[[], Any], dask_worker: Any = None) -> _Outcome:
    try:
        return _Outcome(await asyncio.to_thread(call))
    except Exception as error:  # noqa: BLE001 (raised at the client)
        return _Outcome(error=error)


async def _serve(ticket: Ticket, dask_worker: Any = None) -> str:
    return await asyncio.to_thread(meeting.serve, ticket, _host(dask_worker.address))


async def _join(ticket: Ticket, numbers: dict[str, int], options: Options | None, dask_worker: Any = None) -> None:
    address = dask_worker.address
    await asyncio.to_thread(meeting.join, ticket, numbers[address], _host(address), options)


def _host(address: str) -> str:
    """Return the host in the address of a worker."""
    return "127.0.0.1" if address.startswith("inproc://") else str(urlsplit(address).hostname)

"""Ranks in processes that another engine has placed, such as the workers of Dask and the actors of Ray.

Theory of operation. The program that controls the engine makes a `Ticket`, which has the id and the key of a new job.
It passes the ticket to the processes by the engine's own messages. The process of rank 0 serves the store, because the
others can reach it. Its address comes back to the program, which passes it on. Then all ranks meet there.

Each process keeps its communicators by name, so that later calls of the engine find them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from unisono import Communicator, Options, UsageError
from unisono.collectives.bootstrap.environment import Launch
from unisono.collectives.bootstrap.init import meet
from unisono.options import variable
from unisono.transports.links.handshake import JOB_NBYTES, KEY_NBYTES
from unisono.transports.rendezvous.tcp_store import StoreServer


class Ticket(NamedTuple):
    """The facts of a new job. Every process that has it can join the job.

    Attributes:
        launcher: "dask" or "ray".
        name: the name of the communicator in each process.
        job, key: the id and the key of the job.
        size: the number of ranks.
        store: the URL of the store; empty before rank 0 serves it.
    """

    launcher: str
    name: str
    job: bytes
    key: bytes
    size: int
    store: str = ""

    @classmethod
    def new(cls, launcher: str, name: str, size: int) -> Ticket:
        """Return the ticket of a job that nobody else knows."""
        return cls(launcher, name, os.urandom(JOB_NBYTES), os.urandom(KEY_NBYTES), size)


_lock = threading.Lock()
_servers: dict[str, StoreServer] = {}
_communicators: dict[str, Communicator] = {}


def serve(ticket: Ticket, host: str) -> str:
    """Serve the store of a job at an address of this process until rank 0 has met the others; return its URL.

    Raises:
        RendezvousError: this process cannot listen on the address.
        UsageError: this process has an open communicator of this name.
    """
    with _lock:
        _check_free(ticket.name)
        if ticket.name in _servers:
            raise UsageError(
                f"another thread of this process opens a communicator named {ticket.name!r}: pass another name"
            )
        server = _servers[ticket.name] = StoreServer(host, 0, key=ticket.key, job=ticket.job)
    return server.url


def join(ticket: Ticket, rank: int, host: str, options: Options | None = None) -> Communicator:
    """Meet the other ranks, and keep the communicator under the name of the ticket.

    Args:
        ticket: the job, with its store.
        rank: this rank.
        host: the address of this process in the network of the engine, on which it listens unless ``bind_address`` is
            set.
        options: as of `un.init`.

    Raises:
        UsageError: this process has an open communicator of this name.
        RendezvousError, TransportUnavailableError: as in `un.init`.
    """
    with _lock:
        _check_free(ticket.name)
    launch = Launch(rank, ticket.size, ticket.store, ticket.job, ticket.key, ticket.launcher)
    try:
        world = meet(launch, options_at(host, options))
    finally:
        stop_serving(ticket.name)
    with _lock:
        _communicators[ticket.name] = world
    return world


def options_at(host: str, options: Options | None = None) -> Options:
    """Return the options of this process, which listens on `host` unless the program or its variable says where."""
    settings = (options or Options()).resolved(os.environ)
    is_set = "bind_address" in settings.passed or variable("bind_address") in os.environ
    return settings if is_set else settings.adopting({"bind_address": host})


def stop_serving(name: str) -> None:
    """Close the store that this process serves, if it serves one."""
    with _lock:
        server = _servers.pop(name, None)
    if server is not None:
        server.close()


def current(name: str) -> Communicator:
    """Return the communicator of a name in this process.

    Raises:
        UsageError: there is none, or it was closed.
    """
    with _lock:
        world = _communicators.get(name)
    if world is None:
        raise UsageError(
            f"this process has no communicator named {name!r}: the program that starts the ranks opens one by"
            f" `communicator(…, name={name!r})` of unisono.launchers.ray or unisono.launchers.dask, and keeps it open"
        )
    return world


def call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(world, ...)`` with the communicator of a name in this process.

    If the function raises, calls of the other ranks fail, because they could wait for this rank until their time is
    over. The communicator cannot be used after that.
    """
    world = current(name)
    try:
        return function(world, *args, **kwargs)
    except BaseException as error:
        world.abort(f"its function raised {type(error).__name__}: {error}")
        raise


def leave(name: str) -> None:
    """Close the communicator of a name in this process, if there is one."""
    stop_serving(name)
    with _lock:
        world = _communicators.pop(name, None)
    if world is not None:
        world.close()


def names() -> list[str]:
    """Return the names of the communicators of this process."""
    with _lock:
        return list(_communicators)


def _check_free(name: str) -> None:
    if name in _communicators:
        raise UsageError(f"this process has a communicator named {name!r} already: close it, or pass another name")

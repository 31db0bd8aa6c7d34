"""`init`: from what the launcher has told this process to a communicator of all ranks."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from unisono import log
from unisono.collectives.calls import Place
from unisono.collectives.communicator import Communicator
from unisono.collectives.environment import Launch, agree_on_key, detect, job_of_key, key_of_file
from unisono.errors import UnisonoError, UsageError
from unisono.options import Options
from unisono.transports import _core
from unisono.transports.hello import KEY_NBYTES
from unisono.transports.native_executor import NativeExecutor
from unisono.transports.rendezvous import given_store, host_and_port, open_store
from unisono.transports.rendezvous.roster import Member, Roster, join
from unisono.transports.rendezvous.stores import Store
from unisono.transports.rendezvous.tcp_store import StoreServer
from unisono.transports.session import Identity, Session

_log = logging.getLogger("unisono")

# How long rank 0, when it serves the store and gives up, lets the others read why.
_LINGER_S = 2.0
# The options of rank 0 that all ranks adopt: they must choose the same algorithms, and treat links alike.
_SHARED_OPTIONS = ("transport", "algorithm", "segment_nbytes", "tcp_streams", "tcp_checksum")


@dataclass
class _Job:
    """What a world communicator holds open, and closes."""

    session: Session
    store: Store | None
    server: StoreServer | None

    def close(self) -> None:
        self.session.close(_farewell())
        if self.store is not None:
            self.store.close()
        if self.server is not None:
            self.server.close()


_open_worlds: weakref.WeakKeyDictionary[Communicator, _Job] = weakref.WeakKeyDictionary()


def init(
    options: Options | None = None, *, store: Any = None, rank: int | None = None, size: int | None = None
) -> Communicator:
    """Meet the other ranks of the job and return the communicator of all of them.

    Rank, size and store come from the launcher's environment (`unisono run`, torchrun), or from the arguments; without
    either, the communicator has one rank. All ranks must call it equally often. It is closed by `Communicator.close`,
    by ``with``, or at exit.

    Args:
        options: settings; by default those of the ``UNISONO_*`` variables. All ranks adopt rank 0's `transport`,
            `algorithm`, `segment_nbytes`, `tcp_streams` and `tcp_checksum`.
        store: where the ranks meet, ``tcp://host:port`` (served by rank 0) or ``file:///directory``; or a store of
            torch.distributed, which the ranks of this job alone use at its prefix, and which hands over the job's key.
        rank: this rank; with `store` only.
        size: the number of ranks; with `store` only.

    Raises:
        UsageError: an argument or an environment variable cannot be used.
        RendezvousError: ranks did not arrive within the option `rendezvous_timeout_s` (the message names them), or the
            store cannot be used.
    """
    settings = Options.from_environment(os.environ) if options is None else options
    launch = _launch(store, rank, size)
    if not _open_worlds:  # of several, the first gives the process its name
        log.configure(settings.log, launch.rank, launch.size)
    began = time.perf_counter()
    server = _serve(launch)
    meeting: Store | None = None
    session: Session | None = None
    try:
        meeting, key = _open(launch, settings, store)
        identity = Identity(key, launch.job or job_of_key(key), 0, launch.rank, launch.size)
        session = Session(identity, settings.bind_address)
        world = _join(session, meeting, launch, settings, _Job(session, meeting, server))
    except BaseException as error:
        if session is not None:
            session.close(_farewell())
        if meeting is not None:
            meeting.close()
        if server is not None:
            server.close(linger_s=_LINGER_S if isinstance(error, UnisonoError) else 0.0)
        if isinstance(error, UnisonoError):
            raise error.with_traceback(None) from None  # how the ranks meet is nothing that the caller could mend
        raise
    _log.info("%d rank(s) met in %.1f ms, launched by: %s", launch.size, _ms_since(began), launch.launcher)
    return world


def _launch(store: Any, rank: int | None, size: int | None) -> Launch:
    given = (store is not None, rank is not None, size is not None)
    if not any(given):
        return detect(os.environ)
    if not all(given):
        raise UsageError("store, rank and size must be given together, or none of them")
    if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
        raise UsageError(f"rank must be an integer from 0 to size - 1; got rank={rank!r} and size={size!r}")
    if not isinstance(store, str):
        return Launch(rank, size, 0, 1, None, b"", key_of_file(os.environ), "a program with a store")
    place = {"UNISONO_RANK": str(rank), "UNISONO_SIZE": str(size), "UNISONO_STORE": store}
    # Who launches by hand says nothing of hosts; each rank finds its own by the roster.
    return detect({**place, "UNISONO_LOCAL_RANK": "0", "UNISONO_LOCAL_SIZE": "1"})


def _serve(launch: Launch) -> StoreServer | None:
    if not launch.serves_store or launch.store is None:
        return None
    return StoreServer(*host_and_port(launch.store), key=launch.key, job=launch.job)


def _open(launch: Launch, options: Options, given: Any) -> tuple[Store | None, bytes]:
    """Return the store, if there is one, and the job's key. `given` is the store that the program has, or names."""
    limit_s = options.rendezvous_timeout_s
    if launch.store is not None:
        store = open_store(launch.store, rank=launch.rank, key=launch.key, job=launch.job, timeout_s=limit_s)
    elif given is not None:
        store = given_store(given, launch.rank)
    else:
        return None, os.urandom(KEY_NBYTES)
    try:
        return store, launch.key or agree_on_key(store, launch.rank, limit_s)
    except BaseException:
        store.close()
        raise


def _join(session: Session, store: Store | None, launch: Launch, options: Options, job: _Job) -> Communicator:
    cores = sum(1 << core for core in os.sched_getaffinity(0))
    me = Member(launch.rank, session.addresses, f"{cores:x}")
    shared = {name: getattr(options, name) for name in _SHARED_OPTIONS}
    if store is None:
        roster = Roster((me,), shared)
    else:
        roster = join(store, launch.rank, launch.size, me, options.rendezvous_timeout_s, settings=shared)
    agreed = options.adopting({name: roster.settings[name] for name in _SHARED_OPTIONS})
    session.meet(roster, agreed)
    executor = NativeExecutor(session)
    world = Communicator(executor, _place(roster, agreed.transport), agreed, job.close)
    _open_worlds[world] = job
    return world


def _place(roster: Roster, transport: str) -> Place:
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    masks: defaultdict[str, int] = defaultdict(int)
    for member in roster.members:
        hosts[member.addresses.host_id].append(member.rank)
        masks[member.addresses.host_id] |= int(member.cores, 16)
    link = transport if transport != "auto" else "shm" if len(hosts) == 1 else "tcp"
    cores = tuple(mask.bit_count() for mask in masks.values())
    return Place(tuple(tuple(ranks) for ranks in hosts.values()), link, cores)


def _farewell() -> str:
    """Return why this process leaves, if it is because of an error."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return "" if error is None or isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3


def _close_all() -> None:
    for world in list(_open_worlds):
        world.close()


def _abandon_all() -> None:
    """In a forked child: the worlds are the parent's, and the child must not keep its connections open."""
    for world, job in list(_open_worlds.items()):
        world.refuse("this process was forked from a rank; call unisono in the rank itself, or start ranks with it")
        job.session.abandon()
    _open_worlds.clear()


_core.set_package_directory(os.path.dirname(os.path.dirname(__file__)))
atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)

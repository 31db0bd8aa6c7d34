"""The communicator of a view: its members meet at a store that the proposer of the view serves, as ranks of a job do.

Used by: `membership`.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from unisono.collectives.bootstrap.init import join_world
from unisono.collectives.bootstrap.rendezvous import Rendezvous, SingleRank, StoreRendezvous
from unisono.errors import UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.options import Options
from unisono.swarm.routes import Routes
from unisono.swarm.settings import Settings
from unisono.swarm.views import Member, View
from unisono.transports.links.handshake import JOB_NBYTES
from unisono.transports.links.session import RankIdentity, Session
from unisono.transports.rendezvous import host_and_port
from unisono.transports.rendezvous.tcp_store import StoreServer, TcpStore
from unisono.transports.tcp.tls import TlsPolicy

if TYPE_CHECKING:
    from unisono.collectives.communicator import Communicator

_ANSWER_S = 5.0
_FAREWELL = "the members of the swarm have changed"


def job_of_view(job: bytes, view: View) -> bytes:
    """Return the id of the job that the members of a view are. So no connection of one view reaches another."""
    return hashlib.sha256(b"view " + view.id.encode() + job).digest()[:JOB_NBYTES]


def serve_store(host: str, view: View, key: bytes, job: bytes) -> StoreServer | None:
    """Serve the store where the members of `view` meet; return None if there is one member, which needs none.

    Raises:
        RendezvousError: it cannot be served on `host`.
    """
    return StoreServer(host, 0, key=key, job=job_of_view(job, view)) if len(view.members) > 1 else None


def meet(
    view: View,
    me: str,
    proposer: Member,
    store_url: str,
    routes: Routes,
    settings: Settings,
    deadline: Deadline,
) -> Communicator:
    """Meet the other members of a view, and return the communicator of all of them. Its caller closes it.

    Args:
        view: the view, which has not been chosen yet.
        me: the id of this process.
        proposer: the process that serves the store.
        store_url: the URL of the store; not used if this is the only member.
        routes: the ways to the members and to the proposer.
        settings: the arguments of the swarm.
        deadline: the end of the meeting.

    Raises:
        UnisonoError: not all have met.
    """
    key, options = settings.key, settings.options
    rank, size, own_job = view.ids.index(me), len(view.members), job_of_view(settings.job, view)
    with contextlib.ExitStack() as opened:
        certificates = [member.certificate for member in view.members]
        identity = RankIdentity(key, own_job, 0, rank, size, 0, rank)
        session = Session(identity, options, routes.of(view.members), certificates)
        opened.callback(session.close, _FAREWELL)
        routes.listen(session.addresses.tcp_port, session.take)
        rendezvous: Rendezvous = SingleRank()
        if size > 1:
            port = host_and_port(store_url)[1]
            connect = partial(routes.connect, proposer, port)
            rendezvous = _at_store(store_url, rank, size, key, own_job, options, deadline, connect)
            opened.callback(rendezvous.close)
        world = join_world(session, rendezvous, options, None, deadline)
        opened.pop_all()
        return world


def _at_store(
    url: str,
    rank: int,
    size: int,
    key: bytes,
    job: bytes,
    options: Options,
    deadline: Deadline,
    connect: Callable[[float], socket.socket | None],
) -> StoreRendezvous:
    host, port = host_and_port(url)
    limit_s = deadline.remaining_s()
    store = TcpStore(
        host,
        port,
        key=key,
        job=job,
        timeout_s=min(limit_s, _ANSWER_S),
        is_served=True,
        tls=TlsPolicy(options.tls),
        connect=connect,
    )
    return StoreRendezvous(store, rank, size, key, limit_s)


def abort_quietly(comm: Communicator | None, why: str) -> None:
    """Let all calls on a communicator fail, if there is one and it has not ended."""
    if comm is not None:
        with contextlib.suppress(UnisonoError):
            comm.abort(why)


def close_quietly(comm: Communicator, in_background: Callable[[Callable[[], None]], object]) -> None:
    """Close the communicator of a former view in another thread, because closing may take seconds."""

    def close() -> None:
        with contextlib.suppress(Exception):  # its members are in another view, or gone
            comm.close()

    in_background(close)

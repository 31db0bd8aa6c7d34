"""`joined`: a process that is new joins a running job, when the members of the job call `grow`.

Used by: `init.py`, for `un.join` and for `un.init` in a process that the launcher has started anew.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from unisono.collectives.bootstrap.environment import WaitingPlace
from unisono.collectives.bootstrap.grow import JoinWorld, store_of_leader
from unisono.collectives.bootstrap.rendezvous import StoreRendezvous
from unisono.errors import UnisonoError, UsageError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.options import Options
from unisono.transports.links.joiners import Invitation, Joiner
from unisono.transports.links.session import RankIdentity, Session
from unisono.transports.rendezvous import open_waiting_place
from unisono.transports.tcp.tls import TlsPolicy

if TYPE_CHECKING:
    from unisono.collectives.communicator import Communicator

_log = log.get("rendezvous")

# How long the leader may take to say why a meeting has failed.
_REASON_S = 5.0
_FAREWELL = "the members begin again"


def joined(place: WaitingPlace, options: Options, timeout_s: float, join_world: JoinWorld) -> Communicator:
    """Return the communicator of the members and of this process, as `un.join` documents.

    `join_world` is the function of `init.py`. It is a parameter because `init.py` imports this file.
    """
    deadline = Deadline(timeout_s)
    store = open_waiting_place(place.store, place.key, place.job, timeout_s, TlsPolicy(options.tls))
    with contextlib.ExitStack() as waiting:
        waiting.callback(store.close)
        tls = TlsPolicy.of(options)
        joiner = Joiner(store, place.key, place.job, options.bind_address, options.heartbeat_timeout_s, tls)
        waiting.callback(joiner.close)
        while (world := _attempt(place, joiner, options, deadline, join_world)) is None:
            _log.debug("this process asks again to join the job")
        return world


def _attempt(
    place: WaitingPlace, joiner: Joiner, options: Options, deadline: Deadline, join_world: JoinWorld
) -> Communicator | None:
    """Return the new communicator once the members admit this process; None if the members begin again."""
    invitation = joiner.invitation(deadline)
    with contextlib.ExitStack() as opened:
        try:
            world = _meet(place, invitation, options, deadline, opened, join_world)
        except UsageError:
            raise
        except UnisonoError as error:
            joiner.await_reason(error, Deadline(_REASON_S))
            return None
        joiner.tell_met()
        if not joiner.may_begin(deadline):
            return None
        opened.pop_all()
        return world


def _meet(
    place: WaitingPlace,
    invitation: Invitation,
    options: Options,
    deadline: Deadline,
    opened: contextlib.ExitStack,
    join_world: JoinWorld,
) -> Communicator:
    """Meet the members and other joiners; return the new communicator."""
    me = RankIdentity(
        place.key,
        place.job,
        invitation.epoch,
        invitation.rank,
        invitation.size,
        invitation.meeting,
        invitation.rank if place.rank is None else place.rank,
        place.store,
    )
    log.configure(options.log, me.rank, me.size)
    session = Session(me, options)
    opened.callback(session.close, _FAREWELL)
    with contextlib.closing(store_of_leader(invitation.store, me, deadline, options)) as store:
        rendezvous = StoreRendezvous(store, me.rank, me.size, me.key, deadline.remaining_s())
        world = join_world(session, rendezvous, options, None, deadline)
    opened.callback(world.close)
    return world

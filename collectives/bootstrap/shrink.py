"""`shrink`: after a rank was lost, the survivors agree on their list, meet again, and get a new communicator.

Used by: `init.py`, which hands it to every `Communicator`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from unisono.collectives.bootstrap.rendezvous import Rendezvous, SingleRank, StoreRendezvous
from unisono.errors import RendezvousError, UnisonoError, UsageError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.options import Options
from unisono.transports.contracts.executor import Executor
from unisono.transports.executors.native import NativeExecutor
from unisono.transports.links.session import Session
from unisono.transports.links.survivors import Search, Verdict
from unisono.transports.rendezvous import host_and_port
from unisono.transports.rendezvous.tcp_store import StoreServer, TcpStore
from unisono.transports.tcp.tls import TlsPolicy

if TYPE_CHECKING:
    from unisono.collectives.communicator import Communicator

JoinWorld: TypeAlias = "Callable[[Session, Rendezvous, Options, StoreServer | None], Communicator]"

_log = log.get("rendezvous")

# How long a survivor waits for an answer of the store, which its leader serves already.
_ANSWER_S = 5.0
_FAREWELL = "the survivors begin again"


def shrink(executor: Executor, options: Options, timeout_s: float, join_world: JoinWorld) -> Communicator:
    """Return a communicator of the survivors of `executor`, as `Communicator.shrink` documents.

    `join_world` is the function of `init.py`. It is a parameter because `init.py` imports this file.
    """
    if not isinstance(executor, NativeExecutor):
        raise UsageError("a communicator over a plugin transport cannot shrink: call un.init() again")
    if executor.session.control.failure()[0] == 0:
        raise UsageError("nothing has failed: dup() makes another communicator of the same ranks, and split() of some")
    deadline = Deadline(timeout_s)
    epoch = executor.session.latest_epoch
    while True:
        with contextlib.ExitStack() as opened:
            attempt = _Attempt(executor, options, epoch, deadline, opened, join_world)
            verdict = attempt.agree()
            epoch = executor.session.latest_epoch = verdict.epoch
            try:
                world = attempt.meet(verdict)
            except UnisonoError as error:
                if deadline.has_passed():
                    raise RendezvousError(f"the survivors did not meet in time: {error.message}") from None
                _log.debug("the survivors begin again: %s", error.message)
                continue
            opened.pop_all()
            executor.session.survivors.end(executor.communicator)
            return world


class _Attempt:
    """One attempt to find the survivors and to meet them. `opened` closes everything that the attempt opens."""

    def __init__(
        self,
        executor: NativeExecutor,
        options: Options,
        epoch: int,
        deadline: Deadline,
        opened: contextlib.ExitStack,
        join_world: JoinWorld,
    ) -> None:
        self._session = executor.session
        self._options = options
        self._deadline = deadline
        self._opened = opened
        self._join_world = join_world
        self._server: StoreServer | None = None
        me = self._session.identity
        self._search = Search(
            me.rank,
            executor.communicator,
            executor.members,
            epoch,
            self._session.survivors,
            self._session.reach,
            self._serve,
        )
        opened.callback(self._search.close)

    def agree(self) -> Verdict:
        """Return the list of survivors on which all of them have agreed."""
        return self._search.agree(self._deadline)

    def meet(self, verdict: Verdict) -> Communicator:
        """Meet the other survivors and return the new communicator, once all have met.

        Raises:
            UnisonoError: another survivor was lost meanwhile.
        """
        me = self._session.identity
        rank, size = verdict.members.index(me.rank), len(verdict.members)
        identity = replace(me, epoch=verdict.epoch, rank=rank, size=size)
        session = Session(identity, self._options)
        self._opened.callback(session.close, _FAREWELL)

        def lost(reason: str) -> None:
            session.give_up(reason)
            if self._server is not None:
                self._server.fail(reason)

        with self._search.watch(lost):
            rendezvous, store = self._rendezvous(verdict, rank, size)
            world = self._join_world(session, rendezvous, self._options, self._server)
            self._opened.callback(world.close)
            if store is not None:
                _await_all(store, rank, size, self._deadline)
        return world

    def _rendezvous(self, verdict: Verdict, rank: int, size: int) -> tuple[Rendezvous, TcpStore | None]:
        if size == 1:
            if self._server is not None:
                self._server.close()
            return SingleRank(), None
        me = self._session.identity
        limit_s = self._deadline.remaining_s()
        # The leader has served the store since before the verdict. If the store does not answer, the leader is gone.
        host, port = host_and_port(verdict.store)
        answer_s, tls = min(limit_s, _ANSWER_S), TlsPolicy(self._options.tls)
        store = TcpStore(host, port, key=me.key, job=me.job, timeout_s=answer_s, is_served=True, tls=tls)
        self._opened.callback(store.close)
        return StoreRendezvous(store, rank, size, me.key, limit_s), store

    def _serve(self) -> str:
        me = self._session.identity
        self._server = StoreServer(self._session.addresses.tcp_host, 0, key=me.key, job=me.job)
        self._opened.callback(self._server.close)
        return self._server.url


def _await_all(store: TcpStore, rank: int, size: int, deadline: Deadline) -> None:
    """Wait until all survivors have met, so that none uses the new communicator while another starts a new attempt."""
    limit_s = deadline.remaining_s()
    if rank == 0:
        for other in range(1, size):
            store.get(f"met/{other}", limit_s)
        store.set("all met", b"")
    else:
        store.set(f"met/{rank}", b"")
        store.get("all met", limit_s)

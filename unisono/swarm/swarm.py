"""`Swarm`: what a program uses."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from unisono.collectives.arrays import adapters
from unisono.collectives.bootstrap.environment import job_of_key
from unisono.errors import MismatchError, PeerLostError, RendezvousError, UnisonoError, UsageError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline, checked_timeout_s
from unisono.foundation.uncopyable import uncopyable
from unisono.operations import Op
from unisono.options import Options
from unisono.swarm.calls import Leaves, SwarmCall
from unisono.swarm.links import NOTHING, Caller, Service
from unisono.swarm.meeting_place import MeetingPlace, Places, checked_key
from unisono.swarm.membership import Membership
from unisono.swarm.proposer import Proposer
from unisono.swarm.routes import Routes, Way
from unisono.swarm.state import Offer, StateExchange, StateSummary, check_drift, checked_revision, ranks_with_state
from unisono.swarm.views import MOST_NAME, Member, View, new_id
from unisono.transports.host.fd_limit import lift_limit_of_files
from unisono.transports.links.listener import listen_tcp
from unisono.transports.tcp.tls import TlsPolicy

if TYPE_CHECKING:
    from typing_extensions import Self

_log = log.get("rendezvous")

Arrays = TypeVar("Arrays")

_DESCRIPTORS = 1024
# A member that leaves waits for the others for so many heartbeats.
_LEAVING = 4.0


class LastCall(NamedTuple):
    """Facts about the last call of a swarm that has ended.

    Attributes:
        number: the number of the call, from 1; equal on all members.
        contributors: the members whose contributions are in its result, in the order of their ranks.
        attempts: how often this member has made it; 2 if one member was lost meanwhile.
    """

    number: int
    contributors: tuple[Member, ...]
    attempts: int


class SharedState(Generic[Arrays]):
    """A state that all members share, and its revision, as `Swarm.state` returns them."""

    def __init__(self, value: Arrays, revision: int) -> None:
        self.value = value
        self.revision = revision


@uncopyable("it belongs to this process; a process enters once")
class Swarm:
    """Processes that make calls together, while some of them leave, are lost, or enter; a context manager.

    A process enters by the address of a meeting place and the key of the job. The first one founds the swarm. The
    others admit a process that waits between two of their calls. A call ends with the contributions of all current
    members. If one is lost meanwhile, the others repeat the call from their arrays, which no call changes before it has
    ended. So a program needs no code for losses.

    All members make the same calls in the same order, and only one thread makes calls at a time. A process that has
    entered begins with the call that the others make next.

    Args:
        places: the address of the meeting place, such as ``tcp://host:29400``, or several.
        key: the key of the job, 32 bytes; by default that in the file of ``UNISONO_KEY_FILE``.
        name: the name of this process for people; by default its host and number.
        serve: whether this process also serves a meeting place at the first of `places` that is on its machine and that
            nobody serves. It then takes over when another process that served it ends.
        min_size: the least number of members that go on together. By default, a majority of the members before a loss
            goes on. If `min_size` is at most half of the members, both parts of a cut network may go on.
        quorum_timeout_s: seconds for which a call waits if too few members answer.
        patience_s: seconds for which a call waits for a member that has not begun it. Such a member is then left
            behind. None waits for the option `timeout_s`. The log names members that are late by `warn_after_s`, or
            that take several times as long between calls as the others.
        options: as of `unisono.init`. `heartbeat_timeout_s` is the time after which a silent member is lost, and
            `timeout_s` limits each call with all its repetitions. TLS is "on" unless `tls` is set.
        settings: fields of `Options`, such as ``heartbeat_timeout_s=5``.

    Attributes:
        last_call: facts about the last call, such as its contributors; None before the first one.

    Raises:
        UsageError: an argument cannot be used, or there is no key.
        RendezvousError: the members have not admitted this process in `rendezvous_timeout_s` seconds, or refuse it.
        TransportUnavailableError: the meeting place has another key.
    """

    def __init__(
        self,
        places: str | Sequence[str],
        *,
        key: bytes | None = None,
        name: str | None = None,
        serve: bool = False,
        min_size: int | None = None,
        quorum_timeout_s: float | None = None,
        patience_s: float | None = None,
        options: Options | None = None,
        **settings: Any,
    ) -> None:
        if settings:
            options = Options(**settings) if options is None else dataclasses.replace(options, **settings)
        self._options = _with_tls((options or Options()).resolved(os.environ))
        log.configure(self._options.log)
        self._key = checked_key(key)
        self._job = job_of_key(self._key)
        self._name = _checked_name(name)
        self._min_size = _checked_size(min_size)
        self._patience_s = None if patience_s is None else checked_timeout_s(patience_s)
        heartbeat_s = self._options.heartbeat_timeout_s
        self._quorum_timeout_s = 2 * heartbeat_s if quorum_timeout_s is None else checked_timeout_s(quorum_timeout_s)
        self._urls = (places,) if isinstance(places, str) else tuple(places)
        self._serve = serve
        self._tls = TlsPolicy.of(self._options)
        lift_limit_of_files(_DESCRIPTORS)
        self._caller = Caller(self._key, self._job, self._tls)
        self._places = Places(self._urls, self._caller)
        self._place: MeetingPlace | None = None
        self._calling = threading.Lock()
        self.last_call: LastCall | None = None
        self._is_closed = False
        self._stop = threading.Event()
        self._state: Membership | None = None
        self._exchange = StateExchange(self._caller, lambda: self._membership().has_result)
        self._found_with = 1  # how many processes found a swarm
        self._least = 1  # how many members there are when `enter` returns
        self._is_new = True  # it has not the state of the members
        self._has_state = False  # it has called `state`
        self._service: Service | None = None
        self._routes: Routes | None = None
        self._proposer: Proposer | None = None
        self._problem: UnisonoError | None = None
        self._is_refused = False  # by a meeting place, so that waiting is in vain
        self._registering: threading.Thread | None = None
        try:
            self.enter()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<unisono.Swarm {self._name}, {len(self.members)} members>"

    @property
    def members(self) -> tuple[Member, ...]:
        """The present members, in the order of their ranks. They may change with each call."""
        view = self._view()
        return () if view is None else view.members

    @property
    def me(self) -> Member:
        """This process."""
        return self._membership().me

    @property
    def rank(self) -> int:
        """The place of this process among the members, which may change with each call."""
        return self.members.index(self.me)

    @property
    def size(self) -> int:
        """The number of members, which may change with each call."""
        return len(self.members)

    @property
    def view(self) -> int:
        """The number of the present list of members, which counts its changes."""
        view = self._view()
        return 0 if view is None else view.number

    @property
    def next_call(self) -> int:
        """The number of the next call, which is equal on all members."""
        return self._membership().has_result + 1

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways to the other members that this process knows: which it dials, and who relays to the rest."""
        return () if self._routes is None else self._routes.ways(self.members)

    @property
    def place(self) -> str | None:
        """The address of the meeting place that this process serves; None if it serves none."""
        return None if self._place is None else self._place.url

    def enter(self) -> None:
        """Enter the swarm, again if this process has been left behind, or has lost the quorum. It is new to the others.

        After a lost quorum, this process gives its place among the members up. It enters the swarm that goes on without
        it, as soon as it can reach it. If none goes on, the processes that enter found a new one, once as many as the
        quorum are there: at least `min_size`, or else a majority of the members before. Their newest state counts.

        Raises:
            RendezvousError: the members have not admitted it in time, or refuse it. The call may be made again.
            UsageError: it is a member, or the swarm is closed.
        """
        if self._is_closed:
            raise UsageError("this swarm is closed: make another one")
        before = self._state
        self._found_with = self._least = self._min_size or 1
        if before is not None and not before.gone:
            if not before.has_lost_quorum:
                raise UsageError("this process is a member already")
            self._found_with = max(self._found_with, before.quorum())
        if before is not None:
            self._withdraw(before)
        deadline = Deadline(self._options.rendezvous_timeout_s)
        listening = listen_tcp(self._options.bind_address)
        host, port = listening.getsockname()[:2]
        me = Member(new_id(), self._name, host, port)
        self._problem, self._is_refused, self._stop = None, False, threading.Event()
        self._is_new, self._has_state = True, False
        self._exchange.offer(None)
        routes = self._routes = Routes(me, self._key, self._job, self._caller, self._options.heartbeat_timeout_s)
        state = self._state = Membership(
            me, self._caller, routes, self._key, self._job, self._options, self._min_size, self._quorum_timeout_s
        )
        self._service = Service(listening, self._key, self._job, self._tls, self._answer, routes.admit)
        routes.listen(port, self._service.take)
        self._proposer = Proposer(state, self._patience_s)
        self._registering = threading.Thread(
            target=self._register, args=(state, self._proposer, self._stop), name="unisono-swarm-register", daemon=True
        )
        self._registering.start()
        try:
            self._await_admission(state, deadline)
        except BaseException:
            self._withdraw(state)
            raise

    def allreduce(
        self,
        x: Arrays,
        op: str | Op = "avg",
        *,
        out: Arrays | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Arrays:
        """Combine the arrays of all members, element by element; every member gets the same bits.

        Args:
            x: an array, or a list, tuple or dict of arrays, of the same shapes and dtypes on all members. The call does
                not change it.
            op: as of `Communicator.allreduce`. "avg" divides by the number of contributors.
            out: arrays that receive the result when the call has ended, in the form of `x`; may be `x`. By default the
                call makes new ones.
            timeout_s: seconds until the call fails, with all repetitions; by default the option `timeout_s`.
            options: `algorithm`, `reproducible` and `accumulate`, as of `Communicator.allreduce`.

        Raises:
            UsageError: the call is wrong; nothing has been sent.
            MismatchError: this member passes other arrays than the others, which go on without it.
            QuorumLostError: too few members answer. The call may be made again, or this process may `enter` again.
            LeftBehindError: the other members have gone on without this one.
            CollectiveTimeoutError: the call has not ended in time.
        """
        leaves = Leaves(x)
        results = self._make(
            SwarmCall(
                "allreduce",
                lambda comm, limit_s: comm.allreduce(leaves.arrays, op, timeout_s=limit_s, **options),
                lambda _: leaves.arrays,
            ),
            timeout_s,
        )
        return cast(Arrays, _delivered(leaves, results, out))

    def broadcast(
        self, x: Arrays, root: Member, *, out: Arrays | None = None, timeout_s: float | None = None
    ) -> Arrays:
        """Copy the arrays of one member to all. The arguments and errors are those of `allreduce`.

        Args:
            x: the arrays; on other members than the root only their shapes and dtypes matter.
            root: the member, such as ``swarm.members[0]``. The members may change, so it is no rank.
            out: as of `allreduce`.
            timeout_s: as of `allreduce`.

        Raises:
            PeerLostError: the root is no member any more. The call has ended without a result on all members.
        """
        leaves = Leaves(x)

        def make(comm: Any, limit_s: float) -> Any:
            ids = self._membership().ids_of(comm)
            has_root = root.id in ids
            result = comm.broadcast(leaves.arrays, ids.index(root.id) if has_root else 0, timeout_s=limit_s)
            comm.barrier(timeout_s=limit_s)  # no member has the result before all have made the call
            return result if has_root else None

        results = self._make(SwarmCall("broadcast", make, lambda _: leaves.arrays), timeout_s)
        if results is None:
            raise PeerLostError(f"the root of the broadcast, {root.name}, is no member of the swarm any more")
        return cast(Arrays, _delivered(leaves, results, out))

    def allgather(self, x: Arrays, *, timeout_s: float | None = None) -> Arrays:
        """Return the concatenation of the arrays of all members, in the order of `last_call.contributors`.

        The arguments and errors are those of `allreduce`. Each array of `x` has at least one dimension.
        """
        leaves = Leaves(x)
        results = self._make(
            SwarmCall(
                "allgather",
                lambda comm, limit_s: comm.allgather(leaves.arrays, timeout_s=limit_s),
                lambda size: [_repeated(array, size) for array in leaves.arrays],
            ),
            timeout_s,
        )
        return cast(Arrays, _delivered(leaves, results, None))

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until all members have made this call."""
        import numpy as np

        self.allreduce(np.zeros(1, np.int8), "max", timeout_s=timeout_s)

    def state(
        self,
        state: Arrays,
        revision: int,
        *,
        check_every: int = 0,
        on_drift: str = "mend",
        timeout_s: float | None = None,
    ) -> SharedState[Arrays]:
        """Share the state of the program: newcomers get it from the members, and members compare it.

        All members make this call at the beginning of each step, and a process that has entered makes it first. Do not
        change the state until the next call has ended. Processes enter only after this call, once a program uses it.

        If none has called it before, the member with the highest revision passes its state to all others. So a swarm of
        which every member was lost resumes from the newest checkpoint that one of its processes has loaded.

        Args:
            state: an array, a number, a text, None, or a list, tuple, dict or pytree of JAX of states. Or a module or
                optimizer of torch, or a model or a built optimizer of Keras. On a newcomer, arrays are written in place
                if they can be.
            revision: the number of the step that the state belongs to.
            check_every: compare the states of all members in each call whose number it divides; 0 compares none. A
                comparison hashes the state.
            on_drift: "mend" lets members whose state differs from that of most get it from these. "end" lets them raise
                `CorruptionError`, and leave. Their names are logged.
            timeout_s: seconds until the call fails; by default the option `timeout_s`.

        Returns:
            The state and its revision, which are those of the other members on a newcomer.

        Raises:
            UsageError: the state cannot be passed on, or an optimizer of Keras is not built.
            MismatchError: the state of this member has other shapes or dtypes than that of the others, which go on
                without it.
            PeerLostError: the others could not pass their state to this member.
            CorruptionError: the state of this member has drifted, and `on_drift` is "end".
            QuorumLostError, LeftBehindError, CollectiveTimeoutError: as of `allreduce`.
        """
        number = checked_revision(revision)
        if on_drift not in ("mend", "end"):
            raise UsageError(f"on_drift must be 'mend' or 'end'; got {on_drift!r}")
        limit = Deadline(self._options.timeout_s if timeout_s is None else checked_timeout_s(timeout_s))
        member = self._membership()
        with member.changed:
            member.uses_state = True
        call = member.has_result
        if self._is_new and call:
            others = [other for other in self.members if other.id != member.me.id]
            fetched = self._fetched(state, call, others, limit)
            if fetched is not None:
                return self._shared(*fetched, call)
        return self._compared(state, number, check_every, on_drift == "end", limit)

    def _compared(
        self, state: Any, revision: int, check_every: int, must_end: bool, limit: Deadline
    ) -> SharedState[Any]:
        """Make the call in which members tell their revisions and compare digests; return the newest state."""
        import numpy as np

        number = self.next_call
        offer = Offer(state, revision, number)
        digest = offer.number() if check_every and number % check_every == 0 else 0
        row = np.array([[revision, digest, self._has_state]], np.int64)
        self._exchange.offer(offer)
        call = SwarmCall(
            "state",
            lambda comm, limit_s: comm.allgather(row, timeout_s=limit_s),
            lambda size: np.zeros((size, row.shape[1]), np.int64),
            is_state=True,
        )
        rows = [StateSummary(*fields) for fields in self._make(call, limit.remaining_s()).tolist()]
        names = [member.name for member in call.contributors]
        me = call.contributors.index(self.me)
        right = ranks_with_state(rows)
        if all(row.has_state for row in rows):
            check_drift(names, right, me, must_end=must_end)
        if me in right:
            self._is_new, self._has_state = False, True
            return SharedState(state, revision)
        fetched = self._fetched(state, number, [call.contributors[rank] for rank in right], limit)
        if fetched is None:
            raise PeerLostError("no other member could pass its state on to this one")
        return self._shared(*fetched, number)

    def _fetched(self, state: Any, call: int, members: Sequence[Member], limit: Deadline) -> tuple[Any, int] | None:
        try:
            return self._exchange.fetch(state, call, members, limit)
        except MismatchError as error:
            self._membership().leave_for(error)
            raise

    def _shared(self, state: Any, revision: int, call: int) -> SharedState[Any]:
        self._is_new, self._has_state = False, True
        self._exchange.offer(Offer(state, revision, call))
        return SharedState(state, revision)

    def expel(self, rank: int) -> None:
        """Let the members go on without the member `rank`, which raises `LeftBehindError` in its next call.

        It returns at once. No process of the same name may enter again, as long as the swarm lives. A hostile process
        that holds the key can take another name: to keep it out, begin anew with another key.

        Raises:
            UsageError: there is no such rank, or it is this one.
        """
        state, members = self._membership(), self.members
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < len(members):
            raise UsageError(f"rank must be one of the {len(members)} members; got {rank!r}")
        if members[rank].id == state.me.id:
            raise UsageError("a member does not expel itself: call close()")
        request = {"do": "expel", "member": members[rank].id, "for_good": True}
        view = self._view()
        assert view is not None
        state.answer(dict(request))
        state.tell(view.members, request)

    def close(self) -> None:
        """Leave the swarm. The others go on at once; a call of theirs in progress is repeated without this member."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(UnisonoError):
            self._leave()
        self._end()
        if self._place is not None:
            self._place.close()
        self._caller.close()

    def _leave(self) -> None:
        state = self._state
        if state is None or state.gone:
            return
        view = state.view
        if view is None or len(view.members) == 1:
            self._places.leave(state.me, state.heartbeat_s)
            return
        request = {"do": "leave", "member": state.me.id}
        state.answer(dict(request))
        state.tell(view.members, request)
        deadline = Deadline(_LEAVING * state.heartbeat_s)
        with state.changed:
            # If all leave, nobody is there to choose a view without them.
            while not state.gone and not deadline.has_passed() and set(view.ids) - state.peers.lost() - state.leaving:
                state.changed.wait(state.heartbeat_s / 4)
                view = state.view or view
        if not state.gone:
            self._places.leave(state.me, state.heartbeat_s)

    def _withdraw(self, state: Membership) -> None:
        """Stop being a member, or waiting, and let the meeting places forget this process."""
        self._end()
        if self._registering is not None:
            self._registering.join(state.heartbeat_s)
        self._places.leave(state.me, state.heartbeat_s)

    def _end(self) -> None:
        """Stop being a member, or waiting."""
        self._stop.set()
        if self._proposer is not None:
            self._proposer.close()
        if self._state is not None:
            self._state.close()
        if self._service is not None:
            self._service.close()
        if self._routes is not None:
            self._routes.close()

    def _membership(self) -> Membership:
        if self._state is None:
            raise UsageError("this process has not entered the swarm: call enter() first")
        return self._state

    def _view(self) -> View | None:
        return None if self._state is None else self._state.view

    def _answer(self, request: dict[str, Any], _: bytes) -> tuple[dict[str, Any], bytes]:
        if request.get("do") == "state":
            return self._exchange.answer(request)
        return self._membership().answer(request), NOTHING

    def _make(self, call: SwarmCall, timeout_s: float | None) -> Any:
        limit_s = self._options.timeout_s if timeout_s is None else checked_timeout_s(timeout_s)
        if self._is_closed:
            raise UsageError("this swarm is closed: make another one")
        if not self._calling.acquire(blocking=False):
            raise UsageError("another thread makes a call on this swarm: members make one call at a time")
        try:
            self._membership().make(call, limit_s)
        finally:
            self._calling.release()
        self.last_call = LastCall(call.number, call.contributors, call.attempts)
        return call.result

    def _await_admission(self, state: Membership, deadline: Deadline) -> None:
        with state.changed:
            while state.view is None or len(state.view.members) < self._least:
                if self._problem is not None and self._is_refused:
                    raise self._problem
                if deadline.has_passed() or state.gone:
                    raise self._problem or RendezvousError(self._why_not(state))
                state.changed.wait(min(0.1, deadline.remaining_s()))

    def _why_not(self, state: Membership) -> str:
        limit_s = self._options.rendezvous_timeout_s
        if state.gone:
            return state.gone
        if state.view is not None:
            return f"{len(state.view.members)} of {self._least} members came within {limit_s:g} s"
        why = f": {state.obstacle}" if state.obstacle else ""
        return (
            f"the members of the swarm at {', '.join(self._urls)} did not admit this process within {limit_s:g} s{why}"
        )

    def _register(self, state: Membership, proposer: Proposer, stop: threading.Event) -> None:
        """Register at the meeting places again and again, and found the swarm if they say so."""
        period_s = state.heartbeat_s / 4
        while not stop.is_set():
            began = time.monotonic()
            self._try_to_serve()
            view = state.view
            try:
                news = self._places.register(
                    state.me, 0 if view is None else view.number, state.heartbeat_s, self._found_with
                )
                self._problem = RendezvousError(f"no meeting place answers: {news.problem}") if news.problem else None
            except UnisonoError as error:
                self._problem, self._is_refused = error, True
            else:
                state.routes.greet(news.waiting if view is not None else news.members)
                if view is not None:
                    proposer.offer(news.waiting)
                elif news.may_found and not stop.is_set():
                    self._found(state)
            stop.wait(max(0.01, period_s - (time.monotonic() - began)))

    def _found(self, state: Membership) -> None:
        self._least = self._found_with  # so that the newest state of all of them counts
        try:
            state.found()
        except UnisonoError as error:
            self._problem = error

    def _try_to_serve(self) -> None:
        """Serve a meeting place if this process must, and none of its machine is served."""
        if not self._serve or self._place is not None:
            return
        for url in self._urls:
            try:
                self._place = MeetingPlace(url, self._key)
            except (RendezvousError, OSError):
                continue
            _log.info("this process serves the meeting place at %s", self._place.url)
            return


def _delivered(leaves: Leaves, results: Sequence[Any], out: Any) -> Any:
    """Return the results in the form of the caller's arrays, in `out` if there is one."""
    if out is None:
        return leaves.value_of(results)
    targets = Leaves(out).arrays
    if len(targets) != len(results):
        raise UsageError(f"out has {len(targets)} arrays, and the result {len(results)}")
    for target, result in zip(targets, results, strict=True):
        adapters.adapter_of(target, "out").view_to_write(target, "out")[...] = adapters.view(result, "the result")
    return out


def _repeated(array: Any, size: int) -> Any:
    import numpy as np

    adapter = adapters.adapter_of(array, "x")
    return adapter.wrap(np.concatenate([adapter.view(array, "x")] * size), array)


def _with_tls(options: Options) -> Options:
    """Return the options with TLS, unless the program or the environment has set it."""
    is_set = "tls" in options.passed or "UNISONO_TLS" in os.environ
    return options if is_set else options.adopting({"tls": "on"})


def _checked_name(name: str | None) -> str:
    if name is None:
        return f"{socket.gethostname()[: MOST_NAME - 12]}:{os.getpid()}"
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME or not name.isprintable():
        raise UsageError(f"name must be a printable text of 1 to {MOST_NAME} characters; got {name!r}")
    return name


def _checked_size(size: int | None) -> int | None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise UsageError(f"min_size must be a positive number of members; got {size!r}")
    return size

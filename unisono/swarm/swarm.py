"""`Swarm`: what a program uses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from unisono.errors import LeftBehindError, PeerLostError, QuorumLostError, UnisonoError, UsageError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline, checked_timeout_s
from unisono.foundation.uncopyable import uncopyable
from unisono.operations import Op
from unisono.options import Options
from unisono.swarm.calls import Forms, Leaves, SwarmCall, delivered, repeated
from unisono.swarm.entry import Entry
from unisono.swarm.links import Caller
from unisono.swarm.meeting_place import Places
from unisono.swarm.membership import Membership
from unisono.swarm.routes import Way
from unisono.swarm.settings import settings_of
from unisono.swarm.sharing import Asked
from unisono.swarm.state import checked_revision
from unisono.swarm.views import MOST_BARRED, NO_BARS, Member, View
from unisono.transports.host.fd_limit import lift_limit_of_files
from unisono.transports.tcp.tls import TlsPolicy

if TYPE_CHECKING:
    from typing_extensions import Self

    from unisono.tuning.machine.network_map import NetworkMap

Arrays = TypeVar("Arrays")

_log = log.get("rendezvous")

_DESCRIPTORS = 1024


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
        self._settings = settings_of(key, name, min_size, quorum_timeout_s, patience_s, options, settings)
        log.configure(self._settings.options.log)
        lift_limit_of_files(_DESCRIPTORS)
        tls = TlsPolicy.of(self._settings.options)
        self._caller = Caller(self._settings.key, self._settings.job, tls)
        urls = tuple(places) if isinstance(places, Sequence) and not isinstance(places, str) else (places,)
        # A meeting place has no certificate, as a store has none: the key of the job authenticates it.
        by_key = TlsPolicy(self._settings.options.tls)
        self._place_caller = Caller(self._settings.key, self._settings.job, by_key)
        self._places = Places(urls, self._place_caller, serves=serve, key=self._settings.key)
        self._calling = threading.Lock()
        self._forms = Forms()
        self.last_call: LastCall | None = None
        self._is_closed = False
        self._entry: Entry | None = None
        self._found_with = self._settings.min_size or 1  # how many processes found a swarm
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
        return f"<unisono.Swarm {self._settings.name}, {len(self.members)} members>"

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
        return () if self._entry is None else self._entry.routes.ways(self.members)

    @property
    def network(self) -> NetworkMap | None:
        """The delays and rates between the hosts, equal on all members; None if they have not measured them.

        Members on hosts that are far apart measure them once they have been the same ones for a minute, and again every
        ten minutes. Each of their calls is made with the map, or without it, on all members.
        """
        if self._entry is None:
            return None
        with self._entry.membership.changed:
            comm = self._entry.membership.comm
        return None if comm is None else comm.network

    @property
    def place(self) -> str | None:
        """The address of the meeting place that this process serves; None if it serves none."""
        return self._places.served

    def enter(self) -> None:
        """Enter the swarm, again if this process has been left behind, or has lost the quorum. It is new to the others.

        After a lost quorum, this process gives its place among the members up. It enters the swarm that goes on without
        it, as soon as it can reach it. If none goes on, the processes that enter found a new one, once as many as the
        quorum are there: at least `min_size`, or else a majority of the members before. Their newest state counts.
        Until then, new processes at the same meeting place wait too, for `rendezvous_timeout_s` of this one at most.
        The same holds for a process that was left behind, because the others may go on where it cannot reach them.

        Raises:
            RendezvousError: the members have not admitted it in time, or refuse it. The call may be made again.
            UsageError: it is a member, or the swarm is closed.
        """
        if self._is_closed:
            raise UsageError("this swarm is closed: make another one")
        if self._entry is not None:
            state = self._entry.membership
            if not state.gone and not state.has_lost_quorum:
                raise UsageError("this process is a member already")
            self._found_with = max(self._found_with, state.quorum())
            if state.gone:
                self._entry.leave()  # the others may need the vote of this one to go on without it
            self._entry.withdraw()
        barred = NO_BARS if self._entry is None else self._entry.membership.barred
        self._entry = entry = Entry(self._settings, self._caller, self._places, self._found_with, barred)
        try:
            entry.await_admission()
        except BaseException:
            entry.withdraw()
            raise
        self._found_with = self._settings.min_size or 1

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
            MismatchError: this member passes other arrays than the others, or arrays of other keys. They go on without
                it.
            QuorumLostError: too few members answer. The call may be made again, or this process may `enter` again.
            LeftBehindError: the other members have gone on without this one.
            CollectiveTimeoutError: the call has not ended in time.
        """
        leaves = Leaves(x)
        targets = None if out is None else leaves.check_out(out)

        def make(comm: Any, limit_s: float) -> Any:
            result = comm.allreduce(leaves.arrays, op, timeout_s=limit_s, **options)
            self._forms.check(leaves.form, comm, limit_s)
            return result

        results = self._make(SwarmCall("allreduce", make, lambda _: leaves.arrays), self._limit(timeout_s))
        return cast(Arrays, delivered(leaves, results, out, targets))

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
            UsageError: also if `root` is no `Member`.
            PeerLostError: the root is no member any more. The call has ended without a result on all members.
        """
        if not isinstance(root, Member):
            raise UsageError(f"root must be a member, such as swarm.members[0], because ranks may change; got {root!r}")
        leaves = Leaves(x)
        targets = None if out is None else leaves.check_out(out)

        def make(comm: Any, limit_s: float) -> Any:
            ids = self._membership().ids_of(comm)
            has_root = root.id in ids
            result = comm.broadcast(leaves.arrays, ids.index(root.id) if has_root else 0, timeout_s=limit_s)
            self._forms.check(leaves.form, comm, limit_s)
            comm.barrier(timeout_s=limit_s)  # no member has the result before all have made the call
            return result if has_root else None

        results = self._make(SwarmCall("broadcast", make, lambda _: leaves.arrays), self._limit(timeout_s))
        if results is None:
            raise PeerLostError(f"the root of the broadcast, {root.name}, is no member of the swarm any more")
        return cast(Arrays, delivered(leaves, results, out, targets))

    def allgather(self, x: Arrays, *, timeout_s: float | None = None) -> Arrays:
        """Return the concatenation of the arrays of all members, in the order of `last_call.contributors`.

        The arguments and errors are those of `allreduce`. Each array of `x` has at least one dimension.
        """
        leaves = Leaves(x)

        def make(comm: Any, limit_s: float) -> Any:
            result = comm.allgather(leaves.arrays, timeout_s=limit_s)
            self._forms.check(leaves.form, comm, limit_s)
            return result

        call = SwarmCall("allgather", make, lambda size: [repeated(array, size) for array in leaves.arrays])
        return cast(Arrays, delivered(leaves, self._make(call, self._limit(timeout_s))))

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

        A process that has been left behind or has lost the quorum becomes a member again in this call, as by `enter`,
        and gets the state of the others. So a program begins its step anew if another call raises one of these errors.

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
            MismatchError: the shapes or dtypes of this member's state differ from those of the others, which go on
                without it.
            PeerLostError: the others could not pass their state to this member.
            CorruptionError: the state of this member has drifted, and `on_drift` is "end".
            RendezvousError: as of `enter`. The call may be made again.
            QuorumLostError, LeftBehindError, CollectiveTimeoutError: as of `allreduce`, after `timeout_s`.
        """
        if on_drift not in ("mend", "end"):
            raise UsageError(f"on_drift must be 'mend' or 'end'; got {on_drift!r}")
        if type(check_every) is not int or check_every < 0:
            raise UsageError(f"check_every must be a number of calls, or 0 for no comparison; got {check_every!r}")
        number, limit = checked_revision(revision), self._limit(timeout_s)
        asked = Asked(state, number, check_every, on_drift == "end")
        while True:
            member = self._membership()
            if member.gone or member.has_lost_quorum:
                self.enter()
            try:
                return SharedState(*self._entered().sharing.share(asked, self._make, limit))
            except (LeftBehindError, QuorumLostError):
                if limit.has_passed():
                    raise

    def expel(self, rank: int, *, may_return: bool = False) -> None:
        """Let the members go on without the member `rank`, which raises `LeftBehindError` in its next call.

        It returns at once. No process of the same name may enter again, as long as the swarm lives, and none that
        presents the member's certificate, or one that was renewed for the same public key. If other members present
        it too, only the name is barred. Without certificates, a process that holds the key can take another name: to
        keep it out, begin anew with another key.

        Args:
            rank: the member.
            may_return: whether nothing is barred, so that the process may enter again as a new member.

        Raises:
            UsageError: there is no such rank, it is this one, or as many processes are barred as may be.
        """
        state, members = self._membership(), self.members
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < len(members):
            raise UsageError(f"rank must be one of the {len(members)} members; got {rank!r}")
        if members[rank].id == state.me.id:
            raise UsageError("a member does not expel itself: call close()")
        if not may_return:
            self._check_bar(members[rank], members)
        self._entered().announce({"do": "expel", "member": members[rank].id, "for_good": not may_return})

    def _check_bar(self, barred: Member, members: Sequence[Member]) -> None:
        if len(self._membership().barred.names) >= MOST_BARRED:
            raise UsageError(f"a swarm bars {MOST_BARRED} processes at most: begin anew with another key")
        if sum(member.certificate == barred.certificate != "" for member in members) > 1:
            _log.warning("other members have the certificate of %s too, so only its name is barred", barred.name)

    def close(self) -> None:
        """Leave the swarm. The others go on at once; a call of theirs in progress is repeated without this member."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._entry is not None:
            with contextlib.suppress(UnisonoError):
                self._entry.leave()
            self._entry.close()
        self._places.close()
        self._place_caller.close()
        self._caller.close()

    def _entered(self) -> Entry:
        if self._entry is None:
            raise UsageError("this process has not entered the swarm: call enter() first")
        return self._entry

    def _membership(self) -> Membership:
        return self._entered().membership

    def _view(self) -> View | None:
        return None if self._entry is None else self._entry.view

    def _limit(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._settings.options.timeout_s if timeout_s is None else checked_timeout_s(timeout_s))

    def _make(self, call: SwarmCall, limit: Deadline) -> Any:
        if self._is_closed:
            raise UsageError("this swarm is closed: make another one")
        if not self._calling.acquire(blocking=False):
            raise UsageError("another thread makes a call on this swarm: members make one call at a time")
        try:
            self._entered().attempts.make(call, limit)
        finally:
            self._calling.release()
        self.last_call = LastCall(call.number, call.contributors, call.attempts)
        return call.result

"""Averages of fragments over the members of a swarm, which may change between any two calls.

Theory of operation
-------------------
A thread makes the calls, because those of a swarm block, and all members make them in one order. For each average it
makes three calls:

1. an allreduce of a *note*, which holds the number of the average and a checksum of the outer parameters;
2. a call that adds the changes, each of which has a weight (`swarm_sums`);
3. a call of `Swarm.state` with all outer parameters and velocities. Newcomers enter after it.

Between the second and the third call, the thread applies the average to the outer parameters. So these change only
inside an average. A newcomer gets them after the third call, while the others train on, and then makes the next average
with them. It has no change yet, so its note is empty and its weight is 0. It learns from the note of the others which
fragment it is, and after which step. After the average it trains from that step, with the weight 1. So a newcomer waits
for one average. The others wait for it only if they come to that average before it has all parameters.

If a member is lost, the swarm repeats the call among the others. The weights are part of the call, so the average
divides by the members whose changes it has.

By their notes (`notes`) all members see whether any two differ. The members whose note differs from that of most raise
an error. The others expel them, and go on.

A member that is left behind, or loses the quorum, drops the averages that are on their way. Then it enters again as a
newcomer does. The call of `Swarm.state` makes it a member again, as soon as the others can be reached.

Example: A, B and C make average 7, and D enters after it. Twenty steps later, A, B and C note the number 8, and D notes
nothing. C dies while they sum the changes a, b, c and 0. A, B and D repeat it, and get a + b + 0 and the weight 2.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unisono import LeftBehindError, MismatchError, QuorumLostError, UsageError
from unisono.foundation import log
from unisono.frameworks.arrays import Array, checksum, same_bits
from unisono.frameworks.outer.notes import Note, are_equal, usual
from unisono.frameworks.outer.swarm_sums import swarm_sum

if TYPE_CHECKING:
    from unisono import Swarm

_log = log.get()

_NONE = Note(-1, 0)  # stands for a missing note
_HAS_LOST_THE_OTHERS = (LeftBehindError, QuorumLostError)
_NO_RESIDUALS = np.zeros(0, np.float32)


class Turn(NamedTuple):
    """The position of one average in the order of all averages of a training.

    Attributes:
        step: the step after which the fragment leaves.
        fragment: the index of the fragment.
        following: how many fragments leave after it in the same step.
    """

    step: int
    fragment: int
    following: int

    def number(self, fragments: int) -> int:
        """Return the number of this turn among `fragments` fragments.

        >>> Turn(7, 1, 2).number(4), Turn.of(118, 4)
        (118, Turn(step=7, fragment=1, following=2))
        """
        return (self.step * fragments + self.fragment) * fragments + self.following

    @classmethod
    def of(cls, number: int, fragments: int) -> Turn:
        """Return the turn whose `number` among `fragments` fragments is `number`."""
        return cls(number // fragments // fragments, number // fragments % fragments, number % fragments)


class SharedParameters(NamedTuple):
    """The facts that all members have in common.

    Attributes:
        facts: the arguments of the training and the form of the parameters, as text.
        values, velocities: by fragment, the outer parameters and the velocities of the outer optimizer.
    """

    facts: str
    values: Sequence[Array]
    velocities: Sequence[Array | None]


class SwarmAverages:
    """The averages of fragments over the members of a swarm. At most one of each fragment is in flight.

    All members start them in the same order. While this object is open, the program makes no calls on the swarm.

    Args:
        swarm: the members.
        memories: by fragment, the flat memory with the change, which is overwritten by the average.
        shared: the facts that a newcomer gets; written in place.
        apply: applies the average of a fragment to the outer parameters; its arguments are the fragment and the number
            of members whose changes the average has. It is called by the thread that makes the calls.
        compression: as of `swarm_sum`.
        timeout_s: the time limit of each call; None for that of the swarm.

    Attributes:
        states: by fragment, and then by kind, the residuals of compression; without compression there are no kinds.

    Raises:
        UsageError: the compression cannot be used on a swarm.
    """

    def __init__(
        self,
        swarm: Swarm,
        memories: Sequence[Array],
        shared: SharedParameters,
        apply: Callable[[int, int], None],
        compression: str | None,
        timeout_s: float | None,
    ) -> None:
        self._sum = swarm_sum(compression)
        self._swarm, self._memories, self._shared, self._apply = swarm, memories, shared, apply
        self.states = [{} if compression is None else {"residuals": np.zeros(x.size, np.float32)} for x in memories]
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[tuple[Note, Future[None]] | None] = queue.SimpleQueue()
        self._flying: dict[int, Future[None]] = {}
        self._error: BaseException | None = None
        self._is_closed = False
        self._step = 0  # the step of the last average that this member has applied
        self._thread = threading.Thread(target=self._work, name="unisono-outer", daemon=True)

    def begin(self, step: int) -> int:
        """Get the outer parameters that all members share, and return the step from which this member trains.

        If all members begin now, these are the parameters of a member with the highest `step`.

        Raises:
            MismatchError: the others have other arguments or parameters.
            UnisonoError: a call failed.
        """
        self._step = step
        step = self._entered()
        self._thread.start()
        return step

    def enter_again(self) -> int:
        """Drop the averages that are on their way, and begin with the others once more; as `begin`, after an error.

        Raises:
            RendezvousError: the others have not admitted this process in time, or refuse it.
            MismatchError, UnisonoError: as by `begin`.
        """
        for future in self._flying.values():
            future.exception()  # all of them fail after the first one
        self._flying.clear()
        step = self._entered()
        self._error = None
        return step

    def start(self, index: int, number: int, checksum: int) -> None:
        """Start the average of fragment `index`. Its memory belongs to this object until `wait` has returned."""
        if self._is_closed:
            raise UsageError("this training has ended: make another one")
        self._flying[index] = Future()
        self._jobs.put((Note(number, checksum), self._flying[index]))

    def wait(self, index: int) -> None:
        """Wait until the average of fragment `index` has been applied. It raises its error again, until `enter_again`.

        Raises:
            MismatchError: this member has made another number of steps, or holds other outer parameters.
            QuorumLostError, LeftBehindError, CollectiveTimeoutError: a call failed.
        """
        self._flying[index].result()
        del self._flying[index]

    def nbytes_sent(self) -> int:
        """Raise `UsageError`, because a swarm does not count bytes."""
        raise UsageError("a swarm does not count the bytes that it sends")

    def close(self) -> None:
        """End the thread. A call in progress ends when the swarm is closed."""
        self._is_closed = True
        self._jobs.put(None)
        if self._thread.is_alive() and all(each.done() for each in self._flying.values()):
            self._thread.join()

    def _entered(self) -> int:
        """Become a member with the state of the others, and return the step from which this member trains."""
        while True:
            try:
                return self._adopted()
            except _HAS_LOST_THE_OTHERS as error:
                _log.info("this member enters the swarm again: %s", error.message)

    def _adopted(self) -> int:
        before, own_step = self._swarm.last_call, self._step
        shared = self._share(own_step)
        if shared.value["facts"] != self._shared.facts or any(
            own is not other for own, other in zip(self._shared.values, shared.value["values"], strict=False)
        ):
            raise MismatchError(
                f"the other members train with other arguments or parameters: {shared.value['facts']}, and these are "
                f"{self._shared.facts}"
            )
        step = int(shared.revision)
        is_newcomer = self._swarm.last_call is before  # the others have begun before, and have made the call of `state`
        if is_newcomer:
            step = self._follow(step)
        if is_newcomer or step != own_step:  # the residuals are those of other parameters
            for state in self.states:
                for each in state.values():
                    each[...] = 0
        return step

    # --- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_closed:
            note, future = job
            try:
                if self._error is not None:
                    raise self._error
                self._average(note)
            except BaseException as error:  # noqa: BLE001 (`wait` raises it)
                self._error = error
                future.set_exception(error)
            else:
                future.set_result(None)

    def _follow(self, step: int) -> int:
        """Take part in the next averages without a change, until a step averages one fragment only.

        Return the step of the last average.
        """
        while True:
            number = self._average(None)
            if number is None:  # the members that have trained are gone, and this one has their state
                return step
            step, _, following = Turn.of(number, len(self._memories))
            if not following:
                return step

    def _average(self, note: Note | None) -> int | None:
        """Make an average, and return its number; None if no member has a note."""
        agreed = self._agree(note)
        if agreed is None:
            return None
        number, expected = agreed
        step, index, _ = Turn.of(number, len(self._memories))
        if checksum(self._shared.values[index]) != expected:
            raise self._difference(0, index)
        count = self._combine(index, 0 if note is None else 1)
        if count:
            self._apply(index, count)
        self._step = step
        self._share(step)
        return number

    def _agree(self, note: Note | None) -> Note | None:
        """Return the note that the members with one agree on; None if no member has one."""
        while True:
            own = np.zeros(4, np.int64) if note is None else note.bits()
            joined = self._swarm.allreduce(own, "bor", timeout_s=self._timeout_s)
            if are_equal(joined):
                return Note(int(joined[0]), int(joined[2])) if joined[1] else None
            self._expel_others(note)

    def _expel_others(self, note: Note | None) -> None:
        """Expel the members whose notes differ from that of most; raise an error if this member is one of them."""
        gathered = self._swarm.allgather(np.array([note or _NONE], np.int64), timeout_s=self._timeout_s)
        notes = [Note(*row) for row in gathered.tolist()]
        present = [each for each in notes if each != _NONE]
        last_call = self._swarm.last_call
        if not present or last_call is None:
            return
        most = usual(present)
        if note is not None and note != most:
            column = 0 if note.number == most.number else 1
            raise self._difference(column, Turn.of(note.number, len(self._memories)).fragment)
        for member, other in zip(last_call.contributors, notes, strict=True):
            members = self._swarm.members
            if other not in (most, _NONE) and member in members:
                self._swarm.expel(members.index(member), may_return=True)

    @same_bits
    def _combine(self, index: int, weight: int) -> int:
        """Replace the change of a fragment by the average; return the sum of the weights."""
        memory = self._memories[index]
        change = memory if weight else np.zeros_like(memory)
        residuals = self.states[index].get("residuals", _NO_RESIDUALS)
        total, members = self._sum(self._swarm, change, residuals, weight, self._timeout_s)
        if members:
            np.divide(total.astype(memory.dtype), memory.dtype.type(members), out=memory)
        return members

    def _share(self, step: int) -> Any:
        return self._swarm.state(self._shared._asdict(), step, timeout_s=self._timeout_s)

    def _difference(self, column: int, index: int) -> MismatchError:
        text = (
            f"fragment {index}: the outer parameters on this member have other bits than on the others",
            "this member has made another number of steps than the others. All members call step() equally often",
        )[column]
        return MismatchError(f"{text}. Enter the swarm anew")

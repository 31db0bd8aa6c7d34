"""The errors that Unisono raises, with a class for each way in which a collective can fail.

Every error derives from `UnisonoError`. Its attributes hold the rank that raises, the peer, the call with its sequence
number on the communicator, and the state of the caller's buffers. They are None if unknown. Every error can be pickled,
because errors travel between processes: launchers return them, and survivors raise the first one.
"""

from __future__ import annotations

from typing import Any

from unisono.foundation.printable import printable


class UnisonoError(Exception):
    """The base class of all errors of Unisono.

    Attributes:
        rank: the rank that raises, or None outside a communicator.
        peer: the rank that the error is about, or None.
        operation: the call, for example ``"allreduce(float32[8], op=sum)"``, or None.
        sequence: the number of the call on its communicator, from 0, or None.
        buffers: the state of the caller's output, for example ``"output untouched"``, or None.
        last_calls: the last calls of this rank that had ended before a job failed, the newest first.
        dump: the file with a dump of this rank's last calls, or None: see the option `dump`.
    """

    last_calls: tuple[str, ...] = ()
    dump: str | None = None

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        operation: str | None = None,
        sequence: int | None = None,
        buffers: str | None = None,
    ) -> None:
        # A peer may have written a part of the message.
        self.message = printable(message)
        super().__init__(self.message)
        self.rank = rank
        self.peer = peer
        self.operation = operation
        self.sequence = sequence
        self.buffers = buffers

    def __str__(self) -> str:
        shown = "; ".join(fact for fact in self._facts() if fact)
        return f"{self.message} [{shown}]" if shown else self.message

    def _facts(self) -> list[str]:
        """Return the facts that the text of the error shows after the message."""
        return [
            f"rank {self.rank}" if self.rank is not None else "",
            f"#{self.sequence} {self.operation}" if self.operation and self.sequence is not None else "",
            self.operation if self.operation and self.sequence is None else "",
            self.buffers or "",
            f"dump: {self.dump}" if self.dump else "",
            f"calls before: {', '.join(self.last_calls)}" if self.last_calls and not self.dump else "",
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.__dict__)


def _rebuild(error_class: type[UnisonoError], message: str, state: dict[str, Any]) -> UnisonoError:
    error = error_class(message)
    error.__dict__.update(state)
    return error


class UsageError(UnisonoError, ValueError):
    """The arguments of a call are wrong. Raised on the calling rank before anything is sent.

    Remedy:
        Correct the argument, option or variable that the message names. The communicator still works.
    """


class MismatchError(UnisonoError):
    """Ranks disagree on the call. The message names the divergent rank and both calls. Raised on every rank.

    Remedy:
        Compare the two places in the program that the message names. The usual causes are a collective inside an ``if``
        on the rank, shapes or dtypes that depend on the rank, and a number of steps that differs between ranks.
    """


class PeerLostError(UnisonoError):
    """A rank that a call needs has died, or has left the communicator.

    Attributes:
        host: the name of the host of `peer`, or None.
        pid: its process id there, or None.

    Remedy:
        Read the output of the lost rank first: an exception there is the cause. If a signal killed the rank, look for a
        lack of memory in the kernel's log. To continue without the rank, call `Communicator.shrink`.
    """

    host: str | None = None
    pid: int | None = None

    def _facts(self) -> list[str]:
        where = f"rank {self.peer} was process {self.pid} on {self.host}" if self.pid is not None else ""
        return [*super()._facts(), where]


class CollectiveTimeoutError(UnisonoError, TimeoutError):
    """The call did not complete in time. The message names the ranks that had not made the call.

    Remedy:
        Find out what the named ranks do, with ``unisono top --stacks``. If they need more time, for example to write a
        checkpoint, raise the option `timeout_s` or the argument of the same name.
    """


class AbortedError(UnisonoError):
    """The communicator was aborted by another rank or by an interrupt, or had failed before this call.

    Remedy:
        Look for the first error of the job: the message names the rank that aborted, and `last_calls` the calls before.
        A communicator that has failed stays unusable; call `Communicator.shrink` or end the program.
    """


class RendezvousError(UnisonoError):
    """The ranks could not find each other. The message names the missing ranks, or the problem with the store.

    Remedy:
        Check that all ranks were started, with the same number of ranks, store, job and key. ``unisono doctor`` shows
        these on each host. If hosts start slowly, raise the option `rendezvous_timeout_s`.
    """


class QuorumLostError(UnisonoError):
    """Too few members of a swarm answer, so this member does not go on. The message names those that do not answer.

    They may go on without this one, if they are the larger part of a network that is cut.

    Remedy:
        Make the call again to wait for them, or begin the step anew with `Swarm.state`, which also lets new processes
        take their places. To go on with fewer members, end the program, and start a new swarm from a checkpoint. The
        argument `min_size` of `Swarm` sets the least number.
    """


class LeftBehindError(UnisonoError):
    """The other members of a swarm have gone on without this one. The message says why, if it is known.

    This process did not answer in time, was too slow, was expelled, or has left.

    Remedy:
        Begin the step anew with `Swarm.state`, which makes this process a member again, with the state of the others.
        Without a state, call `Swarm.enter`.
    """


class TransportUnavailableError(UnisonoError):
    """The requested transport cannot be used. The message says why, and what would make it usable.

    Remedy:
        Do what the message says, such as raising a limit by ``ulimit``, or remove the transport from the option
        `transports`. ``unisono doctor`` tests each transport.
    """


class NoAlgorithmError(UnisonoError):
    """No registered algorithm can run the call. The message says why each one was refused.

    Remedy:
        Do not name an algorithm, or name one that ``unisono explain`` lists for the call.
    """


class PlanError(UnisonoError):
    """A plan is wrong. The message names the first wrong rank, step and contribution, or a cycle of waiting ranks.

    Remedy:
        Correct the builder of the algorithm. ``unisono verify FILE`` shows the picture of the error, and
        ``unisono show`` the schedule.
    """


class CorruptionError(UnisonoError):
    """Bits of a message or of a result have changed, and no program changed them.

    A network, a memory or a processor has damaged them. Raised on every rank. `peer` is the rank whose messages or
    result differ; None if no majority of the ranks tells which of the results is the right one.

    Remedy:
        Do not use the results of this call. If the same rank or host is named again, replace the hardware.
    """


class InternalError(UnisonoError):
    """An invariant of Unisono is broken.

    Remedy:
        Report it, with the message, the version and a dump of each rank (``UNISONO_DUMP``).
    """

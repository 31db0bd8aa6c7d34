"""Dispatches collective calls: checks the arguments, plans the call, runs it, and adds it to the call cache.

Used by: the methods of `Collectives`, `VectorCollectives`, groups of calls and `Communicator.plan`.

Theory of operation
-------------------
Most calls of a program repeat earlier ones, so each method of a communicator asks the native call cache first. On a hit
the native core runs the call, and nothing in this module runs. On a miss, `Dispatcher._dispatch` does the following:

1. The checker binds the arguments: it makes a call spec (`CallSpec`) from them, and flat memory (`binding`).
2. The planner returns the call of this spec: the tuner's algorithm, this rank's plan, and the signature.
3. The executor compiles the plan, if it is new, and runs it.
4. The call goes into the call cache under its arguments, so that the next equal call is a hit.

Ranks do not agree on a call before they communicate, because that would cost a round of messages. Instead every message
carries a digest of the call's signature, and the receiver compares it with its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.collectives.arrays.operands import LISTS
from unisono.collectives.calls.arguments import CallArguments, OpArgument, checked_integer, gets_result
from unisono.collectives.calls.checking import CallChecker
from unisono.collectives.calls.message_handoff import NO_RANK
from unisono.collectives.calls.planning import AlgorithmLike, CallPlanner, HostLayout
from unisono.collectives.calls.views import is_of_other_library, run_on_views
from unisono.collectives.calls.work import Work, Works
from unisono.collectives.device.gateway import Devices
from unisono.errors import TransportUnavailableError, UsageError
from unisono.foundation import log
from unisono.foundation.autograph import unconverted
from unisono.foundation.deadlines import checked_timeout_s
from unisono.options import Options
from unisono.transports.contracts.executor import NO_CACHE, NO_MESSAGES, Executor
from unisono.transports.contracts.wildcards import ANY_SOURCE, ANY_TAG, NOBODY
from unisono.transports.host.system_limits import is_refusal, unavailable
from unisono.tuning.decide.choice import NO_STATE, TunerState

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from unisono.collectives.calls.arguments import Arguments
    from unisono.collectives.calls.group_recorder import Group
    from unisono.collectives.device.contracts import HostCalls

_log = log.get("calls")


class Dispatcher:
    """The base class of everything that makes collective calls on a communicator: caches, planner and dispatch.

    Attributes:
        rank, size: this rank, and the number of ranks.
    """

    # `CachedMethod` reads the slots _cache and _messages at their offsets, because a look-up by name costs time.
    __slots__ = ("__dict__", "__weakref__", "_cache", "_messages")

    def __init_subclass__(cls) -> None:
        unconverted(cls)

    def __init__(
        self, executor: Executor, host_layout: HostLayout, options: Options, tuner_state: TunerState = NO_STATE
    ) -> None:
        self.rank = executor.rank
        self.size = executor.size
        self._executor = executor
        self._options = options
        self._planner = CallPlanner(self.rank, self.size, host_layout, options, executor.vendors, tuner_state)
        self._works = Works(executor)
        self._devices = Devices(executor, self._planner, self._works, options, self._host_calls)
        self._checker = CallChecker(executor, self._planner, self._works, self._devices, options)
        self._refusal: str | None = None
        # If the log shows each call, every call must be dispatched, so the call cache and fast messages are off.
        are_logged = _log.shows("debug")
        self._cache = NO_CACHE if are_logged or self._checker.verifier else executor.call_cache(options.timeout_s)
        self._messages = NO_MESSAGES if are_logged else executor.message_calls(ANY_SOURCE, ANY_TAG, options.timeout_s)
        self._group: Group | None = None

    @property
    def tuner_state(self) -> TunerState:
        """The decision table and the calibration by which the tuner chooses; rank 0 has read them for all ranks."""
        return self._planner.tuner_state

    def _try_algorithms(self) -> None:
        """Let some calls try other algorithms. All ranks do so before their first call."""
        from unisono.collectives.calls.job_trials import JobTrials

        self._checker.trials = JobTrials(self._executor, self._planner, self._works, self._cache)
        self._cache = self._checker.trials.cache

    def _follow(self, tuner_state: TunerState) -> None:
        """Plan later calls by another state of the tuner. All ranks do so between the same two calls."""
        self._planner.follow(tuner_state)
        self._cache.forget()

    def _dispatch(
        self, collective: str, x: Any, out: Any, target: Any, *, wait: bool = True, **arguments: Unpack[Arguments]
    ) -> Any:
        """Check a call, run it, add it to the call cache if possible, and return its result.

        The arguments are those of `CallArguments`. `target` is the array that a cached call writes: `out`, or if `out`
        is None, the array that the method has made for the result, or None. With ``wait=False`` the call is started,
        and its `Work` is returned. In a group the call is only recorded, and its `Work` is returned.
        """
        if self._group is not None:
            return self._group.recorder.add(collective, x, out, target, **arguments)
        try:
            return self._make_call(CallArguments(collective, x, out, **arguments), wait)
        except (OSError, RuntimeError) as error:
            if not is_refusal(error):
                raise
            raise self._refused_by_system(collective, error) from None

    def _make_call(self, arguments: CallArguments, wait: bool) -> Any:
        collective, x, out = arguments[:3]
        arrays = out if x is None else x
        if type(arrays) in LISTS and not arrays:
            if wait:
                return arrays
            return Work(self._works, None, arrays, self._limit_s(arguments.timeout_s), None)
        if wait and arguments.counts is None and is_of_other_library(x, out):
            return run_on_views(getattr(self, collective), arguments, self.rank)
        call = self._checker.check_one(arguments, self._check_usable)
        limit_s = self._limit_s(arguments.timeout_s)
        work = None if wait else call.start(limit_s)
        if work is None:
            call.run(limit_s)
        call.remember(collective, x, out, arguments.op, arguments.root, arguments.algorithm)
        return call.checked.finish() if work is None else work

    def _start(
        self,
        collective: str,
        x: Any,
        out: Any,
        target: Any,
        *,
        op: OpArgument = None,
        root: int | None = None,
        algorithm: AlgorithmLike = None,
        timeout_s: float | None = None,
    ) -> Work[Any]:
        """Start a call from the call cache, or else by `_dispatch`, whose arguments it takes; return its work."""
        limit_s = self._limit_s(timeout_s)
        operation = self._cache.start(collective, x, target, op, root, algorithm, limit_s)
        if operation is None:
            work: Work[Any] = self._dispatch(
                collective, x, out, target, wait=False, op=op, root=root, algorithm=algorithm, timeout_s=timeout_s
            )
            return work
        return self._works.add(operation, target if gets_result(collective, self.rank, root) else None, limit_s)

    def _refused_by_system(self, action: str, error: Exception) -> TransportUnavailableError:
        """Return the error of a call for which the system refused resources, and let the call fail on all ranks."""
        rank = self._executor.members[self.rank]
        refused = unavailable(f"rank {rank} cannot carry out {action}", error, self.rank)
        self._executor.fail(refused)
        return refused

    def _host_calls(self) -> HostCalls:
        """Return a communicator of the same ranks, for the parts of device calls that run on the host."""
        raise NotImplementedError

    def _rank_of(self, rank: int, name: str) -> int:
        return checked_integer(rank, name, 0, self.size - 1)

    def _peer_of(self, peer: int, name: str) -> int:
        """Return the checked rank of the other end of a message; `NO_RANK` for `NOBODY`."""
        self._check_usable()
        return NO_RANK if peer is NOBODY else self._rank_of(peer, name)

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise UsageError(self._refusal)

    def _check_alone(self) -> None:
        """Check that a call that consists of several dependent messages can be made now.

        Raises:
            UsageError: the call is in a group, whose messages only start when the group ends; or the communicator is
                closed.
        """
        self._check_usable()
        if self._group is not None:
            raise UsageError("this call waits for messages of its own: make it outside of a group")

    def _limit_s(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self._options.timeout_s
        return checked_timeout_s(timeout_s)

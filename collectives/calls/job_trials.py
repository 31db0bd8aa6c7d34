"""Tries algorithms in the calls of a running job: the option `tune`. Rank 0 writes the times as a decision table.

Used by: `checking`, which wraps the calls that it has checked, and `Communicator` and `init`, which make it for each
communicator of which rank 0 of the job is a member. That rank writes the times of all of them. The communicators
without it, such as the other rows of a grid, most often make the same calls.

Theory of operation
-------------------
`tuning.measure.job_tuning` decides which call is a turn, and which algorithm runs there. This file counts the calls
that wait for their end, runs the turns, and lets the ranks agree on their facts.

Between two turns, the call cache serves calls without Python, and counts them (`PacedCache`). Then it serves none, so
the next call comes here on every rank. All ranks count the same, whether the cache, a method or a persistent call makes
a call. The communicators of a rank have nothing in common, neither counts nor budgets.

Calls that are only started are not counted. The ranks can agree on the time of such a call when it has ended, and this
is no moment that they share: one rank waits at once, and another one starts 20 more calls before. An agreement there
must wait for the others, and a program may be right only because starting waits for nobody. For example, rank 0 starts
20 calls, and then sends the message for which rank 1 waits before it starts its calls. An agreement at the tenth call
would wait for ever. A turn whose time is agreed on at the next call that waits for its end would be safe. It was not
built, because the programs that would gain, such as trainers, only start calls.

After a turn the ranks exchange its facts by an allreduce of a few integers on the same communicator, right behind the
call. All of them are there, because they make the same calls in the same order. A rank notes facts only when the
exchange has ended. If it fails, the job has failed, and no rank has another turn.

If ranks disagreed all the same, they would run different algorithms. The digest of a call contains its algorithm, so
that would be a `MismatchError`, and no wrong result.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from unisono import __version__
from unisono.collectives.calls.executable import ExecutableCall, HostCall, OpLike
from unisono.collectives.calls.planning import AlgorithmLike, CallPlanner, CallSpec
from unisono.collectives.calls.prepared import PreparedCall
from unisono.collectives.calls.shapes import layout_of
from unisono.collectives.calls.work import Work, Works
from unisono.dtypes import DTYPES
from unisono.errors import NoAlgorithmError, UsageError
from unisono.foundation import log
from unisono.transports import _core
from unisono.transports.contracts.call import Call, Signature
from unisono.transports.contracts.executor import CallCache, Executor
from unisono.tuning.decide.choice import Question
from unisono.tuning.measure.job_tuning import JobTuning, agreed_facts, facts_of_rank

_log = log.get("tuning")

_writing = threading.Lock()  # of the table, because threads may close communicators

# The algorithm of the exchange, which the tuner cannot change.
_EXCHANGE = "recursive_doubling"


class JobTrials:
    """The trials of one communicator.

    Attributes:
        cache: the call cache for the methods of the communicator, which serves the calls between two turns.

    Args:
        executor, planner, works, cache: those of the communicator.
    """

    def __init__(self, executor: Executor, planner: CallPlanner, works: Works, cache: CallCache) -> None:
        self._executor, self._planner, self._works = executor, planner, works
        self._state = planner.tuner_state
        self._tuning = JobTuning()
        self._exchange_ns = 0
        self.cache = _core.PacedCache(cache)
        self.cache.remaining = self._tuning.pause

    def tried(self, call: HostCall) -> ExecutableCall:
        """Return the call, some uses of which are turns."""
        return TriedCall(self, call)

    def run(self, call: HostCall, make: Callable[[HostCall], Any], limit_s: float) -> Any:
        """Make a call that waits for its end, or a trial in its place, and return the result of `make`.

        Args:
            call: the call.
            make: makes the call that it gets, on the arrays of `call`.
            limit_s: the seconds after which the exchange of a turn fails.
        """
        if self.cache.remaining > 0:
            self.cache.remaining -= 1
            return make(call)
        came_ns = time.perf_counter_ns()
        question = self._open(call.prepared)
        rival = None if question is None else self._tuning.trial(question)
        taken = call
        if question is not None and rival is not None:
            taken = self._trial(call, question, rival)
            rival = None if taken is call else rival
        began_ns = time.perf_counter_ns()
        result = make(taken)
        span = began_ns, time.perf_counter_ns()
        self._agree(question, rival, span, began_ns - came_ns, limit_s)
        return result

    def write(self, table: str) -> None:
        """Append the measurements to the file beside a table, and compile the table from all of them.

        A file that cannot be written is a warning, because the job has done its work.
        """
        import datetime

        from unisono.tuning.machine.fingerprint import fingerprint
        from unisono.tuning.measure.measurement_log import MeasurementStore
        from unisono.tuning.measure.table_files import compile_table, log_of

        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        about = {"machine": fingerprint(), "job": secrets.token_hex(4), "library": __version__, "date": now}
        path = Path(table)
        store = MeasurementStore(log_of(path))
        try:
            with _writing:
                before = store.read() if store.path.exists() else []
                measurements = self._tuning.measurements({**about, "trial": True}, before)
                if measurements:
                    store.append(measurements)
                    compile_table(path, store.read(), __version__)
                else:
                    _log.info("the trials are too few to be sure of, so %s stays as it is", path)
        except UsageError as error:
            _log.warning("%s", error.message)

    def _open(self, prepared: PreparedCall) -> Question | None:
        """Return the question about a call whose algorithm may be changed; None if the call says more about it."""
        if self._planner.tuner_state is not self._state:  # all ranks have changed it between the same two calls
            self._state, self._tuning = self._planner.tuner_state, JobTuning()
        question = self._planner.question_of([array.spec for array in prepared.arrays])
        if question.algorithm != "auto" or question.order is not None or question.varying:
            return None
        if self._tuning.is_new(question):
            with _core.DefaultFloatEnvironment():  # predictions decide, so they must have the same bits on all ranks
                self._tuning.open(question, self._planner.variant_of(question), self._state)
        return question

    def _trial(self, call: HostCall, question: Question, rival: str) -> HostCall:
        """Return the call by another algorithm; `call` itself if that cannot run it, which all ranks notice."""
        prepared = call.prepared
        specs = [array.spec._replace(algorithm=rival) for array in prepared.arrays]
        try:
            planned = self._planner.find(*specs)
        except (NoAlgorithmError, UsageError) as error:
            _log.debug("%s is not tried: %s", rival, error.message)
            self._tuning.refuse(question, rival)
            return call
        return HostCall(self._executor, self._works, PreparedCall(prepared.arrays, prepared.gathered, planned))

    def _agree(
        self, question: Question | None, rival: str | None, span: tuple[int, int], before_ns: int, limit_s: float
    ) -> None:
        """Exchange the facts of a turn with the other ranks and note them."""
        began_ns, hosts = time.perf_counter_ns(), len(self._planner.hosts)
        # The last exchange counts here, because the time of this one is not known yet.
        own = facts_of_rank(self._host, hosts, span, before_ns + self._exchange_ns, self._communicating_ns())
        facts = np.array(own, np.int64)
        self._executor.run(self._exchange, [facts], [facts], limit_s)
        with _core.DefaultFloatEnvironment():
            self._tuning.note(question, rival, agreed_facts(facts.tolist(), hosts))
        self.cache.remaining = self._tuning.pause
        self._exchange_ns = time.perf_counter_ns() - began_ns

    def _communicating_ns(self) -> int:
        """Return the time of all calls on this rank so far; of most calls only some are timed."""
        return round(
            sum(usage.seconds * usage.calls / max(1, usage.timed) for _, usage in self._executor.usage()) * 1e9
        )

    @cached_property
    def _host(self) -> int:
        return next(index for index, ranks in enumerate(self._planner.hosts) if self._executor.rank in ranks)

    @cached_property
    def _exchange(self) -> Call:
        length = len(facts_of_rank(0, len(self._planner.hosts), (0, 0), 0, 0))
        layout = layout_of("allreduce", (length,), size=self._executor.size, rank=self._executor.rank)
        return self._planner.find(CallSpec("allreduce", layout, DTYPES["int64"], op="max", algorithm=_EXCHANGE))


class TriedCall(ExecutableCall):
    """A call on host memory, some uses of which run another algorithm than the chosen one.

    Args:
        trials: decides which uses.
        call: the call; it is planned already.
    """

    def __init__(self, trials: JobTrials, call: HostCall) -> None:
        super().__init__(call.checked)
        self._trials = trials
        self._call = call

    @property
    def signature(self) -> Signature:
        return self._call.signature

    def _run(self, limit_s: float) -> None:
        self._trials.run(self._call, lambda call: call._run(limit_s), limit_s)

    def _start(self, limit_s: float) -> Work[Any]:
        return self._call._start(limit_s)

    def persist(self, limit_s: float) -> Callable[..., Any]:
        usual = self._call.persist(limit_s)
        make = partial(self._make_again, usual, limit_s)

        def again(wait: bool = True) -> Any:
            return self._trials.run(self._call, make, limit_s) if wait else usual(wait=False)

        return again

    def _make_again(self, usual: Callable[..., Any], limit_s: float, call: HostCall) -> Any:
        return (usual if call is self._call else call.persist(limit_s))()

    def remember(
        self, collective: str, x: Any, out: Any, op: OpLike, root: int | None, algorithm: AlgorithmLike
    ) -> None:
        self._call.remember(collective, x, out, op, root, algorithm)

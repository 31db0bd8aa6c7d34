"""`GradientReducer`, the gradient engine: it averages named gradients over ranks while backward computes others.

Theory of operation
-------------------
In the first step the reducer records the gradients while backward computes them (`first_step`), and averages them when
the step ends. Then the ranks agree on names, shapes and order (`agreement`), and compute a layout (`layout`): flat
memory for all gradients, cut into buckets in the order in which the gradients become ready.

In every later step, each gradient is copied to its slot in that memory, unless it lies there already (`intake`). A
bucket is started when it is full and all buckets before it have been started (`steps_in_flight`). So all ranks start
the same buckets in the same order, whatever the order in which their gradients become ready. With priorities the start
order is another one (`priorities`).

`finish` starts the buckets that have not been started. It also starts a small reduction of the facts on which the ranks
must agree in this step, such as complaints and requests for a new layout (`agreement.Flags`). Then it waits for the
step that is due (`lag`) and hands out its gradients. A checksum of some parameters travels with the flags, so that
ranks notice when their parameters differ (`sync_check`).

A step in flight has memory of its own (`step_memory`): with a lag of k, k + 1 step memories are in use. The layout
changes only between two steps, after the ranks have agreed on it, in three cases (`replanning`, `additions`):

- after the sixth step, when the measured times tell how large buckets should be and which should go first;
- when rank 0 sees gradients become ready in another order;
- when a rank passes a gradient that is not in the layout.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono import Communicator, UnisonoError, UsageError
from unisono.foundation import log
from unisono.foundation.autograph import unconverted
from unisono.foundation.uncopyable import uncopyable
from unisono.frameworks.arrays import Array, Named, pairs_of
from unisono.frameworks.data_parallel.sync_check import SyncCheck
from unisono.frameworks.gradients import agreement, intake, traces
from unisono.frameworks.gradients.additions import average_new
from unisono.frameworks.gradients.agreement import Complaint, Flags
from unisono.frameworks.gradients.bucket_comms import BucketComms, Teams, resolved_teams
from unisono.frameworks.gradients.compression import SHARED_STATE
from unisono.frameworks.gradients.first_step import FirstStep
from unisono.frameworks.gradients.lag import lag_of
from unisono.frameworks.gradients.layout import Gradient
from unisono.frameworks.gradients.on_device import GradientMemory
from unisono.frameworks.gradients.priorities import Arriving
from unisono.frameworks.gradients.replanning import Replanner
from unisono.frameworks.gradients.settings import Settings, check_arguments
from unisono.frameworks.gradients.step_memory import StepMemory, StepMemoryPool
from unisono.frameworks.gradients.steps_in_flight import StepsInFlight
from unisono.frameworks.gradients.timeline import Report, Timeline, now, report_of
from unisono.transports.recorder.traces import add_source

_log = log.get()


@unconverted
@uncopyable("make another one; state_dict() returns its state")
class GradientReducer:
    """A context manager that averages named gradients over ranks while the program computes the next ones.

    In every training step (*step* for short), each rank calls ``ready(name, array)`` for each gradient as soon as it
    has computed the gradient, in any order. Then it calls ``finish()``, which returns the reduced gradients. All ranks
    open and close the reducer, and call `finish`, `flush` and the other methods that say so, in the same order. The
    calls of the reducer go over communicators of its own, so they are independent of other calls on `world`.

    If one rank makes an error, `finish` raises this error on all ranks, in the same step and with the same text. It
    names the rank and the gradient. The reducer can be used after a `UsageError`, `MismatchError` or `NotFiniteError`;
    the contents of the gradients of that step are undefined. After an error of another class all communicators have
    failed.

    The program may pass new gradients in a later step, for example when it unfreezes layers. The new gradients are
    averaged in the step in which all ranks pass them for the first time, and in all steps after it.

    Args:
        world: the ranks.
        bucket_nbytes: the approximate number of bytes that are reduced by one call. By default, the reducer measures
            its first steps and chooses this number.
        compression: the form in which gradients of wider floats travel, with error feedback: "float16", "bfloat16",
            "int8", "float8", "int4", "onebit", "topk" or "powersgd", with settings behind a colon, such as
            "topk:ratio=0.001,momentum=0.9" and "powersgd:rank=2"; None for no compression.
        lag: after how many steps gradients are applied: `finish` of step t returns those of step t − lag. In the steps
            in which the lag rises, `finish` returns nothing; in those in which it falls, it returns the sum of two
            steps. So every gradient is returned once.
        warmup_fraction, cooldown_fraction: the parts of `total_steps` at the beginning and at the end that have no lag.
        total_steps: the number of all steps; only needed for these fractions.
        op: "avg" or "sum". A gradient that was accumulated onto the sum of an earlier step counts that sum for each
            rank. An average of an earlier step counts once.
        missing: "error" if a rank makes an error by passing no gradient of a name that another rank passes in that
            step; "zero" if its gradient counts as zeros.
        check_finite: whether an element that is infinite or not a number, on any rank, is a `NotFiniteError`.
        teams: how many bucket communicators reduce buckets at the same time, or a `Teams`. By default, one for each
            step in flight, and one more over a network or with compression.
        priorities: whether buckets that wait for the link go in the order in which the next forward needs them. Then
            `finish` returns before all gradients have arrived, and looking up a gradient in its result waits for that
            gradient. Priorities cannot be combined with a lag.
        timeline: whether the reducer notes the end of each bucket as soon as it happens. By default, it notes the end
            when the program waits for the bucket.
        timeout_s: the time limit of each reduction; by default, the option `timeout_s`.
        parameters: the arrays, by name, that the gradients change. They must be the same on all ranks whenever `finish`
            is called: each `finish` compares a checksum of some of them, and of all of them in the first three steps.
            If it is a dict, the program may replace its arrays and add names between steps. By default, nothing is
            compared.
        verify_every: in how many steps each parameter is compared once; 0 for never.

    Attributes:
        turn: a number from 0 to 7 that `finish` compares with the other ranks. A program that may call `finish` at
            several places sets it, so that ranks at different places raise a `MismatchError`.

    Raises:
        UsageError: an argument has a value that it cannot have.

    >>> import numpy as np, unisono as un
    >>> def step(world):
    ...     with un.GradientReducer(world) as reducer:
    ...         for name, size in (("bias", 2), ("weight", 3)):
    ...             reducer.ready(name, np.full(size, float(world.rank)))
    ...         return {name: array.tolist() for name, array in reducer.finish().items()}
    >>> un.launch(step, 2)[0]
    {'bias': [0.5, 0.5], 'weight': [0.5, 0.5, 0.5]}
    """

    def __init__(
        self,
        world: Communicator,
        *,
        bucket_nbytes: int | None = None,
        compression: str | None = None,
        lag: int = 0,
        warmup_fraction: float = 0.0,
        cooldown_fraction: float = 0.0,
        total_steps: int | None = None,
        op: str = "avg",
        missing: str = "error",
        check_finite: bool = False,
        teams: int | Teams | None = None,
        priorities: bool = False,
        timeline: bool = False,
        timeout_s: float | None = None,
        parameters: Named | None = None,
        verify_every: int = 100,
    ) -> None:
        check_arguments(bucket_nbytes, op, missing)
        if priorities and lag:
            raise UsageError("priorities=True needs lag=0, because they reorder the gradients of one step")
        self._lag = lag_of(lag, total_steps, warmup_fraction, cooldown_fraction)
        resolved = resolved_teams(teams, len(world.hosts), lag, compression)
        self._sync_check = _sync_check(world, parameters, verify_every)
        self._settings = Settings(
            bucket_nbytes,
            compression,
            self._lag,
            op,
            missing,
            resolved.bucket_comms or 1,
            priorities,
            verify_every if self._sync_check else 0,
        )
        self._check_finite = check_finite
        self._notes_ends = timeline
        self._timeout_s = timeout_s
        self._control = world.dup()
        self._where = GradientMemory()
        self._comms = BucketComms(world, resolved, op, compression, timeout_s)
        self._lock = threading.RLock()  # of the state below, because several threads may pass gradients
        self._timeline = Timeline()
        self._tracks = traces.Tracks(self._timeline)
        add_source(self._tracks)
        self._replanner = Replanner(self._control, self._settings, self._comms, self._timeline)
        self._steps = StepsInFlight(self._control, timeout_s)
        self._step = self.turn = 0
        self._arriving: Arriving | None = None
        self.reset()

    def __enter__(self) -> GradientReducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self, name: str, array: Any) -> None:
        """Pass a gradient of this step: an array of numpy, torch or any other library, on the host or on a GPU.

        A GPU does all work on gradients there. It reads the array later, behind the program's current stream. The
        reducer has all its gradients in one place: on the host, or on one GPU of each rank.

        The program must neither change nor read the elements until `finish`, which overwrites the array if it can be
        written, and returns it. `finish` detects such changes: in the first step by a checksum, and later if the
        library counts writes, as torch does. An array that cannot be reduced is no error here: `finish` raises it, on
        all ranks.

        Raises:
            PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
        """
        with self._lock:
            if self._pool is None:
                self._first_step.record(name, array)
            else:
                self._take(self._steps.current or self._current(self._pool), name, array)

    def finish(self) -> Mapping[str, Any]:
        """End the step: wait for the gradients that are due, and return them by name. All ranks call it.

        With priorities, `finish` waits only until it knows that no rank has an error. Then it returns an `Arriving`: a
        lookup waits for that gradient, and iteration follows the order in which the next forward needs them. Look them
        up before the next step.

        Returns:
            By name, the array that the program passed in this step, overwritten with the reduced gradient. If that
            array cannot be written, or the program passed none, this is a new numpy array. A gradient that no rank
            passed in the step is not in the result. If no gradients are due in this step, the result is empty, and the
            arrays that the program passed hold zeros. On a GPU the results are there when the work of the program's
            current stream is done.

        Raises:
            MismatchError: a rank has not passed a gradient that others have, or one of another shape or dtype; or the
                `parameters` or turns differ between ranks.
            UsageError: a rank has passed an array that cannot be reduced, has passed a name twice, or has changed a
                gradient after passing it.
            NotFiniteError: a gradient is not finite, and `check_finite` is True.
            PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
        """
        with self._lock:
            memory = self._end_first_step() if self._pool is None else self._steps.current or self._current(self._pool)
            began = now()
            self._end_step(memory)
            self._steps.pending.append(memory)
            try:
                if self._settings.priorities:
                    return self._arrive(memory)
                if self._lag.steps:
                    return _write(memory, self._retire_due())
                return self._hand_out(memory)
            finally:
                memory.step.waits.append((began, now()))
                self._step += 1
                self._steps.current = None  # the next step takes a memory when it begins

    def slot(self, name: str) -> Array | None:
        """Return the memory in which a gradient of this step is reduced, or None if there is none.

        If the program computes a gradient in this slot, `ready` need not copy it, and the result is in the slot too.
        The slot stays the same in all steps until the order or the size of buckets changes. There is no slot in the
        first step, none on a GPU, and none with a lag, because a step then returns the gradients of another step.
        """
        with self._lock:
            has_slots = self._pool is not None and not self._lag.steps and self._where.workspace is None
            if not has_slots or self._pool is None or name not in self._pool.layout.gradients:
                return None
            slot: Array = self._current(self._pool).shaped[name]
            return slot

    def flush(self) -> list[dict[str, Array]]:
        """End all steps in flight and return the gradients of each, the oldest first. Without a lag there is none.

        All ranks call it between two steps: at the end, and before they save the model. The program applies the
        gradients of each step. After `flush` the lag rises from 0 again. It raises the same errors as `finish`.
        """
        with self._lock:
            self._settle()
            flushed = []
            while self._steps.pending:
                memory = self._retire()
                flushed.append({name: array.copy() for name, array in memory.present(memory.shaped).items()})
            return flushed

    def reset(self) -> None:
        """Forget all gradients, so that the next step may have others. All ranks call it, between two steps.

        Raises:
            UsageError: steps are in flight; call `flush` first.
        """
        self._settle()
        if self._steps.pending:
            raise UsageError("reset() needs all steps to be finished: call flush() first")
        self._first_step = FirstStep(self._where)
        self._steps.current = None
        self._pool: StepMemoryPool | None = None
        self._replanner.reset(self._step)

    def complain(self, message: str) -> None:
        """Make `finish` raise a `UsageError` with this text on all ranks, as if a gradient of this rank were wrong."""
        with self._lock:
            complaint = Complaint("UsageError", message)
            if self._pool is None:
                self._first_step.complain(complaint)
            else:
                self._current(self._pool).complain(complaint)

    def verify_all(self) -> None:
        """Make the next `finish` compare all `parameters`, for example because the program has set them."""
        if self._sync_check is not None:
            self._sync_check.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank for `load_state_dict`: numpy arrays and plain values in dicts and lists.

        All ranks call it, between two steps.

        The state holds the order of the gradients, the residuals of compression and the gradients of the steps in
        flight. `state_dict` waits for these steps, which stay in flight. It raises the same errors as `finish`.
        """
        with self._lock:
            self._settle()
            in_flight = []
            for memory in self._steps.pending:
                self._steps.wait(memory)
                in_flight.append(memory.copies())
            return {
                "step": self._step,
                "rank": self._control.rank,
                "size": self._control.size,
                "device": None if self._where.workspace is None else self._where.workspace.device.ordinal,
                "bucket_nbytes": int(self._replanner.bucket_nbytes),
                "turns": self._pool.start_order if self._pool else (),
                "gradients": [tuple(gradient) for gradient in self._pool.layout.gradients.values()]
                if self._pool
                else [],
                **{kind: self._pool.copy_state(kind) if self._pool else {} for kind in self._comms.kinds_of_state},
                "in_flight": in_flight,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, of which each rank passes its own. All ranks call it, between two steps.

        A rank may pass the state of another rank. It then starts with residuals of zero, because a residual is the
        rounding error of its own rank; all else is the same on all ranks. So compression loses the rounding errors of
        one step.

        Raises:
            UsageError, MismatchError: the states of the ranks do not belong together.
        """
        with self._lock:
            self._settle()
            self._steps.pending.clear()
            self._step = state["step"]
            self.reset()
            own = [Gradient(name, tuple(shape), dtype) for name, shape, dtype in state["gradients"]]
            facts = (
                self._settings,
                self._step,
                state["bucket_nbytes"],
                state["turns"],
                len(own),
                len(state["in_flight"]),
            )
            gradients = agreement.agree(self._control, facts, own, None, zeros=False) if own else ()
            if not gradients:
                return
            device = state.get("device")  # states of earlier versions lack it
            self._replanner.is_on_device = device is not None
            self._replanner.restore(state["bucket_nbytes"])
            if device is not None:
                self._where.open(device)
            self._pool = self._new_pool(gradients, state["turns"])
            kinds = self._pool.states.keys()
            for kind in kinds if kinds and self._is_own(state) else kinds & SHARED_STATE:
                self._pool.states[kind].write(state.get(kind, {}))
            for saved in state["in_flight"]:
                memory = self._pool.take()
                memory.write(saved)
                self._steps.pending.append(memory)

    def _is_own(self, state: Mapping[str, Any]) -> bool:
        """Return whether this rank has saved a state, among as many ranks; log that its residuals are not used."""
        own = self._control.rank, self._control.size
        saved = state.get("rank", own[0]), state.get("size", own[1])  # states of earlier versions lack them
        if saved != own:
            text = "the state of a reducer is that of rank %d of %d, so the residuals of compression begin at zero"
            _log.info(text, *saved)
        return saved == own

    def report(self) -> Report:
        """Return the times and the traffic of the last steps on this rank."""
        return report_of(self._timeline.ended(), self._comms.nbytes_sent() / max(1, self._step))

    def trace(self, path: str | Path) -> None:
        """Write the last steps of this rank, with buckets and waits, to a file for chrome://tracing or Perfetto.

        The traces of the rank's calls (`Communicator.trace` and the option `trace`) have them too, while this exists.
        """
        traced = [{**event, "pid": self._control.rank} for event in self._tracks.trace_events()]
        Path(path).write_text(json.dumps({"traceEvents": traced, "displayTimeUnit": "ms"}))

    def draw(self, path: str | Path) -> None:
        """Draw the last three steps of this rank to a file; its extension sets the format, such as PNG.

        Raises:
            UsageError: matplotlib is not installed, or no step has ended.
        """
        traces.draw(self._timeline.ended(), path)

    def close(self) -> None:
        """Close the communicators. Reductions in flight end with an error. A second call does nothing."""
        self._comms.close()
        self._control.close()
        if self._where.workspace is not None:
            self._pool, self._arriving = None, None
            self._steps = StepsInFlight(self._control, self._timeout_s)
            self._where.close()

    # --- a step -----------------------------------------------------------------------------------------------------

    def _end_first_step(self) -> StepMemory:
        """Agree on the gradients, and return the memory of the first step with the gradients that were recorded."""
        first_step, self._first_step = self._first_step, FirstStep(self._where)
        gradients = first_step.agree(self._control, self._settings)
        if self._where.workspace is not None and not self._replanner.is_on_device:
            self._replanner.is_on_device = True
            self._replanner.reset(self._step)
        self._pool = self._new_pool(gradients)
        memory = self._current(self._pool)
        memory.step.begin_s = memory.step.ready_s = now()
        first_step.copy_to(memory, check_finite=self._check_finite)
        return memory

    def _new_pool(self, gradients: Iterable[Gradient], start_order: Sequence[int] = ()) -> StepMemoryPool:
        nbytes = self._replanner.bucket_nbytes
        return StepMemoryPool(self._comms, gradients, nbytes, start_order, None, self._where.workspace)

    def _current(self, pool: StepMemoryPool) -> StepMemory:
        """Return the memory of the current step, which begins if there is none."""
        if self._steps.current is None:
            if self._arriving is not None:
                self._settle()
            memory = self._steps.current = pool.take()
            step = self._timeline.begin(self._step)
            step.spans = pool.spans()
            memory.begin(step, notes_ends=self._notes_ends or step.number in self._replanner.measured_steps)
        return self._steps.current

    def _take(self, memory: StepMemory, name: str, array: Any) -> None:
        """Copy a gradient to its slot, and start the buckets that it completes. An error becomes a complaint."""
        moment = now()
        memory.step.begin_s = memory.step.begin_s or moment
        memory.step.ready_s = moment
        takes_new = not self._lag.steps
        if not intake.take(memory, name, array, self._where, check_finite=self._check_finite, takes_new=takes_new):
            return
        if memory.fill(name, moment):
            self._steps.start_full(memory)

    def _end_step(self, memory: StepMemory) -> None:
        """Start the other buckets, with zeros for missing gradients, and the reduction of the flags."""
        if len(memory.received) < len(memory.flat):
            for name in memory.flat:
                if name not in memory.received:
                    memory.put_zeros(name)
            memory.flags[0] |= Flags.MISSING
        if self._replanner.sees_other_order(memory):
            memory.flags[0] |= Flags.OTHER_ORDER
        if len(memory.works) < len(memory.start_order):
            self._steps.start_rest(memory)
        intake.complain_of_changes(memory)
        memory.set_turn(self.turn)
        if self._sync_check is not None:
            self._set_checksum(memory, self._sync_check)
        self._steps.start_flags(memory)

    def _set_checksum(self, memory: StepMemory, check: SyncCheck) -> None:
        try:
            memory.set_checksum(check.checksum())
        except UnisonoError as error:
            memory.complain(Complaint("UsageError", error.message))

    # --- results ----------------------------------------------------------------------------------------------------

    def _arrive(self, memory: StepMemory) -> Arriving:
        """Wait for the flags (`agreement.Flags`) of the only step in flight.

        Return its gradients, which may still be on their way.

        If a flag is set or the ranks replan after this step, wait for all its gradients. The ranks then call further
        collectives, which they may do only inside `finish`, because all ranks call `finish`.
        """
        self._steps.wait_for_flags(memory)
        if memory.joined_flags() or memory.step.number == self._replanner.last_measured_step:
            self._retire()
        self._arriving = Arriving(memory, lambda index: self._wait_for_arrival(memory, index))
        return self._arriving

    def _wait_for_arrival(self, memory: StepMemory, index: int) -> None:
        """Wait for bucket `index` of the step whose gradients are arriving."""
        with self._lock:
            began = now()
            try:
                self._steps.wait_for_bucket(memory, index)
            finally:
                memory.step.waits.append((began, now()))

    def _settle(self) -> None:
        """End the step whose gradients the program reads one by one as they arrive, if there is such a step."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.end()
            while self._steps.pending:  # empty if `_arrive` has retired the step
                self._retire()

    def _hand_out(self, memory: StepMemory) -> dict[str, Any]:
        """Return the gradients of the only step in flight.

        Each is written to the array of the program as soon as it is reduced, while later buckets are in flight.
        """
        reduced: dict[str, Any] = {}
        waiting = set(memory.works)
        for name in memory.layout.gradients:
            for index in memory.buckets_of[name]:
                if index in waiting:
                    waiting.remove(index)
                    self._steps.wait_for_bucket(memory, index)
            reduced[name] = memory.write_back(name, memory.shaped[name])
        self._retire()
        if len(memory.flat) > len(reduced):
            for name in memory.names[len(reduced) :]:  # the new gradients, which `_retire` has added
                reduced[name] = memory.write_back(name, memory.shaped[name])
        if self._where.workspace is not None:
            memory.deliver()
        return memory.present(reduced) if memory.absent else reduced

    def _retire_due(self) -> StepMemory | None:
        """Wait for the training steps whose gradients the program gets now, by the lag.

        Return a memory with the sum of their gradients, or None if there is no such step.
        """
        due: StepMemory | None = None
        while len(self._steps.pending) > self._lag.at(self._step):
            retired = self._retire()
            if due is not None:
                retired.add_all(due)
            due = retired
        return due

    def _retire(self) -> StepMemory:
        """Wait for the oldest step in flight, act on its flags, and return its memory.

        Raises:
            UsageError, MismatchError, NotFiniteError: a rank has complained, or the parameters of ranks differ.
            PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
        """
        self._steps.wait(self._steps.pending[0])
        memory = self._steps.pending.popleft()
        assert self._pool is not None
        self._pool.put_back(memory)
        flags = memory.joined_flags()
        self._pool = self._replanner.replanned(self._pool, memory, flags)
        if flags:
            self._act_on(flags, memory, self._pool)
        return memory

    def _act_on(self, flags: Flags, memory: StepMemory, pool: StepMemoryPool) -> None:
        """Raise the error that the flags of a step report, or leave out or add gradients. All ranks call it."""
        if flags & Flags.OTHER_TURN:
            agreement.raise_other_turn(self._control, memory.turn)
        if flags & Flags.COMPLAINT:
            agreement.raise_first(self._control, memory.complaint)
        if flags & Flags.PARAMETERS_DIFFER and self._sync_check is not None:
            self._sync_check.raise_difference(self._control)
        if flags & Flags.MISSING:
            self._agree_on_missing(memory)
        if flags & Flags.NEW_GRADIENT:
            self._add_new(pool, memory)

    def _agree_on_missing(self, memory: StepMemory) -> None:
        """Leave out the gradients that no rank has passed in a step, whose reductions have ended. All ranks call it."""
        zeros = self._settings.missing == "zero"
        names, passed = memory.layout.gradients, memory.received
        memory.leave_out(agreement.agree_on_missing(self._control, names, passed, zeros=zeros))

    def _add_new(self, pool: StepMemoryPool, memory: StepMemory) -> None:
        """Average the new gradients of a step, and give them a place in the layout of later steps."""
        op, compression, zeros = self._settings.op, self._settings.compression, self._settings.missing == "zero"
        added = average_new(self._control, memory, op, compression, self._timeout_s, zeros=zeros)
        gradients = [*pool.layout.gradients.values(), *added]
        self._pool = pool.with_layout(gradients, self._replanner.bucket_nbytes)
        self._replanner.start_again(self._step)


def _sync_check(world: Communicator, parameters: Named | None, every: int) -> SyncCheck | None:
    if parameters is None or every == 0:
        return None
    check = SyncCheck(parameters if isinstance(parameters, Mapping) else dict(pairs_of(parameters)), every)
    return check if world.size > 1 else None


def _write(memory: StepMemory, reduced: StepMemory | None) -> dict[str, Any]:
    """Write results into the arrays that the program passed in the step of `memory`; return these arrays by name.

    Without results, the arrays get zeros, and the returned dict is empty.
    """
    if reduced is None:
        memory.write_zeros()
        memory.deliver()
        return {}
    written = {name: memory.write_back(name, array) for name, array in reduced.shaped.items()}
    memory.deliver()
    return reduced.present(written)

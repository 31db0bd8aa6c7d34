"""The gradient engine: `GradientReducer`.

Theory of operation. In the first step, gradients are only taken note of; when it ends, the ranks agree on their names,
shapes and order (`agreement`), and get a layout (`layout`): flat memory for all, cut into buckets in the order in which
the gradients become ready. From then on each gradient is copied to its slot, unless it lies there, and a bucket is
started when all of it is there, behind those before it: all ranks start the same buckets in the same order, whatever
the order in which theirs become ready; with priorities it is another one (`priorities`). `finish` starts what is left
and the flags of the step, waits for the step that is due (`lag`), and hands out its gradients. With the flags travels a
checksum of some parameters, so that ranks that drift apart notice it (`sync_check`).

A step in flight has memory of its own (`memory`), so there is one more `Memory` than steps may be in flight. The layout
changes between two steps, when the ranks have agreed to that in a step that is over: after the sixth step, when the
times tell how large buckets should be (`sizing`) and what goes first, when rank 0 sees another order (`order`), and
when there are new gradients (`additions`).
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unisono import Communicator, UnisonoError, UsageError
from unisono.autograph import unconverted
from unisono.frameworks.arrays import Array, Named, pairs_of, same_bits
from unisono.frameworks.data_parallel.sync_check import SyncCheck
from unisono.frameworks.gradients import agreement, intake, traces
from unisono.frameworks.gradients.additions import average_new
from unisono.frameworks.gradients.agreement import Complaint, Flags
from unisono.frameworks.gradients.bucket_comms import Lanes, Teams, cause, lanes_for
from unisono.frameworks.gradients.bucket_sizing import Pace, pace_of
from unisono.frameworks.gradients.compression import check_compressible
from unisono.frameworks.gradients.lag import Lag, lag_of
from unisono.frameworks.gradients.layout import Gradient
from unisono.frameworks.gradients.memory import Memory
from unisono.frameworks.gradients.pool import Pool
from unisono.frameworks.gradients.priorities import Arriving
from unisono.frameworks.gradients.ready_order import Order
from unisono.frameworks.gradients.replanning import Findings, findings, reordered
from unisono.frameworks.gradients.timeline import Report, Timeline, now, report_of

_FIRST_BUCKET_NBYTES = 1 << 20
_MEASURED_STEPS = 5


class _Settings(NamedTuple):
    """What must be the same on all ranks."""

    bucket_nbytes: int | None
    compression: str | None
    lag: Lag
    op: str
    missing: str
    lanes: int
    priorities: bool
    verify_every: int


@unconverted
class GradientReducer:
    """Averages named gradients over ranks while the next ones are being computed. A context manager.

    Every step, each rank calls ``ready(name, array)`` for each gradient as soon as it has it, in any order, and then
    ``finish()``, which returns the reduced ones. All ranks make and close it and call `finish`, `flush` and the other
    methods that say so alike; its calls have nothing to do with others on `world`.

    What is wrong on one rank is raised by `finish` on all of them, in the same step and with the same text, which names
    the rank and the gradient. The reducer can be used after it; what the gradients of that step hold is undefined.
    After errors of other classes than `UsageError`, `MismatchError` and `NotFiniteError` all communicators have failed.

    Gradients may come later than in the first step, for example when layers are unfrozen. They are averaged in the step
    in which all ranks give them for the first time, and in all later ones.

    Args:
        world: the ranks.
        bucket_nbytes: about how much is reduced at a time; by default, found out in the first steps.
        compression: "float16", "bfloat16" or "int8", in which gradients of wider floats travel, with error feedback;
            None for none.
        lag: how many steps later gradients are applied: `finish` of step t returns those of step t − lag. While that
            rises, nothing is applied in a step, and while it falls, the sum of two steps is; every gradient is once.
        warmup_fraction, cooldown_fraction: parts of `total_steps` in the beginning and in the end that have no lag.
        total_steps: how many steps there will be; only needed for those.
        op: "avg" or "sum".
        missing: "error", if a rank that gave no gradient of some name is an error; "zero", if that counts as zeros.
        check_finite: whether a gradient that is infinite or not a number, on any rank, is a `NotFiniteError`.
        teams: how many lanes carry buckets at the same time, or `Teams` with more to say; by default one for each step
            in flight, and one more over a network or with compression.
        priorities: whether what the next forward needs first goes first, where buckets wait for the link, and `finish`
            returns before all are there: looking up a gradient in what it returns waits for that one. Not with a lag.
        timeline: whether the end of each bucket is noted when it happens, and not when it is waited for.
        timeout_s: of each reduction; by default, the option `timeout_s`.
        parameters: what the gradients change, by name: arrays that must be the same on all ranks whenever `finish` is
            called. Each `finish` compares some of them by a checksum, and all of them in the first steps. A dict may
            get other arrays and more names between steps. By default, nothing is compared.
        verify_every: in how many steps each parameter is compared once; 0 for never.

    Raises:
        UsageError: an argument cannot be used.

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
        _check_arguments(bucket_nbytes, op, missing)
        if priorities and lag:
            raise UsageError("priorities are for gradients of the same step: use them without lag")
        self._lag = lag_of(lag, total_steps, warmup_fraction, cooldown_fraction)
        carried = lanes_for(teams, len(world.hosts), lag, compression)
        self._sync_check = _sync_check(world, parameters, verify_every)
        self._settings = _Settings(
            bucket_nbytes,
            compression,
            self._lag,
            op,
            missing,
            carried.lanes or 1,
            priorities,
            verify_every if self._sync_check else 0,
        )
        self._check_finite = check_finite
        self._notes_ends = timeline
        self._timeout_s = timeout_s
        self._control = world.dup()
        self._lanes = Lanes(world, carried, op, compression, timeout_s)
        self._lock = threading.RLock()  # of what a step changes, for gradients may come from several threads
        self._timeline = Timeline()
        self._step = 0
        self._pending: deque[Memory] = deque()
        self._memory: Memory | None = None
        self._arriving: Arriving | None = None
        self.reset()

    def __enter__(self) -> GradientReducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self, name: str, array: Any) -> None:
        """Take a gradient of this step: an array of numpy, torch or any other library, on the host.

        Its elements must not be changed or read until `finish`, which overwrites them if it can, and returns. `finish`
        finds such changes in the first step, by a checksum, and later where the library counts writes, as torch does.
        It never raises because of what the array is: `finish` does, on all ranks.

        Raises:
            PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
        """
        with self._lock:
            if self._pool is None:
                self._note(name, array)
            else:
                self._take(self._memory or self._current(self._pool), name, array)

    def finish(self) -> Mapping[str, Any]:
        """End the step: wait for the gradients that are due, and return them by name.

        With priorities, wait only until it is known that no rank complains, and return an `Arriving`, which waits for
        each when it is looked up, in the order of need if it is iterated. That must be done before the next step.

        Returns:
            Of each name the array that was given in this step, overwritten, or a new one of numpy where it cannot be
            written or none was given. Empty if nothing is to be applied in this step; the arrays that were given hold
            zeros then.

        Raises:
            MismatchError: a rank has not given a gradient that others have, or another shape or dtype; or the
                `parameters` are no longer the same on all ranks.
            UsageError: a rank has given something else that cannot be reduced, or a name twice, or has changed a
                gradient since.
            NotFiniteError: a gradient is not finite, and `check_finite` was asked for.
            PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
        """
        with self._lock:
            memory = self._learn() if self._pool is None else self._current(self._pool)
            began = now()
            self._end_step(memory)
            self._pending.append(memory)
            try:
                if self._settings.priorities:
                    return self._arrive(memory)
                if self._lag.steps:
                    return _write(memory, self._retire_due())
                return self._hand_out(memory)
            finally:
                memory.step.waits.append((began, now()))
                self._step += 1
                self._memory = None  # the next one is taken when the next step begins

    def slot(self, name: str) -> Array | None:
        """Return the memory from which a gradient of this step is reduced, and in which the result will be.

        A gradient that is computed or copied there before it is given to `ready` is not copied again. It is that of all
        steps until the order or the size of buckets changes. None if there is none: in the first step, and with lag,
        where a gradient of another step is handed out.
        """
        with self._lock:
            if self._pool is None or self._lag.steps or name not in self._pool.layout.gradients:
                return None
            return self._current(self._pool).shaped[name]

    def flush(self) -> list[dict[str, Array]]:
        """End all steps that are in flight; return the gradients of each, the oldest first. Without lag there are none.

        To be called in the end, and before what is trained is saved, by all ranks between two steps. Each is to be
        applied; after it, the lag rises anew. Raises what `finish` does.
        """
        with self._lock:
            self._settle()
            flushed = []
            while self._pending:
                flushed.append({name: array.copy() for name, array in self._retire().shaped.items()})
            return flushed

    def reset(self) -> None:
        """Forget which gradients there are, so that the next step may have others. All ranks call it, between steps.

        Raises:
            UsageError: steps are in flight; `flush` before.
        """
        self._settle()
        if self._pending:
            raise UsageError("steps with the gradients that there were are in flight: flush() before reset()")
        self._noted: dict[str, intake.Noted] = {}
        self._complaint: Complaint | None = None
        self._memory = None
        self._pool: Pool | None = None
        self._order = Order()
        self._bucket_nbytes = self._settings.bucket_nbytes or _FIRST_BUCKET_NBYTES
        self._pace = Pace(1.0, 0.0)  # until it is known, no bucket is taken to wait
        self._measure_next_steps()

    def complain(self, message: str) -> None:
        """Let `finish` raise a `UsageError` on all ranks, with this text, as if a gradient of this rank were wrong."""
        with self._lock:
            complaint = Complaint("UsageError", message)
            if self._pool is None:
                self._complaint = self._complaint or complaint
            else:
                self._current(self._pool).complain(complaint)

    def verify_all(self) -> None:
        """Let the next `finish` compare all `parameters`, for example because the program has set them."""
        if self._sync_check is not None:
            self._sync_check.start_anew()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must give to `load_state_dict` to go on as if it had never ended, as numpy arrays.

        That is the order of the gradients, what compression has left of them, and the steps in flight, which it waits
        for; they remain in flight. All ranks call it, between two steps. Raises what `finish` does.
        """
        with self._lock:
            self._settle()
            in_flight = []
            for memory in self._pending:
                self._wait(memory)
                in_flight.append({name: array.copy() for name, array in memory.shaped.items()})
            return {
                "step": self._step,
                "bucket_nbytes": self._bucket_nbytes,
                "turns": self._pool.turns if self._pool else (),
                "gradients": [tuple(gradient) for gradient in self._pool.layout.gradients.values()]
                if self._pool
                else [],
                "residuals": self._pool.left() if self._pool else {},
                "in_flight": in_flight,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of as many ranks, of which each gives its own. All ranks call it, between two steps.

        Raises:
            UsageError, MismatchError: the states of the ranks do not belong together.
        """
        with self._lock:
            self._settle()
            self._pending.clear()
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
            self._bucket_nbytes, self._measured_steps = state["bucket_nbytes"], range(0)
            self._pool = Pool(self._lanes, gradients, self._bucket_nbytes, state["turns"])
            if self._pool.residuals is not None:
                self._pool.residuals.write(state["residuals"])
            for saved in state["in_flight"]:
                memory = self._pool.take()
                memory.write(saved)
                self._pending.append(memory)

    def report(self) -> Report:
        """Return what the last steps took on this rank."""
        return report_of(self._timeline.ended(), self._lanes.nbytes_sent() / max(1, self._step))

    def trace(self, path: str | Path) -> None:
        """Write the last steps of this rank to a file for chrome://tracing or Perfetto, with its buckets and waits."""
        traced = list(traces.events(self._timeline.ended(), self._control.rank))
        Path(path).write_text(json.dumps({"traceEvents": traced, "displayTimeUnit": "ms"}))

    def draw(self, path: str | Path) -> None:
        """Draw the last three steps of this rank, to a file of a kind that its name says, such as PNG.

        Raises:
            UsageError: matplotlib is not installed, or no step has ended.
        """
        traces.draw(self._timeline.ended(), path)

    def close(self) -> None:
        """Leave; reductions that are in flight end with an error. May be called more than once."""
        self._lanes.close()
        self._control.close()

    def _note(self, name: str, array: Any) -> None:
        """Remember a gradient of the first step."""
        if name in self._noted:
            self._complaint = self._complaint or agreement.given_twice(name)
            return
        try:
            self._noted[name] = intake.note(array, name)
        except UnisonoError as error:
            self._complaint = self._complaint or Complaint("UsageError", error.message)

    def _learn(self) -> Memory:
        """Agree on the gradients, and give the memory of the first step what has been noted."""
        noted, complaint = self._noted, self._complaint
        self._noted, self._complaint = {}, None
        complaint = complaint or next((agreement.changed(name) for name, its in noted.items() if its.changed()), None)
        own = [Gradient(name, its.lent.shape, its.lent.flat.dtype.name) for name, its in noted.items()]
        zeros = self._settings.missing == "zero"
        gradients = agreement.agree(self._control, self._settings, own, complaint, zeros=zeros)
        if self._settings.compression is not None:
            check_compressible(gradients, self._settings.compression)
        self._pool = Pool(self._lanes, gradients, self._bucket_nbytes)
        memory = self._current(self._pool)
        memory.step.begin_s = memory.step.ready_s = now()
        for name, its in noted.items():
            intake.copy(memory, name, its.lent)
            if self._check_finite:
                intake.complain_if_not_finite(memory, name, its.lent.flat)
        return memory

    def _current(self, pool: Pool) -> Memory:
        """Return the memory of the step that is being made."""
        if self._memory is None:
            self._settle()
            self._memory = pool.take()
            step = self._timeline.begin(self._step)
            step.spans = pool.spans()
            self._memory.begin(step)
        return self._memory

    def _tells(self, memory: Memory) -> bool:
        """Return whether a step is the last of those whose times tell how buckets should be."""
        return bool(self._measured_steps) and memory.step.number == self._measured_steps[-1]

    def _learn_anew(self, pool: Pool, memory: Memory) -> None:
        """Adopt the order that rank 0 has seen, or what the times of steps have told it, if there is anything."""
        measured = self._tells(memory)
        if not measured and not memory.told() & Flags.OTHER_ORDER:
            return
        found: Findings = self._control.broadcast_object(
            self._found_out(pool, measured) if self._control.rank == 0 else None
        )
        if not found.names and found[1:] == (self._bucket_nbytes, pool.turns):
            return
        self._bucket_nbytes, self._order = found.bucket_nbytes, Order()
        self._pool = Pool(self._lanes, reordered(pool.layout, found.names), found.bucket_nbytes, found.turns, pool)

    def _found_out(self, pool: Pool, measured: bool) -> Findings:
        """Return what this rank would have all adopt."""
        steps = self._timeline.of(self._measured_steps, pool.layout.buckets) if measured else []
        if steps:
            self._pace = pace_of(steps, pool.layout, self._lanes.predicted_s)
        return findings(
            pool.layout,
            self._order.proposed,
            None if steps and self._settings.bucket_nbytes is None else self._bucket_nbytes,
            self._pace,
            self._lanes.predicted_s,
            priorities=self._settings.priorities,
        )

    def _take(self, memory: Memory, name: str, array: Any) -> None:
        """Copy a gradient to its slot, and start what is complete with it. What is wrong is remembered."""
        moment = now()
        memory.step.begin_s = memory.step.begin_s or moment
        memory.step.ready_s = moment
        takes_new = not self._lag.steps
        if not intake.take(memory, name, array, check_finite=self._check_finite, takes_new=takes_new):
            return
        are_full = [memory.fill(index, moment) for index in memory.buckets_of[name]]
        if any(are_full):
            self._start_full(memory)

    def _start_full(self, memory: Memory) -> None:
        """Start the buckets that are full, as far as it is their turn."""
        while (turn := memory.next()) is not None and memory.lacking[turn] == 0:
            self._start(memory, turn)

    def _start(self, memory: Memory, index: int) -> None:
        """Start a bucket."""
        span = memory.step.spans[index]
        span.start_s = now()
        try:
            work = memory.starts[index]()
        except UnisonoError as error:
            raise self._cause(error) from None
        memory.works[index] = work
        if self._notes_ends or memory.step.number in self._measured_steps:
            work.add_done_callback(lambda _: span.note_end())

    def _end_step(self, memory: Memory) -> None:
        """Start all that has not been, with zeros for what is missing, and the flags."""
        for name in memory.flat.keys() - memory.given.keys():
            memory.flat[name][...] = 0
        if self._settings.missing == "error":
            for name in [name for name in memory.flat if name not in memory.given]:
                memory.complain(agreement.missing(name))
        if self._control.rank == 0 and self._order.see(memory.full, tuple(memory.given)):
            memory.flags[0] |= Flags.OTHER_ORDER
        while (index := memory.next()) is not None:
            self._start(memory, index)
        intake.complain_of_changes(memory)
        self._tell_checksum(memory)
        try:
            memory.telling = self._control.allreduce(
                memory.flags, "bor", out=memory.flags, timeout_s=self._timeout_s, wait=False
            )
        except UnisonoError as error:
            raise self._cause(error) from None

    def _tell_checksum(self, memory: Memory) -> None:
        if self._sync_check is None:
            return
        try:
            memory.tell_checksum(self._sync_check.checksum())
        except UnisonoError as error:
            memory.complain(Complaint("UsageError", error.message))

    def _arrive(self, memory: Memory) -> Arriving:
        """Wait until it is known that no rank has anything to say of the only step in flight; return its gradients.

        Where ranks are to agree on something, all of it is waited for: only `finish` waits for what other ranks call.
        """
        assert memory.telling is not None
        try:
            memory.telling.wait()
        except UnisonoError as error:
            raise self._cause(error) from None
        if memory.told() or self._tells(memory):
            self._retire()
        self._arriving = Arriving(memory, lambda index: self._wait_for(memory, index))
        return self._arriving

    def _settle(self) -> None:
        """End the step whose gradients are arriving, if there is one."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.end()
            while self._pending:  # unless it has been retired
                self._retire()

    def _wait_for(self, memory: Memory, index: int) -> None:
        """Wait for a bucket of the step whose gradients are arriving."""
        with self._lock:
            began, span = now(), memory.step.spans[index]
            try:
                memory.works[index].wait()
            except UnisonoError as error:
                raise self._cause(error) from None
            finally:
                memory.step.waits.append((began, now()))
            span.note_end()

    def _hand_out(self, memory: Memory) -> dict[str, Any]:
        """Return the gradients of the only step in flight, each overwritten while those behind it are on their way."""
        reduced: dict[str, Any] = {}
        waiting = set(memory.works)
        try:
            for name in memory.layout.gradients:
                for index in memory.buckets_of[name]:
                    if index in waiting:
                        waiting.remove(index)
                        memory.wait(index)
                reduced[name] = memory.write_back(name, memory.shaped[name])
        except UnisonoError as error:
            raise self._cause(error) from None
        self._retire()
        for name in memory.names[len(reduced) :]:  # those that were added
            reduced[name] = memory.write_back(name, memory.shaped[name])
        return reduced

    def _retire_due(self) -> Memory | None:
        """Wait for the steps that are due; return one with their gradients, or None if none is."""
        due: Memory | None = None
        while len(self._pending) > self._lag.at(self._step):
            retired = self._retire()
            if due is not None:
                _add(retired, due)
            due = retired
        return due

    def _retire(self) -> Memory:
        """Wait for the oldest step that is in flight; return it.

        Raises:
            UsageError, MismatchError, NotFiniteError: a rank has complained of it, or the parameters of ranks differ.
            PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
        """
        self._wait(self._pending[0])
        memory = self._pending.popleft()
        assert self._pool is not None
        self._pool.give_back(memory)
        self._learn_anew(self._pool, memory)
        told = memory.told()
        if told & Flags.COMPLAINT:
            agreement.raise_first(self._control, memory.complaint)
        if told & Flags.PARAMETERS_DIFFER and self._sync_check is not None:
            self._sync_check.raise_difference(self._control)
        if told & Flags.NEW_GRADIENT:
            self._add_new(memory)
        return memory

    def _add_new(self, memory: Memory) -> None:
        """Average the gradients that ranks have given for the first time, and let later steps have a place for them."""
        assert self._pool is not None
        op, compression, zeros = self._settings.op, self._settings.compression, self._settings.missing == "zero"
        added = average_new(self._control, memory, op, compression, self._timeout_s, zeros=zeros)
        gradients = [*self._pool.layout.gradients.values(), *added]
        self._pool, self._order = Pool(self._lanes, gradients, self._bucket_nbytes, (), self._pool), Order()
        self._measure_next_steps()

    def _measure_next_steps(self) -> None:
        """Let the times of the next steps tell how buckets should be: not of the first, which opens the connections."""
        measures = self._settings.bucket_nbytes is None or self._settings.priorities
        self._measured_steps = range(self._step + 1, self._step + 1 + _MEASURED_STEPS) if measures else range(0)

    def _wait(self, memory: Memory) -> None:
        """Wait for a step."""
        try:
            for index in memory.works:  # one that was loaded has none
                memory.wait(index)
            if memory.telling is not None:
                memory.telling.wait()
        except UnisonoError as error:
            raise self._cause(error) from None

    def _cause(self, error: UnisonoError) -> UnisonoError:
        """Return the error that a reduction in flight has failed with, if `error` only tells that one has."""
        memories = [*self._pending, *([self._memory] if self._memory else [])]
        return cause(error, [work for memory in memories for work in memory.started()])


def _check_arguments(bucket_nbytes: int | None, op: str, missing: str) -> None:
    if bucket_nbytes is not None and (not isinstance(bucket_nbytes, int) or bucket_nbytes < 1):
        raise UsageError(f"bucket_nbytes must be a positive number of bytes, not {bucket_nbytes!r}")
    choices = (
        ("op", op, ("avg", "sum")),
        ("missing", missing, ("error", "zero")),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise UsageError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}")


def _sync_check(world: Communicator, parameters: Named | None, every: int) -> SyncCheck | None:
    if parameters is None or every == 0:
        return None
    check = SyncCheck(parameters if isinstance(parameters, Mapping) else dict(pairs_of(parameters)), every)
    return check if world.size > 1 else None


@same_bits
def _add(total: Memory, other: Memory) -> None:
    for name, slot in total.flat.items():
        np.add(slot, other.flat[name], out=slot)


def _write(memory: Memory, reduced: Memory | None) -> dict[str, Any]:
    """Overwrite what was given in the step of `memory` by what was reduced, and return that."""
    if reduced is None:
        for theirs in memory.given.values():
            theirs.with_elements(np.zeros_like(theirs.flat))
        return {}
    return {name: memory.write_back(name, array) for name, array in reduced.shaped.items()}

"""The Communicator: collective calls on numpy arrays, checked, chosen once for each kind of call, and run.

Theory of operation. A call is looked up by what all ranks must agree on; the first of its kind is planned by the
tuner's choice and compiled by the executor, and later ones go straight to it. Ranks need not agree before they
communicate: every message carries a digest of the call, so a disagreement is found by whoever receives it.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, cast

from unisono.algorithms.binding import Shape
from unisono.algorithms.registry import algorithms_of, find
from unisono.collectives import arrays
from unisono.collectives.arrays import Operand
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.operations import Op, operation
from unisono.options import Options
from unisono.transports.base import AnyArray, Call, Executor, Signature, Traffic
from unisono.tuning.choice import Explanation, Question, choose, explain
from unisono.tuning.model import shown

_log = logging.getLogger("unisono")

_Array = TypeVar("_Array", bound=AnyArray)

_MOST_TAG = (1 << 31) - 1
# Kinds of calls that are remembered; a program whose shapes never repeat must not fill the memory with them.
_MOST_CALLS = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of a communicator are.

    Attributes:
        hosts: the ranks of each host, in the order of their lowest ranks.
        link: the slowest kind of link between ranks: "shm", "tcp" or "local".
    """

    hosts: tuple[tuple[int, ...], ...]
    link: str


class Communicator:
    """The ranks of a job, as seen by one of them. Made by `unisono.init` and `unisono.launch`; a context manager.

    All ranks must make the same calls in the same order. An error poisons the communicator on every rank: it is raised
    as what it is once, and as `AbortedError` by every later call.
    """

    def __init__(
        self, executor: Executor, place: Place, options: Options, on_close: Callable[[], None] = lambda: None
    ) -> None:
        self.rank = executor.rank
        self.size = executor.size
        self.hosts = place.hosts
        self.local_rank = next(host.index(self.rank) for host in place.hosts if self.rank in host)
        self._executor = executor
        self._place = place
        self._options = options
        self._on_close = on_close
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._refusal: str | None = None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<unisono.Communicator rank {self.rank} of {self.size}>"

    def allreduce(
        self,
        x: _Array,
        op: str | Op = "sum",
        *,
        out: _Array | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> _Array:
        """Combine the arrays of all ranks, element by element; every rank gets the result.

        Args:
            x: a numpy array of any shape, with the same shape, dtype and memory order on every rank. It is not changed.
            op: "sum", "prod", "min", "max" or "avg". float16 and bfloat16 are computed in float32 and rounded once for
                each combination; integers wrap; averages of integers truncate towards zero; NaN propagates.
            out: where the result goes: contiguous, of the shape, dtype and order of `x`. It may be `x` itself.
            algorithm: the algorithm to use, by name, on all ranks; by default the tuner chooses.
            timeout_s: seconds until the call fails; by default the option `timeout_s`.

        Returns:
            `out`, or a new array of the shape and dtype of `x`. All ranks get the same bits.

        Raises:
            UsageError: the call is wrong; nothing has been sent.
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: the call failed, on every rank; the
                contents of `out` are undefined.
        """
        source = arrays.source(x)
        result, target = self._result(x, source, out)
        call = self._call("allreduce", source, op=op, algorithm=algorithm)
        self._run(call, source.flat, target.flat, timeout_s)
        return result

    def broadcast(
        self,
        x: _Array,
        root: int = 0,
        *,
        out: _Array | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
    ) -> _Array:
        """Copy the array of rank `root` to every rank.

        Args:
            x: a numpy array, with the same shape, dtype and memory order on every rank; only the root's elements count.
            root: the rank whose array is copied.
            out: where the result goes, as in `allreduce`. ``out=x`` overwrites `x` on all ranks but the root.
            algorithm: as in `allreduce`.
            timeout_s: as in `allreduce`.

        Returns:
            `out`, or a new array.

        Raises:
            The same as `allreduce`.
        """
        root = self._rank_of(root, "root")
        source = arrays.source(x)
        result, target = self._result(x, source, out)
        call = self._call("broadcast", source, root=root, algorithm=algorithm)
        self._run(call, source.flat if self.rank == root else None, target.flat, timeout_s)
        return result

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until all ranks have called it. Raises the same as `allreduce`."""
        self._run(self._call("barrier", None), None, None, timeout_s)

    def send(self, x: AnyArray, dest: int, tag: int = 0, *, timeout_s: float | None = None) -> None:
        """Send an array to rank `dest`, which must receive it with the same tag, dtype and number of elements.

        Returns when `x` may be changed: a small array has been buffered then, a large one mostly received.

        Args:
            x: a numpy array.
            dest: another rank.
            tag: 0 to 2^31 - 1. Messages of one tag arrive in the order in which they were sent.
            timeout_s: seconds until the call fails; by default the option `timeout_s`.

        Raises:
            UsageError: the call is wrong; nothing has been sent.
            PeerLostError, CollectiveTimeoutError, AbortedError, MismatchError: the call failed.
        """
        dest, tag = self._peer_of(dest, "dest"), _integer(tag, "tag", 0, _MOST_TAG)
        source = arrays.source(x)
        limit_s = self._limit_s(timeout_s)
        self._executor.send(source.flat, source.dtype, dest, tag).wait(limit_s)

    def recv(self, out: _Array, source: int, tag: int = 0, *, timeout_s: float | None = None) -> _Array:
        """Receive the next message with this tag from rank `source` into `out`, and return `out`.

        Args:
            out: a writable, contiguous numpy array of the dtype and number of elements that were sent.
            source: another rank.
            tag: as in `send`.
            timeout_s: as in `send`.

        Raises:
            MismatchError: another dtype or number of elements was sent; also raised on the other ranks.
            UsageError, PeerLostError, CollectiveTimeoutError, AbortedError: as in `send`.
        """
        source, tag = self._peer_of(source, "source"), _integer(tag, "tag", 0, _MOST_TAG)
        target = arrays.target(out)
        limit_s = self._limit_s(timeout_s)
        self._executor.recv(target.flat, target.dtype, source, tag).wait(limit_s)
        return out

    def explain(self, collective: str, nbytes: int, dtype: str = "float32", op: str | Op = "sum") -> Explanation:
        """Return which algorithm a call would use, and why; print it for a table. Nothing is communicated.

        Raises:
            UsageError: `nbytes` or `dtype` cannot be.
            NoAlgorithmError: no algorithm carries out such a call.
        """
        if nbytes < 0 or dtype not in DTYPES:
            raise UsageError(f"nbytes must not be negative, and dtype one of {', '.join(DTYPES)}")
        return explain(self._question(collective, nbytes, operation(op), None))

    def stats(self) -> Mapping[int, Traffic]:
        """Return what has been sent to and received from each peer so far, and by which transport."""
        return self._executor.traffic()

    def abort(self, reason: str) -> None:
        """Make every call in progress, and every later one, raise `AbortedError` with `reason`, on all ranks."""
        self._executor.abort(reason)

    def close(self) -> None:
        """Leave the communicator. Calls of other ranks that still need this one raise `PeerLostError`.

        It may be called more than once; any other call after it raises `UsageError`.
        """
        if self._refusal is None:
            self._refusal = "this communicator is closed: call unisono.init() for a new one"
            self._executor.close()
            self._on_close()

    def refuse(self, why: str) -> None:
        """Make every later call raise `UsageError(why)`, without telling anyone; for a forked child."""
        self._refusal = why

    def _result(self, x: _Array, source: Operand, out: _Array | None) -> tuple[_Array, Operand]:
        if out is None:
            return cast("tuple[_Array, Operand]", arrays.empty_like(source))
        if out is x and x.flags.writeable and x.flags.forc:
            return x, source
        target = arrays.target(out, source)
        arrays.check_overlap(source, target)
        return out, target

    def _call(
        self,
        collective: str,
        source: Operand | None,
        *,
        op: str | Op | None = None,
        root: int | None = None,
        algorithm: str | None = None,
    ) -> Call:
        array = None if source is None else (source.dtype.code, source.shape, source.order)
        key = (collective, array, op, root, algorithm)
        try:
            found = self._calls.get(key)
        except TypeError:
            raise UsageError(f"op and algorithm must be names; got {op!r} and {algorithm!r}") from None
        if found is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            reduction = None if op is None else operation(op)
            found = self._calls[key] = self._prepare(collective, source, reduction, root, algorithm)
        return found

    def _prepare(
        self, collective: str, source: Operand | None, op: Op | None, root: int | None, forced: str | None
    ) -> Call:
        dtype, shape, order = (source.dtype, source.shape, source.order) if source else (None, None, "C")
        elements = 1
        for extent in shape or ():
            elements *= extent
        if op is not None and dtype is not None:
            op.check(dtype)
        nbytes = elements * (dtype.itemsize if dtype else 1)
        choice = choose(self._question(collective, nbytes, op, forced))
        plan = find(collective, choice.algorithm).build(self.size, self.rank, root or 0)
        op_name = None if op is None else op.name
        dtype_name = None if dtype is None else dtype.name
        signature = Signature(collective, dtype_name, shape, order, op_name, root, choice.algorithm, choice.segments)
        _log.info(
            "%s: %s over %d segment(s), by tier %s, %s",
            *(signature, choice.algorithm, choice.segments, choice.tier, shown(choice.predicted_s)),
        )
        return Call(signature, plan, Shape((elements, elements), {}), dtype, op, choice.segments)

    def _question(self, collective: str, nbytes: int, op: Op | None, forced: str | None) -> Question:
        # The option forces an algorithm only for collectives that have it; the argument of a call must be right.
        algorithm = forced or self._options.algorithm
        if forced is None and algorithm not in algorithms_of(collective):
            algorithm = "auto"
        return Question(
            collective=collective,
            nbytes=nbytes,
            size=self.size,
            link=self._place.link,
            commutative=op is None or op.commutative,
            algorithm=algorithm,
            segment_nbytes=self._options.segment_nbytes,
        )

    def _run(self, call: Call, source: AnyArray | None, target: AnyArray | None, timeout_s: float | None) -> None:
        if self._refusal is not None:
            raise UsageError(self._refusal)
        limit_s = self._limit_s(timeout_s)
        if not _log.isEnabledFor(logging.DEBUG):
            self._executor.run(call, source, target, limit_s)
            return
        began = time.perf_counter()
        self._executor.run(call, source, target, limit_s)
        _log.debug("%s took %.1f us", call.signature, (time.perf_counter() - began) * 1e6)

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._options.timeout_s if timeout_s is None else _positive(timeout_s)

    def _rank_of(self, rank: int, name: str) -> int:
        return _integer(rank, name, 0, self.size - 1)

    def _peer_of(self, peer: int, name: str) -> int:
        if self._refusal is not None:
            raise UsageError(self._refusal)
        peer = self._rank_of(peer, name)
        if peer == self.rank:
            raise UsageError(f"{name} is this rank itself ({peer}): messages go between two ranks")
        return peer


def _integer(value: int, name: str, least: int, most: int) -> int:
    try:
        found = operator.index(value)
    except TypeError:
        found = least - 1
    if isinstance(value, bool) or not least <= found <= most:
        raise UsageError(f"{name} must be an integer, {least} to {most}, not {value!r}")
    return found


def _positive(timeout_s: float) -> float:
    if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise UsageError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
    return timeout_s

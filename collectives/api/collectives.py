"""The collectives in which all ranks have equal shares. Each method asks the executor's cache first: see `caller`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, overload

from unisono.collectives.arrays import operands
from unisono.collectives.calls.dispatch import Dispatcher, cached_method
from unisono.collectives.calls.planning import algorithm_request
from unisono.collectives.calls.work import Work
from unisono.operations import Op

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    from unisono.collectives.arrays.typing import Arrays

if TYPE_CHECKING:

    class CallOptions(TypedDict, Generic[Arrays], total=False):
        """What every collective takes, whether or not it waits."""

        out: Arrays | None
        algorithm: str | None
        timeout_s: float | None

    class GivenToReduce(CallOptions[Arrays], total=False):
        """What every collective that reduces takes, whether or not it waits."""

        reproducible: bool
        accumulate: str | None


class Collectives(Dispatcher):
    """Collective calls on arrays of numpy and of any other library, as `kinds` has them.

    All of them take:

    - `x`: an array of any shape and memory order, 0-dimensional or empty too, with the same shape and dtype on every
      rank. It is not changed. What is called a row is an element of the first axis. A list or a tuple of arrays of any
      shapes and dtypes is as good, with an `out` likewise: they are sent together, and the result is one of results.
    - `out`: where the result goes: writable, contiguous (in C order, but where the result is like `x`: in the order of
      `x`), and of the shape and dtype of the result. By default, a new array of the kind of `x`. It may be in the
      memory of `x` where the method says so; no other memory may be in both.
    - `op`: "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor", "minloc", "maxloc",
      ``Op.premul_sum(factor)``, or ``Op.from_function(fn)``, which does what the function does. Floats of 8 and 16 bits
      are computed in float32 and rounded once for each combination; integers wrap, also in the sum that an average
      divides, and its division truncates towards zero; NaN propagates. Logical operations give 0 or 1. "minloc" and
      "maxloc" take pairs: value + 1j * index.
    - `root`: the rank that gives or gets something that the others do not; the same on every rank.
    - `algorithm`: the algorithm to use, by name, on all ranks; by default the tuner chooses.
    - `reproducible`: with True, the bits of the result depend on the contributions and their ranks alone: not on
      shapes, algorithms, transports, hosts or time. Ranks are combined by a balanced tree; in a scan, one after the
      other.
    - `accumulate`: with "float32", float16, bfloat16 and the 8-bit floats are summed up in float32 and rounded once.
      Any other dtype must be the one that is named here.
    - `timeout_s`: seconds until the call fails; by default the option `timeout_s`.
    - `wait`: with False, the call goes on by itself, and a `Work` is returned at once, whose `wait` returns the result.
      Until it has ended, `x` must not be changed nor `out` be read. Calls are carried out one after the other, in the
      order in which they are made, with and without waiting.

    And raise:

    - `UsageError`: the call is wrong; nothing has been sent.
    - `TransportUnavailableError`: an array is on a device that cannot be used here; nothing has been sent.
    - `NoAlgorithmError`: there is no algorithm of this name, or it cannot be used here, as none can with a function;
      nothing has been sent.
    - `MismatchError`, `PeerLostError`, `CollectiveTimeoutError`, `AbortedError`: the call failed, on every rank; the
      contents of `out` are undefined.
    """

    @overload
    def allreduce(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[False], **given: Unpack[GivenToReduce[Arrays]]
    ) -> Work[Arrays]: ...

    @overload
    def allreduce(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[True] = ..., **given: Unpack[GivenToReduce[Arrays]]
    ) -> Arrays: ...

    @cached_method
    def allreduce(
        self,
        x: Arrays,
        op: str | Op = "sum",
        *,
        out: Arrays | None = None,
        algorithm: str | None = None,
        reproducible: bool = False,
        accumulate: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Arrays | Work[Arrays]:
        """Combine the arrays of all ranks, element by element; every rank gets the result, and the same bits.

        In place: ``out=x``.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.allreduce(np.array([1, world.rank])).tolist(), 3)
        [[3, 3], [3, 3], [3, 3]]
        """
        wanted = (
            algorithm_request(algorithm, reproducible, accumulate)
            if reproducible or accumulate is not None
            else algorithm
        )
        target: Arrays = operands.target_like(x) if out is None else out
        if not wait:
            return self._start("allreduce", x, out, target, op=op, algorithm=wanted, timeout_s=timeout_s)
        if not self._cache.run("allreduce", x, target, op, None, wanted, timeout_s):
            target = self._dispatch("allreduce", x, out, target, op=op, algorithm=wanted, timeout_s=timeout_s)
        return target

    @overload
    def reduce(
        self,
        x: Arrays,
        op: str | Op = ...,
        root: int = ...,
        *,
        wait: Literal[False],
        **given: Unpack[GivenToReduce[Arrays]],
    ) -> Work[Arrays | None]: ...

    @overload
    def reduce(
        self,
        x: Arrays,
        op: str | Op = ...,
        root: int = ...,
        *,
        wait: Literal[True] = ...,
        **given: Unpack[GivenToReduce[Arrays]],
    ) -> Arrays | None: ...

    def reduce(
        self,
        x: Arrays,
        op: str | Op = "sum",
        root: int = 0,
        *,
        out: Arrays | None = None,
        algorithm: str | None = None,
        reproducible: bool = False,
        accumulate: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Arrays | Work[Arrays | None] | None:
        """Combine the arrays of all ranks, element by element; the root gets the result, and the others None.

        Only the root's `out` matters; that of other ranks is left as it is. In place: ``out=x``.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.reduce(np.array([2.0, world.rank]), "prod", root=1), 2)
        [None, array([4., 0.])]
        """
        wanted = (
            algorithm_request(algorithm, reproducible, accumulate)
            if reproducible or accumulate is not None
            else algorithm
        )
        target: Arrays | None = operands.target_like(x) if out is None and self.rank == root else out
        if not wait:
            return self._start("reduce", x, out, target, op=op, root=root, algorithm=wanted, timeout_s=timeout_s)
        if not self._cache.run("reduce", x, target, op, root, wanted, timeout_s):
            result: Arrays | None = self._dispatch(
                "reduce", x, out, target, op=op, root=root, algorithm=wanted, timeout_s=timeout_s
            )
            return result
        return target if self.rank == root else None

    @overload
    def broadcast(
        self, x: Arrays, root: int = ..., *, wait: Literal[False], **given: Unpack[CallOptions[Arrays]]
    ) -> Work[Arrays]: ...

    @overload
    def broadcast(
        self, x: Arrays, root: int = ..., *, wait: Literal[True] = ..., **given: Unpack[CallOptions[Arrays]]
    ) -> Arrays: ...

    @cached_method
    def broadcast(
        self,
        x: Arrays,
        root: int = 0,
        *,
        out: Arrays | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Arrays | Work[Arrays]:
        """Copy the array of the root to every rank.

        Only the elements of the root's `x` matter. ``out=x`` overwrites `x` on all ranks but the root.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.broadcast(np.full(2, world.rank), root=1).tolist(), 3)
        [[1, 1], [1, 1], [1, 1]]
        """
        target: Arrays = operands.target_like(x) if out is None else out
        if not wait:
            return self._start("broadcast", x, out, target, root=root, algorithm=algorithm, timeout_s=timeout_s)
        if not self._cache.run("broadcast", x, target, None, root, algorithm, timeout_s):
            target = self._dispatch("broadcast", x, out, target, root=root, algorithm=algorithm, timeout_s=timeout_s)
        return target

    @overload
    def allgather(self, x: Arrays, *, wait: Literal[False], **given: Unpack[CallOptions[Arrays]]) -> Work[Arrays]: ...

    @overload
    def allgather(self, x: Arrays, *, wait: Literal[True] = ..., **given: Unpack[CallOptions[Arrays]]) -> Arrays: ...

    @cached_method
    def allgather(
        self,
        x: Arrays,
        *,
        out: Arrays | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Arrays | Work[Arrays]:
        r"""Put the arrays of all ranks, in their order, one after the other; every rank gets the result.

        Where `x` has the shape (k, …), the result has (size·k, …); where it is 0-dimensional, (size,). An `out` of the
        shape (size, \*x.shape) is as good. In place: `x` is this rank's part of `out`.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.allgather(np.array([world.rank, 7])).tolist(), 2)
        [[0, 7, 1, 7], [0, 7, 1, 7]]
        """
        target: Arrays = operands.target_of_all(x, self.size) if out is None else out
        if not wait:
            return self._start("allgather", x, out, target, algorithm=algorithm, timeout_s=timeout_s)
        if not self._cache.run("allgather", x, target, None, None, algorithm, timeout_s):
            target = self._dispatch("allgather", x, out, target, algorithm=algorithm, timeout_s=timeout_s)
        return target

    @overload
    def reduce_scatter(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[False], **given: Unpack[GivenToReduce[Arrays]]
    ) -> Work[Arrays]: ...

    @overload
    def reduce_scatter(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[True] = ..., **given: Unpack[GivenToReduce[Arrays]]
    ) -> Arrays: ...

    @cached_method
    def reduce_scatter(
        self,
        x: Arrays,
        op: str | Op = "sum",
        *,
        out: Arrays | None = None,
        algorithm: str | None = None,
        reproducible: bool = False,
        accumulate: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Arrays | Work[Arrays]:
        """Combine the arrays of all ranks, element by element; each rank gets an equal part of the rows of the result.

        Where `x` has the shape (size·k, …), the result has (k, …); with one row for each rank, an `out` of the shape of
        a row is as good. In place: `out` is this rank's part of `x`, the rest of which is then undefined.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.reduce_scatter(np.array([1, 2, 3, world.rank])).tolist(), 2)
        [[2, 4], [6, 1]]
        """
        wanted = (
            algorithm_request(algorithm, reproducible, accumulate)
            if reproducible or accumulate is not None
            else algorithm
        )
        target: Arrays = operands.target_of_share(x, self.size) if out is None else out
        if not wait:
            return self._start("reduce_scatter", x, out, target, op=op, algorithm=wanted, timeout_s=timeout_s)
        if not self._cache.run("reduce_scatter", x, target, op, None, wanted, timeout_s):
            target = self._dispatch("reduce_scatter", x, out, target, op=op, algorithm=wanted, timeout_s=timeout_s)
        return target

    @overload
    def gather(
        self, x: Arrays, root: int = ..., *, wait: Literal[False], **given: Unpack[CallOptions[Arrays]]
    ) -> Work[Arrays | None]: ...

    @overload
    def gather(
        self, x: Arrays, root: int = ..., *, wait: Literal[True] = ..., **given: Unpack[CallOptions[Arrays]]
    ) -> Arrays | None: ...

    def gather(
        self,
        x: Arrays,
        root: int = 0,
        *,
        out: Arrays | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Arrays | Work[Arrays | None] | None:
        """Put the arrays of all ranks, in their order, one after the other; the root gets that, and the others None.

        The shapes are those of `allgather`. Only the root's `out` matters; that of other ranks is left as it is. In
        place: the root's `x` is its part of its `out`.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.gather(np.array([[world.rank, 5]]), root=1), 2)
        [None, array([[0, 5],
               [1, 5]])]
        """
        target: Arrays | None = operands.target_of_all(x, self.size) if out is None and self.rank == root else out
        if not wait:
            return self._start("gather", x, out, target, root=root, algorithm=algorithm, timeout_s=timeout_s)
        if not self._cache.run("gather", x, target, None, root, algorithm, timeout_s):
            result: Arrays | None = self._dispatch(
                "gather", x, out, target, root=root, algorithm=algorithm, timeout_s=timeout_s
            )
            return result
        return target if self.rank == root else None

    @overload
    def scatter(
        self, x: Arrays | None = ..., root: int = ..., *, wait: Literal[False], **given: Unpack[CallOptions[Arrays]]
    ) -> Work[Arrays]: ...

    @overload
    def scatter(
        self,
        x: Arrays | None = ...,
        root: int = ...,
        *,
        wait: Literal[True] = ...,
        **given: Unpack[CallOptions[Arrays]],
    ) -> Arrays: ...

    @cached_method
    def scatter(
        self,
        x: Arrays | None = None,
        root: int = 0,
        *,
        out: Arrays | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Arrays | Work[Arrays]:
        """Give each rank an equal part of the rows of the root's array.

        Where the root's `x` has the shape (size·k, …), the result has (k, …); with one row for each rank, an `out` of
        the shape of a row is as good. Other ranks must give an `out`, which says what they get, and their `x` does not
        matter. In place: the root's `out` is its part of its `x`.

        >>> import numpy as np, unisono as un
        >>> def scattered(world):
        ...     x = np.arange(4.0) if world.rank == 0 else None
        ...     return world.scatter(x, out=np.zeros(2)).tolist()
        >>> un.launch(scattered, 2)
        [[0.0, 1.0], [2.0, 3.0]]
        """
        x = x if self.rank == root else None
        target: Arrays = operands.target_of_share(x, self.size) if out is None else out
        if not wait:
            return self._start("scatter", x, out, target, root=root, algorithm=algorithm, timeout_s=timeout_s)
        if not self._cache.run("scatter", x, target, None, root, algorithm, timeout_s):
            target = self._dispatch("scatter", x, out, target, root=root, algorithm=algorithm, timeout_s=timeout_s)
        return target

    @overload
    def alltoall(self, x: Arrays, *, wait: Literal[False], **given: Unpack[CallOptions[Arrays]]) -> Work[Arrays]: ...

    @overload
    def alltoall(self, x: Arrays, *, wait: Literal[True] = ..., **given: Unpack[CallOptions[Arrays]]) -> Arrays: ...

    @cached_method
    def alltoall(
        self,
        x: Arrays,
        *,
        out: Arrays | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Arrays | Work[Arrays]:
        """Give each rank an equal part of the rows of every rank's array: part r of `x` goes to rank r.

        The result has the shape of `x`, whose rows are divisible by the number of ranks; its part r is from rank r. It
        cannot be in the memory of `x`.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.alltoall(np.array([10, 20]) + world.rank).tolist(), 2)
        [[10, 11], [20, 21]]
        """
        target: Arrays = operands.target_of_all(x, 1) if out is None else out
        if not wait:
            return self._start("alltoall", x, out, target, algorithm=algorithm, timeout_s=timeout_s)
        if not self._cache.run("alltoall", x, target, None, None, algorithm, timeout_s):
            target = self._dispatch("alltoall", x, out, target, algorithm=algorithm, timeout_s=timeout_s)
        return target

    @overload
    def scan(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[False], **given: Unpack[GivenToReduce[Arrays]]
    ) -> Work[Arrays]: ...

    @overload
    def scan(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[True] = ..., **given: Unpack[GivenToReduce[Arrays]]
    ) -> Arrays: ...

    @cached_method
    def scan(
        self,
        x: Arrays,
        op: str | Op = "sum",
        *,
        out: Arrays | None = None,
        algorithm: str | None = None,
        reproducible: bool = False,
        accumulate: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Arrays | Work[Arrays]:
        """Combine the arrays of the ranks up to this one and its own, element by element.

        The operation "avg" is not defined here. In place: ``out=x``.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: int(world.scan(np.array(world.rank + 1))), 4)
        [1, 3, 6, 10]
        """
        wanted = (
            algorithm_request(algorithm, reproducible, accumulate)
            if reproducible or accumulate is not None
            else algorithm
        )
        target: Arrays = operands.target_like(x) if out is None else out
        if not wait:
            return self._start("scan", x, out, target, op=op, algorithm=wanted, timeout_s=timeout_s)
        if not self._cache.run("scan", x, target, op, None, wanted, timeout_s):
            target = self._dispatch("scan", x, out, target, op=op, algorithm=wanted, timeout_s=timeout_s)
        return target

    @overload
    def exscan(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[False], **given: Unpack[GivenToReduce[Arrays]]
    ) -> Work[Arrays]: ...

    @overload
    def exscan(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[True] = ..., **given: Unpack[GivenToReduce[Arrays]]
    ) -> Arrays: ...

    @cached_method
    def exscan(
        self,
        x: Arrays,
        op: str | Op = "sum",
        *,
        out: Arrays | None = None,
        algorithm: str | None = None,
        reproducible: bool = False,
        accumulate: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Arrays | Work[Arrays]:
        """Combine the arrays of the ranks before this one, element by element.

        Rank 0 has none before it: its `out` is left as it is, and a new array is of zeros. The operation "avg" is not
        defined here. In place: ``out=x``.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: int(world.exscan(np.array(world.rank + 1))), 4)
        [0, 1, 3, 6]
        """
        wanted = (
            algorithm_request(algorithm, reproducible, accumulate)
            if reproducible or accumulate is not None
            else algorithm
        )
        target: Arrays = operands.zeros_like(x) if out is None else out
        if not wait:
            return self._start("exscan", x, out, target, op=op, algorithm=wanted, timeout_s=timeout_s)
        if not self._cache.run("exscan", x, target, op, None, wanted, timeout_s):
            target = self._dispatch("exscan", x, out, target, op=op, algorithm=wanted, timeout_s=timeout_s)
        return target

    @overload
    def barrier(
        self, *, wait: Literal[False], algorithm: str | None = ..., timeout_s: float | None = ...
    ) -> Work[None]: ...

    @overload
    def barrier(
        self, *, wait: Literal[True] = ..., algorithm: str | None = ..., timeout_s: float | None = ...
    ) -> None: ...

    @cached_method
    def barrier(
        self, *, algorithm: str | None = None, timeout_s: float | None = None, wait: bool = True
    ) -> Work[None] | None:
        """Wait until all ranks have called it."""
        if not wait:
            return self._start("barrier", None, None, None, algorithm=algorithm, timeout_s=timeout_s)
        ended: Work[None] | None = None
        if not self._cache.run("barrier", None, None, None, None, algorithm, timeout_s):
            ended = self._dispatch("barrier", None, None, None, algorithm=algorithm, timeout_s=timeout_s)
        return ended

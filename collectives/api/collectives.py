"""The collectives with equal shares, such as `allreduce` and `allgather`.

Used by: `Communicator`, which inherits from `Collectives`. Each method asks the call cache first; see
`calls/dispatch.py`. The overloads tell type checkers that ``wait=False`` returns a `Work`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, overload

from unisono.collectives.arrays import operands
from unisono.collectives.calls.cached_methods import cached_method
from unisono.collectives.calls.dispatch import Dispatcher
from unisono.collectives.calls.planning import algorithm_request
from unisono.collectives.calls.work import Work
from unisono.operations import Op

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    from unisono.collectives.arrays.typing import Arrays

if TYPE_CHECKING:

    class CallOptions(TypedDict, Generic[Arrays], total=False):
        """The options of every collective, apart from `wait`."""

        out: Arrays | None
        algorithm: str | None
        timeout_s: float | None

    class ReduceOptions(CallOptions[Arrays], total=False):
        """The options of every collective that reduces, apart from `wait`."""

        reproducible: bool
        accumulate: str | None


class Collectives(Dispatcher):
    """The collectives with equal shares, on arrays of numpy and of every library in `arrays/adapters.py`.

    All of them take these arguments:

    - `x`: an array of any shape and memory order, which may be 0-dimensional or empty. All ranks pass the same shape
      and dtype. The call does not change `x`. A *row* is an element of the first axis. `x` may also be a list or a
      tuple of arrays of any shapes and dtypes, with an `out` of the same form. They travel as one call, and the result
      is a list or tuple of results in the same order.
    - `out`: the array that receives the result, and is returned. It must be writable and contiguous, and have the shape
      and dtype of the result. It is in C order, or in the order of `x` if the result has the shape of `x`. By default
      the call makes a new array of the library of `x`. `out` may overlap `x` only as the method says under "In place".
    - `op`: "sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor", "minloc", "maxloc",
      ``Op.premul_sum(factor)``, or ``Op.from_function(fn)``, which combines arrays by a Python function. Floats of 8
      and 16 bits are computed in float32, and rounded once for each combination. Integers wrap around, also in the sum
      of an average, whose division truncates towards zero. NaN propagates. Logical operations return 0 or 1. "minloc"
      and "maxloc" take complex numbers as pairs: value + 1j * index.
    - `root`: the rank that has the input or gets the result; the same on every rank.
    - `algorithm`: the name of the algorithm to use, the same on all ranks; by default the tuner chooses.
    - `reproducible`: True makes the bits of the result depend only on the contributions and their ranks, and not on
      shapes, algorithms, transports, hosts or time. Contributions are combined by a balanced tree, and in a scan in the
      order of ranks.
    - `accumulate`: "float32" sums float16, bfloat16 and 8-bit floats in float32, and rounds once at the end. For other
      dtypes the only possible value is the dtype itself.
    - `timeout_s`: seconds until the call fails; by default the option `timeout_s`.
    - `wait`: False starts the call and returns a `Work` at once; `Work.wait` returns the result. Do not change `x` or
      read `out` before the call has ended. A communicator runs its calls one after the other, in the order in which
      they were made, with or without waiting.

    All of them raise these errors:

    - `UsageError`: the call is wrong; nothing has been sent.
    - `TransportUnavailableError`: an array is on a device that cannot be used here; nothing has been sent.
    - `NoAlgorithmError`: there is no algorithm of this name, or it cannot carry out this call. No algorithm can be
      named for an `op` by a Python function. Nothing has been sent.
    - `MismatchError`, `PeerLostError`, `CollectiveTimeoutError`, `AbortedError`: the call failed, on every rank; the
      contents of `out` are undefined.
    """

    @overload
    def allreduce(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[False], **options: Unpack[ReduceOptions[Arrays]]
    ) -> Work[Arrays]: ...

    @overload
    def allreduce(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[True] = ..., **options: Unpack[ReduceOptions[Arrays]]
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
        """Combine the arrays of all ranks, element by element; every rank gets the result, with the same bits.

        In place: ``out=x``.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.allreduce(np.array([1, world.rank])).tolist(), 3)
        [[3, 3], [3, 3], [3, 3]]
        """
        request = (
            algorithm_request(algorithm, reproducible, accumulate)
            if reproducible or accumulate is not None
            else algorithm
        )
        target: Arrays = operands.target_like(x) if out is None else out
        if not wait:
            return self._start("allreduce", x, out, target, op=op, algorithm=request, timeout_s=timeout_s)
        if not self._cache.run("allreduce", x, target, op, None, request, timeout_s):
            target = self._dispatch("allreduce", x, out, target, op=op, algorithm=request, timeout_s=timeout_s)
        return target

    @overload
    def reduce(
        self,
        x: Arrays,
        op: str | Op = ...,
        root: int = ...,
        *,
        wait: Literal[False],
        **options: Unpack[ReduceOptions[Arrays]],
    ) -> Work[Arrays | None]: ...

    @overload
    def reduce(
        self,
        x: Arrays,
        op: str | Op = ...,
        root: int = ...,
        *,
        wait: Literal[True] = ...,
        **options: Unpack[ReduceOptions[Arrays]],
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
        """Combine the arrays of all ranks, element by element; the root gets the result, and other ranks get None.

        Other ranks than the root ignore their `out`. In place: ``out=x``.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.reduce(np.array([2.0, world.rank]), "prod", root=1), 2)
        [None, array([4., 0.])]
        """
        request = (
            algorithm_request(algorithm, reproducible, accumulate)
            if reproducible or accumulate is not None
            else algorithm
        )
        target: Arrays | None = operands.target_like(x) if out is None and self.rank == root else out
        if not wait:
            return self._start("reduce", x, out, target, op=op, root=root, algorithm=request, timeout_s=timeout_s)
        if not self._cache.run("reduce", x, target, op, root, request, timeout_s):
            result: Arrays | None = self._dispatch(
                "reduce", x, out, target, op=op, root=root, algorithm=request, timeout_s=timeout_s
            )
            return result
        return target if self.rank == root else None

    @overload
    def broadcast(
        self, x: Arrays, root: int = ..., *, wait: Literal[False], **options: Unpack[CallOptions[Arrays]]
    ) -> Work[Arrays]: ...

    @overload
    def broadcast(
        self, x: Arrays, root: int = ..., *, wait: Literal[True] = ..., **options: Unpack[CallOptions[Arrays]]
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

        Other ranks pass an `x` for its shape and dtype; its elements are ignored. In place: ``out=x`` overwrites `x` on
        all ranks but the root.

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
    def allgather(self, x: Arrays, *, wait: Literal[False], **options: Unpack[CallOptions[Arrays]]) -> Work[Arrays]: ...

    @overload
    def allgather(self, x: Arrays, *, wait: Literal[True] = ..., **options: Unpack[CallOptions[Arrays]]) -> Arrays: ...

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
        r"""Concatenate the arrays of all ranks along the first axis, in the order of ranks; every rank gets the result.

        If `x` has the shape (k, …), the result has the shape (size·k, …). If `x` is 0-dimensional, it is (size,). `out`
        may also have the shape (size, \*x.shape). In place: `x` is this rank's part of `out`.

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
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[False], **options: Unpack[ReduceOptions[Arrays]]
    ) -> Work[Arrays]: ...

    @overload
    def reduce_scatter(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[True] = ..., **options: Unpack[ReduceOptions[Arrays]]
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

        If `x` has the shape (size·k, …), the result has the shape (k, …). If k is 1, `out` may also have the shape of a
        row. In place: `out` is this rank's part of `x`; the rest of `x` is undefined afterwards.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.reduce_scatter(np.array([1, 2, 3, world.rank])).tolist(), 2)
        [[2, 4], [6, 1]]
        """
        request = (
            algorithm_request(algorithm, reproducible, accumulate)
            if reproducible or accumulate is not None
            else algorithm
        )
        target: Arrays = operands.target_of_share(x, self.size) if out is None else out
        if not wait:
            return self._start("reduce_scatter", x, out, target, op=op, algorithm=request, timeout_s=timeout_s)
        if not self._cache.run("reduce_scatter", x, target, op, None, request, timeout_s):
            target = self._dispatch("reduce_scatter", x, out, target, op=op, algorithm=request, timeout_s=timeout_s)
        return target

    @overload
    def gather(
        self, x: Arrays, root: int = ..., *, wait: Literal[False], **options: Unpack[CallOptions[Arrays]]
    ) -> Work[Arrays | None]: ...

    @overload
    def gather(
        self, x: Arrays, root: int = ..., *, wait: Literal[True] = ..., **options: Unpack[CallOptions[Arrays]]
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
        """Concatenate the arrays of all ranks along the first axis; the root gets the result, and other ranks get None.

        The shapes are those of `allgather`. Other ranks than the root ignore their `out`. In place: the root's `x` is
        its part of its `out`.

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
        self, x: Arrays | None = ..., root: int = ..., *, wait: Literal[False], **options: Unpack[CallOptions[Arrays]]
    ) -> Work[Arrays]: ...

    @overload
    def scatter(
        self,
        x: Arrays | None = ...,
        root: int = ...,
        *,
        wait: Literal[True] = ...,
        **options: Unpack[CallOptions[Arrays]],
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

        If the root's `x` has the shape (size·k, …), the result has the shape (k, …). If k is 1, `out` may also have the
        shape of a row. Other ranks must pass an `out`, because its shape and dtype say what they receive; their `x` is
        ignored. In place: the root's `out` is its part of its `x`.

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
    def alltoall(self, x: Arrays, *, wait: Literal[False], **options: Unpack[CallOptions[Arrays]]) -> Work[Arrays]: ...

    @overload
    def alltoall(self, x: Arrays, *, wait: Literal[True] = ..., **options: Unpack[CallOptions[Arrays]]) -> Arrays: ...

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
        """Send part r of `x` to rank r, and receive a part from every rank; the parts are equal numbers of rows.

        The number of rows of `x` must be divisible by the number of ranks. The result has the shape of `x`, and its
        part r comes from rank r. `out` cannot overlap `x`.

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
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[False], **options: Unpack[ReduceOptions[Arrays]]
    ) -> Work[Arrays]: ...

    @overload
    def scan(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[True] = ..., **options: Unpack[ReduceOptions[Arrays]]
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
        """Combine the arrays of ranks 0 to this rank, its own included, element by element.

        The op "avg" is not defined for it. In place: ``out=x``.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: int(world.scan(np.array(world.rank + 1))), 4)
        [1, 3, 6, 10]
        """
        request = (
            algorithm_request(algorithm, reproducible, accumulate)
            if reproducible or accumulate is not None
            else algorithm
        )
        target: Arrays = operands.target_like(x) if out is None else out
        if not wait:
            return self._start("scan", x, out, target, op=op, algorithm=request, timeout_s=timeout_s)
        if not self._cache.run("scan", x, target, op, None, request, timeout_s):
            target = self._dispatch("scan", x, out, target, op=op, algorithm=request, timeout_s=timeout_s)
        return target

    @overload
    def exscan(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[False], **options: Unpack[ReduceOptions[Arrays]]
    ) -> Work[Arrays]: ...

    @overload
    def exscan(
        self, x: Arrays, op: str | Op = ..., *, wait: Literal[True] = ..., **options: Unpack[ReduceOptions[Arrays]]
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

        No rank is before rank 0: its `out` stays unchanged, or a new array holds zeros. The op "avg" is not defined for
        it. In place: ``out=x``.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: int(world.exscan(np.array(world.rank + 1))), 4)
        [0, 1, 3, 6]
        """
        request = (
            algorithm_request(algorithm, reproducible, accumulate)
            if reproducible or accumulate is not None
            else algorithm
        )
        target: Arrays = operands.zeros_like(x) if out is None else out
        if not wait:
            return self._start("exscan", x, out, target, op=op, algorithm=request, timeout_s=timeout_s)
        if not self._cache.run("exscan", x, target, op, None, request, timeout_s):
            target = self._dispatch("exscan", x, out, target, op=op, algorithm=request, timeout_s=timeout_s)
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
        """Wait until every rank has called `barrier`."""
        if not wait:
            return self._start("barrier", None, None, None, algorithm=algorithm, timeout_s=timeout_s)
        ended: Work[None] | None = None
        if not self._cache.run("barrier", None, None, None, None, algorithm, timeout_s):
            ended = self._dispatch("barrier", None, None, None, algorithm=algorithm, timeout_s=timeout_s)
        return ended

"""The vector collectives, such as `allgatherv`: each rank has its own number of rows, possibly zero.

Used by: `Communicator`, which inherits from `VectorCollectives`. The call cache does not hold these calls, because its
keys have no counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

from unisono.collectives.calls.dispatch import Dispatcher
from unisono.collectives.calls.planning import algorithm_request
from unisono.collectives.calls.work import Work
from unisono.operations import Op

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from unisono.collectives.api.collectives import CallOptions, ReduceOptions
    from unisono.collectives.arrays.typing import Array


class VectorCollectives(Dispatcher):
    """The collectives in which rank r has `counts[r]` rows.

    `Collectives` describes `x`, `out`, `op`, `root`, `algorithm`, `timeout_s`, `wait` and the errors. The arrays of all
    ranks have rows of the same shape and dtype. `counts[r]` is the number of rows that rank r contributes or receives,
    and may be 0. All ranks pass the same `counts`, except in `alltoallv`. `Communicator.plan` makes a repeated call
    faster.
    """

    @overload
    def allgatherv(
        self, x: Array, counts: Sequence[int], *, wait: Literal[False], **options: Unpack[CallOptions[Array]]
    ) -> Work[Array]: ...

    @overload
    def allgatherv(
        self, x: Array, counts: Sequence[int], *, wait: Literal[True] = ..., **options: Unpack[CallOptions[Array]]
    ) -> Array: ...

    def allgatherv(
        self,
        x: Array,
        counts: Sequence[int],
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Array | Work[Array]:
        """Concatenate the rows of all ranks, in the order of ranks; every rank gets the result.

        In place: `x` is this rank's part of `out`.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.allgatherv(np.full(world.rank, 7), counts=(0, 1, 2)).tolist(), 3)
        [[7, 7, 7], [7, 7, 7], [7, 7, 7]]
        """
        result: Array | Work[Array] = self._dispatch(
            "allgather", x, out, None, wait=wait, counts=(counts,), algorithm=algorithm, timeout_s=timeout_s
        )
        return result

    @overload
    def gatherv(
        self,
        x: Array,
        counts: Sequence[int],
        root: int = ...,
        *,
        wait: Literal[False],
        **options: Unpack[CallOptions[Array]],
    ) -> Work[Array | None]: ...

    @overload
    def gatherv(
        self,
        x: Array,
        counts: Sequence[int],
        root: int = ...,
        *,
        wait: Literal[True] = ...,
        **options: Unpack[CallOptions[Array]],
    ) -> Array | None: ...

    def gatherv(
        self,
        x: Array,
        counts: Sequence[int],
        root: int = 0,
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Array | Work[Array | None] | None:
        """Concatenate the rows of all ranks, in the order of ranks; the root gets the result, and other ranks get None.

        Other ranks than the root ignore their `out`. In place: the root's `x` is its part of its `out`.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.gatherv(np.full(world.rank, 7), counts=(0, 1)), 2)
        [array([7]), None]
        """
        result: Array | Work[Array | None] | None = self._dispatch(
            "gather", x, out, None, wait=wait, root=root, counts=(counts,), algorithm=algorithm, timeout_s=timeout_s
        )
        return result

    @overload
    def scatterv(
        self,
        x: Array | None,
        counts: Sequence[int],
        root: int = ...,
        *,
        wait: Literal[False],
        **options: Unpack[CallOptions[Array]],
    ) -> Work[Array]: ...

    @overload
    def scatterv(
        self,
        x: Array | None,
        counts: Sequence[int],
        root: int = ...,
        *,
        wait: Literal[True] = ...,
        **options: Unpack[CallOptions[Array]],
    ) -> Array: ...

    def scatterv(
        self,
        x: Array | None,
        counts: Sequence[int],
        root: int = 0,
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Array | Work[Array]:
        """Send rank r the next `counts[r]` rows of the root's array.

        Other ranks than the root must pass an `out`; their `x` is ignored. In place: the root's `out` is its part of
        its `x`.

        >>> import numpy as np, unisono as un
        >>> def scattered(world):
        ...     x = np.arange(3) if world.rank == 0 else None
        ...     return world.scatterv(x, counts=(1, 2), out=np.zeros(world.rank + 1, int)).tolist()
        >>> un.launch(scattered, 2)
        [[0], [1, 2]]
        """
        result: Array | Work[Array] = self._dispatch(
            "scatter",
            x if self.rank == root else None,
            out,
            None,
            wait=wait,
            root=root,
            counts=(counts,),
            algorithm=algorithm,
            timeout_s=timeout_s,
        )
        return result

    @overload
    def reduce_scatterv(
        self,
        x: Array,
        counts: Sequence[int],
        op: str | Op = ...,
        *,
        wait: Literal[False],
        **options: Unpack[ReduceOptions[Array]],
    ) -> Work[Array]: ...

    @overload
    def reduce_scatterv(
        self,
        x: Array,
        counts: Sequence[int],
        op: str | Op = ...,
        *,
        wait: Literal[True] = ...,
        **options: Unpack[ReduceOptions[Array]],
    ) -> Array: ...

    def reduce_scatterv(
        self,
        x: Array,
        counts: Sequence[int],
        op: str | Op = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        reproducible: bool = False,
        accumulate: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Array | Work[Array]:
        """Combine the arrays of all ranks, element by element; rank r gets the next `counts[r]` rows of the result.

        In place: `out` is this rank's part of `x`; the rest of `x` is undefined afterwards.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.reduce_scatterv(np.arange(3), counts=(1, 2)).tolist(), 2)
        [[0], [2, 4]]
        """
        request = algorithm_request(algorithm, reproducible, accumulate)
        result: Array | Work[Array] = self._dispatch(
            "reduce_scatter", x, out, None, wait=wait, op=op, counts=(counts,), algorithm=request, timeout_s=timeout_s
        )
        return result

    @overload
    def alltoallv(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        wait: Literal[False],
        **options: Unpack[CallOptions[Array]],
    ) -> Work[Array]: ...

    @overload
    def alltoallv(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        wait: Literal[True] = ...,
        **options: Unpack[CallOptions[Array]],
    ) -> Array: ...

    def alltoallv(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Array | Work[Array]:
        """Send rank r the next `send_counts[r]` rows of `x`, and receive `recv_counts[r]` rows from it.

        The result holds the received rows in the order of ranks. `recv_counts[r]` must be the number of rows that rank
        r sends to this rank. Otherwise the call raises `MismatchError`; if one of the two numbers is 0, it may also
        raise `CollectiveTimeoutError`. `out` cannot overlap `x`.

        >>> import numpy as np, unisono as un
        >>> def exchanged(world):
        ...     counts = ((1, 2), (0, 1)), ((1, 0), (2, 1))
        ...     send_counts, recv_counts = counts[0][world.rank], counts[1][world.rank]
        ...     x = np.full(sum(send_counts), world.rank)
        ...     return world.alltoallv(x, send_counts, recv_counts).tolist()
        >>> un.launch(exchanged, 2)
        [[0], [0, 0, 1]]
        """
        result: Array | Work[Array] = self._dispatch(
            "alltoall",
            x,
            out,
            None,
            wait=wait,
            counts=(send_counts, recv_counts),
            algorithm=algorithm,
            timeout_s=timeout_s,
        )
        return result

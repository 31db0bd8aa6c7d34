"""The collectives in which each rank has a share of its own length: so many rows, none of them too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

from unisono.collectives.calls.dispatch import Dispatcher
from unisono.collectives.calls.planning import algorithm_request
from unisono.collectives.calls.work import Work
from unisono.operations import Op

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from unisono.collectives.api.collectives import CallOptions, GivenToReduce
    from unisono.collectives.arrays.typing import Array


class VectorCollectives(Dispatcher):
    """Collective calls on arrays of which each rank has `counts` rows of its own.

    What `Collectives` says of `x`, `out`, `op`, `root`, `algorithm`, `timeout_s`, `wait` and errors holds here too. All
    arrays have rows of the same shape and dtype; `counts[r]` is how many rows rank r has, or gets, and may be 0. All
    ranks give the same `counts`, but for `alltoallv`. What is called often is quicker as a plan: see
    `Communicator.plan`.
    """

    @overload
    def allgatherv(
        self, x: Array, counts: Sequence[int], *, wait: Literal[False], **given: Unpack[CallOptions[Array]]
    ) -> Work[Array]: ...

    @overload
    def allgatherv(
        self, x: Array, counts: Sequence[int], *, wait: Literal[True] = ..., **given: Unpack[CallOptions[Array]]
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
        """Put the rows of all ranks, in their order, one after the other; every rank gets all of them.

        In place: `x` is this rank's part of `out`.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.allgatherv(np.full(world.rank, 7), counts=(0, 1, 2)).tolist(), 3)
        [[7, 7, 7], [7, 7, 7], [7, 7, 7]]
        """
        call = self._dispatch if wait else self._dispatch_async
        result: Array | Work[Array] = call(
            "allgather", x, out, None, counts=(counts,), algorithm=algorithm, timeout_s=timeout_s
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
        **given: Unpack[CallOptions[Array]],
    ) -> Work[Array | None]: ...

    @overload
    def gatherv(
        self,
        x: Array,
        counts: Sequence[int],
        root: int = ...,
        *,
        wait: Literal[True] = ...,
        **given: Unpack[CallOptions[Array]],
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
        """Put the rows of all ranks, in their order, one after the other; the root gets them, and the others None.

        Only the root's `out` matters. In place: the root's `x` is its part of its `out`.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.gatherv(np.full(world.rank, 7), counts=(0, 1)), 2)
        [array([7]), None]
        """
        call = self._dispatch if wait else self._dispatch_async
        result: Array | Work[Array | None] | None = call(
            "gather", x, out, None, root=root, counts=(counts,), algorithm=algorithm, timeout_s=timeout_s
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
        **given: Unpack[CallOptions[Array]],
    ) -> Work[Array]: ...

    @overload
    def scatterv(
        self,
        x: Array | None,
        counts: Sequence[int],
        root: int = ...,
        *,
        wait: Literal[True] = ...,
        **given: Unpack[CallOptions[Array]],
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
        """Give rank r the next `counts[r]` rows of the root's array.

        Other ranks than the root must give an `out`, and their `x` does not matter. In place: the root's `out` is its
        part of its `x`.

        >>> import numpy as np, unisono as un
        >>> def scattered(world):
        ...     x = np.arange(3) if world.rank == 0 else None
        ...     return world.scatterv(x, counts=(1, 2), out=np.zeros(world.rank + 1, int)).tolist()
        >>> un.launch(scattered, 2)
        [[0], [1, 2]]
        """
        call = self._dispatch if wait else self._dispatch_async
        result: Array | Work[Array] = call(
            "scatter",
            x if self.rank == root else None,
            out,
            None,
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
        **given: Unpack[GivenToReduce[Array]],
    ) -> Work[Array]: ...

    @overload
    def reduce_scatterv(
        self,
        x: Array,
        counts: Sequence[int],
        op: str | Op = ...,
        *,
        wait: Literal[True] = ...,
        **given: Unpack[GivenToReduce[Array]],
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

        In place: `out` is this rank's part of `x`, the rest of which is then undefined.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.reduce_scatterv(np.arange(3), counts=(1, 2)).tolist(), 2)
        [[0], [2, 4]]
        """
        wanted = algorithm_request(algorithm, reproducible, accumulate)
        call = self._dispatch if wait else self._dispatch_async
        result: Array | Work[Array] = call(
            "reduce_scatter", x, out, None, op=op, counts=(counts,), algorithm=wanted, timeout_s=timeout_s
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
        **given: Unpack[CallOptions[Array]],
    ) -> Work[Array]: ...

    @overload
    def alltoallv(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        wait: Literal[True] = ...,
        **given: Unpack[CallOptions[Array]],
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

        The rows that are received stand in the order of ranks. What a rank receives from another one must be what that
        one sends to it: anything else is a `MismatchError`, or, where one of the two is 0, may end as a
        `CollectiveTimeoutError`. The result cannot be in the memory of `x`.

        >>> import numpy as np, unisono as un
        >>> def exchanged(world):
        ...     counts = ((1, 2), (0, 1)), ((1, 0), (2, 1))
        ...     send_counts, recv_counts = counts[0][world.rank], counts[1][world.rank]
        ...     x = np.full(sum(send_counts), world.rank)
        ...     return world.alltoallv(x, send_counts, recv_counts).tolist()
        >>> un.launch(exchanged, 2)
        [[0], [0, 0, 1]]
        """
        call = self._dispatch if wait else self._dispatch_async
        result: Array | Work[Array] = call(
            "alltoall", x, out, None, counts=(send_counts, recv_counts), algorithm=algorithm, timeout_s=timeout_s
        )
        return result

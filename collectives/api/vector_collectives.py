"""The vector collectives, such as `allgatherv`: each rank has its own number of rows, possibly zero.

Used by: `Communicator`, which inherits from `VectorCollectives`. The call cache does not hold these calls, because its
keys have no counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

from unisono.collectives.calls.dispatch import Dispatcher
from unisono.collectives.calls.planning import algorithm_request
from unisono.collectives.calls.row_blocks import RECEIVED, ROWS, SENT, Blocks, checked_blocks
from unisono.collectives.calls.shapes import RootCounts, checked_rows
from unisono.collectives.calls.work import Work
from unisono.errors import UsageError
from unisono.operations import Op

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from unisono.collectives.api.collectives import CallOptions, ReduceOptions
    from unisono.collectives.arrays.typing import Array
    from unisono.collectives.calls.arguments import Arguments

    class SharesOptions(CallOptions[Array], Generic[Array], total=False):
        """The optional arguments of `VectorCollectives.allgatherv` except `wait`."""

        displacements: Sequence[int] | None

    class RootOptions(SharesOptions[Array], Generic[Array], total=False):
        """The optional arguments of `VectorCollectives.gatherv` and `scatterv` except `wait`."""

        counts_at_root: bool

    class ExchangeOptions(CallOptions[Array], Generic[Array], total=False):
        """The optional arguments of `VectorCollectives.alltoallv` except `wait`."""

        send_displacements: Sequence[int] | None
        recv_displacements: Sequence[int] | None


class VectorCollectives(Dispatcher):
    """The collectives in which rank r has `counts[r]` rows.

    `Collectives` describes `x`, `out`, `op`, `root`, `algorithm`, `timeout_s`, `wait` and the errors. The arrays of all
    ranks have rows of the same shape and dtype. `counts[r]` is the number of rows that rank r contributes or receives,
    and may be 0. All ranks pass the same `counts`, except in `alltoallv`. `Communicator.plan` makes a repeated call
    faster.

    Displacements are numbers of rows from the start of an array of this rank, so other ranks may pass others, or none.
    Shares that do not follow each other in the order of ranks are copied once more. Shares that a call reads may
    overlap, and shares that it writes may not.
    """

    @overload
    def allgatherv(
        self, x: Array, counts: Sequence[int], *, wait: Literal[False], **options: Unpack[SharesOptions[Array]]
    ) -> Work[Array]: ...

    @overload
    def allgatherv(
        self, x: Array, counts: Sequence[int], *, wait: Literal[True] = ..., **options: Unpack[SharesOptions[Array]]
    ) -> Array: ...

    def allgatherv(
        self,
        x: Array,
        counts: Sequence[int],
        *,
        displacements: Sequence[int] | None = None,
        out: Array | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Array | Work[Array]:
        """Concatenate the rows of all ranks, in the order of ranks; every rank gets the result.

        With `displacements`, the rows of rank r go to `out` from row `displacements[r]` on. The other rows of `out`
        stay as they are.

        In place: `x` is this rank's part of `out`.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.allgatherv(np.full(world.rank, 7), counts=(0, 1, 2)).tolist(), 3)
        [[7, 7, 7], [7, 7, 7], [7, 7, 7]]
        """
        written = None if displacements is None else checked_blocks(ROWS, counts, displacements, self.size)
        result: Array | Work[Array] = self._dispatch_displaced(
            "allgather", x, out, written=written, wait=wait, counts=(counts,), algorithm=algorithm, timeout_s=timeout_s
        )
        return result

    @overload
    def gatherv(
        self,
        x: Array,
        counts: Sequence[int] | None = ...,
        root: int = ...,
        *,
        wait: Literal[False],
        **options: Unpack[RootOptions[Array]],
    ) -> Work[Array | None]: ...

    @overload
    def gatherv(
        self,
        x: Array,
        counts: Sequence[int] | None = ...,
        root: int = ...,
        *,
        wait: Literal[True] = ...,
        **options: Unpack[RootOptions[Array]],
    ) -> Array | None: ...

    def gatherv(
        self,
        x: Array,
        counts: Sequence[int] | None = None,
        root: int = 0,
        *,
        displacements: Sequence[int] | None = None,
        counts_at_root: bool = False,
        out: Array | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Array | Work[Array | None] | None:
        """Concatenate the rows of all ranks, in the order of ranks; the root gets the result, and other ranks get None.

        Other ranks than the root ignore their `out` and `displacements`. With `displacements`, the rows of rank r go to
        the root's `out` from row `displacements[r]` on, and its other rows stay as they are. If all ranks pass
        `counts_at_root`, only the root passes `counts`. In place: the root's `x` is its part of its `out`.

        >>> import numpy as np, unisono as un
        >>> un.launch(lambda world: world.gatherv(np.full(world.rank, 7), counts=(0, 1)), 2)
        [array([7]), None]
        """
        is_root, rows = self.rank == root, self._counts(counts, root, counts_at_root)
        written = (
            checked_blocks(ROWS, rows, displacements, self.size) if displacements is not None and is_root else None
        )
        result: Array | Work[Array | None] | None = self._dispatch_displaced(
            "gather",
            x,
            out,
            written=written,
            wait=wait,
            root=root,
            counts=(rows,),
            algorithm=algorithm,
            timeout_s=timeout_s,
        )
        return result

    @overload
    def scatterv(
        self,
        x: Array | None,
        counts: Sequence[int] | None = ...,
        root: int = ...,
        *,
        wait: Literal[False],
        **options: Unpack[RootOptions[Array]],
    ) -> Work[Array]: ...

    @overload
    def scatterv(
        self,
        x: Array | None,
        counts: Sequence[int] | None = ...,
        root: int = ...,
        *,
        wait: Literal[True] = ...,
        **options: Unpack[RootOptions[Array]],
    ) -> Array: ...

    def scatterv(
        self,
        x: Array | None,
        counts: Sequence[int] | None = None,
        root: int = 0,
        *,
        displacements: Sequence[int] | None = None,
        counts_at_root: bool = False,
        out: Array | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Array | Work[Array]:
        """Send rank r the next `counts[r]` rows of the root's array.

        Other ranks than the root must pass an `out`; their `x` and `displacements` are ignored. With `displacements`,
        the rows for rank r are those of the root's array from row `displacements[r]` on. If all ranks pass
        `counts_at_root`, only the root passes `counts`, and the `out` of another rank has its number of rows. In place:
        the root's `out` is its part of its `x`.

        >>> import numpy as np, unisono as un
        >>> def scattered(world):
        ...     x = np.arange(3) if world.rank == 0 else None
        ...     return world.scatterv(x, counts=(1, 2), out=np.zeros(world.rank + 1, int)).tolist()
        >>> un.launch(scattered, 2)
        [[0], [1, 2]]
        """
        is_root, rows = self.rank == root, self._counts(counts, root, counts_at_root)
        read = checked_blocks(ROWS, rows, displacements, self.size) if displacements is not None and is_root else None
        result: Array | Work[Array] = self._dispatch_displaced(
            "scatter",
            x if is_root else None,
            out,
            read=read,
            wait=wait,
            root=root,
            counts=(rows,),
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
        **options: Unpack[ExchangeOptions[Array]],
    ) -> Work[Array]: ...

    @overload
    def alltoallv(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        wait: Literal[True] = ...,
        **options: Unpack[ExchangeOptions[Array]],
    ) -> Array: ...

    def alltoallv(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        send_displacements: Sequence[int] | None = None,
        recv_displacements: Sequence[int] | None = None,
        out: Array | None = None,
        algorithm: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Array | Work[Array]:
        """Send rank r the next `send_counts[r]` rows of `x`, and receive `recv_counts[r]` rows from it.

        The result holds the received rows in the order of ranks. `recv_counts[r]` must be the number of rows that rank
        r sends to this rank. Otherwise the call raises `MismatchError`; if one of the two numbers is 0, it may also
        raise `CollectiveTimeoutError`. `out` cannot overlap `x`.

        With `send_displacements`, the rows for rank r are those of `x` from row `send_displacements[r]` on. With
        `recv_displacements`, the rows of rank r go to `out` from row `recv_displacements[r]` on, and its other rows
        stay as they are.

        >>> import numpy as np, unisono as un
        >>> def exchanged(world):
        ...     counts = ((1, 2), (0, 1)), ((1, 0), (2, 1))
        ...     send_counts, recv_counts = counts[0][world.rank], counts[1][world.rank]
        ...     x = np.full(sum(send_counts), world.rank)
        ...     return world.alltoallv(x, send_counts, recv_counts).tolist()
        >>> un.launch(exchanged, 2)
        [[0], [0, 0, 1]]
        """
        read = written = None
        if send_displacements is not None:
            read = checked_blocks(SENT, send_counts, send_displacements, self.size)
        if recv_displacements is not None:
            written = checked_blocks(RECEIVED, recv_counts, recv_displacements, self.size)
        result: Array | Work[Array] = self._dispatch_displaced(
            "alltoall",
            x,
            out,
            read=read,
            written=written,
            wait=wait,
            counts=(send_counts, recv_counts),
            algorithm=algorithm,
            timeout_s=timeout_s,
        )
        return result

    def _counts(self, counts: Sequence[int] | None, root: int, counts_at_root: bool) -> Sequence[int]:
        """Return the counts of a call with a root, as `CallArguments.counts` takes them.

        Raises:
            UsageError: the counts are missing, or this rank must not have any.
        """
        if counts is None:
            if not counts_at_root:
                raise UsageError(
                    "counts are missing: every rank passes those of all ranks, or only the root does, and every rank "
                    "passes counts_at_root=True"
                )
            if self.rank == root:
                raise UsageError("counts are missing on the root, which knows those of all ranks: pass counts")
            return RootCounts()
        if counts_at_root and self.rank != root:
            raise UsageError("with counts_at_root, only the root passes counts: leave them out on other ranks")
        return RootCounts(checked_rows("counts", counts, self.size)) if counts_at_root else counts

    def _dispatch_displaced(
        self,
        collective: str,
        x: Any,
        out: Any,
        *,
        read: Blocks | None = None,
        written: Blocks | None = None,
        wait: bool,
        **arguments: Unpack[Arguments],
    ) -> Any:
        """Make a call whose shares lie at displacements: those that it reads from `x`, or writes to `out`, or both."""
        if read is None and written is None:
            return self._dispatch(collective, x, out, None, wait=wait, **arguments)
        self._check_usable()
        if self._group is not None:
            raise UsageError("a group has no calls with displacements: make this call outside of it")
        from unisono.collectives.calls.displaced import DisplacedCall

        call = DisplacedCall(x, out, read, written)

        def dispatch(wait: bool) -> Any:
            return self._dispatch(collective, call.source, call.target, None, wait=wait, **arguments)

        return call.make(dispatch, wait)

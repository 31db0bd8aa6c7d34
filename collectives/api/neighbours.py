"""Neighbourhood collectives, such as `neighbor_alltoall`: each rank exchanges blocks with its neighbours only.

Used by: `Grid` and `Graph`, which inherit from `Neighbours`. MPI-4.1, section 8.6, defines the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from unisono.collectives.calls.checking import check_lasting
from unisono.collectives.calls.dispatch import Dispatcher
from unisono.collectives.calls.executable import HostCall
from unisono.collectives.calls.work import Work
from unisono.collectives.neighbourhoods.names import NEIGHBOUR_CALLS
from unisono.errors import UsageError
from unisono.transports.contracts.wildcards import NOBODY, Nobody

if TYPE_CHECKING:
    from unisono.algorithms.ir.neighbourhood import Neighbourhood
    from unisono.collectives.arrays.typing import Array


class Neighbours(Dispatcher):
    """The collectives among neighbours. The order of neighbours is that of `sources` and `destinations`.

    All of them take these arguments:

    - `x`: an array of any library in `arrays/adapters.py`, whose rows are the blocks for the neighbours, one after the
      other. All ranks pass the same dtype and the same shape of a block, or of a row where there are counts.
    - `out`: the array that receives the result, in C order, and is returned. It must not overlap `x`. By default the
      call makes a new array. A block from `NOBODY` stays as it is, and is zero in a new array.
    - `timeout_s`, `wait`: as in `Collectives`.

    They raise `UsageError` if an argument is wrong, and `TransportUnavailableError` if an array is on a GPU. Then
    nothing has been sent. They raise `MismatchError`, `PeerLostError`, `CollectiveTimeoutError` or `AbortedError` if
    the call failed. Neighbours that disagree on the elements of their edge get a `MismatchError` with both ranks and
    both sizes. A call need not involve all ranks, but all ranks make it, in the same order as all other calls.

    Attributes:
        sources: the ranks from which this rank receives, or `NOBODY` where the neighbour is missing.
        destinations: the ranks to which it sends, or `NOBODY`.
    """

    sources: tuple[int | Nobody, ...]
    destinations: tuple[int | Nobody, ...]

    def _meet(self, neighbourhood: Neighbourhood) -> None:
        """Set the neighbours of this rank, and prepare its neighbourhood collectives."""
        self.sources = tuple(NOBODY if rank is None else rank for rank in neighbourhood.sources)
        self.destinations = tuple(NOBODY if rank is None else rank for rank in neighbourhood.destinations)
        from unisono.collectives.neighbourhoods.calls import NeighbourCalls

        self._neighbour_calls = NeighbourCalls(self.rank, self.size, neighbourhood)

    @overload
    def neighbor_allgather(
        self, x: Array, *, out: Array | None = ..., timeout_s: float | None = ..., wait: Literal[False]
    ) -> Work[Array]: ...

    @overload
    def neighbor_allgather(
        self, x: Array, *, out: Array | None = ..., timeout_s: float | None = ..., wait: Literal[True] = ...
    ) -> Array: ...

    def neighbor_allgather(
        self, x: Array, *, out: Array | None = None, timeout_s: float | None = None, wait: bool = True
    ) -> Array | Work[Array]:
        """Send `x` to all destinations, and return the arrays of all sources, concatenated in their order.

        The result of an `x` of shape (k, …) has the shape (n·k, …) for n sources. An `out` of shape (n, k, …) works
        too.

        >>> import numpy as np, unisono as un
        >>> def around(world):
        ...     ring = world.grid([3], periodic=True)
        ...     return ring.neighbor_allgather(np.array([ring.rank])).tolist()
        >>> un.launch(around, 3)
        [[2, 1], [0, 2], [1, 0]]
        """
        result: Array | Work[Array] = self._among_neighbours("neighbor_allgather", x, out, (), timeout_s, wait)
        return result

    @overload
    def neighbor_allgatherv(
        self,
        x: Array,
        counts: Sequence[int],
        *,
        out: Array | None = ...,
        timeout_s: float | None = ...,
        wait: Literal[False],
    ) -> Work[Array]: ...

    @overload
    def neighbor_allgatherv(
        self,
        x: Array,
        counts: Sequence[int],
        *,
        out: Array | None = ...,
        timeout_s: float | None = ...,
        wait: Literal[True] = ...,
    ) -> Array: ...

    def neighbor_allgatherv(
        self,
        x: Array,
        counts: Sequence[int],
        *,
        out: Array | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Array | Work[Array]:
        """Do the same as `neighbor_allgather`, for an `x` with a different number of rows on each rank.

        `counts` has the number of rows of each source.

        >>> import numpy as np, unisono as un
        >>> def around(world):
        ...     line = world.grid([3])
        ...     counts = [0 if source is un.NOBODY else source for source in line.sources]
        ...     return line.neighbor_allgatherv(np.full(line.rank, line.rank), counts).tolist()
        >>> un.launch(around, 3)
        [[1], [2, 2], [1]]
        """
        result: Array | Work[Array] = self._among_neighbours("neighbor_allgatherv", x, out, (counts,), timeout_s, wait)
        return result

    @overload
    def neighbor_alltoall(
        self, x: Array, *, out: Array | None = ..., timeout_s: float | None = ..., wait: Literal[False]
    ) -> Work[Array]: ...

    @overload
    def neighbor_alltoall(
        self, x: Array, *, out: Array | None = ..., timeout_s: float | None = ..., wait: Literal[True] = ...
    ) -> Array: ...

    def neighbor_alltoall(
        self, x: Array, *, out: Array | None = None, timeout_s: float | None = None, wait: bool = True
    ) -> Array | Work[Array]:
        """Send block i of `x` to destination i, and return the blocks of all sources, in their order.

        `x` is as many equal blocks of rows as there are destinations. On a grid, a block that is sent downwards along a
        dimension arrives as the block from above, and vice versa.

        >>> import numpy as np, unisono as un
        >>> def shifted(world):
        ...     ring = world.grid([3], periodic=True)
        ...     down, up = 10 * ring.rank, 10 * ring.rank + 1
        ...     return ring.neighbor_alltoall(np.array([down, up])).tolist()
        >>> un.launch(shifted, 3)
        [[21, 10], [1, 20], [11, 0]]
        """
        result: Array | Work[Array] = self._among_neighbours("neighbor_alltoall", x, out, (), timeout_s, wait)
        return result

    @overload
    def neighbor_alltoallv(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        out: Array | None = ...,
        timeout_s: float | None = ...,
        wait: Literal[False],
    ) -> Work[Array]: ...

    @overload
    def neighbor_alltoallv(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        out: Array | None = ...,
        timeout_s: float | None = ...,
        wait: Literal[True] = ...,
    ) -> Array: ...

    def neighbor_alltoallv(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        out: Array | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Array | Work[Array]:
        """Send the next `send_counts[i]` rows of `x` to destination i, and receive `recv_counts[i]` from source i.

        The rows for and from `NOBODY` count too, but stay where they are.

        >>> import numpy as np, unisono as un
        >>> def upwards(world):
        ...     line = world.grid([3])
        ...     return line.neighbor_alltoallv(np.array([line.rank]), (0, 1), (1, 0)).tolist()
        >>> un.launch(upwards, 3)
        [[0], [0], [1]]
        """
        counts = send_counts, recv_counts
        result: Array | Work[Array] = self._among_neighbours("neighbor_alltoallv", x, out, counts, timeout_s, wait)
        return result

    def _among_neighbours(
        self, name: str, x: Any, out: Any, counts: Sequence[Any], timeout_s: float | None, wait: bool
    ) -> Any:
        """Make the call `name` of `NEIGHBOUR_CALLS`, and return its result or its work."""
        may_be_cached = wait and not counts and out is not None and self._group is None
        if may_be_cached and self._cache.run(name, x, out, None, None, None, timeout_s):
            return out
        limit_s = self._limit_s(timeout_s)
        call = self._checked_among_neighbours(name, x, out, counts)
        if self._group is not None:
            prepared = call.prepared
            start = partial(self._executor.start, prepared.call, prepared.sources(), prepared.targets)
            return self._group.add(start, lambda _: prepared.finish(), limit_s)
        if not wait:
            return call.start(limit_s)
        call.run(limit_s)
        if not counts:
            call.remember(name, x, out, None, None, None)
        return call.checked.finish()

    def _plan_among_neighbours(
        self,
        name: str,
        x: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **others: Any,
    ) -> Callable[..., Any]:
        """Return the persistent call `name` of `NEIGHBOUR_CALLS`; see `Communicator.plan`."""
        if any(value not in (None, False) for value in others.values()):
            raise UsageError(f"{name} takes no {' or '.join(others)}: leave it out")
        rows = _rows_of(name, {"counts": counts, "send_counts": send_counts, "recv_counts": recv_counts})
        call = self._checked_among_neighbours(name, x, out, rows)
        check_lasting(call.checked, x)
        return call.persist(self._limit_s(timeout_s))

    def _checked_among_neighbours(self, name: str, x: Any, out: Any, counts: Sequence[Any]) -> HostCall:
        self._check_usable()
        if x is None:
            raise UsageError(f"x is None in {name}: every rank passes an array")
        return HostCall(self._executor, self._works, self._neighbour_calls.prepared(name, x, out, counts))


def _rows_of(name: str, counts: dict[str, Any]) -> Sequence[Any]:
    """Return the counts of a persistent call in their order.

    Raises:
        UsageError: the call takes other counts.
    """
    names = NEIGHBOUR_CALLS[name][1]
    actual = {key: value for key, value in counts.items() if value is not None}
    if actual.keys() != {*names}:
        raise UsageError(f"{name} takes {' and '.join(names) or 'no counts'}; got {' and '.join(actual) or 'none'}")
    return [actual[key] for key in names]

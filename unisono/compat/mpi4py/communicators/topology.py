"""`Cartcomm`, `Graphcomm` and `Distgraphcomm`: communicators whose ranks have neighbours, and their collectives.

Their states hold a grid or a graph of Unisono, which makes the calls and knows the neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import unisono
from unisono.compat.mpi4py.base.arguments import whole_arguments, whole_numbers
from unisono.compat.mpi4py.base.constants import CONSTANTS, PROC_NULL, UNDEFINED
from unisono.compat.mpi4py.base.errors import fail, translating
from unisono.compat.mpi4py.calls.collectives import concatenated, numbers_of, target_of
from unisono.compat.mpi4py.calls.ready import Native
from unisono.compat.mpi4py.communicators.comm import CLASSES, COMM_NULL, CommState, Intracomm, add_collective, handle_of
from unisono.compat.mpi4py.memory.access import integer
from unisono.compat.mpi4py.memory.buffers import Block, simple, vector, vector_w
from unisono.compat.mpi4py.values.info import INFO_NULL
from unisono.compat.mpi4py.values.pickles import pickle
from unisono.errors import UsageError

_u1 = np.dtype(np.uint8)
UNWEIGHTED, WEIGHTS_EMPTY = CONSTANTS["UNWEIGHTED"], CONSTANTS["WEIGHTS_EMPTY"]


class _Grid:
    """A Cartesian topology."""

    kind = CONSTANTS["CART"]

    def __init__(self, dims: Sequence[int], periods: Sequence[bool]) -> None:
        self.dims, self.periods = [int(dim) for dim in dims], [bool(period) for period in periods]

    def arranged(self, native: Any) -> Any:
        """Return the grid of a communicator."""
        return native.grid(self.dims, periodic=self.periods, reorder=False)


class _Graph:
    """A graph that all ranks know."""

    kind = CONSTANTS["GRAPH"]

    def __init__(self, index: Sequence[int], edges: Sequence[int]) -> None:
        self.index, self.edges = [integer(each) for each in index], [integer(each) for each in edges]

    def of(self, rank: int) -> list[int]:
        """Return the neighbours of a rank."""
        return self.edges[self.index[rank - 1] if rank else 0 : self.index[rank]]

    def neighbours(self, rank: int) -> tuple[list[int], list[int]]:
        return self.of(rank), self.of(rank)

    def arranged(self, native: Any) -> Any:
        return _graph_of(native, *self.neighbours(native.rank))


class _DistGraph:
    """A graph of which each rank knows its own neighbours."""

    kind = CONSTANTS["DIST_GRAPH"]

    def __init__(self, sources: Sequence[int], targets: Sequence[int], weights: Any) -> None:
        self.sources, self.targets, self.weights = list(sources), list(targets), weights

    def neighbours(self, rank: int) -> tuple[list[int], list[int]]:
        return list(self.sources), list(self.targets)

    def arranged(self, native: Any) -> Any:
        return _graph_of(native, self.sources, self.targets)


def _graph_of(native: Any, sources: Sequence[int], destinations: Sequence[int]) -> Any:
    """Return the graph of a communicator; the communicator if both ends of an edge do not name it equally often.

    Programs may make such graphs as long as they make no calls on them, which then raise an error.
    """
    try:
        return native.graph(sources=sources, destinations=destinations)
    except UsageError:
        return native


def _native(state: Any) -> Any:
    """Return the grid or the graph of a state; raises `Exception` if it has none."""
    if not hasattr(state.native, "sources"):
        why = "has no topology" if state.topology is None else "has an edge of which one end only knows"
        raise fail("ERR_TOPOLOGY", f"the communicator {why}")
    return state.native


def _ranks(neighbours: Sequence[Any]) -> list[int]:
    return [PROC_NULL if rank is unisono.NOBODY else rank for rank in neighbours]


class Topocomm(Intracomm):
    """A communicator whose ranks have neighbours."""

    __slots__ = ()

    @classmethod
    def _accepts(cls, state: Any) -> bool:
        if state.topology is None:
            return False
        of_kind = CLASSES[state.topology.kind]
        return issubclass(of_kind, cls) or issubclass(cls, of_kind)  # a base of it, or a subclass of the program

    @property
    def inoutedges(self) -> tuple[list[int], list[int]]:
        """The neighbours that this rank receives from, and those that it sends to."""
        state = self._live
        if isinstance(state.topology, (_Graph, _DistGraph)):
            return state.topology.neighbours(state.rank)
        native = _native(state)
        return _ranks(native.sources), _ranks(native.destinations)

    inedges = property(lambda self: self.inoutedges[0], doc="The neighbours that this rank receives from.")
    outedges = property(lambda self: self.inoutedges[1], doc="The neighbours that this rank sends to.")
    degrees = property(lambda self: tuple(map(len, self.inoutedges)), doc="The numbers of such neighbours.")
    indegree = property(lambda self: self.degrees[0], doc="The number of neighbours that this rank receives from.")
    outdegree = property(lambda self: self.degrees[1], doc="The number of neighbours that this rank sends to.")

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Send an object to each neighbour, and return theirs."""
        return self.neighbor_alltoall([sendobj] * self.outdegree)

    @translating
    def neighbor_alltoall(self, sendobj: Any) -> list[Any]:
        """Send each neighbour an object, and return theirs."""
        native = _native(self._live)
        items = [None] * self.outdegree if sendobj is None else list(sendobj)
        if len(items) != self.outdegree:
            raise ValueError(f"expecting {self.outdegree} items, got {len(items)}")
        data = [np.frombuffer(pickle.dumps(item), np.uint8) for item in items]
        sizes = np.array([each.size for each in data], np.int64)
        arriving = native.neighbor_alltoall(sizes, out=np.zeros(self.indegree, np.int64)).tolist()
        stream = np.concatenate([*data, np.empty(0, np.uint8)])
        received = native.neighbor_alltoallv(stream, sizes.tolist(), arriving)
        ends = np.cumsum(arriving)
        return [
            None if peer == PROC_NULL else pickle.loads(received[end - count : end])
            for peer, end, count in zip(self.inedges, ends, arriving, strict=True)
        ]


def _shares(block: Block, neighbours: Sequence[Any]) -> list[Block]:
    parts = [block.part(n * block.count, block.count) for n in range(len(neighbours))]
    return _without_nobody(parts, neighbours)


def _vector(spec: Any, neighbours: Sequence[Any], *, writable: bool = False) -> list[Block]:
    parts = vector(spec, len(neighbours), writable=writable) if neighbours else []
    return _without_nobody(parts, neighbours)


def _without_nobody(parts: Sequence[Block], neighbours: Sequence[Any]) -> list[Block]:
    """Return the blocks, of which those for `NOBODY` are empty."""
    pairs = zip(parts, neighbours, strict=True)
    return [part.part(0, 0) if rank is unisono.NOBODY else part for part, rank in pairs]


def _exchanged(native: Any, sources: Sequence[Block], targets: Sequence[Block], dtype: Any = None) -> Native:
    """Return the call that sends each neighbour a block, and stores theirs in blocks."""
    dtype = dtype or next((block.dtype for block in (*sources, *targets)), _u1)
    out, finish = target_of(targets, dtype)
    args = concatenated(sources, dtype), numbers_of(sources, dtype), numbers_of(targets, dtype)
    return Native(native.neighbor_alltoallv, args, {"out": out}, finish)


def neighbor_allgather(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send a buffer to each neighbour, and collect theirs."""
    native = _native(state)
    target = simple(recvbuf, writable=True, blocks=len(native.sources))
    return _gathered(native, sendbuf, _shares(target, native.sources))


def neighbor_allgatherv(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send a buffer to each neighbour, and collect theirs."""
    native = _native(state)
    return _gathered(native, sendbuf, _vector(recvbuf, native.sources, writable=True))


def _gathered(native: Any, sendbuf: Any, targets: Sequence[Block]) -> Native:
    """Return the call that sends a buffer to all neighbours, and stores theirs in blocks."""
    x = simple(sendbuf).array() if native.destinations else np.empty(0, targets[0].dtype if targets else _u1)
    out, finish = target_of(targets, x.dtype)
    return Native(native.neighbor_allgatherv, (x, numbers_of(targets, x.dtype)), {"out": out}, finish)


def neighbor_alltoall(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send each neighbour a share, and receive one from each."""
    native = _native(state)
    sources = _shares(simple(sendbuf, blocks=len(native.destinations)), native.destinations)
    target = simple(recvbuf, writable=True, blocks=len(native.sources))
    return _exchanged(native, sources, _shares(target, native.sources))


def neighbor_alltoallv(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send each neighbour some elements, and receive some from each."""
    native = _native(state)
    sources = _vector(sendbuf, native.destinations)
    return _exchanged(native, sources, _vector(recvbuf, native.sources, writable=True))


def neighbor_alltoallw(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send each neighbour elements of a datatype of its own, and receive such elements from each."""
    native = _native(state)
    sources = _without_nobody(vector_w(sendbuf, len(native.destinations)), native.destinations)
    targets = _without_nobody(vector_w(recvbuf, len(native.sources), writable=True), native.sources)
    return _exchanged(native, sources, targets, _u1)


for _prepare in (neighbor_allgather, neighbor_allgatherv, neighbor_alltoall, neighbor_alltoallv, neighbor_alltoallw):
    add_collective(Topocomm, _prepare.__name__.capitalize(), _prepare)


@whole_numbers
class Cartcomm(Topocomm):
    """A communicator whose ranks form a grid."""

    __slots__ = ()

    def Get_dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._live.native.dims)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """Return the dimensions, the periods and the coordinates of this rank."""
        grid = self._live.native
        return list(grid.dims), [int(period) for period in grid.periodic], list(grid.coordinates())

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """Return the rank of coordinates."""
        rank = self._live.native.rank_at(list(coords))
        if rank is unisono.NOBODY:
            raise fail("ERR_ARG", f"the coordinates {coords} are outside of the grid")
        return int(rank)

    def Get_coords(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""
        if not 0 <= rank < self._live.size:
            raise fail("ERR_RANK", f"{rank} is not a rank")
        return list(self._state.native.coordinates(rank))

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Return the ranks to receive from and to send to, for a shift along a dimension."""
        try:
            source, target = _ranks(self._live.native.shift(direction, disp))
        except UsageError as error:
            raise fail("ERR_DIMS", str(error)) from error
        return source, target

    @translating
    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Return the communicator of the ranks that differ from this one in the dimensions that remain only."""
        state, remain = self._live, list(remain_dims)
        grid = state.native
        fixed = [coord for coord, stays in zip(grid.coordinates(), remain, strict=True) if not stays]
        dims = [dim for dim, stays in zip(grid.dims, remain, strict=True) if stays]
        periods = [period for period, stays in zip(grid.periodic, remain, strict=True) if stays]
        ranks = [
            rank
            for rank in range(state.size)
            if [coord for coord, stays in zip(grid.coordinates(rank), remain, strict=True) if not stays] == fixed
        ]
        return handle_of(CommState([state.members[rank] for rank in ranks], state.universe, _Grid(dims, periods)))

    dim = property(Get_dim, doc="The number of dimensions.")
    ndim = property(Get_dim, doc="The number of dimensions.")
    topo = property(Get_topo, doc="The dimensions, the periods and the coordinates of this rank.")
    dims = property(lambda self: self.Get_topo()[0], doc="The dimensions.")
    periods = property(lambda self: self.Get_topo()[1], doc="The periods.")
    coords = property(lambda self: self.Get_topo()[2], doc="The coordinates of this rank.")


@whole_numbers
class Graphcomm(Topocomm):
    """A communicator whose ranks form a graph that all of them know."""

    __slots__ = ()

    def Get_dims(self) -> tuple[int, int]:
        """Return the numbers of nodes and edges."""
        graph = self._live.topology
        return len(graph.index), len(graph.edges)

    def Get_topo(self) -> tuple[list[int], list[int]]:
        """Return the index and the edges."""
        graph = self._live.topology
        return list(graph.index), list(graph.edges)

    def Get_neighbors_count(self, rank: int) -> int:
        """Return the number of neighbours of a rank."""
        return len(self.Get_neighbors(rank))

    def Get_neighbors(self, rank: int) -> list[int]:
        """Return the neighbours of a rank."""
        if not 0 <= rank < self._live.size:
            raise fail("ERR_RANK", f"{rank} is not a rank")
        return list(self._state.topology.of(rank))

    dims = property(Get_dims, doc="The numbers of nodes and edges.")
    topo = property(Get_topo, doc="The index and the edges.")
    nnodes = property(lambda self: self.Get_dims()[0], doc="The number of nodes.")
    nedges = property(lambda self: self.Get_dims()[1], doc="The number of edges.")
    index = property(lambda self: self.Get_topo()[0], doc="The index.")
    edges = property(lambda self: self.Get_topo()[1], doc="The edges.")
    nneighbors = property(lambda self: self.Get_neighbors_count(self.rank), doc="The number of neighbours.")
    neighbors = property(lambda self: self.Get_neighbors(self.rank), doc="The neighbours.")


class Distgraphcomm(Topocomm):
    """A communicator whose ranks form a graph of which each rank knows its own neighbours."""

    __slots__ = ()

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        """Return the numbers of neighbours to receive from and to send to, and whether they have weights."""
        indegree, outdegree = self.degrees
        return indegree, outdegree, self._live.topology.weights is not None

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], Any]:
        """Return the neighbours to receive from and to send to, and their weights."""
        return *self.inoutedges, self._live.topology.weights


CLASSES.update({_Grid.kind: Cartcomm, _Graph.kind: Graphcomm, _DistGraph.kind: Distgraphcomm})


@whole_arguments
def Compute_dims(nnodes: int, dims: Any) -> list[int]:
    """Return the dimensions of a grid of ranks, as equal as possible; those that are not 0 stay as they are."""
    try:
        return list(unisono.grid_dims(nnodes, dims))
    except UsageError as error:
        raise fail("ERR_DIMS", str(error)) from error


@translating
def _create_cart(self: Any, dims: Any, periods: Any = None, reorder: bool = False) -> Any:
    """Return the communicator of a grid; null on ranks that are not in it."""
    state = self._live
    dims = [int(dims)] if isinstance(dims, int) else list(dims)
    if periods is None or isinstance(periods, bool):
        periods = [bool(periods)] * len(dims)
    if len(list(periods)) != len(dims):
        raise ValueError(f"expecting {len(dims)} periods, got {len(list(periods))}")
    count = math.prod(dims)
    if any(dim < 0 for dim in dims) or count > state.size:
        raise fail("ERR_DIMS", f"{state.size} ranks do not fill a grid of the dimensions {dims}")
    if state.rank >= count:
        return COMM_NULL
    return Cartcomm._of(CommState(state.members[:count], state.universe, _Grid(dims, list(periods))))


@translating
def _create_graph(self: Any, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
    """Return the communicator of a graph; null on ranks that are not in it."""
    state = self._live
    if len(index) > 1 and index[0] == 0 and (len(index) > state.size or index[1] > 0):
        index = index[1:]  # the index may begin with 0, as the offsets of a sparse matrix do
    if len(index) > state.size:
        raise fail("ERR_ARG", f"{state.size} ranks are fewer than the {len(index)} nodes of the graph")
    if state.rank >= len(index):
        return COMM_NULL
    return Graphcomm._of(CommState(state.members[: len(index)], state.universe, _Graph(index, edges)))


def _weights(weights: Any, count: int | None) -> list[int] | None:
    if weights is None or (isinstance(weights, int) and weights == UNWEIGHTED):
        return None
    numbers = [] if isinstance(weights, int) and weights == WEIGHTS_EMPTY else [int(each) for each in weights]
    if count is not None and len(numbers) != count:
        raise ValueError(f"expecting {count} weights, got {len(numbers)}")
    return numbers


@translating
def _create_dist_graph_adjacent(
    self: Any,
    sources: Any,
    destinations: Any,
    sourceweights: Any = None,
    destweights: Any = None,
    info: Any = INFO_NULL,
    reorder: bool = False,
) -> Any:
    """Return the communicator of a graph of which each rank passes its own neighbours."""
    state, sources, destinations = self._live, list(sources or []), list(destinations or [])
    weights = _weights(sourceweights, len(sources)), _weights(destweights, len(destinations))
    topology = _DistGraph(sources, destinations, None if None in weights else weights)
    return Distgraphcomm._of(CommState(state.members, state.universe, topology))


@translating
def _create_dist_graph(
    self: Any,
    sources: Any,
    degrees: Any,
    destinations: Any,
    weights: Any = None,
    info: Any = INFO_NULL,
    reorder: bool = False,
) -> Any:
    """Return the communicator of a graph of which each rank passes some edges."""
    state = self._live
    numbers, ends = _weights(weights, sum(degrees)), list(itertools.accumulate(degrees))
    edges = [
        (source, destinations[k], 1 if not numbers else numbers[k])
        for source, degree, end in zip(sources, degrees, ends, strict=True)
        for k in range(end - degree, end)
    ]
    told = state.native.allgather_object((edges, numbers is not None))
    everything = [edge for part, _ in told for edge in part]
    inside = [(source, weight) for source, target, weight in everything if target == state.rank]
    outside = [(target, weight) for source, target, weight in everything if source == state.rank]
    is_weighted = all(has for _, has in told)
    topology = _DistGraph(
        [source for source, _ in inside], [target for target, _ in outside],
        ([weight for _, weight in inside], [weight for _, weight in outside]) if is_weighted else None,
    )  # fmt: skip
    return Distgraphcomm._of(CommState(state.members, state.universe, topology))


def _cart_map(self: Any, dims: Any, periods: Any = None) -> int:
    """Return the rank of this process in a grid; `UNDEFINED` if it is not in it."""
    rank = self._live.rank
    return rank if rank < math.prod(dims) else UNDEFINED


def _graph_map(self: Any, index: Sequence[int], edges: Sequence[int]) -> int:
    """Return the rank of this process in a graph; `UNDEFINED` if it is not in it."""
    rank = self._live.rank
    return rank if rank < len(index) else UNDEFINED


for _name, _method in {
    "Create_cart": _create_cart,
    "Create_graph": _create_graph,
    "Create_dist_graph_adjacent": _create_dist_graph_adjacent,
    "Create_dist_graph": _create_dist_graph,
    "Cart_map": _cart_map,
    "Graph_map": _graph_map,
}.items():
    _method.__name__ = _method.__qualname__ = _name
    setattr(Intracomm, _name, _method)

"""`Cartcomm`, `Graphcomm` and `Distgraphcomm`: communicators whose ranks have neighbours, and their collectives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.constants import CONSTANTS, PROC_NULL, UNDEFINED
from unisono.compat.mpi4py.base.errors import fail, translating
from unisono.compat.mpi4py.communicators.comm import CLASSES, COMM_NULL, CommState, Intracomm, add_collective
from unisono.compat.mpi4py.memory.buffers import simple, vector, vector_w
from unisono.compat.mpi4py.values.info import INFO_NULL
from unisono.compat.mpi4py.values.pickles import pickle

UNWEIGHTED, WEIGHTS_EMPTY = CONSTANTS["UNWEIGHTED"], CONSTANTS["WEIGHTS_EMPTY"]


class _Grid:
    """A Cartesian topology.

    Attributes:
        dims, periods: the number of ranks in each dimension, and whether it is a ring.
        kind: the constant `CART`.
    """

    kind = CONSTANTS["CART"]

    def __init__(self, dims: Sequence[int], periods: Sequence[bool]) -> None:
        self.dims, self.periods = [int(dim) for dim in dims], [bool(period) for period in periods]

    def rank_of(self, coords: Sequence[int]) -> int:
        rank = 0
        for coord, dim, is_ring in zip(coords, self.dims, self.periods, strict=True):
            if not is_ring and not 0 <= coord < dim:
                raise fail("ERR_ARG", f"coordinate {coord} is outside of a dimension of {dim}")
            rank = rank * dim + coord % dim
        return rank

    def coords_of(self, rank: int) -> list[int]:
        coords = []
        for dim in reversed(self.dims):
            coords.append(rank % dim)
            rank //= dim
        return coords[::-1]

    def shifted(self, rank: int, direction: int, disp: int) -> int:
        coords = self.coords_of(rank)
        coords[direction] += disp
        if not self.periods[direction] and not 0 <= coords[direction] < self.dims[direction]:
            return PROC_NULL
        return self.rank_of(coords)

    def sources(self, rank: int) -> list[int]:
        return [self.shifted(rank, dim, disp) for dim in range(len(self.dims)) for disp in (-1, 1)]

    targets = sources


class _Graph:
    """A graph that all ranks know."""

    kind = CONSTANTS["GRAPH"]

    def __init__(self, index: Sequence[int], edges: Sequence[int]) -> None:
        self.index, self.edges = list(index), list(edges)

    def sources(self, rank: int) -> list[int]:
        return self.edges[self.index[rank - 1] if rank else 0 : self.index[rank]]

    targets = sources


class _DistGraph:
    """A graph of which each rank knows its own neighbours."""

    kind = CONSTANTS["DIST_GRAPH"]

    def __init__(self, sources: Sequence[int], targets: Sequence[int], weights: Any) -> None:
        self._sources, self._targets, self.weights = list(sources), list(targets), weights

    def sources(self, rank: int) -> list[int]:
        return self._sources

    def targets(self, rank: int) -> list[int]:
        return self._targets


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
    def degrees(self) -> tuple[int, int]:
        """The numbers of neighbours that this rank receives from and sends to."""
        sources, targets = self.inoutedges
        return len(sources), len(targets)

    indegree = property(lambda self: self.degrees[0], doc="The number of neighbours that this rank receives from.")
    outdegree = property(lambda self: self.degrees[1], doc="The number of neighbours that this rank sends to.")

    @property
    def inoutedges(self) -> tuple[list[int], list[int]]:
        """The neighbours that this rank receives from, and those that it sends to."""
        state = self._live
        if state.topology is None:
            raise fail("ERR_TOPOLOGY", "the communicator has no topology")
        return state.topology.sources(state.rank), state.topology.targets(state.rank)

    inedges = property(lambda self: self.inoutedges[0], doc="The neighbours that this rank receives from.")
    outedges = property(lambda self: self.inoutedges[1], doc="The neighbours that this rank sends to.")

    @translating
    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Send an object to each neighbour, and return theirs."""
        return self.neighbor_alltoall([sendobj] * self.outdegree)

    @translating
    def neighbor_alltoall(self, sendobj: Any) -> list[Any]:
        """Send each neighbour an object, and return theirs."""
        outdegree = self.outdegree
        items = [None] * outdegree if sendobj is None else list(sendobj)
        if len(items) != outdegree:
            raise ValueError(f"expecting {outdegree} items, got {len(items)}")
        data = [np.frombuffer(pickle.dumps(item), np.uint8) for item in items]
        sizes = np.array([each.size for each in data], np.int64)
        arriving = np.zeros(self.indegree, np.int64)
        self.Neighbor_alltoall([sizes, len(sizes) and 1, "q"], [arriving, len(arriving) and 1, "q"])  # type: ignore[attr-defined]
        received = np.empty(int(arriving.sum()), np.uint8)
        stream = np.concatenate(data) if data else np.empty(0, np.uint8)
        self.Neighbor_alltoallv([stream, sizes, "B"], [received, arriving, "B"])  # type: ignore[attr-defined]
        ends = np.cumsum(arriving)
        return [
            None if peer == PROC_NULL else pickle.loads(received[end - count : end])
            for peer, end, count in zip(self.inedges, ends, arriving, strict=True)
        ]


def _neighbors(state: Any, sends: Sequence[Any], receives: Sequence[Any]) -> Any:
    """Return the exchange of blocks with the neighbours, in which the kth message to a rank is the kth from there."""
    topology = state.topology
    if topology is None:
        raise fail("ERR_TOPOLOGY", "the communicator has no topology")
    sources, targets = topology.sources(state.rank), topology.targets(state.rank)
    outgoing = list(zip(targets, sends, strict=True))
    if isinstance(topology, _Grid):
        # A message to the lower neighbour of a dimension arrives as the one from the upper neighbour.
        outgoing = [outgoing[edge ^ 1] for edge in range(len(outgoing))]
    arriving = [(rank, block) for rank, block in zip(sources, receives, strict=True) if rank != PROC_NULL]
    return state.exchange([(rank, block) for rank, block in outgoing if rank != PROC_NULL], arriving)


def _degrees(state: Any) -> tuple[int, int]:
    if state.topology is None:
        raise fail("ERR_TOPOLOGY", "the communicator has no topology")
    return len(state.topology.sources(state.rank)), len(state.topology.targets(state.rank))


def _shares(block: Any, degree: int) -> list[Any]:
    return [block.part(n * block.count, block.count) for n in range(degree)]


def neighbor_allgather(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send a buffer to each neighbour, and collect theirs."""
    indegree, outdegree = _degrees(state)
    target = simple(recvbuf, writable=True, blocks=indegree)
    return _neighbors(state, [simple(sendbuf)] * outdegree, _shares(target, indegree))


def neighbor_allgatherv(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send a buffer to each neighbour, and collect theirs."""
    indegree, outdegree = _degrees(state)
    return _neighbors(state, [simple(sendbuf)] * outdegree, _vector(recvbuf, indegree, writable=True))


def neighbor_alltoall(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send each neighbour a share, and receive one from each."""
    indegree, outdegree = _degrees(state)
    source = simple(sendbuf, blocks=outdegree)
    return _neighbors(
        state, _shares(source, outdegree), _shares(simple(recvbuf, writable=True, blocks=indegree), indegree)
    )


def _vector(spec: Any, degree: int, *, writable: bool = False) -> list[Any]:
    return vector(spec, degree, writable=writable) if degree else []


def neighbor_alltoallv(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send each neighbour some elements, and receive some from each."""
    indegree, outdegree = _degrees(state)
    return _neighbors(state, _vector(sendbuf, outdegree), _vector(recvbuf, indegree, writable=True))


def neighbor_alltoallw(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send each neighbour elements of a datatype of its own, and receive such elements from each."""
    indegree, outdegree = _degrees(state)
    return _neighbors(state, vector_w(sendbuf, outdegree), vector_w(recvbuf, indegree, writable=True))


for _prepare in (neighbor_allgather, neighbor_allgatherv, neighbor_alltoall, neighbor_alltoallv, neighbor_alltoallw):
    add_collective(Topocomm, _prepare.__name__.capitalize(), _prepare)


class Cartcomm(Topocomm):
    """A communicator whose ranks form a grid."""

    __slots__ = ()

    def Get_dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._live.topology.dims)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """Return the dimensions, the periods and the coordinates of this rank."""
        grid = self._live.topology
        return list(grid.dims), [int(period) for period in grid.periods], grid.coords_of(self._state.rank)

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """Return the rank of coordinates."""
        return int(self._live.topology.rank_of(list(coords)))

    def Get_coords(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""
        if not 0 <= rank < self._live.size:
            raise fail("ERR_RANK", f"{rank} is not a rank")
        return list(self._state.topology.coords_of(rank))

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Return the ranks to receive from and to send to, for a shift along a dimension."""
        grid, rank = self._live.topology, self._state.rank
        if not 0 <= direction < len(grid.dims):
            raise fail("ERR_DIMS", f"there is no dimension {direction} of {len(grid.dims)}")
        return grid.shifted(rank, direction, -disp), grid.shifted(rank, direction, disp)

    @translating
    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Return the communicator of the ranks that differ from this one in the dimensions that remain only."""
        grid, coords = self._live.topology, self.coords
        remain = list(remain_dims)
        key = [coord for coord, stays in zip(coords, remain, strict=True) if not stays]
        color = 0
        for coord, dim in zip(
            key, [dim for dim, stays in zip(grid.dims, remain, strict=True) if not stays], strict=True
        ):
            color = color * dim + coord
        new = self._state.split(color, self._state.rank)
        dims = [dim for dim, stays in zip(grid.dims, remain, strict=True) if stays]
        new.topology = _Grid(dims, [period for period, stays in zip(grid.periods, remain, strict=True) if stays])
        return Cartcomm._of(new)

    dim = property(Get_dim, doc="The number of dimensions.")
    ndim = property(Get_dim, doc="The number of dimensions.")
    topo = property(Get_topo, doc="The dimensions, the periods and the coordinates of this rank.")
    dims = property(lambda self: self.Get_topo()[0], doc="The dimensions.")
    periods = property(lambda self: self.Get_topo()[1], doc="The periods.")
    coords = property(lambda self: self.Get_topo()[2], doc="The coordinates of this rank.")


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
        return list(self._live.topology.sources(rank))

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
        graph = self._live.topology
        return list(graph.sources(0)), list(graph.targets(0)), graph.weights


CLASSES.update({_Grid.kind: Cartcomm, _Graph.kind: Graphcomm, _DistGraph.kind: Distgraphcomm})


def Compute_dims(nnodes: int, dims: Any) -> list[int]:
    """Return the dimensions of a grid of ranks, as equal as possible; those that are not 0 stay as they are."""
    dims = [0] * dims if isinstance(dims, int) else [int(dim) for dim in dims]
    fixed = math.prod(dim for dim in dims if dim)
    if nnodes <= 0 or nnodes % fixed:
        raise fail("ERR_DIMS", f"{nnodes} ranks do not fill a grid of the dimensions {dims}")
    open_dims = [place for place, dim in enumerate(dims) if not dim]
    sizes, rest = [1] * len(open_dims), nnodes // fixed
    factors, divisor = [], 2
    while rest > 1:
        while rest % divisor == 0:
            factors.append(divisor)
            rest //= divisor
        divisor += 1
    if factors and not open_dims:
        raise fail("ERR_DIMS", f"{nnodes} ranks do not fill a grid of the dimensions {dims}")
    for factor in reversed(factors):
        sizes[sizes.index(min(sizes))] *= factor
    for place, size in zip(open_dims, sorted(sizes, reverse=True), strict=True):
        dims[place] = size
    return dims


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
    new = CommState(state.members[:count])
    new.topology = _Grid(dims, list(periods))
    return Cartcomm._of(new)


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
    new = CommState(state.members[: len(index)])
    new.topology = _Graph(index, edges)
    return Graphcomm._of(new)


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
    new = CommState(self._live.members)
    sources, destinations = list(sources or []), list(destinations or [])
    weights = _weights(sourceweights, len(sources)), _weights(destweights, len(destinations))
    new.topology = _DistGraph(sources, destinations, None if None in weights else weights)
    return Distgraphcomm._of(new)


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
    new = CommState(state.members)
    is_weighted = all(has for _, has in told)
    new.topology = _DistGraph(
        [source for source, _ in inside], [target for target, _ in outside],
        ([weight for _, weight in inside], [weight for _, weight in outside]) if is_weighted else None,
    )  # fmt: skip
    return Distgraphcomm._of(new)


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

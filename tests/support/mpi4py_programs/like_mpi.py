"""Calls on 3 ranks that must return the same values as MPI. For each, this front end has returned other values before.

Open MPI 5.0.11 and MPICH 5.0.2 return these values.
"""

import operator
from fractions import Fraction

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size
PARTS = np.dtype([("count", "i4"), ("most", "f8")], align=True)


def whole_numbers() -> None:
    """Arguments are cut off as `int` cuts them; items of lists and of buffers are integers."""
    x, out = np.arange(3.0) + rank, np.zeros(3)
    half = size / 2  # 1.5
    comm.Sendrecv(x, right + 0.5, np.float32(7.9), out, Fraction(left), 7.0)
    assert out.tolist() == [left, left + 1, left + 2]
    assert comm.bcast(rank, half) == comm.scatter([1] * size, False) == 1
    assert comm.gather(rank, root=half) == ([0, 1, 2] if rank == 1 else None)
    for call, arguments in {comm.Bcast: (x,), comm.Reduce: (x, out), comm.Gather: (x[:1], out)}.items():
        call(*arguments, root=half)
    comm.Ireduce(x, out, root=half).Wait()
    assert comm.Split(rank / 2, -rank).size == (2 if rank < 2 else 1)
    grid = comm.Create_cart([size], [True])
    assert (grid.Shift(0.0, 1.5), grid.Get_coords(half)) == ((left, right), [1])
    assert MPI.DOUBLE.Create_vector(size / 1.5, 1.0, half).extent == 16
    assert MPI.INT.Create_resized(0.5, 8.5).extent == 8
    assert MPI.INT.Pack_size(1.9, comm) == 4
    window = MPI.Win.Allocate(24.5, 8.0, comm=comm)
    assert len(window.tomemory()) == 24
    window.Lock(float(right))
    window.Put(x, float(right))
    window.Unlock(float(right))
    window.Free()
    for call in (
        lambda: comm.Send([x, 1.0, MPI.DOUBLE], right),
        lambda: comm.Send(x, "1"),
        lambda: comm.group.Incl([1.0]),
        lambda: comm.Allgatherv(x, [out, [1.0] * size]),
    ):
        assert _raises(TypeError, call)


def _raises(error: type[Exception], call) -> bool:
    try:
        call()
    except error:
        return True
    return False


def add(left_part, right_part, datatype) -> None:
    """Combine pairs of a number and a maximum, which lie apart."""
    assert (datatype.size, datatype.extent) == (12, 16)
    a, b = (np.frombuffer(part, PARTS) for part in (left_part, right_part))
    b["count"] += a["count"]
    b["most"] = np.maximum(a["most"], b["most"])


def products(left_part, right_part, datatype) -> None:
    a, b = (np.frombuffer(part).reshape(-1, 2, 2) for part in (left_part, right_part))
    b[:] = a @ b


def functions_of_the_program() -> None:
    """A function gets elements of several numbers as they lie in memory, and each rank the part that is its own."""
    matrix, of_matrix = MPI.DOUBLE.Create_contiguous(4).Commit(), MPI.Op.Create(products)
    x = np.stack([np.array([[1, rank + 1], [0, other + 1]], float) for other in range(size)])
    expected = np.linalg.multi_dot([np.array([[1, each + 1], [0, rank + 1]], float) for each in range(size)])
    for call in (comm.Reduce_scatter_block, comm.Reduce_scatter):
        out = np.zeros((2, 2))
        call([x, size if call == comm.Reduce_scatter else 1, matrix], [out, 1, matrix], op=of_matrix)
        assert (out == expected).all()
    pair = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.INT, MPI.DOUBLE]).Commit()
    mine, out = np.array([(1, rank), (rank, 1 - rank)], PARTS), np.zeros(2, PARTS)
    comm.Allreduce([mine, 2, pair], [out, 2, pair], MPI.Op.Create(add, commute=True))
    assert out.tolist() == [(3, 2.0), (3, 1.0)]
    assert _raises(MPI.Exception, lambda: comm.Allreduce([mine, 2, pair], [out, 2, pair], MPI.SUM))


def functions_between_groups() -> None:
    inner = comm.Split(rank == 0)
    bridge = inner.Create_intercomm(0, comm, 1 if rank == 0 else 0)
    pair, out = MPI.DOUBLE.Create_contiguous(2).Commit(), np.zeros(4 // inner.size)
    sums = MPI.Op.Create(lambda a, b, _: operator.iadd(np.frombuffer(b), np.frombuffer(a)), commute=True)
    counts = [2 // inner.size] * inner.size
    bridge.Reduce_scatter([np.arange(4.0) + rank, 2, pair], [out, counts[0], pair], counts, sums)
    assert out.tolist() == ([3, 5, 7, 9] if rank == 0 else [0, 1] if rank == 1 else [2, 3])
    least = np.array([(-rank, rank), (0, rank)], np.dtype("d,i", align=True))
    best = np.zeros_like(least)
    bridge.Allreduce([least, 2, MPI.DOUBLE_INT], [best, 2, MPI.DOUBLE_INT], op=MPI.MINLOC)
    assert best.tolist() == ([(-2.0, 2), (0.0, 1)] if rank == 0 else [(0.0, 0), (0.0, 0)])


def characters() -> None:
    """Characters are integers in reductions; arrays of longer strings have no datatype."""
    out = bytearray(2)
    comm.Allreduce([bytes([1 + rank, 0xFF]), MPI.CHAR], [out, MPI.CHAR])
    assert out == bytes([6, 0xFD])
    comm.Allreduce([bytes([1 + rank, 0xFF]), MPI.CHAR], [out, MPI.CHAR], MPI.MAX)
    assert out == bytes([3, 0xFF])
    assert _raises(MPI.Exception, lambda: comm.Allreduce([out, 0, MPI.WCHAR], [out, 0, MPI.WCHAR]))
    for words in (np.array(["ab"]), np.array([b"abc"])):
        assert _raises(KeyError, lambda words=words: comm.Bcast(words))


def packed_elements() -> None:
    """As many elements are packed as their extents fit into the memory."""
    x = np.arange(12, dtype="i4")
    last = MPI.INT.Create_subarray([4], [1], [3]).Commit()
    wide = MPI.INT.Create_resized(0, 20).Commit()
    for datatype, picked in ((last, [3, 7, 11]), (wide, [0, 5])):
        packed = bytearray(48)
        assert datatype.Pack(x, packed, 0, comm) == 4 * len(picked)
        assert np.frombuffer(packed, "i4")[: len(picked)].tolist() == picked


def external_elements() -> None:
    """Each number of a structure has its bytes in big-endian order."""
    if "MPICH" in MPI.Get_library_version():
        return  # MPICH 5.0.2 ends the process
    pair = MPI.Datatype.Create_struct([1, 2], [0, 8], [MPI.SHORT, MPI.DOUBLE]).Commit()
    whole = pair.Create_resized(0, 24).Create_contiguous(2).Commit()
    x, out = np.zeros(2, np.dtype("i2,(2,)f8", align=True)), np.zeros(2, np.dtype("i2,(2,)f8", align=True))
    x["f0"], x["f1"] = [1, 2], [[3, 4], [5, 6]]
    packed = bytearray(whole.Pack_external_size("external32", 1))
    assert whole.Pack_external("external32", x, packed, 0) == len(packed) == 36
    assert packed == x.astype(">i2,(2,)>f8").tobytes()
    assert whole.Unpack_external("external32", packed, 0, out) == 36
    assert (out == x).all()


def memory_of_windows() -> None:
    window = MPI.Win.Allocate(4, comm=comm)
    np.asarray(window)[:] = [1, 2, 3, rank]
    assert bytes(window.tomemory()) == bytes([1, 2, 3, rank])
    window.Free()


def values() -> None:
    group = comm.group
    assert group.Excl([0, 1, 2]) == group.Incl([]) == MPI.Group.Difference(group, group) == MPI.GROUP_EMPTY
    codes = [(MPI.DOUBLE, "d"), (MPI.CHAR, "c"), (MPI.AINT, "p"), (MPI.INT32_T, "i4"), (MPI.C_BOOL, "b1")]
    for datatype, code in codes:
        assert datatype.tocode() == datatype.Dup().tocode() == code
    assert MPI.Datatype.fromcode("i8") == MPI.INT64_T
    graph = comm.Create_graph(np.arange(1, size + 1), np.array([1, 2, 0]))
    assert {type(each) for part in graph.Get_topo() for each in part} == {int}


for check in (
    whole_numbers,
    functions_of_the_program,
    functions_between_groups,
    characters,
    packed_elements,
    external_elements,
    memory_of_windows,
    values,
):
    check()
print(f"rank {rank} has checked everything")

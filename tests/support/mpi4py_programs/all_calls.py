"""A program of mpi4py that checks the calls of `MPI` on 3 ranks, without a word about Unisono."""

import array
import os
import pickle
import tempfile

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
right, left = (rank + 1) % size, (rank - 1) % size
everyone = list(range(size))


def objects() -> None:
    assert comm.bcast({"a": 1} if rank == 1 else None, root=1) == {"a": 1}
    assert comm.scatter([n * n for n in everyone] if rank == 0 else None) == rank * rank
    assert comm.gather(rank, root=2) == (everyone if rank == 2 else None)
    assert comm.allgather(str(rank)) == [str(n) for n in everyone]
    assert comm.alltoall([(rank, n) for n in everyone]) == [(n, rank) for n in everyone]
    assert comm.allreduce(rank) == sum(everyone)
    assert comm.reduce([rank], op=MPI.SUM, root=0) == (everyone if rank == 0 else None)
    assert comm.allreduce((rank * 2 % size, rank), op=MPI.MAXLOC) == max((n * 2 % size, n) for n in everyone)
    assert comm.scan(rank + 1) == sum(range(rank + 2))
    assert comm.exscan(rank + 1) == (None if rank == 0 else sum(range(rank + 1)))
    status = MPI.Status()
    assert comm.sendrecv(rank, right, 3, source=left, recvtag=3, status=status) == left
    assert (status.source, status.tag) == (left, 3)
    request = comm.irecv(source=MPI.ANY_SOURCE, tag=4)
    comm.send(np.arange(rank + 1), dest=rank, tag=4)
    assert request.wait().tolist() == list(range(rank + 1))
    request = comm.isend("matched", dest=right, tag=5)
    message = comm.mprobe(source=left, tag=5)
    assert message.recv() == "matched"
    request.wait()


def structures() -> None:
    pair = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.INT, MPI.DOUBLE]).Create_resized(0, 16).Commit()
    x = np.zeros(2, np.dtype([("a", "i4"), ("b", "f8")], align=True))
    x["a"], x["b"] = rank, rank / 2
    everything = np.zeros(2 * size, x.dtype)
    comm.Allgather([x, pair], [everything, pair])
    assert everything["a"].tolist() == np.repeat(everyone, 2).tolist()
    assert everything["b"].tolist() == (np.repeat(everyone, 2) / 2).tolist()
    days = np.array([rank, 2], "datetime64[D]")
    comm.Sendrecv_replace([days, MPI.BYTE], right, source=left)
    assert days.tolist() == np.array([left, 2], "datetime64[D]").tolist()
    comm.Bcast([x, MPI.BYTE], root=1)
    assert x["a"].tolist() == [1, 1]
    pair.Free()


def synchronous_sends() -> None:
    """Each rank receives the messages of its left neighbour only after that one has seen that no send has ended."""
    x, out = np.arange(3.0), np.empty(3)
    persistent = comm.Ssend_init(x, right, 6)
    persistent.Start()
    requests = [comm.Issend(x, right, 7), comm.issend("object", right, 8), comm.issend("matched", right, 9)]
    message = comm.mprobe(left, 9)
    comm.Probe(left, 7)
    comm.Barrier()
    assert not any(request.Test() for request in (persistent, *requests))
    comm.Barrier()
    assert message.recv() == "matched"
    requests[2].wait()
    comm.Barrier()
    assert not any(request.Test() for request in (persistent, *requests[:2]))
    comm.Barrier()
    assert comm.recv(source=left, tag=8) == "object"
    for tag in (7, 6):
        comm.Recv(out, left, tag)
        assert out.tolist() == [0, 1, 2]
    MPI.Request.Waitall([persistent, *requests[:2]])
    persistent.Free()
    receiving = comm.Irecv(out, left, 6)
    comm.Ssend(2 * x, right, 6)
    receiving.Wait()
    assert out.tolist() == [0, 2, 4]
    receiving = comm.irecv(source=left, tag=7)
    comm.ssend("object", right, 7)
    assert receiving.wait() == "object"


def buffers() -> None:
    mine, out = np.full(4, rank + 1.0), np.empty(4)
    comm.Allreduce(mine, out)
    assert (out == 6).all()
    comm.Allreduce(MPI.IN_PLACE, mine, op=MPI.PROD)
    assert (mine == 6).all()
    comm.Bcast([out, 2, MPI.DOUBLE], root=1)
    every = np.empty((size, 2), "i")
    comm.Allgather(np.array([rank, -rank], "i"), every)
    assert every[:, 0].tolist() == everyone
    typed = array.array("l", [0] * size)
    comm.Gather([array.array("l", [rank]), MPI.LONG], [typed, MPI.LONG] if rank == 0 else None)
    assert rank or typed.tolist() == everyone
    # Only the root knows the counts, and its parts lie apart.
    whole = np.full(10, -1, "i")
    counts, displs = [1, 2, 3], [0, 2, 6]
    comm.Gatherv(np.full(rank + 1, rank, "i"), [whole, (counts, displs), MPI.INT] if rank == 2 else None, root=2)
    assert rank != 2 or whole.tolist() == [0, -1, 1, 1, -1, -1, 2, 2, 2, -1]
    part = np.empty(rank + 1, "i")
    comm.Scatterv([whole, (counts, displs), MPI.INT] if rank == 2 else None, part, root=2)
    assert (part == rank).all()
    request = comm.Iallgatherv(part, [whole, (counts, displs), MPI.INT])
    request.Wait()
    assert whole[[0, 2, 6]].tolist() == everyone
    column = MPI.DOUBLE.Create_vector(3, 1, 3).Commit()
    matrix = np.arange(9.0).reshape(3, 3)
    got = np.zeros(3)
    comm.Sendrecv([matrix, 1, column], right, recvbuf=got, source=left)
    assert got.tolist() == [0, 3, 6]
    row = np.zeros(3 * size, "i")
    comm.Alltoallw(
        [np.arange(size, dtype="i"), ([1] * size, [4 * n for n in everyone]), [MPI.INT] * size],
        [row, ([1] * size, [12 * n for n in everyone]), [MPI.INT] * size],
    )
    assert row[::3].tolist() == [rank] * size
    column.Free()
    persistent = comm.Allreduce_init(got, out[:3])
    for _ in range(2):
        persistent.Start()
        persistent.Wait()
    assert out[:3].tolist() == [0, 9, 18]
    longest = np.array([rank], "g")
    comm.Allreduce(MPI.IN_PLACE, longest)  # Unisono has no such numbers, so the ranks combine them
    assert longest[0] == 3
    least = np.zeros(1, np.dtype("d,i", align=True))
    least[0] = (-(rank % 2), rank)
    best = np.zeros_like(least)
    comm.Allreduce([least, 1, MPI.DOUBLE_INT], [best, 1, MPI.DOUBLE_INT], op=MPI.MINLOC)
    assert best[0].tolist() == (-1.0, 1)


def farther(left_part: memoryview, right_part: memoryview, datatype: MPI.Datatype) -> None:
    a, b = (np.frombuffer(part, "i") for part in (left_part, right_part))
    b[:] = 10 * a + b


def messages() -> None:
    status, short = MPI.Status(), np.zeros(8)
    requests = [comm.Isend(np.full(3, rank + 0.5), right, tag=7), comm.Irecv(short, MPI.ANY_SOURCE, MPI.ANY_TAG)]
    statuses = [MPI.Status(), status]
    MPI.Request.Waitall(requests, statuses)
    assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.DOUBLE)) == (left, 7, 3)
    assert short.tolist() == [left + 0.5] * 3 + [0] * 5
    comm.Recv(short, source=MPI.PROC_NULL, status=status)
    assert (status.source, status.Get_count()) == (MPI.PROC_NULL, 0)
    unmatched = comm.Irecv(short, left, tag=99)
    unmatched.Cancel()
    unmatched.Wait(status)
    assert (status.Is_cancelled(), bool(unmatched)) == (True, False)
    comm.Barrier()
    # The message that the receive would have got arrives after it.
    comm.Isend(np.ones(1), right, tag=99)
    comm.Recv(short, left, 99)
    assert not comm.Iprobe()


def waits_for_some() -> None:
    """A token goes around, so that each wait but the first begins before its message has been sent."""
    comm.Barrier()  # a probe for all messages comes before
    waits = {
        MPI.Request.Waitany: lambda index: index,
        MPI.Request.Waitsome: lambda indices: indices[0],
        MPI.Request.waitany: lambda found: found[0],
        MPI.Request.waitsome: lambda found: found[0][0],
    }
    for number, (wait, first) in enumerate(waits.items()):
        token, never = np.zeros(1), np.zeros(1)
        requests = [comm.Irecv(never, left, 99), comm.Irecv(token, left, number)]
        if rank == 0:
            comm.Send(np.ones(1), right, number)
        assert first(wait(requests)) == 1
        assert token[0] == 1
        if rank != 0:
            comm.Send(token, right, number)
        assert not requests[1]
        requests[0].Cancel()
        requests[0].Wait()


def communicators() -> None:
    half = comm.Split(rank % 2, key=-rank)
    assert half.size == (2 if rank % 2 == 0 else 1)
    copy = half.Dup()
    half.Free()
    assert copy.allreduce(1) == copy.size
    copy.Free()
    group = comm.Get_group().Incl([2, 0])
    pair = comm.Create_group(group) if rank in (0, 2) else MPI.COMM_NULL
    assert (pair == MPI.COMM_NULL) == (rank == 1)
    if pair:
        assert pair.allgather(rank) == [2, 0]
    grid = comm.Create_cart([3], periods=[True])
    assert (grid.Shift(0, 1), type(grid)) == ((left, right), MPI.Cartcomm)
    got = np.zeros(2, "i")
    grid.Neighbor_allgather(np.array([rank], "i"), got)
    assert got.tolist() == [left, right]
    inner = comm.Split(rank == 0)
    bridge = inner.Create_intercomm(0, comm, 1 if rank == 0 else 0)
    assert bridge.allgather(rank) == ([1, 2] if rank == 0 else [0])
    assert bridge.Merge(high=rank == 0).allgather(rank) == [1, 2, 0]
    keyval = MPI.Comm.Create_keyval(copy_fn=True)
    grid.Set_attr(keyval, "kept")
    assert grid.Dup().Get_attr(keyval) == "kept"
    assert MPI.COMM_SELF.allreduce(rank) == rank


def error_class(call) -> int:
    try:
        call()
    except MPI.Exception as error:
        return error.Get_error_class()
    return MPI.SUCCESS


def values() -> None:
    digits = MPI.Op.Create(farther)
    out = np.zeros(1, "i")
    comm.Allreduce(np.array([rank + 1], "i"), out, op=digits)
    assert out[0] == 123  # in the order of ranks
    assert pickle.loads(pickle.dumps(MPI.SUM)) is MPI.SUM
    assert error_class(lambda: comm.Send(out, dest=size)) == MPI.ERR_RANK
    assert error_class(lambda: comm.Send(out, dest=right, tag=-3)) == MPI.ERR_TAG
    assert error_class(lambda: comm.Bcast(out, root=size)) == MPI.ERR_ROOT
    assert error_class(MPI.COMM_NULL.Get_size) == MPI.ERR_COMM
    packed = bytearray(MPI.INT.Pack_size(2, comm))
    assert MPI.INT.Pack(np.array([7, 8], "i"), packed, 0, comm) == 8
    assert "Unisono" in MPI.Get_library_version()


def windows() -> None:
    table = np.zeros(4, "i8")
    win = MPI.Win.Create(table, 8, comm=comm)
    win.Fence()
    win.Put(np.array([rank + 1]), right, 2)
    win.Accumulate(np.array([rank, 1]), 0, [0, 2])
    win.Fence()
    assert table[2] == left + 1
    assert rank > 0 or table[:2].tolist() == [3, 3]
    got = np.zeros(2, "i8")
    win.Get(got, 0, [1, 2, MPI.INT64_T])
    win.Fence(MPI.MODE_NOSUCCEED)
    assert got.tolist() == [3, size]
    assert error_class(lambda: win.Put(got, 0)) == MPI.ERR_RMA_SYNC  # no epoch is open
    ticket = np.zeros(1, "i8")
    win.Lock_all()
    win.Fetch_and_op(np.array([1]), ticket, 0, 3)
    win.Flush(0)
    assert error_class(lambda: win.Put(got, 0, 3)) == MPI.ERR_RMA_RANGE
    win.Unlock_all()
    assert sorted(comm.allgather(int(ticket[0]))) == [0, 1, 2]
    win.Free()
    # Each rank adds to long doubles, for which Unisono has no atomic operation, and to elements that are not aligned.
    wide = np.dtype("g").itemsize
    win = MPI.Win.Allocate_shared(wide + 1 + 8, comm=comm)
    for place, typecode in ((0, "g"), (wide + 1, "i8")):
        win.Lock_all()
        for _ in range(20):
            win.Accumulate(np.ones(1, typecode), 1, place)
        win.Unlock_all()
    comm.Barrier()
    part, unit = win.Shared_query(1)
    raw = np.array(part)
    assert (raw[:wide].view("g")[0], raw[wide + 1 :].view("i8")[0], unit) == (60, 60, 1)
    comm.Barrier()
    others = win.Get_group().Excl([rank])
    win.Post(others)
    win.Start(others)
    for other in (left, right):
        win.Put(np.array([rank], "u1"), other, rank)
    win.Complete()
    win.Wait()
    assert win.tomemory()[left] == left
    assert win.tomemory()[right] == right
    win.Free()
    assert win == MPI.WIN_NULL


def files() -> None:
    path = comm.bcast(tempfile.mktemp() if rank == 0 else None)
    assert error_class(lambda: MPI.File.Open(comm, path, MPI.MODE_RDWR)) == MPI.ERR_NO_SUCH_FILE
    assert error_class(lambda: MPI.File.Open(comm, path, MPI.MODE_CREATE)) == MPI.ERR_AMODE
    file = MPI.File.Open(comm, path, MPI.MODE_RDWR | MPI.MODE_CREATE | MPI.MODE_DELETE_ON_CLOSE)
    # The ranks write the columns of a matrix, and read its rows.
    column = MPI.INT.Create_vector(4, 1, size).Create_resized(0, 4).Commit()
    file.Set_view(4 * rank, MPI.INT, column)
    file.Write_all(np.arange(4, dtype="i") * 10 + rank)
    file.Set_view(0, MPI.INT)
    row, status = np.zeros(size, "i"), MPI.Status()
    file.Read_at_all(size * rank, row, status)
    assert row.tolist() == [10 * rank, 10 * rank + 1, 10 * rank + 2]
    assert (status.Get_count(MPI.INT), file.size) == (size, 4 * 4 * size)
    file.Read_at(4 * size - 1, row, status)  # one element before the end
    assert (status.Get_count(MPI.INT), row[0], row[2]) == (1, 32, 10 * rank + 2)
    file.Seek_shared(2)
    file.Write_ordered(np.full(rank + 1, rank, "i"))
    comm.Barrier()  # all ranks have written
    assert file.Get_position_shared() == 8
    file.Seek(2)
    six = np.zeros(6, "i")
    file.Read(six)
    assert (six.tolist(), file.Get_position()) == ([0, 1, 1, 2, 2, 2], 8)
    file.Set_size(8)
    file.Set_atomicity(True)
    file.Write_shared(np.array([7], "i"))
    comm.Barrier()
    file.Seek(0, MPI.SEEK_END)
    assert file.Get_position() == 8 + size
    file.Close()
    assert not os.path.exists(path)


for check in (
    objects,
    structures,
    synchronous_sends,
    buffers,
    messages,
    waits_for_some,
    communicators,
    values,
    windows,
    files,
):
    check()
print(f"rank {rank} has checked everything")

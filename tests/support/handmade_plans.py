"""Plans with features that few registered algorithms use: several lanes, `after`, permutation, wide spans, counts."""

from __future__ import annotations

from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Counts,
    Group,
    Lane,
    Partition,
    Plan,
    ReadReduce,
    Recv,
    RecvReduce,
    Repeat,
    Send,
    Signal,
    Step,
    Wait,
    Write,
    even,
    in_parts,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
    shares,
)


def shift_in_two_lanes(size: int, rank: int) -> Plan:
    """OUTPUT is the INPUT of the predecessor. Lane 0 receives each half into SCRATCH, then lane 1 copies it."""
    move = Repeat(2, (_shift(size, rank),))
    collect = [Group((Copy(output_block(half), scratch_block(half)),), after=((0, half),)) for half in range(2)]
    return Plan(
        "shift",
        "two_lanes",
        size,
        rank,
        0,
        even(2),
        even(2),
        scratch_like(Buffer.INPUT, even(2)),
        lanes=((move,), tuple(collect)),
    )


def _shift(size: int, rank: int) -> Group:
    send = Send((rank + 1) % size, input_block(0, advance=1))
    return Group((send, Recv((rank - 1) % size, scratch_block(0, advance=1))))


def allgather_bruck(size: int, rank: int, permutation: tuple[int, ...]) -> Plan:
    """Block permutation[r] of OUTPUT is the INPUT of rank r; spans of several blocks wrap around the end of OUTPUT."""
    lane: Lane = (Group((Copy(output_block(rank), input_block()),)),)
    distance = 1
    while distance < size:
        count = min(distance, size - distance)
        send = Send((rank - distance) % size, output_block(rank, count))
        receive = Recv((rank + distance) % size, output_block(rank + distance, count))
        lane += (Group((send, receive)),)
        distance *= 2
    return Plan("allgather", "bruck", size, rank, 0, even(1), even(size), lanes=(lane,), permutation=permutation)


def allgather_both_ways(size: int, rank: int, varying: bool = False) -> Plan:
    """The first half of each rank's share goes around the ring to the next ranks, the second half to those before."""
    following, before = (rank + 1) % size, (rank - 1) % size
    own = Copy(output_block(2 * rank, 2), input_block(0, 2))
    lane: Lane = (Group((own,)),)
    for step in range(size - 1):
        forth = Send(following, output_block(2 * (rank - step))), Recv(before, output_block(2 * (rank - step - 1)))
        lane += (Group(forth),)
    back: Lane = (Group((), after=((0, 0),)),)
    for step in range(size - 1):
        sent, received = output_block(2 * (rank + step) + 1), output_block(2 * (rank + step + 1) + 1)
        back += (Group((Send(before, sent), Recv(following, received))),)
    partitions = in_parts(even(1), 2), in_parts(shares(size, varying), 2)
    return Plan("allgather", "both_ways", size, rank, 0, *partitions, lanes=(lane, back))


def alltoallv_direct(size: int, rank: int) -> Plan:
    """Block p of INPUT goes to rank p, and block p of OUTPUT comes from rank p. Each rank has its own counts."""
    others = [peer for peer in range(size) if peer != rank]
    sends = [Send(peer, input_block(peer)) for peer in others]
    receives = [Recv(peer, output_block(peer)) for peer in others]
    exchange = Group((Copy(output_block(rank), input_block(rank)), *sends, *receives))
    partitions = Partition(size, Counts.SEND), Partition(size, Counts.RECEIVE)
    return Plan("alltoallv", "direct", size, rank, 0, *partitions, lanes=((exchange,),))


def reduce_chain_of_wide_blocks(size: int, rank: int) -> Plan:
    """Rank 0 gets the reduction of all INPUTs. A message holds the second half of the vector before the first half."""
    whole, partial = input_block(1, count=2), scratch_block(1, count=2)
    groups = [Group(_chain_steps(size, rank, receiver)) for receiver in reversed(range(size - 1))]
    if rank == 0:
        groups.append(Group((Copy(output_block(1, count=2), partial if size > 1 else whole, lower=True),)))
    scratch = scratch_like(Buffer.INPUT, even(2))
    return Plan("reduce", "chain", size, rank, 0, even(2), even(2), scratch, lanes=(tuple(groups),))


def _chain_steps(size: int, rank: int, receiver: int) -> tuple[Step, ...]:
    whole, partial = input_block(1, count=2), scratch_block(1, count=2)
    if rank == receiver + 1:
        return (Send(receiver, whole if rank == size - 1 else partial),)
    return (RecvReduce(rank + 1, partial, whole, received_first=True),) if rank == receiver else ()


def allreduce_one_shot(size: int, rank: int) -> Plan:
    """An allreduce that reads mapped memory without waiting for a flag. So it may read before the peer has written."""
    read = ReadReduce(output_block(), tuple((peer, input_block()) for peer in range(size)), lower=True)
    return Plan("allreduce", "one_shot", size, rank, 0, even(1), even(1), lanes=((Group((read,)),),))


def broadcast_by_writes(size: int, rank: int) -> Plan:
    """Every other rank signals that it has begun. Then the root writes to all OUTPUTs, and signals the end."""
    others = range(1, size)
    if rank:
        steps: list[tuple[Step, ...]] = [(Signal(0),), (), (Wait(0),)]
    else:
        written = [Write(peer, output_block(), input_block()) for peer in others]
        own = Copy(output_block(), input_block())
        steps = [tuple(Wait(peer) for peer in others), (*written, own), tuple(Signal(peer) for peer in others)]
    lane = tuple(Group(of_group) for of_group in steps)
    return Plan("broadcast", "writes", size, rank, 0, Partition(0) if rank else even(1), even(1), lanes=(lane,))

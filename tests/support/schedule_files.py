"""Writers of schedules in the formats of MSCCL and MSCCL++, for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


class MscclRank:
    """The threadblocks of a rank of MSCCL, by (send, recv, channel)."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int, int], list[dict[str, Any]]] = {}

    def add(
        self,
        block: tuple[int, int, int],
        kind: str,
        source: tuple[str, int] = ("i", -1),
        target: tuple[str, int] = ("o", -1),
        count: int = 1,
        after: tuple[tuple[int, int, int], int] | None = None,
    ) -> int:
        """Add a step that waits for step `after` of another threadblock; return its number."""
        steps = self.blocks.setdefault(block, [])
        steps.append({"type": kind, "source": source, "target": target, "count": count, "after": after})
        return len(steps) - 1


def msccl(
    collective: str,
    ranks: Sequence[MscclRank],
    chunks: tuple[int, int, int],
    *,
    in_place: bool = False,
    name: str = "made",
) -> bytes:
    """Return the XML of a schedule; `chunks` are those of input, output and scratch."""
    lines = [
        f'<algo name="{name}" proto="Simple" nchannels="2" nchunksperloop="{max(chunks[:2])}" ngpus="{len(ranks)}" '
        f'coll="{collective}" inplace="{int(in_place)}">'
    ]
    for number, rank in enumerate(ranks):
        lines.append(f'<gpu id="{number}" i_chunks="{chunks[0]}" o_chunks="{chunks[1]}" s_chunks="{chunks[2]}">')
        numbers = {block: at for at, block in enumerate(rank.blocks)}
        for block, steps in rank.blocks.items():
            lines.append(f'<tb id="{numbers[block]}" send="{block[0]}" recv="{block[1]}" chan="{block[2]}">')
            for at, step in enumerate(steps):
                (source, source_at), (target, target_at) = step["source"], step["target"]
                other, wait = (-1, -1) if step["after"] is None else (numbers[step["after"][0]], step["after"][1])
                lines.append(
                    f'<step s="{at}" type="{step["type"]}" srcbuf="{source}" srcoff="{source_at}" dstbuf="{target}" '
                    f'dstoff="{target_at}" cnt="{step["count"]}" depid="{other}" deps="{wait}" hasdep="0"/>'
                )
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"]).encode()


def ring_allreduce(size: int, *, in_place: bool = True) -> bytes:
    """A ring with fused steps, in place."""
    ranks = []
    for rank in range(size):
        made, block = MscclRank(), ((rank + 1) % size, (rank - 1) % size, 0)
        kinds = ["s", *["rrs"] * (size - 2), "rrcs", *["rcs"] * (size - 2), "r"]
        for turn, kind in enumerate(kinds):
            at = "i", (rank - turn) % size
            made.add(block, kind, at, at)
        ranks.append(made)
    return msccl("allreduce", ranks, (size, 0, 0), in_place=in_place, name="Ring.Fused-1")


def allpairs_allreduce(size: int, chunks: int) -> bytes:
    """Each rank receives its blocks into scratch, adds them in a threadblock of its own, and sends the sums."""
    ranks = []
    for rank in range(size):
        made, own, peers = MscclRank(), rank * chunks, [peer for peer in range(size) if peer != rank]
        for slot, peer in enumerate(peers):
            made.add((peer, peer, 0), "s", ("i", peer * chunks), ("s", 0), chunks)
            made.add((peer, peer, 0), "r", ("i", own), ("s", slot * chunks), chunks)
        adding = (-1, -1, 0)
        for slot, peer in enumerate(peers):
            made.add(adding, "nop", after=((peer, peer, 0), 1))
            made.add(adding, "re", ("s", slot * chunks), ("i", own), chunks)
        last = len(made.blocks[adding]) - 1
        for peer in peers:
            made.add((peer, peer, 0), "s", ("i", own), ("i", own), chunks, after=(adding, last))
            made.add((peer, peer, 0), "r", ("i", peer * chunks), ("i", peer * chunks), chunks)
        ranks.append(made)
    return msccl("allreduce", ranks, (size * chunks, 0, (size - 1) * chunks), in_place=True, name="allpairs")


def two_way_allgather(size: int) -> bytes:
    """A ring forwards for the first chunk of each share and one backwards for the second; out of place."""
    ranks = []
    for rank in range(size):
        made = MscclRank()
        for part, way in ((0, 1), (1, -1)):
            following, before = (rank + way) % size, (rank - way) % size
            made.add((-1, -1, part), "cpy", ("i", part), ("o", 2 * rank + part))
            block = following, before, part
            made.add(block, "s", ("i", part), ("o", 2 * rank + part))
            for turn in range(1, size - 1):
                at = "o", 2 * ((rank - way * turn) % size) + part
                made.add(block, "rcs", at, at)
            at = "o", 2 * ((rank - way * (size - 1)) % size) + part
            made.add(block, "r", at, at)
        ranks.append(made)
    return msccl("allgather", ranks, (2, 2 * size, 0), name="two_way")


def swap_alltoall() -> bytes:
    """Two ranks exchange a chunk in place: each message must leave before the other one arrives."""
    ranks = []
    for rank in range(2):
        made, other = MscclRank(), 1 - rank
        made.add((other, other, 0), "s", ("i", other), ("i", rank))
        made.add((other, other, 0), "r", ("i", rank), ("i", other))
        ranks.append(made)
    return msccl("alltoall", ranks, (2, 2, 0), in_place=True, name="swap")


def reduce_scatter_by_scratch(size: int) -> bytes:
    """Each rank receives its chunk of all others and adds it with ``rrc``, from its input to its output."""
    ranks = []
    for rank in range(size):
        made = MscclRank()
        for distance in range(1, size):
            to, source = (rank + distance) % size, (rank - distance) % size
            made.add((to, -1, 0), "s", ("i", to), ("o", 0))
            own = ("i", rank) if distance == 1 else ("o", 0)
            before = None if distance == 1 else ((-1, (source + 1) % size, 0), 0)
            made.add((-1, source, 0), "rrc", own, ("o", 0), after=before)
        ranks.append(made)
    return msccl("reduce_scatter", ranks, (size, 1, 0), name="adds")


def broadcast_chain(size: int) -> bytes:
    """A chain from rank 0 in two chunks."""
    ranks = []
    for rank in range(size):
        made = MscclRank()
        for chunk in range(2):
            at = "o", chunk
            if rank == 0:
                made.add((1, -1, 0), "s", ("i", chunk), at)
                made.add((-1, -1, 0), "cpy", ("i", chunk), at)
            else:
                made.add((rank + 1 if rank + 1 < size else -1, rank - 1, 0), "rcs" if rank + 1 < size else "r", at, at)
        ranks.append(made)
    return msccl("broadcast", ranks, (2, 2, 0), name="chain")


# --- MSCCL++ ---------------------------------------------------------------------------------------------------------


class MscclppRank:
    """A rank of MSCCL++ with one memory channel to each peer, and the buffers of all peers."""

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self.peers = [peer for peer in range(size) if peer != rank]
        self.blocks: list[list[dict[str, Any]]] = []
        self.semaphores: list[dict[str, int]] = []

    def block(self) -> list[dict[str, Any]]:
        """Add a threadblock; return its list of operations."""
        self.blocks.append([])
        return self.blocks[-1]

    def channel(self, peer: int) -> int:
        return self.peers.index(peer)

    def remote(self, peer: int, letter: str, index: int, size: int = 1) -> dict[str, Any]:
        return {"buffer_id": 3 * self.channel(peer) + "ios".index(letter), "index": index, "size": size}

    def as_json(self, number: int, chunks: tuple[int, int, int]) -> dict[str, Any]:
        channels = list(range(len(self.peers)))
        references = {"access_channel_type": "memory", "remote_buffer_ids": list(range(3 * len(self.peers)))}
        return {
            "id": number,
            **dict(zip(("input_chunks", "output_chunks", "scratch_chunks"), chunks, strict=True)),
            "threadblocks": [
                {
                    "id": at,
                    "ops": operations,
                    "channels": [{"channel_type": "memory", "channel_ids": channels}],
                    "remote_buffer_refs": [references],
                }
                for at, operations in enumerate(self.blocks)
            ],
            "channels": [{"channel_type": "memory", "connected_to": self.peers}],
            "remote_buffers": [
                {"rank": peer, "type": letter, "access_channel_types": ["memory"]}
                for peer in self.peers
                for letter in "ios"
            ],
            "semaphores": self.semaphores,
        }


def local(letter: str, index: int, size: int = 1) -> dict[str, Any]:
    """Return a chunk of the rank itself."""
    return {"type": letter, "index": index, "size": size}


def operation(name: str, **fields: Any) -> dict[str, Any]:
    """Return an operation over memory channels. `src` and `dst` are lists of chunks."""
    names = {"src": "src_buff", "dst": "dst_buff", "channels": "channel_ids"}
    return {"name": name, "channel_type": "memory", **{names.get(key, key): value for key, value in fields.items()}}


def mscclpp(
    collective: str,
    ranks: Sequence[MscclppRank],
    chunks: tuple[int, int, int],
    *,
    in_place: bool = True,
    name: str = "made",
) -> bytes:
    """Return the JSON of a plan of MSCCL++; `chunks` are those of input, output and scratch."""
    gpus = [rank.as_json(number, chunks) for number, rank in enumerate(ranks)]
    return json.dumps(
        {"name": name, "collective": collective, "protocol": "Simple", "inplace": in_place, "gpus": gpus}
    ).encode()


def put_allreduce(size: int) -> bytes:
    """Each rank puts its chunks into the scratch of their owners, which add them and put the sums into all inputs."""
    ranks = []
    for rank in range(size):
        made = MscclppRank(size, rank)
        ops, all_channels = made.block(), list(range(size - 1))
        for peer in made.peers:
            slot = rank - (rank > peer)
            ops.append(operation("put", src=[local("i", peer)], dst=[made.remote(peer, "s", slot)]))
        ops += [operation("signal", channels=all_channels), operation("nop"), operation("wait", channels=all_channels)]
        parts = [local("i", rank), *(local("s", slot) for slot in range(size - 1))]
        ops.append(
            operation("res", src=parts, dst=[local("i", rank), *(made.remote(peer, "i", rank) for peer in made.peers)])
        )
        ops += [operation("signal", channels=all_channels), operation("wait", channels=all_channels)]
        ranks.append(made)
    return mscclpp("allreduce", ranks, (size, 0, size - 1), name="put_sum")


def get_allgather(size: int, *, threadblocks: int) -> bytes:
    """Each rank reads the shares of all others, which a group of threadblocks does together."""
    ranks = []
    for rank in range(size):
        made, all_channels = MscclppRank(size, rank), list(range(size - 1))
        first = made.block()
        first.append(operation("copy", src=[local("i", 0)], dst=[local("o", rank)]))
        first += [operation("signal", channels=all_channels), operation("wait", channels=all_channels)]
        blocks = [first, *(made.block() for _ in range(threadblocks - 1))]
        for number, ops in enumerate(blocks):
            ops.append({"name": "barrier", "barrier_id": 0, "num_threadblocks": threadblocks})
            for peer in made.peers:
                group = {"tb_id": number, "tbg_size": threadblocks}
                source, target = made.remote(peer, "o", peer), local("o", peer)
                ops.append(operation("get", src=[source], dst=[target], channels=[made.channel(peer)], tbg_info=group))
        ranks.append(made)
    return mscclpp("allgather", ranks, (1, size, 0), in_place=False, name="get_shares")


def packet_allreduce() -> bytes:
    """Two ranks put their halves as packets, add the packets that come, and put the sums as packets."""
    ranks = []
    for rank in range(2):
        made, other = MscclppRank(2, rank), 1 - rank
        ops = made.block()
        ops.append(operation("ppkt", src=[local("i", other)], dst=[made.remote(other, "s", 0)]))
        sums = [local("i", rank), made.remote(other, "s", 1)]
        ops.append(operation("respkt", src=[local("i", rank), local("s", 0)], dst=sums))
        made.block().append(operation("upkt", src=[local("s", 1)], dst=[local("i", other)]))
        ranks.append(made)
    return mscclpp("allreduce", ranks, (2, 0, 2), name="packets")


def semaphore_allreduce() -> bytes:
    """Two ranks read and add the input of the other one in one threadblock; another one copies the sums."""
    ranks = []
    for rank in range(2):
        made, other = MscclppRank(2, rank), 1 - rank
        adding, copying = made.block(), made.block()
        made.semaphores.append({"init_value": 0})
        source = [local("i", rank), made.remote(other, "i", rank)]
        adding.append(operation("rre", src=source, dst=[local("o", rank)], channels=[0]))
        adding.append({"name": "sem_release", "semaphore_ids": [0]})
        copying.append({"name": "sem_acquire", "semaphore_ids": [0]})
        copying.append(operation("pws", src=[local("o", rank)], dst=[made.remote(other, "o", rank)], channels=[0]))
        copying.append(operation("wait", channels=[0]))
        ranks.append(made)
    return mscclpp("allreduce", ranks, (2, 2, 0), in_place=False, name="semaphores")

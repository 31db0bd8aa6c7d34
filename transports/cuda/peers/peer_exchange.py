"""`PeerExchange`: the ranks of a host exchange the handles by which each uses the others' device memory.

All ranks get the same result. If one of them cannot take part, all learn why; the reason of the lowest rank counts.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.ir.binding import Shape
from unisono.dtypes import DTYPES
from unisono.errors import TransportUnavailableError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.call import Call, Extent, Signature
from unisono.transports.contracts.executor import Executor
from unisono.transports.cuda.device import Device
from unisono.transports.cuda.executors.replays import MOST_RANKS, GraphFlags
from unisono.transports.cuda.memory.host import HostMemory, MemoryHandle
from unisono.transports.cuda.peers.channel import Channel
from unisono.transports.cuda.peers.peer_board import CHANNELS, Board
from unisono.transports.cuda.peers.process_token import process_token
from unisono.transports.executors.polling import pauses_of_polling


class PeerExchange:
    """The result of an exchange between the ranks of a communicator. Each rank creates it at the same point.

    Args:
        executor: carries the exchange.
        device: this rank's device.
        slab_nbytes: the initial size of the slabs.
        timeout_s: how long each of three exchanges may take.

    Attributes:
        refusal: why the ranks cannot use each other's memory; None if they can.
        in_one_process: whether all ranks are threads of this process.
        by_flags: whether flags order the ranks' streams, and not events.
        graph_flags: the flags for graphs; None if persistent calls of these ranks are issued without graphs.
        boards: the boards of all ranks, if they can.
        channels: the channels between them, if they can.

    Raises:
        PeerLostError, CollectiveTimeoutError, AbortedError, MismatchError: an exchange failed.
    """

    def __init__(self, executor: Executor, device: Device, slab_nbytes: int, timeout_s: float) -> None:
        self.boards: list[Board] = []
        self.channels: list[Channel] = []
        self.graph_flags: GraphFlags | None = None
        self._rank, self._device = executor.rank, device
        self._timeout_s = timeout_s
        self._exchange: Callable[[Any], list[Any]] = lambda mine: exchange(executor, mine, timeout_s)
        self.in_one_process = self.by_flags = False
        self.refusal: str | None
        with contextlib.ExitStack() as created:
            descriptions, self.refusal = self._offers_of_all(lambda: self._introduce(executor.size, created))
            if self.refusal is not None:
                return
            created.pop_all()
        local = [description["process"] == descriptions[self._rank]["process"] for description in descriptions]
        self.in_one_process = all(local)
        # Ranks of one process read each other's arrays, whose addresses the host must see before each call.
        self.by_flags = not self.in_one_process and all(description["flags"] for description in descriptions)
        self._by_graphs = self.by_flags and all(each["graphs"] for each in descriptions) and len(local) <= MOST_RANKS
        offers, refusal = self._offers_of_all(lambda: self._offer(self._board, descriptions, local, slab_nbytes))
        if refusal is None:
            _, refusal = self._offers_of_all(lambda: self._open_peers(offers))
        if refusal is not None:
            self._close()
        self.refusal = refusal

    def _introduce(self, size: int, created: contextlib.ExitStack) -> dict[str, Any]:
        """Create this rank's board, and return this rank's description. On an error, `created` closes the board."""
        self._board = Board.new(size, secrets.randbits(63))
        created.callback(self._board.close)
        return {"token": self._board.token, "board": self._board.handle(), **_place(self._device)}

    def _offers_of_all(self, offer: Callable[[], Any]) -> tuple[list[Any], str | None]:
        """Return the offers of all ranks, and the reason if one of them has none."""
        mine: dict[str, Any] = {}
        try:
            mine["offer"] = offer()
        except TransportUnavailableError as error:
            mine["refusal"] = f"rank {self._rank}: {error.message}"
        answers = self._exchange(mine)
        refusal = next((answer["refusal"] for answer in answers if "refusal" in answer), None)
        return [answer.get("offer") for answer in answers], refusal

    def _offer(self, board: Board, descriptions: Sequence[Any], local: Sequence[bool], slab_nbytes: int) -> list[Any]:
        """Map the boards, create the channels, and return the flags or events of each channel."""
        for peer, description in enumerate(descriptions):
            self.boards.append(board if peer == self._rank else _board(description, len(descriptions)))
            uuid = description["uuid"]
            if local[peer] and uuid != self._device.uuid:
                # Their addresses belong to two contexts, and neither sees the memory of the other by default.
                raise TransportUnavailableError(f"rank {peer} is in this process too, but on another device, {uuid}")
            if not self._device.can_reach(uuid):
                raise TransportUnavailableError(
                    f"device {uuid}, of rank {peer}, cannot be reached from {self._device.uuid}: they have no peer "
                    "access, or CUDA_VISIBLE_DEVICES hides it from this process"
                )
        for number in range(CHANNELS):
            self.channels.append(Channel(number, self._rank, self.boards, local, self._device, self.by_flags))
            self.channels[-1].reserve(slab_nbytes)
        if self._by_graphs:
            self.graph_flags = GraphFlags(self._rank, len(descriptions), self._device)
        return [shared.offer() for shared in self._shared()]

    def _shared(self) -> list[Channel | GraphFlags]:
        """Return the channels and graph flags, whose memory, flags and events the other ranks open."""
        return [*self.channels, *([] if self.graph_flags is None else [self.graph_flags])]

    def _open_peers(self, offers: Sequence[Any]) -> None:
        """Open the memory, and the flags or events, that the other ranks offer."""
        for peer, of_peer in enumerate(offers):
            for shared, offer in zip(self._shared(), of_peer, strict=True):
                if peer != self._rank:
                    shared.open_peer(peer, offer)

    def _close(self) -> None:
        """Close everything, and free it once no rank has it open any more. Memory that one still has open is kept."""
        for shared in self._shared():
            shared.close_peers()
        if all(self._exchange(self._has_released())):
            for shared in self._shared():
                shared.free()
        for board in self.boards:
            board.close()
        self.channels, self.boards, self.graph_flags = [], [], None

    def _has_released(self) -> bool:
        """Wait until the device has released the memory of other ranks; return whether it has in time."""
        deadline = Deadline(self._timeout_s / 2)
        for pause_s in pauses_of_polling():
            if self._device.has_released() or deadline.has_passed():
                break
            time.sleep(pause_s or 0.0)
        return self._device.has_released()


def _place(device: Device) -> dict[str, Any]:
    """Return this rank's process and device, and whether the device has flags and graphs."""
    able = {"flags": device.has_flags(), "graphs": device.has_graphs()}
    return {"process": process_token().hex(), "uuid": device.uuid, **able}


def _board(facts: Any, size: int) -> Board:
    """Return the board of another rank; raises `TransportUnavailableError` if it cannot be mapped."""
    board = Board(HostMemory.opened(MemoryHandle(*facts["board"])), size)
    if board.token != facts["token"]:
        board.close()
        raise TransportUnavailableError("host memory of another rank is not accessible: the rank is on another host")
    return board


def exchange(executor: Executor, mine: Any, timeout_s: float) -> list[Any]:
    """Return the values of all ranks, which must be representable as JSON.

    Raises:
        PeerLostError, CollectiveTimeoutError, AbortedError, MismatchError: the exchange failed.
    """
    encoded = json.dumps(mine).encode()
    # Ranks do not know how long the texts of others are. So they exchange the lengths first.
    lengths = _allgather(executor, np.array([len(encoded)], np.uint64).view(np.uint8), timeout_s).view(np.uint64)
    texts = _allgather(executor, np.frombuffer(encoded.ljust(int(lengths.max())), np.uint8), timeout_s)
    return [json.loads(row.tobytes()) for row in texts]


def _allgather(executor: Executor, mine: Any, timeout_s: float) -> Any:
    """Return the bytes of all ranks, as rows of equal length."""
    received = np.empty((executor.size, mine.size), np.uint8)
    plan = find("allgather", "direct").build(executor.size, executor.rank)
    elements = mine.size, received.size
    call = Call(
        Signature("allgather", "uint8", (mine.size,), "C", None, None, plan.algorithm, 1),
        plan,
        Shape(elements, {}),
        (Extent(elements, DTYPES["uint8"], None),),
    )
    executor.run(call, mine, received.reshape(-1), timeout_s)
    return received

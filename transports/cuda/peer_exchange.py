"""How the ranks of a host meet by their devices: who has what, or why they cannot use each other's memory.

All ranks find the same: what one of them cannot do is told to all, and the reason of the lowest rank counts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.ir.binding import Shape
from unisono.dtypes import DTYPES
from unisono.errors import InternalError, TransportUnavailableError
from unisono.transports.contracts.call import Call, Extent, Signature
from unisono.transports.contracts.executor import Executor
from unisono.transports.cuda.channel import Channel
from unisono.transports.cuda.device import Device
from unisono.transports.cuda.host_memory import Handle, HostMemory
from unisono.transports.cuda.peer_board import CHANNELS, Board

# What a rank tells the others of itself, padded: most of all, the events of its channels.
_FACTS_NBYTES = 1 << 14


class Meeting:
    """What ranks have of each other when they have met: each of them makes this at the same point.

    Args:
        executor: exchanges what ranks tell of themselves.
        device: this rank's device.
        slab_nbytes: the size of the slabs to begin with.
        timeout_s: how long each of three exchanges may take.

    Attributes:
        refusal: why they cannot use each other's memory; None if they can.
        in_one_process: whether all of them are threads of this process.
        boards: of all ranks, if they can.
        channels: between them, if they can.

    Raises:
        PeerLostError, CollectiveTimeoutError, AbortedError, MismatchError: an exchange failed.
    """

    def __init__(self, executor: Executor, device: Device, slab_nbytes: int, timeout_s: float) -> None:
        self.boards: list[Board] = []
        self.channels: list[Channel] = []
        self._rank, self._device = executor.rank, device
        self._exchange: Callable[[Any], list[Any]] = lambda mine: _exchange(executor, mine, timeout_s)
        self.in_one_process = False
        self.refusal: str | None
        with contextlib.ExitStack() as made:
            found, self.refusal = self._told(lambda: self._introduce(executor.size, made))
            if self.refusal is not None:
                return
            made.pop_all()
        local = [each["process"] == found[self._rank]["process"] for each in found]
        self.in_one_process = all(local)
        offers, refusal = self._told(lambda: self._offer(self._board, found, local, slab_nbytes))
        if refusal is None:
            _, refusal = self._told(lambda: self._take(offers))
        if refusal is not None:
            self._part()
        self.refusal = refusal

    def _introduce(self, size: int, made: contextlib.ExitStack) -> dict[str, Any]:
        """Make this rank's board, which `made` closes, and return what the others need to know of this rank."""
        self._board = Board.new(size, secrets.randbits(63))
        made.callback(self._board.close)
        return {"token": self._board.token, "board": self._board.handle(), **_place(self._device)}

    def _told(self, offer: Callable[[], Any]) -> tuple[list[Any], str | None]:
        """Return what each rank offers, and why one of them cannot, if there is one."""
        mine: dict[str, Any] = {}
        try:
            mine["offer"] = offer()
        except TransportUnavailableError as error:
            mine["refusal"] = f"rank {self._rank}: {error.message}"
        found = self._exchange(mine)
        refusal = next((each["refusal"] for each in found if "refusal" in each), None)
        return [each.get("offer") for each in found], refusal

    def _offer(self, board: Board, found: Sequence[Any], local: Sequence[bool], slab_nbytes: int) -> list[Any]:
        """Map the boards, make the channels, and return the events of each."""
        for peer, each in enumerate(found):
            self.boards.append(board if peer == self._rank else _board(each, len(found)))
            uuid = each["uuid"]
            if local[peer] and uuid != self._device.uuid:
                # Their addresses are of two contexts, of which none sees the memory of the other unasked.
                raise TransportUnavailableError(f"rank {peer} is in this process too, but on another device, {uuid}")
            if not self._device.can_reach(uuid):
                raise TransportUnavailableError(
                    f"device {uuid}, of rank {peer}, cannot be reached from {self._device.uuid}: they have no peer "
                    "access, or CUDA_VISIBLE_DEVICES hides it from this process"
                )
        for number in range(CHANNELS):
            self.channels.append(Channel(number, self._rank, self.boards, local, self._device))
            self.channels[-1].reserve(slab_nbytes)
        return [channel.events() for channel in self.channels]

    def _take(self, told: Sequence[Any]) -> None:
        """Open what the others offer."""
        for peer, of_channels in enumerate(told):
            for channel, events in zip(self.channels, of_channels, strict=True):
                if peer != self._rank:
                    channel.meet(peer, events)

    def _part(self) -> None:
        """Give everything back, when nobody has it open any more."""
        for channel in self.channels:
            channel.part()
        self._exchange({})
        for channel in self.channels:
            channel.free()
        for board in self.boards:
            board.close()
        self.channels, self.boards = [], []


def _place(device: Device) -> dict[str, Any]:
    """Return where this rank is: its process, by more than its number, which other containers use too."""
    return {"process": _process_token(os.getpid()), "uuid": device.uuid}


@functools.cache
def _process_token(process: int) -> str:
    """Return what no other process has; a forked child, whose number is another one, gets one of its own."""
    return secrets.token_hex(16)


def _board(facts: Any, size: int) -> Board:
    """Return the board of another rank; raises `TransportUnavailableError` if it cannot be mapped."""
    board = Board(HostMemory.opened(Handle(*facts["board"])), size)
    if board.token != facts["token"]:
        board.close()
        raise TransportUnavailableError("host memory of another rank is not found: it is on another host")
    return board


def _exchange(executor: Executor, mine: Any, timeout_s: float) -> list[Any]:
    """Return what each rank tells, as JSON can say it."""
    said = json.dumps(mine).encode()
    if len(said) > _FACTS_NBYTES:
        raise InternalError(f"a rank tells {len(said)} bytes of its device, more than {_FACTS_NBYTES}")
    sent = np.frombuffer(said.ljust(_FACTS_NBYTES), np.uint8)
    received = np.empty(executor.size * sent.size, np.uint8)
    plan = find("allgather", "direct").build(executor.size, executor.rank)
    elements = sent.size, received.size
    call = Call(
        Signature("allgather", "uint8", (sent.size,), "C", None, None, plan.algorithm, 1),
        plan,
        Shape(elements, {}),
        (Extent(elements, DTYPES["uint8"], None),),
    )
    executor.run(call, sent, received, timeout_s)
    return [json.loads(row.tobytes()) for row in received.reshape(executor.size, -1)]

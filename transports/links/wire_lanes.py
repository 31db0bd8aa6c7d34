"""The lane of a channel, as the field `lane` of its HELLOs carries it, and which of two ranks dials the channel.

The lower 16 bits of the field carry the lane. A transport may use the upper 16 bits, as TCP does for its streams.
"""

from __future__ import annotations

from unisono.transports import _core
from unisono.transports.links.handshake import Hello

_LANE_MASK = 0xFFFF
# On the wire, lane 0 is for point-to-point messages, and lane k + 1 is lane k of collectives.
_WIRE_POINT_TO_POINT = 0


def wire_lane(lane: int) -> int:
    """Return the field `lane` of a HELLO for a lane of a channel."""
    return _WIRE_POINT_TO_POINT if lane < 0 else lane + 1


def lane_on_dialled_rank(hello: Hello) -> int:
    """Return the lane of a channel on the dialled rank."""
    lane = hello.lane & _LANE_MASK
    return _core.RECEIVING_LANE if lane == _WIRE_POINT_TO_POINT else lane - 1


def lane_name(lane: int) -> str:
    """Return a lane in words, for the log."""
    return f"of lane {lane}" if lane >= 0 else "for messages"


def must_dial(rank: int, lane: int, peer: int) -> bool:
    """Return whether `rank`, and not `peer`, dials the channel of a lane between them."""
    return lane == _core.SENDING_LANE or (lane >= 0 and peer < rank)

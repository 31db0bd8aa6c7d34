"""The streams of a TCP channel in the field `lane` of a HELLO, above the lane.

Bits 16 to 23 carry the number of the stream, and bits 24 to 31 how many streams the channel has.
"""

from __future__ import annotations

from unisono.transports.links.handshake import Hello
from unisono.transports.links.wire_lanes import wire_lane

_STREAM_SHIFT = 16
_STREAM_MASK = 0xFF
_STREAMS_SHIFT = 24


def wire_stream(lane: int, stream: int, streams: int = 0) -> int:
    """Return the field `lane` of the HELLO of a stream; `streams` counts those of a channel that is being opened."""
    return wire_lane(lane) | stream << _STREAM_SHIFT | streams << _STREAMS_SHIFT


def stream_of(hello: Hello) -> int:
    """Return the number of the stream."""
    return hello.lane >> _STREAM_SHIFT & _STREAM_MASK


def streams_of(hello: Hello) -> int:
    """Return the number of streams of the channel."""
    return hello.lane >> _STREAMS_SHIFT

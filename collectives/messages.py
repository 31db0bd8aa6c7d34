"""Messages of any rank and any tag: what stands for them, and the looking for such messages.

Objects travel with tags of their own, and neither get in the way of these messages nor are they seen here.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from unisono.collectives.caller import Caller, checked_integer
from unisono.errors import UsageError
from unisono.transports.base import FIRST_RESERVED_TAG, Message

MOST_TAG = FIRST_RESERVED_TAG - 1


# Not numbers, so that a rank or tag that was computed wrongly is an error.
class AnySource(Enum):
    """The type of `ANY_SOURCE`, which stands for any other rank."""

    ANY_SOURCE = "any other rank"


class AnyTag(Enum):
    """The type of `ANY_TAG`, which stands for any tag of an array."""

    ANY_TAG = "any tag"


ANY_SOURCE: Final = AnySource.ANY_SOURCE
ANY_TAG: Final = AnyTag.ANY_TAG


class Probes(Caller):
    """Looking for messages without receiving them."""

    def probe(
        self,
        source: int | AnySource = ANY_SOURCE,
        tag: int | AnyTag = ANY_TAG,
        *,
        timeout_s: float | None = None,
    ) -> Message:
        """Wait until there is a message that `recv` with the same `source` and `tag` would get, and return which.

        It stays there: `recv` with the `source` and `tag` of what is returned gets it, unless another thread does.

        Args:
            source: another rank, or `ANY_SOURCE`.
            tag: as in `send`, or `ANY_TAG`.
            timeout_s: as in `send`.

        Raises:
            UsageError: the call is wrong, or there is no other rank.
            PeerLostError: that rank, or all others, have left; also raised on the other ranks.
            CollectiveTimeoutError, AbortedError, MismatchError: as in `send`.

        >>> import numpy as np, unisono as un
        >>> def ask_for_anything(world):
        ...     if world.rank > 0:
        ...         return world.send(np.full(world.rank, 0.5), 0, tag=7)
        ...     found = world.probe(un.ANY_SOURCE, 7)
        ...     x = world.recv(np.empty(found.count, found.dtype), found.source, found.tag)
        ...     return x.tolist(), found
        >>> un.launch(ask_for_anything, 2)[0]
        ([0.5], Message(source=1, tag=7, dtype='float64', count=1))
        """
        message = self._probe(source, tag, timeout_s, once=False)
        assert message is not None, "a probe is done when it has found a message"
        return message

    def iprobe(self, source: int | AnySource = ANY_SOURCE, tag: int | AnyTag = ANY_TAG) -> Message | None:
        """Return what `probe` would, or None if there is no such message now; does not wait for one.

        Raises:
            The same as `probe`; `PeerLostError` if there can never be one.
        """
        return self._probe(source, tag, None, once=True)

    def _probe(
        self, source: int | AnySource, tag: int | AnyTag, timeout_s: float | None, *, once: bool
    ) -> Message | None:
        limit_s = self._limit_s(timeout_s)
        probe = self._executor.probe(self._source_of(source), tag_of(tag), once=once)
        probe.wait(limit_s)
        return probe.found()

    def _source_of(self, source: int | AnySource) -> int | None:
        """Return the rank that is to be received from; None for any."""
        if source is not ANY_SOURCE:
            return self._peer_of(source, "source")
        self._check_usable()
        if self.size == 1:
            raise UsageError("there is no other rank: messages go between two ranks")
        return None


def tag_of(tag: int | AnyTag) -> int | None:
    """Return the tag that is to be received; None for any."""
    return None if tag is ANY_TAG else checked_integer(tag, "tag", 0, MOST_TAG)

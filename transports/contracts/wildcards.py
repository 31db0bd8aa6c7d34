"""`ANY_SOURCE`, `ANY_TAG` and `NOBODY`: peers and tags of messages that stand for any or for none."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final

from unisono.transports.contracts.transport import FIRST_RESERVED_TAG

MOST_TAG = FIRST_RESERVED_TAG - 1


# The wildcards are not numbers, so a rank or tag that the program computed wrongly is never taken for one.
class AnySource(Enum):
    """The type of `ANY_SOURCE`, which stands for any rank."""

    ANY_SOURCE = "any rank"


class AnyTag(Enum):
    """The type of `ANY_TAG`: the tag of any message of an array, or of an object in `recv_object`."""

    ANY_TAG = "any tag"


# An integer, because `Message.source` may be `NOBODY`. Calls compare its identity, so they refuse the number -1.
class Nobody(IntEnum):
    """The type of `NOBODY`, a peer that is no rank. A message to or from it does nothing, and ends at once."""

    NOBODY = -1


ANY_SOURCE: Final = AnySource.ANY_SOURCE
ANY_TAG: Final = AnyTag.ANY_TAG
NOBODY: Final = Nobody.NOBODY

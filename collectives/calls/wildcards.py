"""`ANY_SOURCE`, `ANY_TAG` and `NOBODY`: the peers and tags of messages that are no numbers."""

from __future__ import annotations

from enum import Enum
from typing import Final

from unisono.transports.contracts.transport import FIRST_RESERVED_TAG

MOST_TAG = FIRST_RESERVED_TAG - 1


# The wildcards are not numbers, so a rank or tag that the program computed wrongly is never taken for one.
class AnySource(Enum):
    """The type of `ANY_SOURCE`, which stands for any other rank."""

    ANY_SOURCE = "any other rank"


class AnyTag(Enum):
    """The type of `ANY_TAG`, which stands for the tag of any message of an array, and of no message of an object."""

    ANY_TAG = "any tag"


class Nobody(Enum):
    """The type of `NOBODY`, a neighbour that is no rank."""

    NOBODY = "no rank"


ANY_SOURCE: Final = AnySource.ANY_SOURCE
ANY_TAG: Final = AnyTag.ANY_TAG
NOBODY: Final = Nobody.NOBODY

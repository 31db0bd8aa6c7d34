"""The id of a communicator, which its members compute alike without a message."""

from __future__ import annotations

import hashlib


def communicator_id(parent: int, members: tuple[int, ...], number: int) -> int:
    """Return the 63-bit id of a communicator. The 64th bit is free: the native core marks point-to-point records by it.

    Args:
        parent: the id of the communicator that it was made from.
        members: its ranks, in its order, by their numbers in the job or in the parent; the same form on all ranks.
        number: how many communicators the parent has made of the same members before.
    """
    facts = repr((parent, members, number))
    return int.from_bytes(hashlib.sha256(facts.encode()).digest()[:8], "little") >> 1

"""Counts the hosts that send to one host at once, from the plans of an algorithm with one rank on each host.

If several hosts send to a host at once, they share its line, while the lines of other hosts are idle. Around a ring,
each host receives from one host only. In a direct exchange, all other hosts send to each host in the same group. In a
pairwise exchange, the sender changes from group to group. Ranks do not reach a group at the same moment, so the old and
the new sender overlap for a part of the time, and count as 1.5 senders.

>>> [senders("allgather", name, 4) for name in ("ring", "recursive_doubling", "direct")]
[1.0, 1.5, 3.0]
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import pairwise

from unisono.algorithms.catalogue.flat import flat_algorithms_of
from unisono.algorithms.ir.plan import Plan, Recv, RecvReduce
from unisono.algorithms.ir.walk import steps_as_run

# Plans for more hosts take longer to build, and change the prediction little: n senders count as 1 − 1/n.
_MOST_HOSTS = 16


@lru_cache(maxsize=256)
def senders(collective: str, algorithm: str, hosts: int) -> float:
    """Return how many hosts send to one host at once, in an algorithm with its usual parameters.

    The number is the mean of the most senders in one group and the most in two groups that follow each other, because
    ranks are half a group apart on average. The first rank, the last one and one between them are the receivers.
    """
    row, ranks = flat_algorithms_of(collective)[algorithm], min(hosts, _MOST_HOSTS)
    size = next((size for size in range(ranks, 2 * ranks + 1) if row.supports(size) is None), 0)
    return max((_senders_to(row.build(size, rank)) for rank in {0, size // 2, size - 1} if size), default=1.0)


def _senders_to(plan: Plan) -> float:
    """Return the number of senders to the rank of a plan; at least 1."""
    groups = defaultdict[int, set[int]](set)
    for _, number, step in steps_as_run(plan):
        if isinstance(step, (Recv, RecvReduce)):
            groups[number].add(step.peer)
    peers = [groups[number] for number in sorted(groups)]
    at_once = max(map(len, peers), default=1)
    in_turn = max((len(first | second) for first, second in pairwise(peers)), default=at_once)
    return (at_once + in_turn) / 2

"""The CSV file of NCCL's example of a tuner plugin, which ``NCCL_TUNER_CONFIG_FILE`` names.

A line is: collective, least and greatest bytes, algorithm, protocol, channels, nodes, ranks. The plugin takes the first
line that fits a call. -1 channels leave their number to NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.tuning.exports.counterparts import Library, Rule

PROTOCOLS = ("simple", "ll", "ll128")
LIBRARY = Library(
    "NCCL",
    {
        "allreduce": ("allreduce",),
        "broadcast": ("broadcast",),
        "reduce": ("reduce",),
        "allgather": ("allgather",),
        "reduce_scatter": ("reducescatter",),
    },
    {
        "allreduce": {"ring": "ring", "multi_lane_ring": "ring", "double_binary_tree": "tree"},
        "broadcast": {"chain": "ring"},
        "reduce": {"chain": "ring"},
        "allgather": {"ring": "ring", "pat": "pat"},
        "reducescatter": {"ring": "ring", "pat": "pat"},
    },
    # NCCL cuts every message into chunks of its own, so the length of a segment has no effect on the choice.
    frozenset({("allreduce", "ring"), ("allreduce", "tree"), ("broadcast", "ring"), ("reduce", "ring")}),
    "device",
)
_MOST_BYTES = 2**64 - 1


def written(rules: Sequence[Rule], protocol: str) -> str:
    """Return the rules as the text of a CSV file, all with this protocol of NCCL."""
    lines = ["# collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks"]
    for rule in rules:
        last = _MOST_BYTES if rule.end is None else rule.end - 1
        hosts = -(-rule.ranks // rule.ranks_per_host)
        fields = (rule.collective, rule.first, last, rule.algorithm, protocol, -1, hosts, rule.ranks)
        lines.append(",".join(map(str, fields)))
    return "\n".join(lines) + "\n"

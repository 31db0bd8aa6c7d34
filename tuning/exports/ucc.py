"""The score string of UCC for its layer over UCX, the value of ``UCC_TL_UCP_TUNE``.

Tokens have ``#`` between them. A token is: collective, bytes from and to (not included), ranks from and to, score, and
the algorithm after ``@``. The score ``inf`` chooses this layer for the call. A token may name a kind of memory too.
Documents and code of UCC differ about the name of the host's memory, so no token names one.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.tuning.exports.counterparts import Library, Rule

LIBRARY = Library(
    "UCC",
    {
        **{name: (name,) for name in ("allreduce", "reduce", "allgather", "alltoall", "reduce_scatter")},
        "broadcast": ("bcast",),
    },
    {
        "allreduce": {"recursive_multiplying": "knomial", "rabenseifner": "sra_knomial", "double_binary_tree": "dbt"},
        "bcast": {"knomial": "knomial", "scatter_doubling": "sag_knomial", "double_binary_tree": "dbt"},
        "reduce": {"knomial": "knomial", "double_binary_tree": "dbt"},
        "allgather": {"ring": "ring", "neighbour_exchange": "neighbor", "bruck": "bruck", "direct": "linear"},
        "alltoall": {"pairwise": "pairwise", "bruck": "bruck", "direct": "linear"},
        "reduce_scatter": {"ring": "ring"},
    },
)


def written(rules: Sequence[Rule]) -> str:
    """Return the rules as a score string, with a line end."""
    return "#".join(map(_token, rules)) + "\n"


def _token(rule: Rule) -> str:
    end = "inf" if rule.end is None else rule.end
    return f"{rule.collective}:{rule.first}-{end}:[{rule.ranks}-{rule.ranks}]:inf:@{rule.algorithm}"

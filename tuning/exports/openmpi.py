"""The file of dynamic rules of Open MPI's component ``tuned``, which ``coll_tuned_dynamic_rules_filename`` names.

The file has numbers: of collectives; for each, its id and the number of communicator sizes; for each of these, the
size and the number of rules; for each rule, the bytes from which on it holds, the algorithm, a fan-out, and the bytes
of a segment. Sections and rules hold up to the next one. Algorithm 0 is the library's own choice. So each section for
n ranks is followed by one for n + 1 ranks that leaves the choice to the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from unisono.tuning.exports.counterparts import Library, Rule

_TREES = {"chain": "3", "binary": "5", "binomial": "6", "knomial": "7"}
LIBRARY = Library(
    "Open MPI",
    {
        **{name: (name,) for name in ("allreduce", "reduce", "allgather", "alltoall", "barrier", "gather", "scatter")},
        "broadcast": ("bcast",),
        "reduce_scatter": ("reduce_scatter", "reduce_scatter_block"),
        **{name: (name,) for name in ("scan", "exscan")},
    },
    {
        "allreduce": {"recursive_doubling": "3", "ring": "4", "rabenseifner": "6"},
        "bcast": {**_TREES, "scatter_doubling": "8", "scatter_ring": "9"},
        "reduce": {"chain": "3", "binomial": "5", "binary": "6", "rabenseifner": "7"},
        "allgather": {"bruck": "2", "recursive_doubling": "3", "ring": "4", "neighbour_exchange": "5"},
        "alltoall": {"direct": "1", "pairwise": "2", "bruck": "3"},
        "reduce_scatter": {"recursive_halving": "2", "ring": "3"},
        "reduce_scatter_block": {"recursive_halving": "3"},
        "barrier": {"dissemination": "4"},
        "gather": {"linear": "1", "binomial": "2"},
        "scatter": {"linear": "1", "binomial": "2"},
        "scan": {"linear": "1", "recursive_doubling": "2"},
        "exscan": {"linear": "1", "recursive_doubling": "2"},
    },
    frozenset(
        {*(("bcast", number) for number in _TREES.values()), *(("reduce", number) for number in ("3", "5", "6"))}
    ),
)
# The ids of collectives in Open MPI 4 and 5.
IDS = {
    **{"allgather": 0, "allreduce": 2, "alltoall": 3, "barrier": 6, "bcast": 7, "exscan": 8, "gather": 9, "reduce": 11},
    **{"reduce_scatter": 12, "reduce_scatter_block": 13, "scan": 14, "scatter": 15},
}


def written(rules: Sequence[Rule]) -> str:
    """Return the rules as the text of a file."""
    by_collective = [(name, list(each)) for name, each in groupby(rules, lambda rule: rule.collective)]
    lines = [f"{len(by_collective)} # collectives"]
    for name, of_collective in by_collective:
        sections = _sections(of_collective)
        lines += [f"{IDS[name]} # {name}", f"{len(sections)} # sizes of communicators"]
        for ranks, of_size in sections.items():
            lines += [f"{ranks} # ranks", f"{len(of_size)} # rules: bytes, algorithm, fan-out, bytes of a segment"]
            lines += [f"{first} {algorithm} 0 {segment}" for first, algorithm, segment in of_size]
    return "\n".join(lines) + "\n"


def _sections(rules: Sequence[Rule]) -> dict[int, list[tuple[int, str, int]]]:
    """Return the rules for each number of ranks, with rules that leave gaps to the library."""
    own = (0, "0", 0)
    sections = dict[int, list[tuple[int, str, int]]]()
    for ranks, of_ranks in groupby(rules, lambda rule: rule.ranks):
        section = [own]
        for rule in of_ranks:
            if section[-1][0] == rule.first:
                section.pop()
            section.append((rule.first, rule.algorithm, rule.segment_nbytes))
            if rule.end is not None:
                section.append((rule.end, "0", 0))
        sections[ranks] = section
        sections.setdefault(ranks + 1, [own])
    return dict(sorted(sections.items()))

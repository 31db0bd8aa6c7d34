"""The selection file of MPICH, which ``MPIR_CVAR_COLL_SELECTION_TUNING_JSON_FILE`` names.

The file is a tree of JSON objects. Each key is a condition, such as ``comm_size<=4``, and MPICH follows the first key
that holds. MPICH aborts if a call reaches no algorithm, so the file must cover all collectives. The rules are therefore
put into the tree that MPICH has anyway, before its own conditions: calls without a rule are chosen as before.

Some algorithms of MPICH are right only for some calls: these conditions stand before the algorithm. The conditions
``comm_size<`` of some versions hold for equal sizes too, so only ``comm_size<=`` is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from unisono.errors import UsageError
from unisono.tuning.exports.counterparts import Library, Rule

Tree = Mapping[str, Any]

LIBRARY = Library(
    "MPICH",
    {
        **{name: (name,) for name in ("allreduce", "reduce", "allgather", "alltoall")},
        "broadcast": ("bcast",),
        "reduce_scatter": ("reduce_scatter_block", "reduce_scatter"),
    },
    {
        "allreduce": {
            "recursive_doubling": "Allreduce_intra_recursive_doubling",
            "ring": "Allreduce_intra_ring",
            "rabenseifner": "Allreduce_intra_reduce_scatter_allgather",
        },
        "bcast": {
            "binomial": "Bcast_intra_binomial",
            "scatter_doubling": "Bcast_intra_scatter_recursive_doubling_allgather",
            "scatter_ring": "Bcast_intra_scatter_ring_allgather",
        },
        "reduce": {"binomial": "Reduce_intra_binomial", "rabenseifner": "Reduce_intra_reduce_scatter_gather"},
        "allgather": {
            "bruck": "Allgather_intra_brucks",
            "recursive_doubling": "Allgather_intra_recursive_doubling",
            "ring": "Allgather_intra_ring",
        },
        "alltoall": {
            "bruck": "Alltoall_intra_brucks",
            "pairwise": "Alltoall_intra_pairwise",
            "direct": "Alltoall_intra_scattered",
        },
        **{
            name: {
                "pairwise": f"{name.capitalize()}_intra_pairwise",
                "recursive_halving": f"{name.capitalize()}_intra_recursive_halving",
            }
            for name in ("reduce_scatter_block", "reduce_scatter")
        },
    },
)
# Collectives whose calls MPICH knows by the bytes of all ranks' shares; others by those of one message.
_TOTAL = ("allgather", "reduce_scatter_block", "reduce_scatter")
_KINDS = ("comm_type=intra", "comm_type=inter")
_MOST_BYTES = 2**31 - 1


def base_in(content: bytes, name: str) -> Tree:
    """Return the selection tree in a file of MPICH: its ``generic.json``, or its library, which has it inside.

    Raises:
        UsageError: there is no such tree in the file.
    """
    for text in (content, *re.findall(rb'\{"collective=[^\0]+', content)):
        try:
            tree = json.loads(text)
        except ValueError:
            continue
        if isinstance(tree, dict) and "algorithm=MPIR_" in json.dumps(tree.get("collective=bcast")):
            return tree
    raise UsageError(f"{name} has no selection tree of MPICH: name its generic.json or its libmpi.so by --base")


def written(rules: Sequence[Rule], base: Tree) -> str:
    """Return the rules as the text of a selection file that extends the tree `base`."""
    tree = dict(base)
    for collective, of_collective in groupby(rules, lambda rule: rule.collective):
        key = f"collective={collective}"
        kinds = tree[key] if "comm_type=intra" in tree[key] else dict.fromkeys(_KINDS, tree[key])
        within = _by_ranks(collective, list(of_collective), kinds["comm_type=intra"])
        tree[key] = {**kinds, "comm_type=intra": within}
    return json.dumps(tree, indent=1) + "\n"


def _by_ranks(collective: str, rules: Sequence[Rule], own: Tree) -> Tree:
    tree = dict[str, Any]()
    for ranks, of_ranks in groupby(rules, lambda rule: rule.ranks):
        if ranks > 1 and f"comm_size<={ranks - 1}" not in tree:
            tree[f"comm_size<={ranks - 1}"] = own
        tree[f"comm_size<={ranks}"] = _by_size(collective, list(of_ranks), own)
    return {**tree, "comm_size=any": own}


def _by_size(collective: str, rules: Sequence[Rule], own: Tree) -> Tree:
    kind = "total_msg_size" if collective in _TOTAL else "avg_msg_size"
    tree = dict[str, Any]()
    at = 0
    for rule in rules:
        share = rule.ranks if collective == "alltoall" else 1  # a message of an alltoall is one share
        first, end = (None if each is None else -(-each // share) for each in (rule.first, rule.end))
        if first is not None and at < first <= _MOST_BYTES:
            tree[f"{kind}<={first - 1}"] = own
        if end is None or end > _MOST_BYTES:
            return {**tree, f"{kind}=any": _guarded(rule, own)}
        tree[f"{kind}<={end - 1}"] = _guarded(rule, own)
        at = end
    return {**tree, f"{kind}=any": own}


def _guarded(rule: Rule, own: Tree) -> Tree:
    """Return the algorithm of a rule, behind the conditions under which MPICH's code of it is right."""
    leaf: Tree = {f"algorithm=MPIR_{rule.algorithm}": {}}
    if rule.algorithm.endswith(("reduce_scatter_allgather", "reduce_scatter_gather")):
        return {"is_op_built_in=yes": {"count<pow2": own, "count=any": leaf}, "is_op_built_in=no": own}
    if rule.collective.startswith("reduce_scatter") or rule.algorithm == "Allreduce_intra_ring":
        return {"is_commutative=yes": leaf, "is_commutative=no": own}
    if rule.collective == "alltoall":
        return {"is_sendbuf_inplace=yes": own, "is_sendbuf_inplace=no": leaf}
    return leaf

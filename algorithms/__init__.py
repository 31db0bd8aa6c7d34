"""Algorithms as data: plans, the builders that return them, and the verifier that proves them.

ir/           plans as frozen data: their steps, their binding to elements, their encoding, drawings of them
builders/     functions that return the plan of one rank, a file for each idea
composition/  algorithms made of phases, inside hosts and across them
catalogue/    the registry of all algorithms, with their costs and references, and the registration of users' algorithms
schedules/    schedules that other programs have written, turned into plans
verifier/     the proof that plans are right, free of deadlocks, and cost what they declare

Everything here is pure: no input or output, clock, thread, socket or array. The names below are public, and each is
loaded when it is first used. `un.algorithm` registers an algorithm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.algorithms.builders.arguments import (
        check_at_least as check_at_least,
        check_ranks as check_ranks,
        check_supported as check_supported,
        needs_even as needs_even,
        needs_power_of_two as needs_power_of_two,
    )
    from unisono.algorithms.builders.lane_pieces import (
        copy_own_block as copy_own_block,
        distances as distances,
        empty_groups as empty_groups,
        exchange_with_all as exchange_with_all,
        in_windows as in_windows,
        lane_from_steps as lane_from_steps,
        single_rank_lane as single_rank_lane,
        with_own_block as with_own_block,
    )
    from unisono.algorithms.catalogue import host_crossing as host_crossing
    from unisono.algorithms.catalogue.algorithm import Algorithm as Algorithm, Cost as Cost
    from unisono.algorithms.catalogue.registry import (
        ALGORITHMS as ALGORITHMS,
        algorithms_of as algorithms_of,
        find as find,
    )
    from unisono.algorithms.ir.plan import (
        Buffer as Buffer,
        Copy as Copy,
        Counts as Counts,
        Group as Group,
        Lane as Lane,
        Partition as Partition,
        Plan as Plan,
        Read as Read,
        ReadReduce as ReadReduce,
        Recv as Recv,
        RecvReduce as RecvReduce,
        Reduce as Reduce,
        Repeat as Repeat,
        Send as Send,
        Signal as Signal,
        Span as Span,
        Step as Step,
        Wait as Wait,
        Write as Write,
        even as even,
        input_block as input_block,
        output_block as output_block,
        scratch_block as scratch_block,
        scratch_like as scratch_like,
        scratch_like_block as scratch_like_block,
        shares as shares,
    )
    from unisono.algorithms.verifier.verify import (
        Report as Report,
        verify as verify,
        verify_algorithm as verify_algorithm,
        verify_plans as verify_plans,
    )

# Module → its public names.
_MODULES = {
    "ir.plan": (
        *("Plan", "Group", "Repeat", "Lane", "Step", "Buffer", "Counts", "Partition", "Span"),
        *("Send", "Recv", "RecvReduce", "Copy", "Reduce", "Read", "ReadReduce", "Write", "Signal", "Wait"),
        *("even", "shares", "input_block", "output_block", "scratch_block", "scratch_like", "scratch_like_block"),
    ),
    "builders.arguments": ("check_at_least", "check_ranks", "check_supported", "needs_even", "needs_power_of_two"),
    "builders.lane_pieces": (
        *(
            "single_rank_lane",
            "lane_from_steps",
            "distances",
            "exchange_with_all",
            "empty_groups",
            "in_windows",
            "copy_own_block",
            "with_own_block",
        ),
    ),
    "catalogue.algorithm": ("Algorithm", "Cost"),
    "catalogue.registry": ("ALGORITHMS", "algorithms_of", "find"),
    "verifier.verify": ("Report", "verify", "verify_algorithm", "verify_plans"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_MODULE_OF, "host_crossing"]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    value: object
    if name == "host_crossing":
        value = importlib.import_module("unisono.algorithms.catalogue.host_crossing")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(f"unisono.algorithms.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'unisono.algorithms' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The arguments that calls of all frameworks have in common: reductions, names, roots and numbers of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.compat.horovod import adasum
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.job import calls_of
from unisono.compat.horovod.negotiation import Negotiator
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set

Average, Sum, Adasum, Min, Max, Product = range(6)
# By Horovod's number of a reduction, its name here.
_OPS: Mapping[int, str] = {Average: "avg", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "prod"}
# The reductions through which gradients flow.
DIFFERENTIABLE = ("avg", "sum")


def op_of(op: int | None, average: bool | None = None) -> str:
    """Return the name of a reduction.

    Raises:
        ArgumentError: there is no such reduction, or both `op` and the old argument `average` are passed.
    """
    if average is not None:
        if op is not None:
            raise ArgumentError("pass op or the old argument average, and not both")
        return "avg" if average else "sum"
    name = _OPS.get(Average if op is None else op)
    if name is None:
        raise ArgumentError(f"op must be hvd.Average, Sum, Adasum, Min, Max or Product, not {op!r}")
    return name


def gradient_op(op: int, predivide: float, process_set: ProcessSet) -> str:
    """Return the name of the reduction of a `DistributedOptimizer` or a tape.

    Args:
        op: Horovod's number of it.
        predivide: the argument `gradient_predivide_factor`.
        process_set: the ranks.

    Raises:
        ArgumentError, UsageError: the reduction is not one of gradients, or does not fit the other arguments.
    """
    chosen = op_of(op)
    if chosen not in (*DIFFERENTIABLE, "adasum"):
        raise ArgumentError(f"gradients are reduced by op=Average, Sum or Adasum, not by {chosen}")
    if predivide != 1.0 and chosen != "avg":
        raise ArgumentError("gradient_predivide_factor is for op=Average: leave it out")
    if chosen == "adasum":
        if process_set is not global_process_set:
            raise ArgumentError("op=Adasum is for all ranks: leave process_set out")
        adasum.check_size(calls_of(process_set).comm.size)
    return chosen


def check_passes(passes: object) -> None:
    """Check the argument `backward_passes_per_step`; raises `ArgumentError`."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ArgumentError(f"backward_passes_per_step must be an integer, 1 or more, not {passes!r}")


def check_groups(groups: object) -> None:
    """Check the argument `groups` of TensorFlow and Keras, which has no effect here; raises `ArgumentError`."""
    is_number = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    if groups is not None and not is_number and not isinstance(groups, (list, tuple)):
        raise ArgumentError(f"groups must be a positive number or lists of variables, not {groups!r}")


def check_differentiable(op: str) -> None:
    """Check that gradients flow through a reduction; raises `ArgumentError`."""
    if op not in DIFFERENTIABLE:
        raise ArgumentError(f"gradients flow through op=Average and Sum, and not through {op}")


def scatter_op(op: int) -> str:
    """Return the name of the reduction of a reducescatter; raises `ArgumentError` if it cannot be made."""
    chosen = op_of(op)
    if chosen not in DIFFERENTIABLE:
        raise ArgumentError(f"reducescatter takes op=Average or Sum, not {chosen}")
    return chosen


def root_of(root_rank: int, process_set: ProcessSet) -> int:
    """Return the number in a process set of a rank of the job; raises `ArgumentError` if it is not in the set."""
    ranks = process_set.ranks or []
    if isinstance(root_rank, bool) or root_rank not in ranks:
        raise ArgumentError(f"root_rank must be one of the ranks {ranks}, not {root_rank!r}")
    return ranks.index(root_rank)


def named(calls: Negotiator, kind: str, name: str | None) -> str:
    """Return the name of a call, or one by its place among the calls of the kind; raises `ArgumentError`."""
    if name is not None and not isinstance(name, str):
        raise ArgumentError(f"name must be a string or None, not {name!r}")
    return calls.unnamed(kind) if name is None else name


def rows_to_ranks(splits: Sequence[int], count: int, size: int) -> tuple[int, ...]:
    """Return how many of `count` rows an alltoall sends to each rank.

    Args:
        splits: these numbers, or an empty list for equal parts.
        count: the number of rows.
        size: the number of ranks.

    Raises:
        ArgumentError: the numbers are wrong.
    """
    if len(splits) == 0:
        if count % size:
            raise ArgumentError(f"{count} rows cannot be cut into {size} equal parts: pass splits")
        return (count // size,) * size
    rows = tuple(map(int, splits))
    if len(rows) != size or min(rows) < 0 or sum(rows) != count:
        raise ArgumentError(f"splits must be {size} numbers of rows whose sum is {count}, not {list(rows)}")
    return rows

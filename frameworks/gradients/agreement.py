"""Agreement of the ranks on the gradients and their order, and on the errors of a training step.

Theory of operation
-------------------
All ranks must have the same buckets, but gradients may become ready in another order on each rank. So when the first
step ends, rank 0 broadcasts its gradients in its order. Each rank answers with the gradients that rank 0 lacks, and
with its first error.

In every later step all ranks reduce their `Flags`. Only if a flag is set do the ranks exchange its details. So an error
of one rank is raised on all ranks, in the same step and with the same text, and the communicator can be used after it.

A rank that lacks a gradient sets `Flags.MISSING`. Then one more small reduction tells all ranks which gradients some
rank has, and which some rank lacks. A gradient that no rank has is left out of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntFlag
from typing import NamedTuple

import numpy as np

from unisono import Communicator, MismatchError, UnisonoError, UsageError
from unisono.frameworks.gradients.layout import Gradient


class NotFiniteError(UnisonoError, ArithmeticError):
    """A gradient has an element that is infinite or not a number on some rank. Raised on every rank."""


class Flags(IntFlag):
    """The facts that a rank reports in a training step. The flags of all ranks are joined by "bor"."""

    COMPLAINT = 1
    OTHER_ORDER = 2
    NEW_GRADIENT = 4
    # Not sent: each rank derives it from the checksums of parameters, which travel with the flags.
    PARAMETERS_DIFFER = 8
    MISSING = 16
    # Not sent either: each rank derives it from the turns of all ranks.
    OTHER_TURN = 32


class Complaint(NamedTuple):
    """The error of a rank, before it is raised on all.

    Attributes:
        kind: the name of the error class, a key of `ERRORS`.
        message: the message of the error, which names the gradient.
    """

    kind: str
    message: str


ERRORS: Mapping[str, type[UnisonoError]] = {
    error.__name__: error for error in (UsageError, MismatchError, NotFiniteError)
}


def raise_first(world: Communicator, complaint: Complaint | None) -> None:
    """Raise the complaint of the lowest rank that has one, the same on all ranks. All ranks call it.

    Raises:
        UsageError, MismatchError, NotFiniteError: a rank has a complaint of this class.
    """
    for rank, complaint_of_rank in enumerate(world.allgather_object(complaint)):
        if complaint_of_rank is not None:
            error = ERRORS[complaint_of_rank.kind]
            raise error(f"rank {rank}: {complaint_of_rank.message}", rank=world.rank, peer=rank)


def agree(
    world: Communicator, settings: object, own: Sequence[Gradient], complaint: Complaint | None, *, zeros: bool
) -> tuple[Gradient, ...]:
    """Return the gradients of all ranks: those of rank 0 in its order, then those that only others have.

    All ranks call it.

    Args:
        world: the ranks.
        settings: further facts that must be equal on all ranks.
        own: the gradients of this rank, in the order in which they became ready.
        complaint: the first error of this rank, or None.
        zeros: whether a gradient that a rank has not passed counts as zeros.

    Raises:
        MismatchError: the ranks differ in `settings`, in a shape or dtype, or, without `zeros`, in their gradients.
        UsageError: a rank complains, or no rank has a gradient.
    """
    expected, of_rank_0 = world.broadcast_object((settings, own) if world.rank == 0 else None)
    if complaint is None and settings != expected:
        complaint = Complaint("MismatchError", f"its reducer has {settings}, and that of rank 0 {expected}")
    complaint = complaint or _difference(own, of_rank_0, zeros=zeros)
    names_of_rank_0 = {gradient.name for gradient in of_rank_0}
    extra = [] if complaint else [gradient for gradient in own if gradient.name not in names_of_rank_0]
    raise_first(world, complaint)
    union = _union(world, of_rank_0, world.allgather_object(extra))
    if not union:
        raise UsageError("no rank has passed a gradient: call ready(name, array) before finish()", rank=world.rank)
    return union


def agree_on_new(world: Communicator, own: Sequence[Gradient], *, zeros: bool) -> tuple[Gradient, ...]:
    """Return the new gradients of all ranks. All ranks call it.

    Args:
        world: the ranks.
        own: the new gradients of this rank.
        zeros: as in `agree`.

    Raises:
        MismatchError: the ranks differ in a shape or dtype, or, without `zeros`, in their new gradients.
    """
    new_of_ranks = world.allgather_object(own)
    union = _union(world, (), new_of_ranks)
    for rank, new in enumerate(new_of_ranks):
        names = {gradient.name for gradient in new}
        for gradient in union if not zeros else ():
            if gradient.name not in names:
                text = f"got no gradient of {gradient.name!r}, which other ranks passed for the first time: {_ADVICE}"
                raise MismatchError(f"rank {rank}: {text}", rank=world.rank, peer=rank)
    return union


def agree_on_missing(
    world: Communicator, names: Collection[str], passed: Collection[str], *, zeros: bool
) -> frozenset[str]:
    """Return the names of the gradients that no rank has passed in a step. All ranks call it.

    Args:
        world: the ranks.
        names: all gradients, in the same order on all ranks.
        passed: the gradients of this rank.
        zeros: as in `agree`.

    Raises:
        MismatchError: without `zeros`, a rank lacks a gradient that another one has.
    """
    own = np.array([[name in passed, name not in passed] for name in names], np.uint8)
    of_all = world.allreduce(own, "bor").tolist()
    torn = [name for name, (is_passed, is_lacking) in zip(names, of_all, strict=True) if is_passed and is_lacking]
    if torn and not zeros:
        raise_first(world, next((missing(name) for name in torn if name not in passed), None))
    return frozenset(name for name, (is_passed, _) in zip(names, of_all, strict=True) if not is_passed)


def raise_other_turn(world: Communicator, turn: int) -> None:
    """Raise an error that names the first rank that averages gradients more or less often than rank 0.

    All ranks call it.

    Raises:
        MismatchError: the turns differ.
    """
    turns = world.allgather_object(turn)
    rank = next(rank for rank in range(world.size) if turns[rank] != turns[0])
    raise MismatchError(
        f"rank {rank} averages gradients more or less often than rank 0: on all ranks, call backward outside of "
        "optimizer.no_sync() and optimizer.step() equally often, and set gradients by hand before the same step()",
        rank=world.rank,
        peer=rank,
    )


def _union(
    world: Communicator, first: Iterable[Gradient], of_ranks: Sequence[Sequence[Gradient]]
) -> tuple[Gradient, ...]:
    """Return `first` and the gradients of all ranks, each once.

    All ranks compare the same values, so all of them raise the same error.

    Raises:
        MismatchError: two ranks have another shape or dtype for the same name.
    """
    union = dict.fromkeys(first)
    for rank, gradients in enumerate(of_ranks):
        conflict = _difference(gradients, list(union), zeros=True)
        if conflict is not None:
            raise MismatchError(f"rank {rank}: {conflict.message}", rank=world.rank, peer=rank)
        union.update(dict.fromkeys(gradients))
    return tuple(union)


def _difference(own: Iterable[Gradient], first: Iterable[Gradient], *, zeros: bool) -> Complaint | None:
    """Return a complaint about the first difference between the gradients of a rank and those of others, or None."""
    mine = {gradient.name: gradient for gradient in own}
    theirs = {gradient.name: gradient for gradient in first}
    for name in mine.keys() & theirs.keys():
        if mine[name] != theirs[name]:
            text = f"{described(mine[name])}, and other ranks have {dtype_and_shape(theirs[name])}"
            return Complaint("MismatchError", text)
    if zeros:
        return None
    for name in sorted(theirs.keys() - mine.keys()):
        return missing(name)
    for name in sorted(mine.keys() - theirs.keys()):
        return Complaint("MismatchError", f"passed a gradient of {name!r}, and rank 0 has passed none: {_ADVICE}")
    return None


_ADVICE = 'pass missing="zero" if a missing gradient is to count as zeros'


def missing(name: str) -> Complaint:
    """Return the complaint of a rank whose program has passed no gradient of this name, as another one has."""
    return Complaint("MismatchError", f"got no gradient of {name!r} before finish(), and another rank has: {_ADVICE}")


def given_twice(name: str) -> Complaint:
    """Return the complaint of a rank whose program has passed two gradients of one name in a training step."""
    return Complaint(
        "UsageError",
        f"the gradient of {name!r} was passed twice in a step: call finish() after each step. With a torch optimizer, "
        "put all backwards except the last one before step() in optimizer.no_sync(), also those for another optimizer, "
        "and pass use_reentrant=False to checkpoint()",
    )


def changed(name: str, how: str = "changed") -> Complaint:
    """Return the complaint of a rank whose program has changed a gradient after passing it."""
    return Complaint(
        "UsageError",
        f"the gradient of {name!r} was {how} while it was being averaged: clip and change gradients after finish(), or "
        "with a torch optimizer after optimizer.synchronize()",
    )


def described(gradient: Gradient) -> str:
    """Return the words for a gradient in errors, such as ``the gradient of 'bias' is float32[2]``."""
    return f"the gradient of {gradient.name!r} is {dtype_and_shape(gradient)}"


def dtype_and_shape(gradient: Gradient) -> str:
    """Return dtype and shape in the form ``float32[2, 3]``."""
    return f"{gradient.dtype}{list(gradient.shape)}"

"""What the ranks agree upon: which gradients there are, in which order, and whether a step has gone well.

Theory of operation. Ranks compute in their own time and may even differ in the order in which gradients become ready,
but buckets must be the same on all. So the order of rank 0 is told to the others, each of which answers with what it
has beyond that and with what it finds wrong. In every later step one small reduction, of `Flags`, tells all ranks that
one of them has something to say; only then do they ask what it is. So an error of one rank is the same error on all of
them, in the same step, and the communicator can still be used after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntFlag
from typing import NamedTuple

from unisono import Communicator, MismatchError, UnisonoError, UsageError
from unisono.frameworks.gradients.layout import Gradient


class NotFiniteError(UnisonoError, ArithmeticError):
    """A gradient of some rank has an element that is infinite or not a number. Raised on every rank."""


class Flags(IntFlag):
    """What a rank tells the others in a step; they are joined by "bor"."""

    COMPLAINT = 1
    OTHER_ORDER = 2
    NEW_GRADIENT = 4
    # Not sent by itself: what the checksums of parameters tell, which travel with the flags.
    PARAMETERS_DIFFER = 8


class Complaint(NamedTuple):
    """What is wrong on a rank: a class of `ERRORS`, by its name, and the message, which names the gradient."""

    kind: str
    message: str


ERRORS: Mapping[str, type[UnisonoError]] = {
    error.__name__: error for error in (UsageError, MismatchError, NotFiniteError)
}


def raise_first(world: Communicator, complaint: Complaint | None) -> None:
    """Raise, on all ranks alike, what the first rank with a complaint says. All ranks call it.

    Raises:
        UsageError, MismatchError, NotFiniteError: there is one.
    """
    for rank, its in enumerate(world.allgather_object(complaint)):
        if its is not None:
            raise ERRORS[its.kind](f"rank {rank}: {its.message}", rank=world.rank, peer=rank)


def agree(
    world: Communicator, settings: object, own: Sequence[Gradient], complaint: Complaint | None, *, zeros: bool
) -> tuple[Gradient, ...]:
    """Return the gradients of all ranks, in the order of rank 0; what only others have comes last. All ranks call it.

    Args:
        world: the ranks.
        settings: what must be equal on all ranks, beside the gradients.
        own: the gradients of this rank, in the order in which they have become ready.
        complaint: what was wrong with one of them.
        zeros: whether a gradient that a rank does not have is to count as zeros.

    Raises:
        MismatchError: the ranks differ in a shape or dtype, or, without `zeros`, in which gradients there are.
        UsageError: a rank complains, or there are no gradients at all.
    """
    expected, first = world.broadcast_object((settings, own) if world.rank == 0 else None)
    if complaint is None and settings != expected:
        complaint = Complaint("MismatchError", f"its reducer has {settings}, and that of rank 0 {expected}")
    found = complaint or _difference(own, first, zeros=zeros)
    known = {gradient.name for gradient in first}
    extra = [] if found else [gradient for gradient in own if gradient.name not in known]
    raise_first(world, found)
    union = _union(world, first, world.allgather_object(extra))
    if not union:
        raise UsageError("no rank has given a gradient: call ready(name, array) before finish()", rank=world.rank)
    return union


def agree_on_new(world: Communicator, own: Sequence[Gradient], *, zeros: bool) -> tuple[Gradient, ...]:
    """Return the gradients that some rank has given for the first time. All ranks call it.

    Args:
        world: the ranks.
        own: those of this rank.
        zeros: as in `agree`.

    Raises:
        MismatchError: the ranks differ in a shape or dtype, or, without `zeros`, in which gradients these are.
    """
    new_of_ranks = world.allgather_object(own)
    union = _union(world, (), new_of_ranks)
    for rank, new in enumerate(new_of_ranks):
        names = {gradient.name for gradient in new}
        for gradient in union if not zeros else ():
            if gradient.name not in names:
                text = f"got no gradient of {gradient.name!r}, which other ranks gave for the first time: {_ADVICE}"
                raise MismatchError(f"rank {rank}: {text}", rank=world.rank, peer=rank)
    return union


def _union(
    world: Communicator, first: Iterable[Gradient], of_ranks: Sequence[Sequence[Gradient]]
) -> tuple[Gradient, ...]:
    """Return `first` and the gradients of all ranks, each once; raises `MismatchError` where shapes or dtypes differ.

    All ranks compare the same, and so raise the same.
    """
    union = dict.fromkeys(first)
    for rank, gradients in enumerate(of_ranks):
        conflict = _difference(gradients, list(union), zeros=True)
        if conflict is not None:
            raise MismatchError(f"rank {rank}: {conflict.message}", rank=world.rank, peer=rank)
        union.update(dict.fromkeys(gradients))
    return tuple(union)


def _difference(own: Iterable[Gradient], first: Iterable[Gradient], *, zeros: bool) -> Complaint | None:
    """Return what is wrong with the gradients of a rank, beside those of another one."""
    mine = {gradient.name: gradient for gradient in own}
    theirs = {gradient.name: gradient for gradient in first}
    for name in mine.keys() & theirs.keys():
        if mine[name] != theirs[name]:
            return Complaint("MismatchError", f"{described(mine[name])}, and other ranks have {kind(theirs[name])}")
    if zeros:
        return None
    for name in sorted(theirs.keys() - mine.keys()):
        return missing(name)
    for name in sorted(mine.keys() - theirs.keys()):
        return Complaint("MismatchError", f"gave a gradient of {name!r}, which rank 0 has none of: {_ADVICE}")
    return None


_ADVICE = 'pass missing="zero" if that is right'


def missing(name: str) -> Complaint:
    """Return the complaint of a rank that got no gradient for a parameter."""
    text = f"got no gradient of {name!r} before finish(): {_ADVICE}. If no rank has it any more, call reset() on all"
    return Complaint("MismatchError", text)


def given_twice(name: str) -> Complaint:
    """Return the complaint of a rank that got two gradients for a parameter in one step."""
    return Complaint(
        "UsageError",
        f"the gradient of {name!r} was given twice in a step: call finish() after each step. With a torch optimizer, "
        "put all backwards of a step but the last in optimizer.no_sync(), and call optimizer.synchronize() before a "
        "GradScaler's step(optimizer)",
    )


def changed(name: str, how: str = "changed") -> Complaint:
    """Return the complaint of a rank whose program has changed a gradient that the reducer was averaging."""
    return Complaint(
        "UsageError",
        f"the gradient of {name!r} was {how} while it was being averaged: clip and change gradients after finish(), or "
        "with a torch optimizer after optimizer.synchronize()",
    )


def described(gradient: Gradient) -> str:
    """Return what errors call a gradient."""
    return f"the gradient of {gradient.name!r} is {kind(gradient)}"


def kind(gradient: Gradient) -> str:
    """Return what errors call the dtype and shape of a gradient."""
    return f"{gradient.dtype}{list(gradient.shape)}"

"""Parameters that are the same on all ranks: broadcast in the beginning, and checked by their bits at any time.

Theory of operation. Each rank hashes its arrays, names, dtypes and shapes first. One allreduce of the hash and of its
complement, by "max", tells every rank whether all hashes are equal: the largest one is then the smallest one. Only if
they are not do the ranks exchange a hash for each array, and all of them find the same first array that differs. What
most ranks hold is taken to be right; of equally many, what the lowest of them holds.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono import Communicator, MismatchError, UsageError
from unisono.frameworks.arrays import FlatArray, Named, first_names, flatten, flatten_all, pairs_of

_DIGEST_NBYTES = 16


class _Entry(NamedTuple):
    """What a rank says of an array: name, dtype and shape, and the digest of its bits, which may be left empty."""

    name: str
    described: str
    digest: bytes


def broadcast_parameters(world: Communicator, named: Named, root: int = 0) -> dict[str, Any]:
    """Copy the arrays of the root to all ranks, in place, and check that all ranks hold the same bits then.

    Args:
        world: the ranks, all of which call it.
        named: arrays by name, of numpy, torch, JAX, TensorFlow or Keras: a dict, ``model.state_dict()`` or
            ``model.named_parameters()``; the same names, dtypes and shapes in the same order on all ranks. Arrays in
            one memory, as tied weights are, count once.
        root: the rank whose arrays are copied.

    Returns:
        The arrays by name. Those that cannot be written, of JAX and a ``tf.Tensor``, are new ones.

    Raises:
        UsageError: these are no arrays that can be written; nothing has been sent.
        MismatchError: names, dtypes or shapes differ, and nothing has been copied; or the bits do in the end. It names
            the first array that differs, and the ranks.
        PeerLostError, CollectiveTimeoutError, AbortedError: as in any call.

    >>> import numpy as np, unisono as un
    >>> from unisono.data_parallel import broadcast_parameters
    >>> def started(world):
    ...     parameters = {"weight": np.full(2, world.rank), "bias": np.array(world.rank + 0.5)}
    ...     broadcast_parameters(world, parameters, root=1)
    ...     return parameters["weight"].tolist(), float(parameters["bias"])
    >>> un.launch(started, 2)
    [([1, 1], 1.5), ([1, 1], 1.5)]
    """
    every = {name: flatten(x, name) for name, x in pairs_of(named)}
    lent = first_names(every)
    check_writable(lent)
    _check_alike(world, [_Entry(name, each.described(), b"") for name, each in lent.items()])
    flats = [each.flat for each in lent.values()]
    if flats:
        world.broadcast(flats, root, out=flats)
    _check_alike(world, _entries(lent))
    return {name: each.put_back() for name, each in every.items()}


def verify_sync(world: Communicator, named: Named) -> None:
    """Check that all ranks hold the same bits: two zeros of different sign differ, and a NaN is like itself.

    It costs reading the arrays once, to hash them (BLAKE2b), and one allreduce of 32 bytes.

    Args:
        world: the ranks, all of which call it.
        named: as in `broadcast_parameters`; the arrays are only read.

    Raises:
        UsageError: these are no arrays; nothing has been sent.
        MismatchError: the ranks do not hold the same; it names the first array that differs, and the ranks that
            diverge. Calls may go on after it.
        PeerLostError, CollectiveTimeoutError, AbortedError: as in any call.
    """
    _check_alike(world, _entries(flatten_all(named)))


def first_difference(world: Communicator, named: Named) -> str | None:
    """Return the text of the `MismatchError` that `verify_sync` would raise, or None; raises its other errors."""
    try:
        verify_sync(world, named)
    except MismatchError as error:
        return error.message
    return None


def fingerprint(named: Named) -> str:
    """Return 32 hexadecimal digits that tell names, dtypes, shapes and bits; of this process alone.

    >>> import numpy as np
    >>> from unisono.data_parallel import fingerprint
    >>> fingerprint({"w": np.zeros(2)}) == fingerprint({"w": np.zeros(2)}), fingerprint({"w": -np.zeros(2)})[:4]
    (True, '...')
    """
    return _digest_of(_entries(flatten_all(named))).hex()


def check_writable(lent: Mapping[str, FlatArray], *, in_place: bool = False) -> None:
    """Check that what has been changed can be put back, in the array itself if `in_place`; raises `UsageError`."""
    for name, each in lent.items():
        if not each.writable:
            raise UsageError(f"{name} is read-only, or hands out copies alone: pass an array that can be written")
        if in_place and not each.in_place:
            raise UsageError(f"{name} is of a kind that never changes: pass an array of numpy or torch")


def check_names(world: Communicator, names: Sequence[str]) -> None:
    """Check that all ranks give the same names in the same order; raises `MismatchError` on all."""
    _check_alike(world, [_Entry(name, "", b"") for name in names])


def _entries(lent: Mapping[str, FlatArray]) -> list[_Entry]:
    return [_Entry(name, each.described(), _hash(each.flat.view(np.uint8))) for name, each in lent.items()]


def _hash(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_NBYTES).digest()


def _digest_of(entries: Sequence[_Entry]) -> bytes:
    texts = [f"{len(each.name)} {each.name} {each.described} {each.digest.hex()}" for each in entries]
    return _hash("\n".join(texts).encode())


def agree(world: Communicator, digest: bytes) -> bool:
    """Return on all ranks whether all have given the same 16 bytes."""
    mine = np.frombuffer(digest, np.int64)
    most = world.allreduce(np.concatenate([mine, ~mine]), "max")
    return bool((most[: mine.size] == ~most[mine.size :]).all())


def _check_alike(world: Communicator, entries: Sequence[_Entry]) -> None:
    """Check that all ranks say the same of their arrays; raises `MismatchError` as `verify_sync` does, on all."""
    if agree(world, _digest_of(entries)):
        return
    told: list[list[_Entry]] = [
        [_Entry(*each) for each in rank] for rank in world.allgather_object([tuple(each) for each in entries])
    ]
    raise _mismatch(told, world)


def _mismatch(told: Sequence[Sequence[_Entry]], world: Communicator) -> MismatchError:
    place = next(place for place in range(max(map(len, told)) + 1) if len({_at(rank, place) for rank in told}) > 1)
    held = [_at(rank, place) for rank in told]
    counts = Counter(held)
    usual = max(counts, key=lambda each: (counts[each], -held.index(each)))
    strange = [rank for rank, each in enumerate(held) if each != usual]
    divergent = held[strange[0]]
    ranks = f"rank{'s' * (len(strange) > 1)} {', '.join(str(world.world_ranks[rank]) for rank in strange)}"
    return MismatchError(f"{_difference(usual, divergent, ranks)}", rank=world.rank, peer=world.world_ranks[strange[0]])


def _at(entries: Sequence[_Entry], place: int) -> _Entry | None:
    return entries[place] if place < len(entries) else None


def _difference(usual: _Entry | None, divergent: _Entry | None, ranks: str) -> str:
    if usual is None or divergent is None or usual.name != divergent.name:
        names = ["nothing more" if each is None else repr(each.name) for each in (divergent, usual)]
        return f"{ranks}: {names[0]} where the others have {names[1]}: all must give the same names in the same order"
    if usual.described != divergent.described:
        return f"{usual.name!r} is {divergent.described} on {ranks}, and {usual.described} on the others"
    return f"{usual.name!r} has other bits on {ranks} than on the others ({usual.described})"

"""Parameters that are equal on all ranks: copying them at the start, and comparing their bits at any time.

Theory of operation
-------------------
Each rank hashes the names, dtypes, shapes and bits of its arrays. One allreduce by "max" of the hash and of its
complement tells every rank whether all hashes are equal: then the largest hash is also the smallest. Only if they
differ do the ranks exchange a hash for each array, and all of them find the same first array that differs. The value
that most ranks hold is taken to be right. Of two equally frequent values, the one on the lowest rank is.
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


class _ArrayFacts(NamedTuple):
    """The facts about an array that ranks compare.

    Attributes:
        name: the name.
        described: dtype and shape.
        digest: the digest of the bits; empty if they are not compared.
    """

    name: str
    described: str
    digest: bytes


def broadcast_parameters(world: Communicator, named: Named, root: int = 0) -> dict[str, Any]:
    """Copy the arrays of the root to all ranks, in place, and check that all ranks then hold the same bits.

    Args:
        world: the ranks, all of which call it.
        named: arrays of numpy, torch, JAX, TensorFlow or Keras by name: a dict, ``model.state_dict()`` or
            ``model.named_parameters()``. All ranks pass the same names, dtypes and shapes in the same order. Arrays
            that share memory, such as tied weights, count once.
        root: the rank whose arrays are copied.

    Returns:
        The arrays by name. An array of JAX or a ``tf.Tensor`` cannot be written and is a new one.

    Raises:
        UsageError: an argument is no array that can be written; nothing has been sent.
        MismatchError: names, dtypes or shapes differ, and nothing has been copied; or the bits differ at the end. The
            message names the first array that differs, and the ranks.
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
    all_lent = {name: flatten(x, name) for name, x in pairs_of(named)}
    lent = first_names(all_lent)
    check_writable(lent)
    _check_alike(world, [_ArrayFacts(name, each.described(), b"") for name, each in lent.items()])
    flats = [each.flat for each in lent.values()]
    if flats:
        world.broadcast(flats, root, out=flats)
    _check_alike(world, _entries(lent))
    return {name: each.put_back() for name, each in all_lent.items()}


def verify_sync(world: Communicator, named: Named) -> None:
    """Check that all ranks hold the same bits. So 0.0 and -0.0 differ, and a NaN equals itself.

    It reads the arrays once, to hash them (BLAKE2b), and makes one allreduce of 32 bytes.

    Args:
        world: the ranks, all of which call it.
        named: as in `broadcast_parameters`; the arrays are only read.

    Raises:
        UsageError: an argument is no array; nothing has been sent.
        MismatchError: the arrays differ between ranks; the message names the first array that differs, and the ranks.
            The communicator can be used after it.
        PeerLostError, CollectiveTimeoutError, AbortedError: as in any call.
    """
    _check_alike(world, _entries(flatten_all(named)))


def first_difference(world: Communicator, named: Named) -> str | None:
    """Return the message of the `MismatchError` of `verify_sync`, or None. The other errors are raised."""
    try:
        verify_sync(world, named)
    except MismatchError as error:
        return error.message
    return None


def fingerprint(named: Named) -> str:
    """Return a hash of the names, dtypes, shapes and bits of arrays of this process, as 32 hexadecimal digits.

    >>> import numpy as np
    >>> from unisono.data_parallel import fingerprint
    >>> fingerprint({"w": np.zeros(2)}) == fingerprint({"w": np.zeros(2)}), fingerprint({"w": -np.zeros(2)})[:4]
    (True, '...')
    """
    return _digest_of(_entries(flatten_all(named))).hex()


def check_writable(lent: Mapping[str, FlatArray], *, in_place: bool = False) -> None:
    """Check that arrays can be written, and with `in_place`, without a new array; raises `UsageError`."""
    for name, array in lent.items():
        if not array.writable:
            raise UsageError(f"{name} is read-only, or gives access only to copies: pass an array that can be written")
        if in_place and not array.in_place:
            raise UsageError(f"{name} is immutable: pass an array of numpy or torch")


def check_names(world: Communicator, names: Sequence[str]) -> None:
    """Check that all ranks pass the same names in the same order; raises `MismatchError` on all ranks."""
    _check_alike(world, [_ArrayFacts(name, "", b"") for name in names])


def _entries(lent: Mapping[str, FlatArray]) -> list[_ArrayFacts]:
    return [_ArrayFacts(name, each.described(), _hash(each.flat.view(np.uint8))) for name, each in lent.items()]


def _hash(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_NBYTES).digest()


def _digest_of(entries: Sequence[_ArrayFacts]) -> bytes:
    texts = [f"{len(each.name)} {each.name} {each.described} {each.digest.hex()}" for each in entries]
    return _hash("\n".join(texts).encode())


def agree(world: Communicator, digest: bytes) -> bool:
    """Return, on all ranks, whether all ranks have passed the same 16 bytes."""
    mine = np.frombuffer(digest, np.int64)
    most = world.allreduce(np.concatenate([mine, ~mine]), "max")
    return bool((most[: mine.size] == ~most[mine.size :]).all())


def _check_alike(world: Communicator, entries: Sequence[_ArrayFacts]) -> None:
    """Check that all ranks have the same entries; raises `MismatchError` on all ranks, as `verify_sync` does."""
    if agree(world, _digest_of(entries)):
        return
    tuples_of_ranks = world.allgather_object([tuple(entry) for entry in entries])
    raise _mismatch([[_ArrayFacts(*values) for values in tuples] for tuples in tuples_of_ranks], world)


def _mismatch(entries_of_ranks: Sequence[Sequence[_ArrayFacts]], world: Communicator) -> MismatchError:
    """Return the error that names the first index at which the entries of ranks differ."""
    longest = max(map(len, entries_of_ranks))
    index = next(
        index for index in range(longest + 1) if len({_at(entries, index) for entries in entries_of_ranks}) > 1
    )
    entry_of = [_at(entries, index) for entries in entries_of_ranks]  # by rank
    counts = Counter(entry_of)
    usual = max(counts, key=lambda entry: (counts[entry], -entry_of.index(entry)))
    divergent_ranks = [rank for rank, entry in enumerate(entry_of) if entry != usual]
    peers = [world.world_ranks[rank] for rank in divergent_ranks]
    text = f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
    return MismatchError(_difference(usual, entry_of[divergent_ranks[0]], text), rank=world.rank, peer=peers[0])


def _at(entries: Sequence[_ArrayFacts], index: int) -> _ArrayFacts | None:
    return entries[index] if index < len(entries) else None


def _difference(usual: _ArrayFacts | None, divergent: _ArrayFacts | None, ranks: str) -> str:
    if usual is None or divergent is None or usual.name != divergent.name:
        names = ["no further array" if entry is None else repr(entry.name) for entry in (divergent, usual)]
        return (
            f"{ranks}: {names[0]} where the others have {names[1]}: pass the same names in the same order on all ranks"
        )
    if usual.described != divergent.described:
        return f"{usual.name!r} is {divergent.described} on {ranks}, and {usual.described} on the others"
    return f"{usual.name!r} has other bits on {ranks} than on the others ({usual.described})"

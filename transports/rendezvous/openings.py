"""`agree`: ranks find the keys of their present rendezvous in a store of torch.distributed with keys of older ones.

Theory of operation
-------------------
*The problem.* The store of torchrun's agent lives longer than the ranks. When a rank dies, torchrun starts all ranks
again, and they use the same store. It still has values of processes that died on their way. No rank can know from its
environment which values these are: the number of ranks may have changed, and agents count restarts differently.

*The idea.* Rank 0 makes a random name for each rendezvous. Another rank accepts a name only if no process has used that
rank under this name before, and if rank 0 has seen it use the name.

1. Rank 0 writes the name to the key ``leader``, in place of an older name.
2. Rank r reads the leader and claims ``NAME/here/r``. If this key is set already, a dead process was rank r then. So
   the name is an old one, and rank r waits for another leader.
3. When rank 0 has seen all claims, it sets ``NAME/go`` to the number of ranks. If ranks are missing or disagree, it
   removes the leader and sets ``NAME/go`` to a sentence that says so.
4. Rank r accepts the name when it reads its own number of ranks there. Until then it looks for another leader, too.

An old name whose rank 0 had seen all claims is refused: in step 2 by each rank that existed then, and in step 4 by the
new ranks of a job that has grown. An old name whose rank 0 died before that gets no ``go``.

*The end.* When all ranks have met, rank 0 removes the leader, then ``go``, and then the claims. A rank that is early
for the next rendezvous may still read the old leader. If its old claim is still there, it waits. If the claim has been
removed, so has ``go``, and it waits too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from unisono.errors import RendezvousError
from unisono.foundation.deadlines import Deadline
from unisono.transports.rendezvous.roster import did_not_arrive, terms
from unisono.transports.rendezvous.stores import StoreTimeoutError, poll

if TYPE_CHECKING:
    from unisono.transports.rendezvous.torch_store import TorchStore

_LEADER = "unisono/leader"


def agree(store: TorchStore, rank: int, size: int, timeout_s: float) -> str:
    """Return the prefix of all keys of this rendezvous. It is equal on all ranks, and no other rendezvous has it.

    The values that this sets are removed by `TorchStore.clear` of rank 0.

    Args:
        store: a store that no other rendezvous uses at the same time.
        rank: this rank.
        size: the number of ranks.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        RendezvousError: ranks did not arrive in time (the message names them), were started with another number of
            ranks or run another version of Unisono, or the store failed.
    """
    return _lead(store, size, timeout_s) if rank == 0 else _follow(store, rank, size, timeout_s)


def _lead(store: TorchStore, size: int, timeout_s: float) -> str:
    name = os.urandom(8).hex()
    store.announce(_LEADER, name.encode())
    claims = {rank: _claim(name, rank) for rank in range(1, size)}
    error = _read_claims(store, claims, size, timeout_s)
    if error is not None:
        store.remove(_LEADER)  # so that no rank of a later rendezvous reads the error
        store.announce(_go(name), error.message.encode())
        raise error
    store.announce(_go(name), str(size).encode())
    store.adopt(claims.values())
    return _prefix(name)


def _read_claims(store: TorchStore, claims: dict[int, str], size: int, timeout_s: float) -> RendezvousError | None:
    """Wait for the claims of all ranks; return the error of the rendezvous, or None."""
    deadline = Deadline(timeout_s)
    for rank, key in claims.items():
        try:
            other = store.get(key, deadline.remaining_s()).decode(errors="replace").partition(" ")[2]
        except StoreTimeoutError:
            return did_not_arrive([rank for rank, key in claims.items() if store.look(key) is None], size, timeout_s)
        if other != terms(size):
            return RendezvousError(f"rank {rank} runs {other}, and rank 0 {terms(size)}: all ranks must run the same")
    return None


def _follow(store: TorchStore, rank: int, size: int, timeout_s: float) -> str:
    follower = _Follower(store, rank, size)
    try:
        return poll(follower.look, _LEADER, timeout_s).decode()
    except StoreTimeoutError:
        raise follower.failure(timeout_s) from None


class _Follower:
    """A rank other than 0, which waits until rank 0 has accepted it for a rendezvous."""

    def __init__(self, store: TorchStore, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._own = f"{os.urandom(8).hex()} {terms(size)}".encode()
        self._name: str | None = None  # the latest leader
        self._is_claimed = False  # by this process
        self._other_size = ""  # the number of ranks under `_name`, if it is another one

    def look(self) -> bytes | None:
        """Return the prefix of the rendezvous if rank 0 has accepted this rank, otherwise None."""
        leader = self._store.look(_LEADER)
        if leader is not None and (name := leader.decode(errors="replace")) != self._name:
            self._name = name
            self._other_size = ""
            self._is_claimed = self._store.claim(_claim(self._name, self._rank), self._own)
        if self._name is None or not self._is_claimed:
            return None
        go = (self._store.look(_go(self._name)) or b"").decode(errors="replace")
        if go and not go.isdigit():
            raise RendezvousError(go)
        self._other_size = go if go != str(self._size) else ""
        return _prefix(self._name).encode() if go == str(self._size) else None

    def failure(self, timeout_s: float) -> RendezvousError:
        """Return the reason why no name was accepted in time."""
        if self._other_size:
            return RendezvousError(
                f"rank 0 was started as one of {self._other_size} ranks, and rank {self._rank} as one of {self._size}"
            )
        if self._name is None or not self._is_claimed:
            return did_not_arrive([0], self._size, timeout_s)
        claims = {rank: _claim(self._name, rank) for rank in range(1, self._size)}
        missing = [rank for rank, key in claims.items() if self._store.look(key) is None]
        return did_not_arrive(missing or [0], self._size, timeout_s)


def _prefix(name: str) -> str:
    return f"unisono/{name}/"


def _claim(name: str, rank: int) -> str:
    return f"{_prefix(name)}here/{rank}"


def _go(name: str) -> str:
    return f"{_prefix(name)}go"

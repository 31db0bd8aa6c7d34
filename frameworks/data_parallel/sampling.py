"""Which samples each rank takes: shares of a permutation that all ranks compute alike, so that nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from unisono import UsageError

_STATE = ("length", "seed", "shuffle", "drop_last", "epoch", "taken")


class ShardedSampler:
    """The indices of this rank's samples, of one epoch after the other: as many on each rank.

    Each epoch is a permutation of 0 to `length` - 1, of which rank r takes the elements r, r + size, r + 2 size, …, as
    with `torch.utils.data.DistributedSampler`, which this can stand in for. If `length` is no multiple of `size`, the
    first indices come again in the end, or with `drop_last` the last ones not at all.

    It goes on where `state_dict` was taken, in the middle of an epoch too, and with another number of ranks. After the
    last index of an epoch, it is at the beginning of the next one. A `DataLoader` with workers is ahead of the training
    in taking indices, and so is a state that is taken then.

    Args:
        length: the number of samples, at least 1.
        rank, size: this rank and the number of ranks.
        shuffle: whether each epoch has a permutation of its own; otherwise the order is 0, 1, ….
        seed: of the permutations; the same on all ranks.
        drop_last: whether to leave samples out rather than to take some twice.

    Attributes:
        epoch: the number of the epoch, from 0.

    Raises:
        UsageError: an argument cannot be, or each rank would get nothing.

    >>> from unisono.data_parallel import ShardedSampler
    >>> [list(ShardedSampler(5, rank, 2, shuffle=False)) for rank in range(2)]
    [[0, 2, 4], [1, 3, 0]]
    """

    def __init__(
        self, length: int, rank: int, size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        if length < 1 or not 0 <= rank < size:
            raise UsageError(f"there is no share of rank {rank} of {size} in {length} samples")
        if drop_last and length < size:
            raise UsageError(f"{length} samples are none for each of {size} ranks: pass drop_last=False")
        if seed < 0:
            raise UsageError(f"seed must be 0 or more, not {seed}")
        self._length, self._rank, self._size = length, rank, size
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._taken = 0  # of the epoch, by all ranks

    def __len__(self) -> int:
        """Return how many samples this rank has in a whole epoch."""
        return self._length // self._size if self._drop_last else -(-self._length // self._size)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices that are left of the epoch, and begin the next one after the last."""
        epoch, order = self.epoch, self._order()
        for start in range(self._taken, len(order), self._size):
            self._taken = start + self._size
            yield int(order[start + self._rank])
        if self.epoch == epoch:
            self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; does nothing in the middle of that very one."""
        if epoch < 0:
            raise UsageError(f"epoch must be 0 or more, not {epoch}")
        if epoch != self.epoch:
            self.epoch, self._taken = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return where it is, the same on all ranks that have taken as many: what `load_state_dict` takes."""
        values = (self._length, self._seed, self._shuffle, self._drop_last, self.epoch, self._taken)
        return dict(zip(_STATE, map(int, values), strict=True))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there. The number of ranks may be another one.

        Raises:
            UsageError: it is the state of other samples, or in another order.
        """
        mine = self.state_dict()
        if set(state) != set(mine):
            raise UsageError(f"this is no state of a ShardedSampler, which has {', '.join(mine)}")
        for name in _STATE[:4]:
            if state[name] != mine[name]:
                raise UsageError(f"this state is of a sampler with {name}={state[name]}; this one has {mine[name]}")
        self.epoch, self._taken = state["epoch"], state["taken"]

    def _order(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the indices that all ranks take together in the epoch; what is left of it is the same for each."""
        order = np.arange(self._length)
        if self._shuffle:
            order = np.random.default_rng((self._seed, self.epoch)).permutation(self._length)
        left = max(0, self._length - self._taken)
        surplus = left % self._size
        if self._drop_last:
            return order[: self._length - surplus]
        missing = (self._size - surplus) % self._size
        return np.concatenate([order, np.resize(order, missing)])

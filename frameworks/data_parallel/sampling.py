"""`ShardedSampler`: the samples of each rank. All ranks compute the same permutation, so nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from unisono import UsageError

_STATE = ("length", "seed", "shuffle", "drop_last", "epoch", "taken")


class ShardedSampler:
    """An iterable over the indices of this rank's samples, an epoch at a time. All ranks have equally many.

    Each epoch is a permutation of 0 to `length` - 1. Rank r takes the elements r, r + size, r + 2 size, …, as with
    `torch.utils.data.DistributedSampler`, which this class can replace. If `length` is no multiple of `size`, the first
    indices are taken twice, or with `drop_last` the last ones are dropped.

    A sampler can continue from a saved state, even in the middle of an epoch and with another number of ranks. After
    the last index of an epoch, it is at the start of the next one. A `DataLoader` with workers takes indices ahead of
    the training, and a state that is saved then is ahead too.

    Args:
        length: the number of samples, at least 1.
        rank, size: this rank and the number of ranks.
        shuffle: whether each epoch has a permutation of its own; otherwise the order is 0, 1, ….
        seed: the seed of the permutations; the same on all ranks.
        drop_last: whether to drop samples instead of taking some twice.

    Attributes:
        epoch: the number of the epoch, from 0.

    Raises:
        UsageError: an argument has a value that it cannot have, or a rank would get no sample.

    >>> from unisono.data_parallel import ShardedSampler
    >>> [list(ShardedSampler(5, rank, 2, shuffle=False)) for rank in range(2)]
    [[0, 2, 4], [1, 3, 0]]
    """

    def __init__(
        self, length: int, rank: int, size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        if length < 1 or not 0 <= rank < size:
            raise UsageError(f"length={length} must be 1 or more, and rank={rank} from 0 to size - 1, with size={size}")
        if drop_last and length < size:
            raise UsageError(f"{length} samples leave none for each of {size} ranks: pass drop_last=False")
        if seed < 0:
            raise UsageError(f"seed must be 0 or more, not {seed}")
        self._length, self._rank, self._size = length, rank, size
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._taken = 0  # indices of the epoch that all ranks have taken together

    def __len__(self) -> int:
        """Return the number of samples of this rank in a whole epoch."""
        return self._length // self._size if self._drop_last else -(-self._length // self._size)

    def __iter__(self) -> Iterator[int]:
        """Yield the remaining indices of the epoch, and start the next epoch after the last one."""
        epoch, order = self.epoch, self._order()
        for start in range(self._taken, len(order), self._size):
            self._taken = start + self._size
            yield int(order[start + self._rank])
        if self.epoch == epoch:
            self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. If the sampler is in the middle of that epoch, it stays there."""
        if epoch < 0:
            raise UsageError(f"epoch must be 0 or more, not {epoch}")
        if epoch != self.epoch:
            self.epoch, self._taken = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the state for `load_state_dict`. It is the same on all ranks that have taken equally many indices."""
        values = (self._length, self._seed, self._shuffle, self._drop_last, self.epoch, self._taken)
        return dict(zip(_STATE, map(int, values), strict=True))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state. The number of ranks may differ from that of the state.

        Raises:
            UsageError: the state is of a sampler with another length, seed or order.
        """
        mine = self.state_dict()
        if set(state) != set(mine):
            raise UsageError(f"the state must have the keys {', '.join(mine)}: pass a state_dict() of a ShardedSampler")
        for name in _STATE[:4]:
            if state[name] != mine[name]:
                raise UsageError(
                    f"the state is of a sampler with {name}={state[name]}, and this sampler has {mine[name]}"
                )
        self.epoch, self._taken = state["epoch"], state["taken"]

    def _order(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the indices that all ranks take in the epoch. The number of remaining ones is a multiple of `size`."""
        order = np.arange(self._length)
        if self._shuffle:
            order = np.random.default_rng((self._seed, self.epoch)).permutation(self._length)
        remaining = max(0, self._length - self._taken)
        surplus = remaining % self._size
        if self._drop_last:
            return order[: self._length - surplus]
        missing = (self._size - surplus) % self._size
        return np.concatenate([order, np.resize(order, missing)])

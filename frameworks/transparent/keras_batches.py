"""`ShareOfBatches`: the batches of a `PyDataset` that one rank trains on."""

from __future__ import annotations

from typing import Any

import keras


class ShareOfBatches(keras.utils.PyDataset):  # type: ignore[misc]
    """Every nth batch of a `PyDataset`. A remainder is cut off, so that all ranks have the same number.

    Args:
        batches: the dataset of the program.
        rank: the batch with which this rank begins.
        size: the number of ranks.
    """

    def __init__(self, batches: Any, rank: int, size: int) -> None:
        options = {name: getattr(batches, name) for name in ("workers", "use_multiprocessing", "max_queue_size")}
        super().__init__(**options)
        self._batches, self._rank, self._size = batches, rank, size

    @property
    def num_batches(self) -> int | None:
        count = self._batches.num_batches
        return None if count is None else count // self._size

    def __getitem__(self, index: int) -> Any:
        return self._batches[index * self._size + self._rank]

    def on_epoch_begin(self) -> None:
        self._batches.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._batches.on_epoch_end()
